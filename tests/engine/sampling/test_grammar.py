"""Constrained output of a whole engine: always in the grammar, and the same with speculation and without."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import cast

import jsonschema
import numpy as np
import pytest
from tokenizers import Tokenizer

from actors.shell_messages import Abort, Add
from actors.target.engine_loop import EngineLoop
from engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, SpeculationConfig
from engine.engine_core import EngineCore
from engine.engine_core.loading import load_engine
from engine.proposer import NoProposer, Proposer
from engine.proposer.draft_model.model_proposer import ModelProposer
from engine.proposer.text_match.text_matcher import NgramProposer
from engine.sampling.grammar import CompiledGrammar, GrammarMatcher, TokenMask
from engine.sampling.grammar_compiler import MAX_RULES, MAX_SOURCE_BYTES, GrammarCompiler
from engine.sampling.grammar_trial import GrammarTrial
from protos.errors import OverloadedError, RateLimitError, RequestError
from protos.messages import (
    FinishReason,
    GenerateRequest,
    Grammar,
    GrammarKind,
    SamplingParams,
    Thought,
    TokenChunk,
    VerifyMode,
)
from tests.engine.fixtures.byte_tokenizer import BYTE_VOCAB_SIZE, END_ID, write_tokenizer
from tests.engine.fixtures.checkpoints import write_checkpoint
from tests.engine.fixtures.random_schemas import random_schema

MAX_TOKENS = 400
THOUGHT_BEGIN, THOUGHT_END = 270, 271  # tokens like any other to the engine
REGEX = r"(cat|dog){1,4} [0-9]{2,6}"
CHOICES = ["yes", "no", 'perhaps "so"', "ü\n"]
LARK = 'start: "<" body ">"\nbody: /[a-f]{1,3}/ | "(" body "," body ")"\n'
GBNF = 'root ::= "[" item{1,5} "]"\nitem ::= "ab" | "ba" | "c"\n'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    write_checkpoint(folder, seed=0, vocab_size=BYTE_VOCAB_SIZE, steepness=0.1)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def draft_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("draft")
    write_checkpoint(folder, seed=0, noise=0.1, vocab_size=BYTE_VOCAB_SIZE, steepness=0.1)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def build(
    folder: Path,
    proposer: Proposer | None = None,
    *,
    num_drafts: int = 4,
    verify: VerifyMode = VerifyMode.COUPLED,
    num_blocks: int = 4096,
    block_size: int = 16,
) -> EngineCore:
    config = EngineConfig(
        ModelConfig(str(folder), dtype="float32"),
        CacheConfig(block_size, num_blocks, memory_bytes=None),
        SchedulerConfig(max_num_sequences=256),
        SpeculationConfig(num_drafts, verify),
    )
    return load_engine(config, proposer)


@pytest.fixture(scope="module")
def plain_engine(folder: Path) -> EngineCore:
    """An engine without a proposer; one for all tests, because each starts a process that compiles grammars."""
    return build(folder)


def draft_model(folder: Path) -> ModelProposer:
    cache = CacheConfig(num_blocks=512, memory_bytes=None)
    return ModelProposer.from_config(ModelConfig(str(folder), dtype="float32"), cache, SchedulerConfig())


def request(name: str, grammar: Grammar | None, **sampling: object) -> GenerateRequest:
    sampling = SamplingParams(
        **{"seed": len(name), "max_tokens": MAX_TOKENS, "stop_token_ids": (END_ID,), **sampling},  # type: ignore[arg-type]
        grammar=grammar,
    )
    return GenerateRequest(name, (1, 2, 3), sampling)


def schema_request(index: int, **sampling: object) -> GenerateRequest:
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(random_schema(index)), "response_format")
    return request(f"schema-{index}", grammar, **{"seed": index, **sampling})


def every_kind(**sampling: object) -> list[GenerateRequest]:
    sources = {
        GrammarKind.REGEX: REGEX,
        GrammarKind.CHOICE: json.dumps(CHOICES),
        GrammarKind.GRAMMAR: LARK,
    }
    requests = [request(f"{kind}", Grammar(kind, source, kind), **sampling) for kind, source in sources.items()]
    return [
        *requests,
        request("gbnf", Grammar(GrammarKind.GRAMMAR, GBNF, "guided_grammar"), **sampling),
        *(schema_request(index, **sampling) for index in range(12)),
    ]


def run(engine: EngineCore, requests: Iterable[GenerateRequest]) -> dict[str, TokenChunk]:
    """Each request's whole output as one chunk."""
    whole = {}
    for each in requests:
        engine.add(each)
        whole[each.request_id] = TokenChunk(each.request_id, ())
    while engine.has_work:
        for chunk in engine.step():
            before = whole[chunk.request_id]
            whole[chunk.request_id] = replace(chunk, token_ids=before.token_ids + chunk.token_ids)
        engine.scheduler.check_integrity()
    return whole


