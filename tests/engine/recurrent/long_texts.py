"""Long texts of models with recurrent layers: every K, temperature and case gives the tokens of plain decoding.

    python -m tests.engine.recurrent.long_texts 10000              tokens of each temperature, in all families
    python -m tests.engine.recurrent.long_texts 10000 lfm2 bamba   in some
    python -m tests.engine.recurrent.long_texts 10000 model self   with drafts of these kinds

A group has one text of each temperature and K. Engines are deterministic, so equality has no tolerance. Greedy tokens
are compared with the stock model's likeliest ones after the same text.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import PreTrainedModel

from engine.batch.draft import Draft
from engine.config import (
    CacheConfig,
    EngineConfig,
    HeadConfig,
    HeadKind,
    ModelConfig,
    Quantization,
    SchedulerConfig,
    SpeculationConfig,
)
from engine.engine_core import EngineCore
from engine.engine_core.loading import load_engine
from engine.kv_cache.state_pool import num_states
from engine.proposer import Proposer
from engine.proposer.draft_model.model_proposer import ModelProposer
from engine.sequence.batch import DraftQuery
from engine.sequence.sequence import RequestTokens
from protos.block_keys import CacheDelta, split_keys
from protos.messages import GenerateRequest, SamplingParams, SpeculationMethod, SpeculationParams
from tests.engine.fixtures.ahead_proposer import AheadProposer
from tests.engine.fixtures.fakes import ScriptedProposer
from tests.engine.fixtures.hybrids import HYBRIDS, VOCAB_SIZE, write_hybrid
from tests.engine.fixtures.in_process_transport import InProcessTransport

P = 4
TEMPERATURES = (0.0, 0.7, 1.0)
MAX_DRAFTS = 8
GROUP = len(TEMPERATURES) * (MAX_DRAFTS + 1)
MAX_PROMPT = 40
NEAR_TIE = 1e-5  # of logits up to 4 or so: sums in another order differ by 3e-6 in float32
Texts = dict[str, list[int]]
# The coming text with wrong tokens; a model: the target's equal with wrong tokens, one in int8, and that one ahead of
# verification; the target itself in int8.
DRAFTERS = ("script", "twin", "model", "ahead", "self")
INT8_SELF = HeadConfig(HeadKind.SELF, quantization=Quantization.INT8)


@dataclass(frozen=True, slots=True)
class Case:
    """How the texts of a group are computed.

    Attributes:
        shows: the count of `Outcome` that is not zero if the case has come about.
        share: of a group's texts that run at a time; one text at least.
        room: the pool's blocks, relative to the blocks that a group needs.
        num_rounds: how often each text is computed; every second time in reverse order.
        stay: tokens that a text gets before it goes on in another engine; 0 for all of them.
        is_fetched: another engine prefills.
    """

    shows: str
    share: float = 1.0
    room: float = 1.5
    num_rounds: int = 1
    max_tokens_per_step: int = 256
    stay: int = 0
    is_fetched: bool = False


CASES = {
    "alone": Case("num_accepted", share=0.0, room=0.0),
    "in company, then prefix hits": Case("num_hit_tokens", num_rounds=2),
    "in odd chunks, evicted": Case("num_evicted", share=0.25, room=0.5, num_rounds=2, max_tokens_per_step=41),
    "preempted": Case("num_preemptions", room=0.4),
    "migrated": Case("num_moves", stay=5),
    "prefilled elsewhere": Case("num_fetched", is_fetched=True),
    "all of these": Case("num_fetched", room=0.25, num_rounds=2, max_tokens_per_step=41, stay=5, is_fetched=True),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """Counts of a case."""

    num_tokens: int = 0
    num_differences: int = 0
    num_accepted: int = 0
    num_rejected: int = 0
    num_hit_tokens: int = 0
    num_evicted: int = 0  # blocks
    num_preemptions: int = 0
    num_moves: int = 0
    num_fetched: int = 0  # tokens

    def __add__(self, other: Outcome) -> Outcome:
        return Outcome(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))


class Family:
    """A checkpoint and its plain texts of `length` tokens: without drafts, each with a prefix cache of its own."""

    def __init__(self, folder: Path, name: str, num_groups: int = 1, length: int = 14) -> None:
        self.folder, self.length = folder, length
        self.model: PreTrainedModel = write_hybrid(folder, HYBRIDS[name]())
        self.groups = [list(requests(group, length)) for group in range(num_groups)]
        self._texts: Texts = {}

    @property
    def texts(self) -> Texts:
        if not self._texts:
            core = self.build(Case(""), num_drafts=0)
            for group in self.groups:
                self._texts |= Place([core]).run([replace(each, cache_salt=each.request_id) for each in group])
        return self._texts

    def build(self, case: Case, num_drafts: int = MAX_DRAFTS, drafter: str = DRAFTERS[0], **options: Any) -> EngineCore:
        """Return an engine for a case; `options` are of the cache, except `transport`."""
        sizes = [-(-(len(each.prompt_token_ids) + self.length) // P) for each in self.groups[0]]
        num_blocks = int(max(2 * max(sizes), case.room * sum(sizes)))
        transport = options.pop("transport", None)
        method = SpeculationMethod.SELF if num_drafts and drafter == "self" else SpeculationMethod.MODEL
        config = EngineConfig(
            ModelConfig(str(self.folder), dtype="float32", deterministic=True),
            CacheConfig(**{"block_size": P, "num_blocks": num_blocks, "memory_bytes": None, **options}),
            SchedulerConfig(
                max(1, int(case.share * GROUP)), case.max_tokens_per_step, max_model_len=MAX_PROMPT + self.length
            ),
            SpeculationConfig(num_drafts, max_num_tokens=num_drafts, methods=(method,)),
            INT8_SELF if method is SpeculationMethod.SELF else None,
            min_remote_prefill_tokens=2 * P,
        )
        return load_engine(config, self._proposer(config, drafter) if num_drafts else None, transport)

    def _proposer(self, config: EngineConfig, drafter: str) -> Proposer | None:
        if drafter in ("script", "self"):
            return Drafts(self.texts) if drafter == "script" else None
        near = replace(config.model, quantization=Quantization.INT8, deterministic=False)
        model = ModelProposer.from_config(
            config.model if drafter == "twin" else near,
            replace(config.cache, num_states=num_states(config)),
            config.scheduler,
        )
        if drafter == "twin":
            return SpoiledProposer(model)
        return AheadProposer(model, fan_out=2) if drafter == "ahead" else model

    def outcome(self, case: Case, drafter: str = DRAFTERS[0]) -> Outcome:
        """Compute all texts in a case and compare them with the plain ones."""
        evictions: list[int] = []
        options: dict[str, Any] = {}
        if case.is_fetched:
            elsewhere = self.build(replace(case, max_tokens_per_step=14), num_drafts=0)
            options["transport"] = InProcessTransport(elsewhere, tokens_per_s=1e9)
        cores = [self.build(case, drafter=drafter, **options)]
        cores[0].blocks.add_sink(lambda delta: evictions.append(_num_removed(delta)))
        cores += [self.build(case, drafter=drafter)] if case.stay else []
        place, differences, num_tokens = Place(cores, case.stay), 0, 0
        for group in self.groups:
            for turn in range(case.num_rounds):
                wanted = [_again(each, turn) for each in (reversed(group) if turn % 2 else group)]
                for name, text in place.run(wanted).items():
                    expected = self.texts[_name(name)]
                    num_tokens += len(expected)
                    differences += sum(found != token for found, token in zip(text, expected, strict=True))
        counts = Outcome(num_tokens, differences, num_evicted=sum(evictions), num_moves=place.num_moves)
        return sum(map(_counts, cores), counts)

    @torch.inference_mode()
    def num_unlike_stock(self) -> int:
        """Return how many tokens of the greedy texts are not the stock model's likeliest, or nearly, after the same."""
        found = 0
        for each in (each for group in self.groups for each in group if each.sampling.temperature == 0.0):
            text = self.texts[each.request_id]
            inputs = torch.tensor([[*each.prompt_token_ids, *text[:-1]]])
            logits = self.model(inputs, use_cache=False).logits[0, len(each.prompt_token_ids) - 1 :]
            own = logits.gather(1, torch.tensor(text)[:, None])[:, 0]
            found += int((own < logits.amax(dim=-1) - NEAR_TIE).sum())
        return found


