"""Whatever is kept by a text, a prefix or a schema serves the tenant alone that it was made for."""

from __future__ import annotations

import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from unittest import mock

import httpx
import pytest
import torch

from actors.draft.channel_proposer import ChannelProposer
from actors.draft.draft_server import DraftServer
from actors.process.frames import FrameListener, private_folder
from engine.batch.draft import Draft
from engine.kv_cache.block_manager import BlockManager
from engine.proposer.draft_model.draft_model import DraftSequences
from engine.proposer.text_match.suffix import SharedTexts
from engine.proposer.text_match.text_matcher import PredictionMatcher
from engine.proposer.translation import SameVocabulary
from engine.sampling import masks
from engine.sampling.grammar_compiler import GrammarCompiler
from engine.sequence.sequence import RequestTokens, TokenBlocks
from protos.block_keys import PROBE_SALT, block_keys, probe_token_ids, root_key
from protos.messages import GenerateRequest, Grammar, GrammarKind, SamplingParams
from protos.predicted_text import Prediction
from protos.served_model import ModelCard
from router.api_keys import Client
from router.config import IngressConfig, RouterConfig
from router.generation.generation_service import GenerationService
from router.metrics.ingress_metrics import IngressMetrics
from router.openai.api import build_app
from router.routing.index import IndexState
from router.routing.request_routing import PromptKeys
from router.routing.routed_call import RouteQuery
from router.tokenizer.tokenizer_files import load_tokenizer_files
from tests.engine.fixtures.builders import sequence_of
from tests.engine.fixtures.byte_tokenizer import BYTE_VOCAB_SIZE, END_ID, write_tokenizer
from tests.router.fixtures.engine_backend import EngineBackend, ngram_engine, write_model
from tests.router.fixtures.key_files import api_keys

ROOT = Path(__file__).parents[2]
PROMPT = tuple(range(1, 41))
# What the code keeps under a key: a probe of this module, or why no client's text is in the key.
KERNELS = "engine/model/decoders/native_layers engine/native/library engine/batch/indexing"
KEPT = {
    "engine/proposer/text_match/suffix.py": "finished_texts",
    "engine/sampling/grammar_compiler.py": "grammars",
    "engine/sampling/masks.py": "biases",
    "engine/kv_cache/block_pool.py": "prefixes",
    "engine/kv_cache/state_pool.py": "by the salted keys of blocks (tests/engine/recurrent)",
    "engine/proposer/text_match/text_matcher.py": "predictions",
    "router/routing/index.py": "by the names of conversations, which `Client.secret` makes (test_api_keys.py)",
    "router/tokenizer/chat_prompt.py": "by the server's own template",
    "router/openai/openapi.py": "one document, the same for all",
    "engine/model/checkpoint/hub.py": "by a model of the deployment",
    "engine/model/checkpoint/unread_weight.py": "a change of a library, made once",
    "engine/model/tensor_parallel.py": "one memory of a group of ranks",
    "engine/batch/side_stream.py": "one stream of a GPU",
    "engine/model/runner/served_weights.py": "one digest of our own code",
    "protos/token_bytes.py": "one tokenizer, by a file of the deployment",
    "engine/proposer/tree.py": "by numbers of drafts",
    "engine/proposer/draft_model/ahead_drafter.py": "by numbers of drafts",
    **{f"{name}.py": "functions of libraries" for name in KERNELS.split()},
}
CACHE = re.compile(
    r"^\s*@(?:functools\.)?(?:lru_cache|cache)\b|OrderedDict\[|cachetools|WeakValueDictionary", re.MULTILINE
)


def test_every_cache_is_known() -> None:
    """A new one has a probe below, or is kept by nothing that a client sends."""
    files = (file for name in ("engine", "actors", "router", "protos") for file in (ROOT / name).rglob("*.py"))
    assert {str(file.relative_to(ROOT)) for file in files if CACHE.search(file.read_text())} == KEPT.keys()


