"""Runner and verifier serve a host that is one step behind: tokens stay on the device, texts are the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.batch.draft import NO_DRAFT
from engine.batch.span import Span
from engine.config import CacheConfig, EngineConfig, GraphConfig, GraphKind, ModelConfig, SchedulerConfig
from engine.engine_core.loading import load_engine
from engine.model.runner.model_runner import ModelRunner
from engine.verifier.verifier import Verifier
from engine.verifier.verify_task import IMPOSSIBLE_ID, VerifyTask
from protos.messages import GenerateRequest, Grammar, GrammarKind, SamplingParams
from tests.engine.fixtures.builders import make_sequence
from tests.engine.fixtures.byte_tokenizer import BYTE_VOCAB_SIZE, END_ID, write_tokenizer
from tests.engine.fixtures.checkpoints import write_checkpoint


def test_tokens_are_drawn_without_reading_anything_back() -> None:
    """Tensors without memory cannot be read. On a processor a cut by top-p looks at its scores; a GPU's does not."""
    samplings = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.7, seed=3),
        SamplingParams(top_k=3, min_p=0.1, logit_bias=((1, 1.0),)),
        SamplingParams(min_tokens=9, stop_token_ids=(2,)),
        SamplingParams(repetition_penalty=1.2, frequency_penalty=0.5),
    ]
    tasks = []
    for row, sampling in enumerate(samplings):
        sequence = make_sequence(str(row), (1, 2), sampling, num_drafts=0)
        tasks.append(VerifyTask(sequence, NO_DRAFT, row))
    drawn = Verifier().draw(torch.empty(len(samplings), 16, device="meta"), tasks)
    assert (drawn.shape, drawn.dtype, drawn.device.type) == ((len(samplings),), torch.int64, "meta")
    logits = torch.randn(len(samplings), 16)
    expected = [outcome.token_ids[0] for outcome in Verifier().verify(logits, tasks)]
    assert Verifier().draw(logits, tasks).tolist() == expected
    logits[1, 5], logits[3] = float("nan"), float("-inf")
    expected[1] = expected[3] = IMPOSSIBLE_ID
    assert Verifier().draw(logits, tasks).tolist() == expected


GRAPHS = GraphConfig(GraphKind.EAGER, batches=(2, 4), row_counts=(1,))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    write_checkpoint(folder, seed=0, vocab_size=BYTE_VOCAB_SIZE, steepness=0.1)
    write_tokenizer(folder)
    return folder


def test_a_runner_takes_tokens_from_the_device_in_recorded_passes_and_in_others(folder: Path) -> None:
    runner = ModelRunner(ModelConfig(str(folder), "float32", "cpu", graphs=GRAPHS), CacheConfig(4, num_blocks=32))
    for num_spans in (1, 3, 6):
        token_ids = list(range(5, 5 + num_spans))
        known = [Span([token_id], 0, [place], 1) for place, token_id in enumerate(token_ids)]
        expected = runner.forward(known).clone()
        fed = runner.forward([span._replace(token_ids=[0]) for span in known], torch.tensor(token_ids))
        assert torch.equal(fed, expected)


def generate(folder: Path, *, is_behind: bool, graphs: GraphConfig = GRAPHS) -> tuple[dict[str, list[int]], int]:
    model = ModelConfig(str(folder), "float32", "cpu", graphs=graphs)
    config = EngineConfig(model, CacheConfig(4, num_blocks=64), SchedulerConfig(4, 64))
    with pytest.MonkeyPatch.context() as patch:
        if not is_behind:
            patch.setattr(ModelRunner, "can_overlap", False)
        core = load_engine(config)
    grammar = Grammar(GrammarKind.REGEX, r"(cat|dog){1,4} [0-9]{2,6}", "guided_regex")
    for index in range(7):
        sampling = SamplingParams(
            temperature=0.7 * (index % 2),
            seed=index,
            max_tokens=16,
            stop_token_ids=(END_ID,),
            grammar=grammar if index in (2, 5) else None,
        )
        core.add(GenerateRequest(str(index), tuple(range(40, 49 + index)), sampling))
    texts: dict[str, list[int]] = {}
    while core.has_work:
        for chunk in core.step():
            texts.setdefault(chunk.request_id, []).extend(chunk.token_ids)
        core.scheduler.check_integrity()
    return texts, core.stats().num_overlapped_passes


def test_async_scheduling_changes_no_text_and_can_be_switched_off(folder: Path) -> None:
    texts, num_passes = generate(folder, is_behind=True)
    assert num_passes > 10
    assert generate(folder, is_behind=False) == (texts, 0)
    assert generate(folder, is_behind=True, graphs=GraphConfig()) == (texts, 0), "nothing is recorded on a processor"
