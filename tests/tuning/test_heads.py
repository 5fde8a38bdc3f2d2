"""Heads learn from a log: training drafts like the engine, and the drafts improve."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from engine.config import CacheConfig, EngineConfig, HeadConfig, HeadKind, ModelConfig, SpeculationConfig
from engine.engine_core.loading import load_engine
from engine.model.draft_heads.loader import load_head
from engine.model.draft_heads.medusa import MedusaHeads as ServedMedusa
from engine.model.loader import model_version
from engine.position_log.position_log import top_logprobs
from engine.position_log.shard import LoggedModel, LoggedRequest, log_files, new_file, read_shard, write_shard
from models.training.train_heads import eagle3_logits, new_student, save_head, save_heads
from protos.errors import ConfigError
from protos.messages import GenerateRequest, SamplingParams, SpeculationMethod
from tests.engine.fixtures.checkpoints import write_checkpoint
from tuning.drafts import HeadFolder
from tuning.log_windows import Window, windows_of
from tuning.rollouts import write_own_chats
from tuning.run import top_distillation_loss
from tuning.score import generate, score_draft
from tuning.student import TrainableMedusaHeads
from tuning.tune import TuneSettings, tune, write_new_head

VOCAB_SIZE = 64
WIDTH = 32
NUM_PROMPT_TOKENS = 6
END_ID = 2  # LlamaConfig's
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class LoggedHeads:
    """A target of seven layers, its heads, and the log of its texts."""

    target: Path
    eagle3: Path
    medusa: Path
    log: Path
    requests: list[LoggedRequest]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> LoggedHeads:
    root = tmp_path_factory.mktemp("heads")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=WIDTH,
        intermediate_size=64,
        num_hidden_layers=7,  # the least number with three default layers
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    target = LlamaForCausalLM(config).eval()
    target.get_input_embeddings().weight.data.mul_(8.0)  # a token nearly determines the next one
    target.save_pretrained(root / "target")
    ids = torch.arange(VOCAB_SIZE)[torch.arange(VOCAB_SIZE) % 4 > 0]
    head = new_student(target, len(ids))
    head.begin_as(target, ids)
    save_head(head, target, ids, root / "eagle3")
    heads = TrainableMedusaHeads(WIDTH, num_heads=2, num_blocks=1)
    save_heads(heads, target, root / "medusa")
    requests = written_by(target)
    (root / "log").mkdir()
    write_shard(new_file(root / "log"), LoggedModel(model_version(str(root / "target")), VOCAB_SIZE), requests)
    return LoggedHeads(root / "target", root / "eagle3", root / "medusa", root / "log", requests)


def written_by(target: LlamaForCausalLM) -> list[LoggedRequest]:
    prompts = torch.randint(0, VOCAB_SIZE, (40, NUM_PROMPT_TOKENS), generator=torch.Generator().manual_seed(0))
    requests = []
    for temperature in (0.0, 1.0):
        written = generate(target, prompts, 16, temperature, seed=1)
        with torch.no_grad():
            logits = target(written).logits[:, NUM_PROMPT_TOKENS - 1 : -1]
        positions = np.arange(NUM_PROMPT_TOKENS, written.shape[1], dtype=np.int32)
        requests += [
            LoggedRequest(
                "free",
                temperature,
                1.0,
                ids.numpy().astype(np.int32),
                positions,
                *top_logprobs(rows.numpy(), VOCAB_SIZE),
            )
            for ids, rows in zip(written, logits, strict=True)
        ]
    return requests


def settings(made: LoggedHeads, draft: Path | None, output: Path) -> TuneSettings:
    return TuneSettings(
        log=made.log,
        target=str(made.target),
        draft=draft,
        output=output,
        minutes=5.0,
        learning_rates=(0.02,),
        num_seeds=1,
        rank=None,
        num_tokens=3,
        num_steps=64,
        rollouts=0.0,
    )


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_tuned_heads_are_better_on_what_they_have_not_seen(made: LoggedHeads, tmp_path: Path, kind: str) -> None:
    draft: Path = getattr(made, kind)
    lines: list[str] = []
    assert tune(settings(made, draft, tmp_path / "new"), lines.append, lambda *_: None), lines
    report = json.loads((tmp_path / "new" / "tuning.json").read_text(encoding="utf-8"))
    assert report["after"]["tokens_per_pass"] > 1.05 * report["before"]["tokens_per_pass"]
    assert (tmp_path / "new" / "config.json").read_bytes() == (draft / "config.json").read_bytes()
    before, after = (load_file(folder / "model.safetensors") for folder in (draft, tmp_path / "new"))
    assert {name: (each.shape, each.dtype) for name, each in before.items()} == {
        name: (each.shape, each.dtype) for name, each in after.items()
    }
    written = HeadFolder(tmp_path / "new", str(made.target), CPU)
    held_out = [request for request in made.requests if request.temperature == 0.0]  # others train, too
    assert (
        score_draft(written.load(), held_out, 3).acceptance
        > score_draft(HeadFolder(draft, str(made.target), CPU).load(), held_out, 3).acceptance
    )


@pytest.fixture
def float32_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load the target in float32 on every processor, because the expected values are in float32."""
    monkeypatch.setattr("tuning.drafts.resolve_dtype", lambda *_: torch.float32)