def token_ids(whole: dict[str, TokenChunk]) -> dict[str, Seq[int]]:
    return {name: chunk.token_ids for name, chunk in whole.items()}


def text_of(chunk: TokenChunk, tokenizer: Tokenizer) -> str:
    assert chunk.finish_reason is FinishReason.STOP
    assert chunk.token_ids[-1] == END_ID
    return tokenizer.decode(list(chunk.token_ids[:-1]))


def test_200_random_schemas_are_obeyed(folder: Path, tokenizer: Tokenizer) -> None:
    engine = build(folder, NgramProposer(min_size=1))
    whole = run(engine, [schema_request(index, temperature=1.0 if index % 2 else 0.0) for index in range(200)])
    for index in range(200):
        text = text_of(whole[f"schema-{index}"], tokenizer)
        jsonschema.validate(json.loads(text), random_schema(index))
    assert engine.stats().drafts.num_accepted_tokens > 0


def test_every_kind_of_grammar_is_obeyed(plain_engine: EngineCore, tokenizer: Tokenizer) -> None:
    for seed in range(5):
        whole = run(plain_engine, every_kind(seed=seed))
        texts = {name: text_of(chunk, tokenizer) for name, chunk in whole.items()}
        assert re.fullmatch(REGEX, texts["regex"])
        assert texts["choice"] in CHOICES
        assert re.fullmatch(r"<[a-f(),]+>", texts["grammar"])
        assert re.fullmatch(r"\[(ab|ba|c){1,5}\]", texts["gbnf"])


SAMPLINGS = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "presence_penalty": 1.0, "bad_words": ((5,), (90, 91)), "num_logprobs": 2},
)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_speculation_changes_no_token(
    sampling: dict[str, object], plain_engine: EngineCore, folder: Path, draft_folder: Path
) -> None:
    plain = token_ids(run(plain_engine, every_kind(**sampling)))
    for proposer in (NoProposer(), NgramProposer(min_size=1), draft_model(draft_folder)):
        assert token_ids(run(build(folder, proposer), every_kind(**sampling))) == plain


def test_preemption_changes_no_token(plain_engine: EngineCore, folder: Path) -> None:
    plain = token_ids(run(plain_engine, every_kind()))
    engine = build(folder, NgramProposer(min_size=1), num_blocks=14, block_size=4)
    assert token_ids(run(engine, every_kind())) == plain
    assert engine.stats().num_preemptions > 0