def of(tenant: str) -> GenerateRequest:
    """Return a request as an ingress makes it of the same body, which names a salt, for a tenant."""
    salt = Client(tenant).secret("ours")
    return GenerateRequest("r", PROMPT, SamplingParams(), cache_salt=salt, tenant=tenant)


def prefixes(tmp_path: Path) -> Callable[[GenerateRequest], bool]:
    blocks = BlockManager(64, 4, "m")

    def ask(request: GenerateRequest) -> bool:
        tokens = TokenBlocks(list(request.prompt_token_ids), request.cache_salt)
        is_found = blocks.adopt_prefix(tokens) > 0
        assert blocks.reserve(tokens, len(PROMPT))
        blocks.publish(tokens, len(PROMPT))
        tokens.num_computed_tokens = len(PROMPT)
        blocks.release(tokens)
        return is_found

    return ask


def finished_texts(tmp_path: Path) -> Callable[[GenerateRequest], bool]:
    texts = SharedTexts(1000)

    def ask(request: GenerateRequest) -> bool:
        is_found = texts.of(request.cache_salt) is not None or texts.has_noise(request.cache_salt, (0, 0))
        texts.add(request.cache_salt, (0, 0), request.prompt_token_ids)
        return is_found

    return ask


def grammars(tmp_path: Path) -> Callable[[GenerateRequest], bool]:
    write_tokenizer(tmp_path)
    compiler = GrammarCompiler(tmp_path / "tokenizer.json", BYTE_VOCAB_SIZE, (END_ID,))
    grammar = Grammar(GrammarKind.REGEX, "[ab]+", "guided_regex")

    def ask(request: GenerateRequest) -> bool:
        compiled = compiler.prepare(replace(request, sampling=SamplingParams(grammar=grammar)))
        if compiled is not None:
            compiled.result(60)
        return compiled is None

    return ask


def routes(tmp_path: Path) -> Callable[[GenerateRequest], bool]:
    """By the index: a prefix that was sent to a pair a moment ago."""
    index, keys = IndexState(RouterConfig(block_size=4)), PromptKeys()
    probe = block_keys(probe_token_ids(4), 4, root_key("v1", PROBE_SALT))[-1]
    keys.learn(ModelCard(300, 4096, (0,), "v1", 4, probe_key=probe))

    def ask(request: GenerateRequest) -> bool:
        found = keys.keys_of(request)
        assert found
        query = RouteQuery("r", len(PROMPT), found, request.session_id, ("a", "b"))
        return index.select(query, 0.0).achievable_blocks > 0

    return ask


def drafts(tmp_path: Path) -> Callable[[GenerateRequest], bool]:
    """Ask the draft's process, which learns of requests over the channel."""
    path = private_folder() / "draft.sock"
    proposer = RecordingProposer()
    server = DraftServer(FrameListener(path), proposer, "draft-1")
    threading.Thread(target=server.run, daemon=True).start()
    channel = ChannelProposer(path)

    def ask(request: GenerateRequest) -> bool:
        num_opened = len(proposer.found)
        request = replace(request, request_id=str(num_opened))
        channel.open(sequence_of(request))
        deadline_s = time.monotonic() + 20
        while len(proposer.found) == num_opened and time.monotonic() < deadline_s:
            channel.flush()
            time.sleep(0.01)
        assert proposer.tenants[-1] == (request.tenant, request.cache_salt)
        return proposer.found[-1]

    return ask


class RecordingProposer:
    """Computes each prompt when it is opened, and drafts nothing."""

    def __init__(self) -> None:
        self.found: list[bool] = []
        self.tenants: list[tuple[str, str]] = []
        self._sequences = DraftSequences(BlockManager(64, 4, "m"), SameVocabulary(300, 300), None)

    def open(self, sequence: RequestTokens) -> None:
        self._sequences.open(sequence)
        copy = self._sequences.sync(sequence)
        assert copy is not None
        assert self._sequences.reserve(copy, len(PROMPT))
        self.tenants.append((sequence.request.tenant, sequence.request.cache_salt))
        self.found.append(copy.blocks.num_computed_tokens > 0)
        self._sequences.blocks.publish(copy.blocks, len(PROMPT))
        copy.blocks.num_computed_tokens = len(PROMPT)

    def propose(self, batch: Seq[object]) -> list[Draft]:
        return [Draft(()) for _ in batch]

    def commit(self, sequences: Seq[object]) -> None: ...

    def close(self, request_id: str) -> None: ...