@pytest.mark.usefixtures("float32_target")
@torch.no_grad()
def test_an_eagle3_head_drafts_in_training_what_it_drafts_elsewhere(made: LoggedHeads) -> None:
    """Texts of unlike lengths in a batch, each row and each draft against the head run over one text alone."""
    target = LlamaForCausalLM.from_pretrained(made.target, dtype=torch.float32)
    student = HeadFolder(made.eagle3, str(made.target), CPU).load()
    requests = [made.requests[0], replace_length(made.requests[1], 14)]
    windows = [window for request in requests for window in windows_of(request)]
    alone = eagle3_logits(made.eagle3, target)
    expected = []
    for request in requests:
        ids = torch.from_numpy(request.token_ids.astype(np.int64))[None]
        padded = torch.cat([ids, torch.zeros(1, 3, dtype=torch.long)], dim=1)  # rounds that reach past the text
        drafts = list(alone(padded, 3))
        expected.append([[drafts[j][0, place - 2 - j] for place in request.positions.tolist()] for j in range(3)])
    for draft, logits in enumerate(student.logits(windows, 3)):
        wanted = torch.stack([row for each in expected for row in each[draft]])
        torch.testing.assert_close(logits, wanted[:, student.target_ids(torch.arange(logits.shape[1]))])


def replace_length(request: LoggedRequest, length: int) -> LoggedRequest:
    num_left = length - NUM_PROMPT_TOKENS
    return replace(
        request,
        token_ids=request.token_ids[:length],
        positions=request.positions[:num_left],
        top_ids=request.top_ids[:num_left],
        top_logprobs=request.top_logprobs[:num_left],
    )


@pytest.mark.usefixtures("float32_target")
@torch.no_grad()
def test_medusa_heads_draft_in_training_what_the_engine_drafts(made: LoggedHeads) -> None:
    target = LlamaForCausalLM.from_pretrained(made.target, dtype=torch.float32)
    served = load_head(HeadConfig(HeadKind.MEDUSA, str(made.medusa)), target, CPU)
    assert isinstance(served, ServedMedusa)
    served.lm_head = target.lm_head
    student = HeadFolder(made.medusa, str(made.target), CPU).load()
    request = made.requests[0]
    hidden = target.model(torch.from_numpy(request.token_ids.astype(np.int64))[None]).last_hidden_state[0]
    drafts = served.logits(hidden, 2)  # [T, K, V]
    for draft, logits in enumerate(student.logits(list(windows_of(request)), 2)):
        wanted = torch.stack([drafts[place - 2 - draft, draft] for place in request.positions.tolist()])
        torch.testing.assert_close(logits, wanted, atol=1e-3, rtol=1e-3)


def test_tokens_outside_a_drafts_vocabulary_count_for_nothing() -> None:
    """A draft that equals p over its vocabulary has no loss; a row with no token of its vocabulary has no weight."""
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]))
    top_ids = torch.tensor([[0, 1, 2, -1], [-1, 0, 1, 2]])
    p = torch.tensor([[0.25, 0.125, 0.125, 0.5], [1.0, 0.0, 0.0, 0.0]])
    assert top_distillation_loss(logits, top_ids, torch.log(p + 1e-30), 1.0) == pytest.approx(0.0, abs=1e-3)
    whole = torch.tensor([[0, 1, 2], [0, 1, 2]])
    assert top_distillation_loss(logits, whole, torch.log(p[:, 1:] + 1e-30), 1.0) > 0.1


@pytest.mark.usefixtures("float32_target")
def test_a_new_head_learns_from_the_log_and_drafts_in_the_engine(made: LoggedHeads, tmp_path: Path) -> None:
    """The engine drafts as the training does; no text changes, and drafts are right more often than before."""
    lines: list[str] = []
    assert tune(settings(made, None, tmp_path / "new"), lines.append, lambda *_: None), lines
    write_new_head(tmp_path / "untrained", str(made.target), made.requests)
    students = {name: HeadFolder(tmp_path / name, str(made.target), CPU).load() for name in ("untrained", "new")}
    prompts = [tuple(request.token_ids[:NUM_PROMPT_TOKENS].tolist()) for request in made.requests[:12]]
    plain, _ = written(made.target, None, prompts)
    num_right = {}
    for name, student in students.items():
        texts, drafts = written(made.target, tmp_path / name, prompts)
        assert texts == plain
        compared = [each for prompt in prompts for each in drafts[prompt]]
        agreed = []
        for text, drafted in compared:
            for length, token_id in enumerate(drafted):
                ids = torch.tensor((*text, *drafted[:length]))
                row = torch.tensor([len(ids) - 1])
                *_, logits = student.logits([Window(ids, row, row, row, row)], length + 1)
                found = logits[0, student.draft_ids(torch.tensor(token_id))]
                agreed.append(bool(found > logits.max() - 0.1))  # states differ by 1%, as the engine rounds otherwise
        assert sum(agreed) > 0.96 * len(agreed)
        num_right[name] = sum(
            plain[prompt][len(text) : len(text) + 1] == drafted[:1]
            for prompt in prompts
            for text, drafted in drafts[prompt]
        ) / len(compared)
    assert num_right["new"] > 2 * num_right["untrained"], num_right


