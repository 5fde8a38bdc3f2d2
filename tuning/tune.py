"""A draft tuned on its deployment's log, and on further continuations of its prompts by the target.

Several short trainings run first, then a long one of the best; the best draft of all is the result.
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
from transformers import AutoConfig

from engine.model.draft_heads.checkpoint import read_config
from engine.model.loader import model_version
from engine.position_log.shard import LoggedModel, LoggedRequest
from protos.errors import ConfigError
from tuning.drafts import DraftFolder, HeadFolder, TunableDraft, holds_heads
from tuning.log_windows import Log, log_end, read_log, wait_for_positions, windows_of
from tuning.new_head import write_new_head
from tuning.rollouts import write_rollouts
from tuning.run import Candidate, TrainingRun
from tuning.score import Score, score_draft

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
    requests = [*log.training, *written]
    settings = replace(settings, minutes=(1 - share) * settings.minutes)
    scored = _Tuning(
        settings,
        draft,
        log,
        requests,
        workplace,
        device,
        report,
        lambda name, progress: on_progress(name, share + (1 - share) * progress),
    ).run()
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


class _Tuning:
    """The trainings of one tuning, and their scores."""

    def __init__(
        self,
        settings: TuneSettings,
        draft: TunableDraft,
        log: Log,
        requests: Sequence[LoggedRequest],
        workplace: Workplace,
        device: torch.device,
        report: Report,
        on_progress: OnProgress,
    ) -> None:
        self._settings, self._draft, self._log = settings, draft, log
        self._workplace, self._device = workplace, device
        self._report, self._on_progress = report, on_progress
        self._windows = [window for request in requests for window in windows_of(request)]
        self._share_done = 0.0

    def run(self) -> list[Scored]:
        """Train all candidates, and return the scores of the trainings that have not diverged."""
        settings = self._settings
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
        settings = self._settings
        num_steps = None if settings.num_steps is None else max(1, round(share * settings.num_steps))
        candidate = Candidate(rate, seed, share, share * settings.minutes, num_steps, settings.rank)
        return TrainingRun(
            candidate, self._draft, self._workplace.folder / f"{rate:g}-{seed}-{share:.3f}.state", self._device
        )

    def _scored(self, runs: Sequence[TrainingRun]) -> list[Scored]:
        """Train and measure, one after the other."""
        scored = []
        for run in runs:
            self._train(run)
            model = run.trained()
            if model is None:
                self._report(f"{run.candidate.name}: dropped after {run.num_steps} steps, its loss is not a number")
                continue
            score = score_draft(model, self._log.held_out, self._settings.num_tokens)
            scored.append((score, run))
            self._report(_line(f"{run.candidate.name}: {run.num_steps} steps", score))
        return scored

    def _train(self, run: TrainingRun) -> None:
        begin, share = self._share_done, run.candidate.share / (_TRIALS_SHARE + _LONG_SHARE)
        run.train(self._windows, lambda progress: self._on_progress(run.candidate.name, begin + share * progress))
        self._share_done += share


def _line(name: str, score: Score) -> str:
    return f"{name}: acceptance {score.acceptance:.3f}, {score.tokens_per_pass:.2f} tokens per pass"