def biases(tmp_path: Path) -> Callable[[GenerateRequest], bool]:
    """Two requests with the same biases have tables of their own: nobody's request is quicker for another's."""
    scores, known = torch.zeros(1, 300), []

    def ask(request: GenerateRequest) -> bool:
        sampling = next(
            (each for each, tenant in known if tenant == request.tenant), SamplingParams(logit_bias=((5, 1.0),))
        )
        made = masks.bias_of(sampling, scores)
        is_found = any(made is other for other in (masks.bias_of(each, scores) for each, _ in known))
        known.append((sampling, request.tenant))
        return is_found

    return ask


def predictions(tmp_path: Path) -> Callable[[GenerateRequest], bool]:
    """Of a request whose choices are opened one after the other."""
    matcher, names = PredictionMatcher(), iter("abcdefgh")

    def ask(request: GenerateRequest) -> bool:
        with mock.patch("engine.proposer.text_match.text_matcher.Prediction", side_effect=Prediction) as made:
            matcher.open(sequence_of(replace(request, request_id=next(names), prediction_token_ids=PROMPT)))
        return not made.called

    return ask


PROBES = {each.__name__: each for each in (prefixes, finished_texts, grammars, routes, drafts, biases, predictions)}


@pytest.mark.parametrize("name", PROBES)
def test_what_is_kept_for_a_tenant_serves_no_other(tmp_path: Path, name: str) -> None:
    ask = PROBES[name](tmp_path)
    assert not ask(of("first"))
    assert ask(of("first")), "the probe has power: one's own is found"
    assert not ask(of("second"))
    assert ask(of("second"))


@pytest.mark.parametrize("name", [name for name in PROBES if name != "biases"])
def test_what_is_kept_under_a_salt_is_found_under_it_alone(tmp_path: Path, name: str) -> None:
    """Without keys all clients are one tenant, and only a salt separates them."""
    ask = PROBES[name](tmp_path)
    ours, theirs = (replace(of(""), cache_salt=salt) for salt in ("ours", "theirs"))
    assert [ask(each) for each in (ours, ours, theirs, theirs)] == [False, True, False, True]


async def test_times_do_not_depend_on_the_schemas_of_another_tenant(tmp_path: Path) -> None:
    """The first tenant sends each schema twice, then the second sends it with the same salt."""
    write_model(tmp_path)
    files, backend = load_tokenizer_files(str(tmp_path)), EngineBackend(ngram_engine(tmp_path))
    service = GenerationService(backend, files, IngressConfig(model_id="fake", model_path="nowhere"), IngressMetrics())
    transport = httpx.ASGITransport(build_app(service, api_keys("one tenant=one", "two tenant=two")))
    seconds = defaultdict[str, list[float]](list)
    async with httpx.AsyncClient(transport=transport, base_url="http://outrider") as http:
        for number in range(24):
            schema = {"type": "object", "properties": {f"p{number}_{index}": {"type": "null"} for index in range(300)}}
            body = {"prompt": "x", "max_tokens": 1, "cache_salt": "ours", "guided_json": schema}
            for name, key in (("new", "one"), ("again", "one"), ("second", "two")):
                began_s = time.process_time()
                answer = await http.post("/v1/completions", json=body, headers={"x-api-key": key})
                seconds[name].append(time.process_time() - began_s)
                assert answer.status_code == 200, answer.text
    # The first starts the compiler. Other programs only add to the time, so the least one is compared.
    new, again, second = (min(each[1:]) for each in seconds.values())
    assert again < new / 2, "the probe has power: one's own schema is seen"
    assert second - again > new - second, (new, again, second)