def test_a_migrated_sequence_goes_on_in_its_grammar(plain_engine: EngineCore) -> None:
    for each in every_kind():
        whole = run(plain_engine, [each])[each.request_id].token_ids
        for cut in {1, len(whole) // 2, len(whole) - 1}:
            moved = replace(each, output_token_ids=tuple(whole[:cut]))
            assert run(plain_engine, [moved])[each.request_id].token_ids == whole[cut:]


def test_an_aborted_sequence_leaves_the_others_alone(plain_engine: EngineCore, folder: Path) -> None:
    requests = every_kind()
    plain = token_ids(run(plain_engine, requests))
    engine = build(folder, NoProposer())
    for each in requests:
        engine.add(each)
    engine.step()
    engine.abort(requests[0].request_id)
    rest: dict[str, list[int]] = {each.request_id: [] for each in requests[1:]}
    while engine.has_work:
        for chunk in engine.step():
            rest[chunk.request_id] += chunk.token_ids
    assert all(plain[name][-len(ids) :] == tuple(ids) for name, ids in rest.items())


def test_forced_text_costs_no_pass_of_its_own(folder: Path) -> None:
    """Without any proposer, a text that the grammar knows in advance takes a pass per K + 1 tokens."""
    fixed = Grammar(GrammarKind.REGEX, "one text and no other one, forty letters!", "guided_regex")
    engine = build(folder, NoProposer(), num_drafts=7)
    engine.add(request("fixed", fixed))
    num_steps = num_tokens = 0
    while engine.has_work:
        num_tokens += sum(len(chunk.token_ids) for chunk in engine.step())
        num_steps += 1
    assert num_steps < num_tokens / 3
    assert engine.stats().drafts.num_accepted_tokens > num_tokens / 2


def test_without_speculation_nothing_is_drafted(folder: Path) -> None:
    engine = build(folder, NoProposer(), num_drafts=0)
    run(engine, every_kind())
    assert engine.stats().drafts.num_draft_tokens == 0


@pytest.mark.parametrize("verify", [VerifyMode.REJECTION, VerifyMode.BLOCK])
def test_the_grammar_holds_in_every_verify_mode(
    verify: VerifyMode, folder: Path, draft_folder: Path, tokenizer: Tokenizer
) -> None:
    engine = build(folder, draft_model(draft_folder), verify=verify)
    whole = run(engine, [schema_request(index) for index in range(20)])
    for index in range(20):
        jsonschema.validate(json.loads(text_of(whole[f"schema-{index}"], tokenizer)), random_schema(index))


@pytest.mark.parametrize("verify", VerifyMode)
def test_a_drafted_end_is_forgotten_like_any_draft(
    verify: VerifyMode, folder: Path, draft_folder: Path, tokenizer: Tokenizer
) -> None:
    """Drafts hold the end token where the grammar leaves nothing else; the committed text may end before it."""
    digits = Grammar(GrammarKind.REGEX, "[0-9]{3}", "guided_regex")
    engine = build(folder, draft_model(draft_folder), verify=verify)
    whole = run(engine, [request(f"r{index}", digits, seed=index) for index in range(40)])
    assert {re.fullmatch("[0-9]{3}", text_of(chunk, tokenizer)) is None for chunk in whole.values()} == {False}


def test_a_draft_model_drafts_within_the_grammar(folder: Path) -> None:
    """The target's own weights as the draft: only a draft that knows the grammar has all of its tokens accepted."""
    engine = build(folder, draft_model(folder))
    run(engine, every_kind(temperature=1.0))
    drafts = engine.stats().drafts
    assert drafts.num_draft_tokens > 100
    assert drafts.num_accepted_tokens >= 0.98 * drafts.num_draft_tokens


def test_bad_words_yield_to_the_grammar(plain_engine: EngineCore, tokenizer: Tokenizer) -> None:
    a_ids = [token_id for token_id in range(BYTE_VOCAB_SIZE) if tokenizer.decode([token_id]) == "a"]
    only_a = Grammar(GrammarKind.REGEX, "a{5}", "guided_regex")
    whole = run(plain_engine, [request("x", only_a, bad_words=tuple((token_id,) for token_id in a_ids))])
    assert text_of(whole["x"], tokenizer) == "aaaaa"


def nested_rules(depth: int) -> str:
    rules = "".join(f"r{i}: r{i + 1}\n" for i in range(depth - 1))
    return f'start: r0\n{rules}r{depth - 1}: "a"\n'


def nested_schema(depth: int) -> str:
    steps = [
        {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}, "required": ["a"]} for i in range(depth)
    ]
    return json.dumps({"$defs": {f"d{i}": step for i, step in enumerate([*steps, {"type": "null"}])}, **steps[0]})


@pytest.mark.parametrize(
    ("kind", "source", "words"),
    [
        (GrammarKind.REGEX, "(", "unclosed group"),
        (GrammarKind.REGEX, r"(?=a)b", "look-around"),
        (GrammarKind.REGEX, r"[^\s\S]", "no text matches"),
        (GrammarKind.JSON_SCHEMA, '{"type": "strin"}', "Invalid type: strin"),
        (GrammarKind.JSON_SCHEMA, '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        (GrammarKind.JSON_SCHEMA, '{"type": "integer", "minimum": 5, "maximum": 2}', "minimum (5)"),
        (GrammarKind.JSON_SCHEMA, '{"$ref": "#"}', "no text matches"),
        (GrammarKind.GRAMMAR, "start: foo", "foo"),
        (GrammarKind.GRAMMAR, 'root ::= "a" | foo', "foo"),
        (GrammarKind.REGEX, "(a{1000}){1000}", "no token of a text can be read"),
        (GrammarKind.REGEX, "a" * (MAX_SOURCE_BYTES + 1), "at most"),
        (GrammarKind.GRAMMAR, nested_rules(MAX_RULES), "1001 rules or references; at most 1000"),
        (GrammarKind.JSON_SCHEMA, nested_schema(MAX_RULES), "1001 rules or references; at most 1000"),
    ],
)
def test_a_bad_grammar_is_refused_with_its_fault(
    kind: GrammarKind, source: str, words: str, plain_engine: EngineCore
) -> None:
    for _ in range(2):  # a failure that is remembered reads the same
        with pytest.raises(RequestError, match=re.escape(words)) as refused:
            plain_engine.add(request("x", Grammar(kind, source, "the_param")))
        assert refused.value.param == "the_param"
    assert not plain_engine.has_work


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        (GrammarKind.GRAMMAR, nested_rules(MAX_RULES - 1)),
        (GrammarKind.JSON_SCHEMA, nested_schema(MAX_RULES - 1)),
    ],
)
def test_rules_may_be_nested_as_deep_as_there_may_be_rules(
    kind: GrammarKind, source: str, plain_engine: EngineCore
) -> None:
    """The library recurses over them: on a thread's usual stack the second of these ends the process."""
    whole = run(plain_engine, [request("x", Grammar(kind, source, "the_param"), max_tokens=8)])
    assert whole["x"].finish_reason in (FinishReason.STOP, FinishReason.LENGTH)


