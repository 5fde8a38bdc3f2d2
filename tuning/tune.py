"""A draft tuned on its deployment's log, and on further continuations of its prompts by the target.

Several short trainings run first, then a long one of the best; the best draft of all is the result. Without a draft to
start from, a new DSpark head is made.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers.utils.logging
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoConfig

from engine.config import HeadKind
from engine.model.draft_heads.checkpoint import read_config
from engine.model.draft_heads.published import HeadFormat
from engine.model.loader import model_version
from engine.position_log.shard import LoggedModel, LoggedRequest
from protos.errors import ConfigError
from tuning.drafts import DraftFolder, HeadFolder, TunableDraft, holds_heads, load_reader, partial_of
from tuning.log_windows import Log, Window, log_end, read_log, wait_for_positions, windows_of
from tuning.rollouts import write_rollouts
from tuning.run import Candidate, TrainingRun
from tuning.score import Score, score_draft
from tuning.student import BlockStudent

_TRIALS_SHARE = 0.3  # share of the minutes for all short trainings together
_LONG_SHARE = 0.6  # share for the long one; the rest is for measuring

OnProgress = Callable[[str, float], None]  # the run, and the share of all training that is done
Report = Callable[[str], None]
Scored = tuple[Score, TrainingRun]  # of a trained draft


@dataclass(frozen=True, slots=True)
class TuneSettings:
    """The settings of a tuning: `rank` None trains all weights; the score is for K = `num_tokens`.

    Without a `draft` a new DSpark head is trained. `num_steps` may end trainings before the minutes do. `rollouts` is
    the share of the minutes for the target to write more text; None derives it from the target's size. With `num_fresh`
    only new positions of the log count, and the training waits for that many, at most for `minutes`.
    """

    log: Path
    target: str
    draft: Path | None
    output: Path
    minutes: float
    learning_rates: tuple[float, ...]
    num_seeds: int
    rank: int | None
    num_tokens: int
    num_steps: int | None = None
    rollouts: float | None = None
    num_fresh: int = 0


class Workplace:
    """The folder next to the output where runs keep their state until all is done.

    Raises:
        ConfigError: the output exists, or the folder has the state of another tuning.
    """

    def __init__(self, settings: TuneSettings) -> None:
        self.folder = working_folder(settings.output)
        check_output(settings.output)
        self.folder.mkdir(parents=True, exist_ok=True)
        arguments = {name: str(value) for name, value in asdict(settings).items()}
        if self.remember("arguments", arguments)[1] != arguments:
            raise ConfigError(
                f"{self.folder} has the state of a tuning with other options; finish that tuning, or remove the folder"
            )

    def remember(self, name: str, value: dict[str, Any]) -> tuple[bool, dict[str, Any]]:
        """Store a value under a name unless an earlier process has; return True if it is new, and the stored value."""
        file = self.folder / f"{name}.json"
        if file.is_file():
            return False, json.loads(file.read_text(encoding="utf-8"))
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(value), encoding="utf-8")
        os.replace(partial, file)
        return True, value

    def remove(self) -> None:
        """Remove the state of all runs."""
        shutil.rmtree(self.folder, ignore_errors=True)


def check_output(output: Path) -> None:
    """Raise ConfigError if the output exists, or cannot be created."""
    if output.exists():
        raise ConfigError(f"--output {output} exists; give another folder, or remove it")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output {output} cannot be made: {error}") from error


def working_folder(output: Path) -> Path:
    """Return the folder with the state of an unfinished tuning."""
    return output.with_name(f"{output.name}.tuning")


def tune(settings: TuneSettings, report: Report, on_progress: OnProgress) -> bool:
    """Train, and write the best draft to the output if it is better than the present one; return True if it is.

    After a kill at any point, a call with the same settings continues.

    Raises:
        ConfigError: the log or the draft cannot be used, or the output exists.
    """
    transformers.utils.logging.disable_progress_bar()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = _logged_model(settings.target)
    draft = None if settings.draft is None else draft_of(settings, device)
    log = _new_log(settings, target, report) if settings.num_fresh else read_log(settings.log, target, report)
    workplace = Workplace(settings)
    if draft is None:
        folder = workplace.folder / "head"
        if not folder.is_dir():
            write_new_head(folder, settings.target, log.training)
        draft = draft_of(replace(settings, draft=folder), device)
    # Score the present draft: a new one must be better on the held-out requests.
    before = score_draft(draft.load(), log.held_out, settings.num_tokens)
    report(f"{log.num_positions} positions; {before.num_positions} are for measurement only")
    report(_line("the present draft", before))
    # Let the target write more text for a share of the minutes.
    share = _rollouts_share(settings)
    written = _write_more(settings, share, log, workplace, report, on_progress) if share else []
    # Train candidates for the rest of the time, and score each.
    windows = [window for request in (*log.training, *written) for window in windows_of(request)]
    settings = replace(settings, minutes=(1 - share) * settings.minutes)

    def on_training(name: str, progress: float) -> None:
        on_progress(name, share + (1 - share) * progress)

    scored = _Trainings(settings, draft, log, windows, workplace.folder, device, report, on_training).run()
    after, run = max(scored, key=_tokens_per_pass, default=(before, None))
    # A smaller gain may be chance.
    is_better = after.tokens_per_pass >= 1.01 * before.tokens_per_pass
    model = run.trained() if run is not None and is_better else None
    if run is None or model is None:
        report("no training has made a draft that is better on this traffic; nothing is written")
    else:
        draft.write(model, settings.output, _figures(settings, log, before, after, run))
        report(_line("the best draft", after))
    workplace.remove()
    return settings.output.exists()


def draft_of(settings: TuneSettings, device: torch.device) -> TunableDraft:
    """Return the draft to tune, a model or heads. Raises ConfigError if it cannot be tuned."""
    assert settings.draft is not None, "it is made before"
    file = settings.draft / "config.json"
    if not file.is_file() or not holds_heads(read_config(settings.draft)):
        return DraftFolder(settings.draft, settings.target, device)
    if settings.rank is not None:
        raise ConfigError(f"--draft {settings.draft} holds heads, and all weights of heads are trained; remove --rank")
    return HeadFolder(settings.draft, settings.target, device, settings.output.parent)


def _new_log(settings: TuneSettings, target: LoggedModel, report: Report) -> Log:
    """Return the log since the start of the tuning, once it is long enough."""
    workplace = Workplace(settings)
    is_new, end = workplace.remember("log_end", log_end(settings.log))
    if is_new:
        wait_for_positions(settings.log, end, settings.num_fresh, 60.0 * settings.minutes, report)
    return read_log(settings.log, target, report, end)


def _rollouts_share(settings: TuneSettings) -> float:
    if settings.rollouts is not None:
        return settings.rollouts
    num_bytes = sum(file.stat().st_size for file in Path(settings.target).glob("*.safetensors"))
    return 0.3 if num_bytes <= 2 << 30 else 0.0  # small targets write fast enough


def _write_more(
    settings: TuneSettings, share: float, log: Log, workplace: Workplace, report: Report, on_progress: OnProgress
) -> Sequence[LoggedRequest]:
    """Let the target write for a share of the minutes, and return its texts."""
    name, minutes = "the target writes more text", share * settings.minutes
    report(f"{name}, for {minutes:.1f} minutes")
    folder = workplace.folder / "rollouts"
    written = write_rollouts(
        settings.target, log, folder, minutes, lambda progress: on_progress(name, share * progress)
    )
    report(f"{sum(len(request.positions) for request in written)} positions of {len(written)} texts more")
    return written


def _logged_model(target: str) -> LoggedModel:
    try:
        vocab_size = AutoConfig.from_pretrained(target).get_text_config().vocab_size
        return LoggedModel(model_version(target), int(vocab_size))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--target {target} is not a model, so its log cannot be identified: {error}") from error


def _tokens_per_pass(scored: Scored) -> float:
    return scored[0].tokens_per_pass


def _figures(settings: TuneSettings, log: Log, before: Score, after: Score, run: TrainingRun) -> dict[str, Any]:
    """Return the content of tuning.json."""
    return {
        "draft": str(settings.draft),
        "log": str(settings.log),
        "num_positions": log.num_positions,
        "num_tokens": settings.num_tokens,
        "before": asdict(before),
        "after": asdict(after),
        "training": {**asdict(run.candidate), "num_steps": run.num_steps},
    }


@dataclass(slots=True)
class _Trainings:
    """The trainings of one tuning, and their scores."""

    settings: TuneSettings
    draft: TunableDraft
    log: Log
    windows: Sequence[Window]
    folder: Path  # of their state
    device: torch.device
    report: Report
    on_progress: OnProgress
    share_done: float = 0.0

    def run(self) -> list[Scored]:
        """Train all candidates, and return the scores of the trainings that have not diverged."""
        settings = self.settings
        ways = [(rate, seed) for rate in settings.learning_rates for seed in range(settings.num_seeds)]
        if len(ways) == 1:
            return self._scored([self._run(*ways[0], _TRIALS_SHARE + _LONG_SHARE)])
        trials = self._scored([self._run(*way, _TRIALS_SHARE / len(ways)) for way in ways])
        if not trials:
            return []
        # A long training that an earlier process has begun goes on: new scores might choose another one.
        begun = (run for way in ways if (run := self._run(*way, _LONG_SHARE)).has_begun)
        return [*trials, *self._scored([next(begun, None) or self._long_of(trials)])]

    def _long_of(self, trials: Sequence[Scored]) -> TrainingRun:
        best = max(trials, key=_tokens_per_pass)[1].candidate
        return self._run(best.learning_rate, best.seed, _LONG_SHARE)

    def _run(self, rate: float, seed: int, share: float) -> TrainingRun:
        settings = self.settings
        num_steps = None if settings.num_steps is None else max(1, round(share * settings.num_steps))
        candidate = Candidate(rate, seed, share, share * settings.minutes, num_steps, settings.rank)
        return TrainingRun(candidate, self.draft, self.folder / f"{rate:g}-{seed}-{share:.3f}.state", self.device)

    def _scored(self, runs: Sequence[TrainingRun]) -> list[Scored]:
        """Train and measure, one after the other."""
        scored = []
        for run in runs:
            self._train(run)
            model = run.trained()
            if model is None:
                self.report(f"{run.candidate.name}: dropped after {run.num_steps} steps, its loss is not a number")
                continue
            score = score_draft(model, self.log.held_out, self.settings.num_tokens)
            scored.append((score, run))
            self.report(_line(f"{run.candidate.name}: {run.num_steps} steps", score))
        return scored

    def _train(self, run: TrainingRun) -> None:
        begin, share = self.share_done, run.candidate.share / (_TRIALS_SHARE + _LONG_SHARE)
        run.train(self.windows, lambda progress: self.on_progress(run.candidate.name, begin + share * progress))
        self.share_done += share


def _line(name: str, score: Score) -> str:
    return f"{name}: acceptance {score.acceptance:.3f}, {score.tokens_per_pass:.2f} tokens per pass"


def write_new_head(folder: Path, target: str, requests: Sequence[LoggedRequest]) -> None:
    """Write an untrained DSpark head (arXiv:2607.05147) in speculators' layout: one layer as wide as its target's.

    Its vocabulary is the most frequent tokens at logged positions of `requests`.

    Raises:
        ConfigError: the target has too few layers, or its states cannot be computed here.
    """
    text: Any = AutoConfig.from_pretrained(target).get_text_config()
    least_layers = 4  # for three different taps
    if text.num_hidden_layers < least_layers:
        raise ConfigError(
            f"--draft dspark makes a head on three of the target's layers, and {target} has {text.num_hidden_layers}; "
            f"it needs {least_layers} or more: give the folder of a draft model"
        )
    reader = load_reader(target, torch.device("cpu"), folder.parent)
    counts = _token_counts(requests, reader.vocab_size)
    # 5120 tokens are 97% to 98% of a chat model's own answers; a head for SmolLM2-135M then has 19 MB.
    target_ids = counts.argsort(descending=True, stable=True)[:5120].sort().values
    config = _head_config(text, reader.vocab_size, len(target_ids), mask_id=int(counts.argmin()))
    student = BlockStudent(HeadFormat.of(HeadKind.DSPARK, config, reader.shape, str(folder)))
    _begin_head(student, reader.embedding.float(), reader.lm_head.float(), target_ids)
    partial = partial_of(folder)
    partial.mkdir(parents=True)
    tensors = {name: each.detach().bfloat16().contiguous() for name, each in student.state_dict().items()}
    tensors["d2t"] = target_ids - torch.arange(len(target_ids))
    tensors["t2d"] = torch.zeros(reader.vocab_size, dtype=torch.bool).index_fill_(0, target_ids, True)
    save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    partial.rename(folder)


def _token_counts(requests: Sequence[LoggedRequest], vocab_size: int) -> Tensor:
    chosen = [torch.from_numpy(each.token_ids[each.positions]).long() for each in requests]
    return torch.bincount(torch.cat(chosen), minlength=vocab_size)


def _head_config(text: Any, vocab_size: int, draft_vocab_size: int, mask_id: int) -> dict[str, Any]:
    """Return config.json. Every head has its own keys and values: what a row knows of the text comes through them."""
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    num_heads = max(1, text.hidden_size // head_dim)
    layer = {
        "model_type": "qwen3",
        "hidden_act": "silu",
        "hidden_size": text.hidden_size,
        "intermediate_size": text.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "head_dim": head_dim,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": text.max_position_embeddings,
        "vocab_size": vocab_size,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    }
    num_layers = text.num_hidden_layers
    return {
        "architectures": ["DSparkSpeculator"],
        "speculators_model_type": "dspark",
        "transformer_layer_config": layer,
        "draft_vocab_size": draft_vocab_size,
        "aux_hidden_state_layer_ids": sorted(
            {min(2, num_layers // 4), num_layers // 2, num_layers - num_layers // 10 - 1}
        ),
        "block_size": 4,
        "mask_token_id": mask_id,
        "sample_from_anchor": True,
        "markov_rank": 32,
        "markov_head_type": "vanilla",
        "enable_confidence_head": False,
    }


@torch.no_grad()
def _begin_head(student: BlockStudent, embedding: Tensor, lm_head: Tensor, target_ids: Tensor) -> None:
    """Take the target's output layer, and its tokens' main directions for the term of the token before."""
    student.lm_head.weight.copy_(lm_head[target_ids])
    known = embedding[target_ids]
    student.mask_embedding.copy_(known.mean(0))
    centred = embedding - known.mean(0)
    rank = student.markov_head.markov_w1.embedding_dim
    directions = torch.linalg.svd(centred[target_ids], full_matrices=False).Vh[:rank]
    table = centred @ directions.T
    student.markov_head.markov_w1.weight[:, : table.shape[1]] = table / table[target_ids].std()
    student.markov_head.markov_w2.weight.zero_()
    # At first a row sees the mean of the highest states before it. Larger logits would be wrong with confidence.
    student.norm.weight.fill_(1.5 / float(student.lm_head.weight.norm(dim=1).mean()))
    nn.init.zeros_(student.fc.weight)
    student.fc.weight[:, -student.fc.out_features :].fill_diagonal_(1.0)
    for layer in student.layers:
        nn.init.eye_(layer.self_attn["v_proj"].weight)
        nn.init.eye_(layer.self_attn["o_proj"].weight)
        layer.mlp["down_proj"].weight.mul_(0.1)
