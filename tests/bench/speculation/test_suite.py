"""The suite's pieces: every method gives plain decoding's text, and counts its passes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from bench.speculation.methods import PLAIN, Suite
from bench.speculation.workload import RunFigures, measure, questions
from engine.config import CacheConfig
from protos.messages import SamplingParams

DEMO = Path(__file__).parents[3] / "models" / "demo"
TOKENIZER = Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json"))
PROMPTS = [
    TOKENIZER.encode(text, add_special_tokens=False).ids
    for text in ("for name in names:\n    print(name)\n" * 6, "def main():\n    parser = argparse.ArgumentParser(")
]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """A method sets torch's threads; put them back."""
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


def run(names: Seq[str]) -> dict[str, tuple[RunFigures, dict[str, list[int]]]]:
    """Return the figures and the greedy texts of each method."""
    runs = {}
    with ExitStack() as stack:
        suite = Suite(DEMO / "target", DEMO, "float32", CacheConfig(num_blocks=64, memory_bytes=None), stack)
        for method in suite.methods(names):
            texts: dict[str, list[int]] = defaultdict(list)
            sampling = SamplingParams(temperature=0.0, max_tokens=24)
            figures = measure(
                method.engine(),
                PROMPTS,
                sampling,
                method.before_step,
                lambda request_id, token_ids, texts=texts: texts[request_id].extend(token_ids),  # type: ignore[misc]
            )
            runs[method.name] = figures, dict(texts)
    return runs


def test_every_method_gives_the_plain_text_in_fewer_passes() -> None:
    runs = run(["ngram", "suffix", "draft", "draft, tree", "hybrid", "medusa"])
    plain, texts = runs.pop(PLAIN)
    assert (plain.num_tokens, plain.num_passes) == (48, 48)
    assert plain.accepted_by_position == ()
    for name, (figures, found) in runs.items():
        assert found == texts, name
        assert figures.num_tokens == 48, name
        assert figures.tokens_per_pass > 1.2, name
        assert figures.accepted_by_position[0] > 0.2, name


def test_questions_are_spread_over_the_file_and_cut(tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text("\n".join(f'{{"turns": ["{word} {word} {word}", "later"]}}' for word in "abcdef"))
    found = questions(DEMO / "target", file, num_streams=3, max_prompt_tokens=2)
    assert [TOKENIZER.decode(ids)[0] for ids in found] == ["a", "c", "e"]
    assert {len(ids) for ids in found} == {2}