def entangled_rules(num_rules: int) -> str:
    """GBNF that takes half a second to compile: each rule refers to another."""
    rules = [f'r{rule} ::= "a{rule}" r{rule * 7 % num_rules} | "b"' for rule in range(num_rules - 1)]
    return "\n".join([f"root ::= {' | '.join(f'r{rule}' for rule in range(num_rules - 1))}", *rules])


def test_a_grammar_that_is_compiled_holds_up_no_other(folder: Path) -> None:
    compiler = GrammarCompiler(folder / "tokenizer.json", BYTE_VOCAB_SIZE, (END_ID,))
    known = Grammar(GrammarKind.REGEX, "[ab]+", "guided_regex")
    (compiler.prepare(request("k", known)) or Future()).result(60)
    slow = compiler.prepare(request("s", Grammar(GrammarKind.GRAMMAR, entangled_rules(700), "guided_grammar")))
    assert slow is not None
    assert compiler.prepare(request("k", known)) is None
    assert compiler.matcher(request("a", known)) is not None
    assert not slow.done()
    waiting = [
        compiler.prepare(request("w", Grammar(GrammarKind.REGEX, "a" * size, "guided_regex"))) for size in range(1, 16)
    ]
    with pytest.raises(OverloadedError, match="16 grammars wait") as caught:
        compiler.prepare(request("b", Grammar(GrammarKind.REGEX, "b", "guided_regex")))
    assert caught.value.retry_after_s == 4  # a quarter of a second for each
    assert all(future is not None and future.result(60) for future in waiting)
    assert compiler.matcher(request("b", Grammar(GrammarKind.REGEX, "b", "guided_regex"))) is not None


def test_threads_started_after_the_compiler_s_have_the_usual_stack(folder: Path) -> None:
    compiler = GrammarCompiler(folder / "tokenizer.json", BYTE_VOCAB_SIZE, (END_ID,))
    (compiler.prepare(request("a", Grammar(GrammarKind.REGEX, "a", "guided_regex"))) or Future()).result(60)
    assert threading.stack_size() == 0  # the system's


def test_a_tenant_leaves_places_at_the_compiler_to_others(folder: Path) -> None:
    compiler = GrammarCompiler(folder / "tokenizer.json", BYTE_VOCAB_SIZE, (END_ID,))
    slow = Grammar(GrammarKind.GRAMMAR, entangled_rules(700), "guided_grammar")
    own = [slow, *(Grammar(GrammarKind.REGEX, "a" * size, "guided_regex") for size in range(1, 4))]
    for each in own:
        compiler.prepare(replace(request("a", each), tenant="first"))
    more = Grammar(GrammarKind.REGEX, "b", "guided_regex")
    with pytest.raises(RateLimitError, match="4 grammars of this key's tenant wait"):
        compiler.prepare(replace(request("a", more), tenant="first"))
    compiler.prepare(replace(request("a", own[1]), tenant="first"))  # the same again takes no place
    future = compiler.prepare(replace(request("a", more), tenant="second"))
    assert future is not None
    assert future.result(60)
    assert compiler.prepare(replace(request("a", more), tenant="second")) is None