Drafts = dict[tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...]]]]


def written(
    target: Path, head: Path | None, prompts: list[tuple[int, ...]]
) -> tuple[dict[tuple[int, ...], tuple[int, ...]], Drafts]:
    """The engine's greedy text after each prompt, and its drafts with the text before each."""
    config = None if head is None else HeadConfig(HeadKind.DSPARK, str(head))
    methods = (SpeculationMethod.NONE if head is None else SpeculationMethod.DSPARK,)
    engine = load_engine(
        EngineConfig(
            ModelConfig(str(target), "float32"),
            CacheConfig(num_blocks=64),
            speculation=SpeculationConfig(3, methods=methods),
            head=config,
        )
    )
    texts, shown = dict.fromkeys(prompts, ()), []
    engine.on_drafted = shown.extend
    names = {str(index): prompt for index, prompt in enumerate(prompts)}
    for name, prompt in names.items():
        engine.add(GenerateRequest(name, prompt, SamplingParams(temperature=0.0, max_tokens=24), returns_drafts=True))
    while engine.has_work:
        for chunk in engine.step():
            texts[names[chunk.request_id]] += chunk.token_ids
    engine.close()
    drafts: Drafts = {prompt: [] for prompt in prompts}
    for chunk in shown:
        prompt = names[chunk.request_id]
        drafts[prompt].append(((*prompt, *texts[prompt][: chunk.offset]), chunk.draft_ids))
    return {prompt: (*prompt, *text) for prompt, text in texts.items()}, drafts


def test_a_new_head_needs_layers_to_read(tmp_path: Path, made: LoggedHeads) -> None:
    write_checkpoint(tmp_path / "flat", seed=0)
    with pytest.raises(ConfigError, match="has 2; it needs 4 or more"):
        write_new_head(tmp_path / "new", str(tmp_path / "flat"), made.requests)
    assert not (tmp_path / "new").exists()


def test_a_target_writes_chats_to_train_on(made: LoggedHeads, tmp_path: Path) -> None:
    """A question is a text that ended; it is answered after the template's tokens, and logged with its answer."""
    progress: list[float] = []
    write_own_chats(str(made.target), (5, 6), (7,), tmp_path / "log", 40, progress.append)
    requests = [each for file in log_files(tmp_path / "log") for each in read_shard(file)]
    assert 5 < len(requests) <= 40
    assert progress == sorted(progress)
    assert progress[-1] == pytest.approx(1.0)
    for request in requests:
        question = request.token_ids[: request.positions[0]].tolist()
        assert question[:2] == [5, 6]
        assert question[-1] == 7
        assert END_ID not in question
    assert len({request.temperature for request in requests}) == 2
    written_before = (tmp_path / "log").stat().st_mtime_ns
    write_own_chats(str(made.target), (5, 6), (7,), tmp_path / "log", 40, progress.append)
    assert (tmp_path / "log").stat().st_mtime_ns == written_before, "a second start uses the first one's"
    with pytest.raises(ConfigError, match="was asked for 1 questions and wrote none"):
        write_own_chats(str(made.target), tuple([5] * 500), (7,), tmp_path / "none", 1, progress.append)


def test_heads_that_cannot_be_tuned_are_refused(made: LoggedHeads, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="remove --rank"):
        tune(replace(settings(made, made.eagle3, tmp_path / "new"), rank=4), print, lambda *_: None)
    config = json.loads((made.eagle3 / "config.json").read_text(encoding="utf-8"))
    for name, changes, message in (
        ("normed", {"norm_before_residual": True}, "norm_before_residual"),
        ("other", {"hidden_size": 16}, "made for a target of hidden size 16"),
        ("wide", {"intermediate_size": 32}, "the tensor midlayer.mlp"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**config, **changes}), encoding="utf-8")
        save_file(load_file(made.eagle3 / "model.safetensors"), folder / "model.safetensors")
        with pytest.raises(ConfigError, match=message):
            HeadFolder(folder, str(made.target), CPU)
    (tmp_path / "medusa").mkdir()
    (tmp_path / "medusa" / "config.json").write_text(json.dumps({"medusa_num_heads": 2, "medusa_num_layers": 1}))
    save_file(load_file(made.medusa / "model.safetensors"), tmp_path / "medusa" / "model.safetensors")
    with pytest.raises(ConfigError, match="served and not tuned"):
        HeadFolder(tmp_path / "medusa", str(made.target), CPU)