class Drafts(ScriptedProposer):
    """Proposes the coming text with a wrong token at changing places."""

    def __init__(self, texts: Texts) -> None:
        super().__init__(self._draft)
        self._texts = texts

    def _draft(self, sequence: Any, max_tokens: int) -> list[int]:
        at = sequence.num_output_tokens
        known = self._texts[_name(sequence.request_id)][at : at + max_tokens]
        wrong = (5 * at + len(sequence.request_id)) % (max_tokens + 2)
        return [(token + (index == wrong)) % VOCAB_SIZE for index, token in enumerate(known)]


class SpoiledProposer:
    """Drafts as a model does, with a wrong token at changing places; implements `Proposer`.

    `num_right` counts the tokens before the wrong ones.
    """

    def __init__(self, model: ModelProposer) -> None:
        self.model = model
        self.num_right = 0

    def open(self, sequence: RequestTokens) -> None:
        self.model.open(sequence)

    def commit(self, sequences: Seq[RequestTokens]) -> None:
        self.model.commit(sequences)

    def close(self, request_id: str) -> None:
        self.model.close(request_id)

    def propose(self, queries: Seq[DraftQuery]) -> list[Draft]:
        drafts = self.model.propose(queries)
        self.model.sequences.check_integrity()
        return [self._spoiled(*each) for each in zip(queries, drafts, strict=True)]

    def _spoiled(self, query: DraftQuery, draft: Draft) -> Draft:
        token_ids = list(draft.token_ids)
        wrong = (5 * len(query.sequence.token_ids)) % (len(token_ids) + 1)
        self.num_right += wrong
        token_ids[wrong : wrong + 1] = [(token_id + 1) % VOCAB_SIZE for token_id in token_ids[wrong : wrong + 1]]
        return Draft(tuple(token_ids))