def test_a_tenant_s_grammars_are_known_to_it_alone(folder: Path) -> None:
    """Another tenant, or another salt of the same one, does not find the grammar compiled."""
    compiler = GrammarCompiler(folder / "tokenizer.json", BYTE_VOCAB_SIZE, (END_ID,))
    asked = replace(request("a", Grammar(GrammarKind.REGEX, "[ab]+", "guided_regex")), tenant="first", cache_salt="1")
    (compiler.prepare(asked) or Future()).result(60)
    assert compiler.prepare(asked) is None
    for other in (replace(asked, tenant="second", cache_salt="2"), replace(asked, cache_salt="3")):
        compiled = compiler.prepare(other)
        assert compiled is not None
        assert compiled.result(60)


def test_a_tenant_with_many_grammars_pushes_out_its_own_alone(folder: Path) -> None:
    compiler = GrammarCompiler(folder / "tokenizer.json", BYTE_VOCAB_SIZE, (END_ID,))
    few = [
        replace(request("a", Grammar(GrammarKind.REGEX, "a" * size, "guided_regex")), tenant="few", cache_salt="few")
        for size in (1, 2)
    ]
    for each in few:
        (compiler.prepare(each) or Future()).result(60)
    used = replace(request("b", Grammar(GrammarKind.REGEX, "[ab]", "guided_regex")), tenant="many", cache_salt="used")
    (compiler.prepare(used) or Future()).result(60)
    for size in range(1, 100):
        grammar = Grammar(GrammarKind.REGEX, f"[ab]{{{size}}}", "guided_regex")
        many = replace(request("b", grammar), tenant="many", cache_salt=str(size))
        (compiler.prepare(many) or Future()).result(60)
        assert compiler.prepare(used) is None, "the one used last stays"
    assert all(compiler.prepare(each) is None for each in few)
    assert compiler.prepare(many) is None


def test_parameters_that_contradict_a_grammar_are_refused(plain_engine: EngineCore) -> None:
    grammar = Grammar(GrammarKind.REGEX, "a+", "guided_regex")
    with pytest.raises(RequestError, match="min_tokens is 3"):
        plain_engine.add(request("x", grammar, min_tokens=3))
    with pytest.raises(RequestError, match="leave ignore_eos out"):
        plain_engine.add(request("x", grammar, stop_token_ids=()))
    with pytest.raises(RequestError, match="forbids the output generated so far"):
        plain_engine.add(replace(request("x", grammar), output_token_ids=(5,)))


@pytest.mark.parametrize(
    ("kind", "source", "reason"),
    [
        (GrammarKind.REGEX, r"[^\s\S]", "no text matches it"),
        (
            GrammarKind.JSON_SCHEMA,
            json.dumps({"type": "object", "properties": {f"p0_{each}": {"type": "null"} for each in range(2000)}}),
            r"it is too complex: .*Too many items \(limit 5000",
        ),
    ],
    ids=["no text", "too complex"],
)
def test_what_is_too_complex_is_not_said_to_match_no_text(
    kind: GrammarKind, source: str, reason: str, folder: Path
) -> None:
    compiler = GrammarCompiler(folder / "tokenizer.json", BYTE_VOCAB_SIZE, (END_ID,))
    with pytest.raises(RequestError, match=reason):
        compiler.matcher(request("x", Grammar(kind, source, "the_param")))


def test_a_grammar_for_a_model_without_end_tokens_names_the_file_that_lacks_them() -> None:
    compiler = GrammarCompiler(None, 16, ())
    with pytest.raises(RequestError, match=r"names none; set eos_token_id in its generation_config\.json"):
        compiler.matcher(request("x", Grammar(GrammarKind.REGEX, "a", "guided_regex")))


def test_a_grammar_needs_each_of_several_end_tokens() -> None:
    compiler = GrammarCompiler(None, 16, (END_ID, END_ID + 1))
    with pytest.raises(RequestError, match="leave ignore_eos out"):
        compiler.matcher(request("x", Grammar(GrammarKind.REGEX, "a", "guided_regex")))


def test_a_grammar_for_a_model_without_tokenizer_is_refused() -> None:
    compiler = GrammarCompiler(None, 16, (END_ID,))
    with pytest.raises(RequestError, match=r"no tokenizer\.json"):
        compiler.matcher(request("x", Grammar(GrammarKind.REGEX, "a", "guided_regex")))


