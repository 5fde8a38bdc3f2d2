"""Tokens per pass of the demo pair where the draft has another tokenizer: through shared tokens, and through text.

    python -m bench.speculation.foreign_draft --entries 512 1024 2048 4096

Byte-level tokenizers of other sizes, with another rule for words, learned from other files; the draft is the demo draft
moved to each without training (`models.fixtures.transplant`), so it knows less than one that grew up with its
tokenizer. Tokens per pass do not depend on the machine.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from bench.contenders.prompts import held_out_prompts
from bench.padded_pair import DEMO
from engine.config import (
    CacheConfig,
    DraftVocabulary,
    EngineConfig,
    ModelConfig,
    ModelDtype,
    SchedulerConfig,
    SpeculationConfig,
)
from engine.engine_core.loading import load_engine
from engine.proposer.draft_model.loader import load_drafter
from engine.proposer.vocab_mapping.choice import choose_vocabulary
from models.fixtures.transplant import transplant
from models.training.corpus import collect
from models.training.tokenizer import SPECIAL_TOKENS
from protos.messages import GenerateRequest, SamplingParams

CACHE = CacheConfig(num_blocks=1024, memory_bytes=None)
NUM_FILES = 200


def main() -> None:
    """Generate with drafts of several tokenizers and print their figures."""
    args = _parse_args()
    prompts = held_out_prompts(DEMO / "target", args.prompts)
    print(f"{'draft':28}{'coverage':>9}{'vocabulary':>14}{'T':>5}{'tokens/pass':>13}{'accepted':>10}{'lost':>7}")
    for temperature in args.temperatures:
        figures = generate(prompts, temperature, args.tokens, DEMO / "draft", num_draft_tokens=args.num_draft_tokens)
        _print("demo draft", 1.0, DraftVocabulary.SAME, temperature, figures)
    for num_entries in args.entries:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / "draft"
            transplant(DEMO / "draft", foreign_tokenizer(num_entries), folder)
            choice = choose_vocabulary(str(DEMO / "target"), str(folder), DraftVocabulary.TEXT)
            coverage = choice.require_pair().coverage()
            for vocabulary in (DraftVocabulary.INTERSECTION, DraftVocabulary.TEXT):
                for temperature in args.temperatures:
                    figures = generate(prompts, temperature, args.tokens, folder, vocabulary, args.num_draft_tokens)
                    _print(f"moved to {num_entries} entries", coverage, vocabulary, temperature, figures)


def foreign_tokenizer(num_entries: int, texts: Iterable[str] | None = None) -> Tokenizer:
    """GPT-2's rule for words, learned from files of tests; the demo pair's own has another, from other files."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=num_entries,
        special_tokens=list(SPECIAL_TOKENS[:1]),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    documents = (document.text for document in collect().training if document.is_test)
    core.train_from_iterator(islice(documents, NUM_FILES) if texts is None else texts, trainer)
    return core


@dataclass(frozen=True, slots=True)
class Figures:
    """The result of one batch; `share_lost` is of the tokens that the draft would have given."""

    texts: dict[str, tuple[int, ...]]
    tokens_per_pass: float = 1.0
    share_accepted: float = 0.0
    share_lost: float = 0.0


def generate(
    prompts: list[list[int]],
    temperature: float,
    num_tokens: int,
    draft: Path | None = None,
    vocabulary: DraftVocabulary = DraftVocabulary.AUTO,
    num_draft_tokens: int = 4,
) -> Figures:
    """Return all prompts in one batch, `coupled`, float32; without a draft for comparison."""
    target = ModelConfig(str(DEMO / "target"), dtype=ModelDtype.FLOAT32, num_threads=1)
    proposer = None
    if draft is not None:
        model = ModelConfig(str(draft), dtype=ModelDtype.FLOAT32, num_threads=1)
        proposer = load_drafter(model, CACHE, SchedulerConfig(), target.path, vocabulary).proposer
    speculation = SpeculationConfig(num_tokens=num_draft_tokens if proposer else 0)
    engine = load_engine(EngineConfig(target, CACHE, speculation=speculation), proposer)
    for index, prompt in enumerate(prompts):
        sampling = SamplingParams(seed=index, temperature=temperature, max_tokens=num_tokens)
        engine.add(GenerateRequest(str(index), tuple(prompt), sampling))
    texts: dict[str, tuple[int, ...]] = {}
    while engine.has_work:
        for chunk in engine.step():
            texts[chunk.request_id] = texts.get(chunk.request_id, ()) + tuple(chunk.token_ids)
    if proposer is None:
        return Figures(texts)
    drafts, counts = engine.stats().drafts, proposer.counts
    return Figures(
        texts,
        drafts.acceptance_length,
        drafts.num_accepted_tokens / max(1, drafts.num_draft_tokens),
        counts.num_lost / max(1, counts.num_tokens),
    )


def _print(name: str, coverage: float, vocabulary: DraftVocabulary, temperature: float, figures: Figures) -> None:
    print(
        f"{name:28}{coverage:9.3f}{vocabulary:>14}{temperature:5.1f}{figures.tokens_per_pass:13.2f}"
        f"{figures.share_accepted:10.3f}{figures.share_lost:7.3f}",
        flush=True,
    )


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, nargs="+", default=[512, 1024, 2048, 4096], help="of the tokenizers")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate for each prompt")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--num-draft-tokens", type=int, default=4, help="K")
    return parser.parse_args()


if __name__ == "__main__":
    main()