class Place:
    """Engines that step in turn; a text goes on in the next one after it has got `stay` tokens."""

    def __init__(self, cores: Seq[EngineCore], stay: int = 0) -> None:
        self.num_moves = 0
        self._cores, self._stay = cores, stay

    def run(self, wanted: Seq[GenerateRequest]) -> Texts:
        texts: Texts = {each.request_id: [] for each in wanted}
        present = {each.request_id: each for each in wanted}
        for each in wanted:
            self._cores[0].add(each)
        for _ in range(1_000 + 100 * sum(each.sampling.max_tokens for each in wanted)):
            if not any(core.has_work for core in self._cores):
                return texts
            for core, following in zip(self._cores, (*self._cores[1:], self._cores[0]), strict=True):
                for chunk in core.step() if core.has_work else ():
                    texts[chunk.request_id] += chunk.token_ids
                    request = present[chunk.request_id]
                    num_new = len(texts[chunk.request_id]) - len(request.output_token_ids)
                    if self._stay and num_new >= self._stay and chunk.finish_reason is None:
                        core.abort(chunk.request_id)
                        moved = replace(request, output_token_ids=tuple(texts[chunk.request_id]))
                        present[chunk.request_id] = moved
                        following.add(moved)
                        self.num_moves += 1
                core.scheduler.check_integrity()
        raise AssertionError("the engines make no progress")


def requests(group: int, length: int) -> Iterator[GenerateRequest]:
    """Yield one request of each temperature and K; two of three prompts begin with the same 13 tokens."""
    generator = torch.Generator().manual_seed(1)
    shared = torch.randint(1, VOCAB_SIZE, (13,), generator=generator).tolist()
    generator.manual_seed(100 + group)
    for index in range(GROUP):
        size = 2 + (5 * index) % (MAX_PROMPT - 13 - 2)
        own = torch.randint(1, VOCAB_SIZE, (size,), generator=generator).tolist()
        sampling = SamplingParams(
            temperature=TEMPERATURES[index % len(TEMPERATURES)], seed=GROUP * group + index, max_tokens=length
        )
        prompt = (*(shared if index % 3 else ()), *own)
        drafts = SpeculationParams(num_tokens=index // len(TEMPERATURES))
        yield GenerateRequest(f"{group}-{index}", prompt, sampling, drafts)


def _again(request: GenerateRequest, turn: int) -> GenerateRequest:
    return replace(request, request_id=f"{request.request_id}/{turn}")


def _name(request_id: str) -> str:
    return request_id.partition("/")[0]


def _num_removed(delta: CacheDelta) -> int:
    return len(split_keys(delta.removed))


def _counts(core: EngineCore) -> Outcome:
    stats = core.stats()
    return Outcome(
        num_accepted=stats.drafts.num_accepted_tokens,
        num_rejected=stats.drafts.num_draft_tokens - stats.drafts.num_accepted_tokens,
        num_hit_tokens=stats.num_prefix_hit_tokens,
        num_preemptions=stats.num_preemptions,
        num_fetched=stats.remote.num_tokens,
    )


def main(num_tokens: int, names: Seq[str], drafters: Seq[str]) -> None:
    """Print the counts of every family in every case, with every kind of drafts."""
    length = 100
    num_groups = -(-num_tokens // (length * (MAX_DRAFTS + 1)))
    for name in names:
        with TemporaryDirectory() as folder:
            family = Family(Path(folder), name, num_groups, length)
            num_greedy = sum(map(len, family.texts.values())) // len(TEMPERATURES)
            _say(f"{name}: {family.num_unlike_stock()} of {num_greedy} greedy tokens are not transformers'")
            for drafter, (title, case) in product(drafters, CASES.items()):
                began_s = time.process_time()
                outcome = family.outcome(case, drafter)
                counts = ", ".join(f"{each.name[4:]} {getattr(outcome, each.name)}" for each in fields(outcome))
                _say(f"  {drafter}, {title}: {counts}; {time.process_time() - began_s:.0f} s")
                assert getattr(outcome, case.shows) > 0, f"{case.shows} is 0"


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    chosen = sys.argv[2:]
    main(
        int(sys.argv[1]),
        [each for each in chosen if each in HYBRIDS] or list(HYBRIDS),
        [each for each in chosen if each in DRAFTERS] or DRAFTERS[:1],
    )