@pytest.mark.parametrize(
    ("begin_id", "end_ids", "bias_each"),
    [(None, (THOUGHT_END,), 4.0), (THOUGHT_BEGIN, (THOUGHT_END,), 4.0), (None, (THOUGHT_BEGIN, THOUGHT_END), 7.0)],
)
def test_a_grammar_begins_behind_a_thought(
    plain_engine: EngineCore,
    folder: Path,
    draft_folder: Path,
    tokenizer: Tokenizer,
    begin_id: int | None,
    end_ids: tuple[int, ...],
    bias_each: float,
) -> None:
    def requests() -> list[GenerateRequest]:
        thought = Thought(end_ids, begin_id)
        grammar = Grammar(GrammarKind.REGEX, REGEX, "guided_regex", thought)
        bias = ((THOUGHT_BEGIN, bias_each), (THOUGHT_END, bias_each))
        return [request(f"r{seed}", grammar, seed=seed, temperature=1.0, logit_bias=bias) for seed in range(12)]

    plain = run(plain_engine, requests())
    num_thoughts = 0
    for chunk in plain.values():
        ids = list(chunk.token_ids)
        is_thought = begin_id is None or ids[0] == begin_id
        num_thoughts += is_thought
        ends = (rank for rank in range(len(ids)) if tuple(ids[:rank][-len(end_ids) :]) == end_ids)
        start = next(ends) if is_thought else 0
        assert END_ID not in ids[:-1]
        assert re.fullmatch(REGEX, text_of(replace(chunk, token_ids=tuple(ids[start:])), tokenizer))
    assert 0 < num_thoughts <= (12 if begin_id is None else 11)
    for proposer in (NgramProposer(min_size=1), draft_model(draft_folder)):
        assert token_ids(run(build(folder, proposer), requests())) == token_ids(plain)
    for each in requests()[:4]:  # a migrated sequence continues in its thought, or after it
        whole = plain[each.request_id].token_ids
        for cut in {1, len(whole) // 2, len(whole) - 1}:
            rest = run(plain_engine, [replace(each, output_token_ids=whole[:cut])])[each.request_id].token_ids
            assert whole[:cut] + rest == whole


ENDLESS = json.dumps({"allOf": [{"type": "string", "pattern": f".*a.{{{gap}}}b.*"} for gap in range(30)]})


def test_a_grammar_that_compiles_for_ever_is_given_up_and_costs_no_other(folder: Path) -> None:
    """A schema of 1,381 characters, whose compilation would take days."""
    compiler = GrammarCompiler(folder / "tokenizer.json", BYTE_VOCAB_SIZE, (END_ID,))
    with pytest.raises(RequestError, match="takes more than 2 s or 256 MiB to compile"):
        compiler.matcher(request("x", Grammar(GrammarKind.JSON_SCHEMA, ENDLESS, "guided_json")))
    assert compiler.matcher(request("y", Grammar(GrammarKind.REGEX, "a+", "guided_regex"))) is not None


def test_a_killed_trial_begins_anew(folder: Path) -> None:
    trial = GrammarTrial(folder / "tokenizer.json", BYTE_VOCAB_SIZE, (END_ID,))
    trial.source("regex", "a+")
    assert trial._process is not None
    trial._process.kill()
    with pytest.raises(ValueError, match="2 s or 256 MiB"):
        trial.source("regex", "b+")
    assert "b+" in trial.source("regex", "b+")
    process = trial._process
    assert os.getpgid(process.pid) != os.getpgrp(), "Ctrl-C in the terminal would end it with a traceback"
    trial.close()
    trial.close()
    assert process.poll() is not None


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        (GrammarKind.GRAMMAR, 'root ::= r0\nr0 ::= "a"* | "a"{1,100} [a-z]? r0{1,100}'),  # 0.2 s
        (GrammarKind.GRAMMAR, 'start: e\ne: e e | e "+" e | e? e? "x"? | "a"'),
        (GrammarKind.REGEX, "|".join(f".*a.{{{gap}}}b" for gap in range(60))),
    ],
)
def test_no_mask_takes_long(kind: GrammarKind, source: str, folder: Path) -> None:
    """A short grammar can have costly masks. The parser's limits then end that text alone."""
    compiler = GrammarCompiler(folder / "tokenizer.json", BYTE_VOCAB_SIZE, (END_ID,))
    matcher = compiler.matcher(request("x", Grammar(kind, source, "the_param"), max_tokens=60))
    assert matcher is not None
    times = []
    for _ in range(40):
        began_s = time.thread_time()
        mask = np.unpackbits(np.frombuffer(matcher.masks(())[0], np.uint8), bitorder="little")
        times.append(time.thread_time() - began_s)
        allowed = [int(each) for each in np.flatnonzero(mask) if each != END_ID]
        if not allowed or not matcher.read(allowed[:1]):
            break
    assert max(times) < 0.1  # 9 ms on an idle machine


# Texts of z are easy. After five letters b or c, no parser finds the next mask within the limits.
EASY_OR_HARD = "z{30}|[bc]{5}(a{1000}){1000}"


def test_a_text_that_exceeds_the_parser_s_limits_ends_no_other_text(folder: Path, tokenizer: Tokenizer) -> None:
    """The parsers of a grammar share a lexer, which fails for good: neither other texts nor later ones notice."""
    grammar = Grammar(GrammarKind.REGEX, EASY_OR_HARD, "guided_regex")
    easy, hard = (tuple((each, 100.0) for each in tokenizer.encode(text).ids) for text in ("z", "bc"))
    engine = build(folder)
    run(engine, [request("first", grammar, max_tokens=1)])
    whole = run(engine, [request("beside", grammar, logit_bias=easy), request("hard", grammar, logit_bias=hard)])
    run(engine, [request("alone", grammar, logit_bias=hard)])
    later = request("later", grammar, logit_bias=easy)
    assert engine.prepare(later) is not None, "the grammar is compiled again, off the engine's thread"
    whole |= run(engine, [later])
    assert whole["hard"].finish_reason is FinishReason.GRAMMAR
    for name in ("beside", "later"):
        assert text_of(whole[name], tokenizer) == "z" * 30


def test_dear_masks_wait_their_turn_and_hold_up_no_other_text(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve texts with masks of 20 ms, four of 0.1 ms, one without a grammar; a step has 30 ms for masks."""
    costs: list[float] = []

    def mask(self: GrammarMatcher) -> TokenMask:
        costs.append(0.02 if "dear" in self.grammar._compile.args[1] else 0.0001)
        self._note(costs[-1])
        return self._matcher.compute_bitmask()

    def grammar(word: str) -> Grammar:
        return Grammar(GrammarKind.REGEX, f"[ab]{{9}}({word})?", "guided_regex")

    dear = [request(f"dear-{index}", grammar("dear"), seed=index) for index in range(12)]
    others = [request(f"cheap-{index}", grammar("c"), seed=index) for index in range(4)]
    others.append(request("free", None, max_tokens=9, stop_token_ids=()))
    plain = token_ids(run(build(folder, NgramProposer(min_size=1)), [*dear, *others]))

    monkeypatch.setattr(GrammarMatcher, "_mask", mask)
    engine = build(folder, NgramProposer(min_size=1))
    for each in [*dear, *others]:
        engine.add(each)
    tokens: dict[str, Seq[int]] = dict.fromkeys(plain, ())
    waits = dict.fromkeys(plain, 0)
    ended: set[str] = set()
    num_steps = 0
    while engine.has_work:
        costs.clear()
        chunks = engine.step()
        assert costs.count(0.02) <= 3, "two fit, and the longest waiting"
        num_steps += 1
        for name in waits.keys() - ended:
            waits[name] = 0 if any(each.request_id == name for each in chunks) else waits[name] + 1
            is_patient = name.startswith("dear") or (num_steps == 1 and name != "free")  # which are dear shows first
            assert waits[name] <= (12 / 2 if is_patient else 0), name
        for chunk in chunks:
            tokens[chunk.request_id] = (*tokens[chunk.request_id], *chunk.token_ids)
            ended |= {chunk.request_id} if chunk.finish_reason else set()
        engine.scheduler.check_integrity()
    assert tokens == plain


NO_KEY_LEFT = {
    "type": "object",
    "properties": {"b": {"type": "integer"}},
    "patternProperties": {"^b$": {"type": "integer"}},
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": "[ ]"},
}
# A text of two hundred letters may be followed by d; by b, whose rule never ends; or by a mark that no text matches.
LATE_DEAD_END = 'start: /[a-z]{200}/ ("1" endless | "2" NOTHING | "3")\nendless: "d" endless\nNOTHING: /a{3}/ & ~/a+/\n'


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        (GrammarKind.JSON_SCHEMA, json.dumps(NO_KEY_LEFT)),
        (GrammarKind.GRAMMAR, 'start: "a" start'),
        (GrammarKind.GRAMMAR, 'start: "a" rest | "c"\nrest: "b" rest\n'),
        (GrammarKind.GRAMMAR, 'start: "a" MORE\nMORE: /a{3}/ & ~/a+/\n'),
    ],
)
def test_a_grammar_with_a_beginning_that_nothing_completes_is_refused(
    kind: GrammarKind, source: str, folder: Path
) -> None:
    compiler = GrammarCompiler(folder / "tokenizer.json", BYTE_VOCAB_SIZE, (END_ID,))
    with pytest.raises(RequestError, match="cannot be completed") as error:
        compiler.matcher(request("x", Grammar(kind, source, "the_param")))
    assert error.value.param == "the_param"


@pytest.mark.parametrize("end", ["1", "2"])
def test_an_answer_that_comes_to_a_dead_end_says_so_and_not_that_it_was_long(
    end: str, folder: Path, draft_folder: Path, tokenizer: Tokenizer
) -> None:
    """With drafts, and without: the same tokens, and the same reason."""
    grammar = Grammar(GrammarKind.GRAMMAR, LATE_DEAD_END, "guided_grammar")
    [end_id] = tokenizer.encode(end, add_special_tokens=False).ids
    asked = [
        request("late", grammar, logit_bias=((end_id, 100.0),)),
        request("whole", grammar, logit_bias=tuple((each, 100.0) for each in tokenizer.encode("3").ids)),
    ]
    plain_engine = build(folder)
    plain = run(plain_engine, asked)
    assert {name: chunk.finish_reason for name, chunk in plain.items()} == {
        "late": FinishReason.GRAMMAR,
        "whole": FinishReason.STOP,
    }
    assert end_id in plain["late"].token_ids
    drafted_engine = build(folder, draft_model(draft_folder))
    drafted = run(drafted_engine, asked)
    assert token_ids(drafted) == token_ids(plain)
    assert [each.finish_reason for each in drafted.values()] == [each.finish_reason for each in plain.values()]
    for engine in (plain_engine, drafted_engine):
        assert not engine.has_work
        assert engine.stats().num_used_blocks == 0


def test_a_draft_that_the_parser_cannot_bear_is_forgotten(folder: Path, tokenizer: Tokenizer) -> None:
    compiler = GrammarCompiler(folder / "tokenizer.json", BYTE_VOCAB_SIZE, (END_ID,))
    matcher = compiler.matcher(request("x", Grammar(GrammarKind.GRAMMAR, LATE_DEAD_END, "guided_grammar")))
    assert matcher is not None
    matcher.read(tokenizer.encode("z" * 200, add_special_tokens=False).ids)
    before = matcher.masks(())
    for dead_end in ("1", "2"):
        draft = tokenizer.encode(dead_end, add_special_tokens=False).ids
        assert matcher.masks(draft)[0] == before[0]
        assert matcher.mask_after(draft) is not None
        assert matcher.masks(()) == before
        assert not matcher.has_failed
    assert matcher.read(tokenizer.encode("3", add_special_tokens=False).ids)


def test_a_request_that_is_aborted_while_its_grammar_is_compiled_never_runs(folder: Path) -> None:
    engine = build(folder)
    emitted: list[object] = []
    loop = EngineLoop(engine, emitted.append)
    slow = Grammar(GrammarKind.GRAMMAR, entangled_rules(700), "guided_grammar")
    for name in ("aborted", "all"):
        loop.submit(Add(request(name, slow)))
    loop._carry_out_commands()
    compiled = engine.prepare(request("same", slow))
    assert compiled is not None
    loop.submit(Abort("aborted"))
    loop._carry_out_commands()
    assert set(loop._preparing) == {"all"}
    loop.abort_all()
    loop._carry_out_commands()
    assert compiled.result(60)
    loop._carry_out_commands()
    assert not loop._preparing
    assert not engine.has_work
    assert engine.stats().num_used_blocks == 0
    assert not emitted


def test_an_error_of_the_parser_is_logged_in_one_short_line(caplog: pytest.LogCaptureFixture) -> None:
    """It may quote the client's grammar."""

    class FailedMatcher:
        def consume_token(self, token_id: int) -> bool:
            return False

        def get_error(self) -> str:
            return "no token\nERROR forged\x1b[2J" + "a" * 5000

    class FailingGrammar:
        generation = 0

        def begin(self) -> FailedMatcher:
            return FailedMatcher()

    assert not GrammarMatcher(cast(CompiledGrammar, FailingGrammar()), (0,)).read([5])
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.isprintable()
    assert "no token\\nERROR forged\\x1b[2Ja" in said
    assert len(said) < 300
