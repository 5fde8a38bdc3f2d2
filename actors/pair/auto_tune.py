"""The automatic response to a drift alarm: train a draft on the traffic log, try it, and keep it if it is faster.

The trainer is a separate program (`outrider tune`), known here only by its arguments and exit status. It gives way to
all other work. Its draft is handled like any other: checked, tried in turns with the old one, kept if it is faster.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from actors.pair.pair_draft import PairDraft, PairDrafts
from actors.settings import NO_GAIN, AutoTuneSettings
from protos.errors import ServingError
from protos.served_model import CheckDraft, TryDraft

logger = logging.getLogger(__name__)

_PREFIX = "draft-"


class AutoTune:
    """Trains and tries a draft for one pair: one at a time, and one an hour.

    Pairs of one node share the folder of drafts: one trains, and the others try its newer drafts.
    """

    def __init__(
        self, settings: AutoTuneSettings, draft: PairDraft, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings
        self._draft = draft
        self._clock = clock
        self._folder = Path(settings.folder)
        self._answered_at_s: float | None = None
        self._task: asyncio.Task[None] | None = None

    def on_drift(self) -> None:
        """Respond to an alarm, unless a response is running or the last one began within an hour."""
        now_s, pause_s = self._clock(), 3600.0
        if self._task is not None and not self._task.done():
            return
        if self._answered_at_s is not None and now_s - self._answered_at_s < pause_s:
            logger.info("no response to the drift alarm: the last one began less than %.0f s ago", pause_s)
            return
        self._answered_at_s = now_s
        self._task = asyncio.create_task(self._answer(), name="auto-tune")

    async def _answer(self) -> None:
        """Train and try a draft, and report the outcome. A failure here never affects serving."""
        try:
            self._note("training")
            path = await self._new_draft(time.time())
            if path is None:
                return
            self._note(f"{path.name} is being checked")
            await self._draft.carry_out(CheckDraft(str(path)))
            await self._draft.carry_out(TryDraft(str(path)))
            self._note(f"{path.name} is being tried")
        except ServingError as error:
            self._note(f"given up: {error.message}", logging.ERROR)
        except OSError as error:
            self._note(f"given up: {error}; free or repair {self._folder}", logging.ERROR)
        except Exception as error:  # the edge of a task that nothing awaits
            logger.exception("an answer to a drift alarm failed")
            self._note(f"given up: {error!r}; this is a bug, please report it", logging.ERROR)

    async def _new_draft(self, alarm_at_s: float) -> Path | None:
        """Return a draft made after the alarm, by this pair or another on the node; None if there is no better one."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        while True:
            with _lock(self._folder / "lock") as is_mine:
                if is_mine:
                    made = [each for each in self._drafts() if each.stat().st_mtime >= alarm_at_s]
                    return max(made, default=None) or await self._train()
            await asyncio.sleep(1.0)

    async def _train(self) -> Path | None:
        """Run the trainer to its end. Return None if it made no better draft, or failed."""
        self._remove_old()
        # Run `outrider tune` on the log, with its output in a file next to the new draft.
        output = self._folder / f"{_PREFIX}{time.strftime('%Y%m%d-%H%M%S')}"
        log = output.with_suffix(".log")
        arguments = (
            sys.executable,
            *self._settings.command,
            "--draft",
            self._draft.report.path,
            "--output",
            str(output),
        )
        logger.info("training a draft: %s", " ".join(arguments))
        with log.open("wb") as stream:
            trainer = await asyncio.create_subprocess_exec(
                *arguments, stdin=asyncio.subprocess.DEVNULL, stdout=stream, stderr=stream, env=_environment()
            )
            try:
                # Three times its ten minutes, since the trainer gives way to other work.
                async with asyncio.timeout(1800.0):
                    status = await trainer.wait()
            except TimeoutError:
                self._note(f"the training took too long and was stopped; see {log}", logging.ERROR)
                return None
            finally:
                with suppress(ProcessLookupError):
                    trainer.kill()
        # Report why there is no draft.
        if status == NO_GAIN:
            self._note("no training gave a better draft")
        elif status or not output.is_dir():
            self._note(f"the training failed with status {status}; see {log}", logging.ERROR)
        return output if status == 0 and output.is_dir() else None

    def _drafts(self) -> list[Path]:
        return sorted(each for each in self._folder.glob(f"{_PREFIX}*") if (each / "config.json").is_file())

    def _remove_old(self) -> None:
        """Remove leftovers of failed trainings and the oldest drafts, except the running draft and deploy.yaml's."""
        for each in self._folder.glob(f"{_PREFIX}*.tuning"):
            shutil.rmtree(each, ignore_errors=True)
        used = {self._draft.report.path, self._draft.deployed_path}
        unused = [each for each in self._drafts() if str(each) not in used]
        for each in unused[: max(0, len(unused) - 3)]:  # not counting the drafts in use
            shutil.rmtree(each, ignore_errors=True)
            each.with_suffix(".log").unlink(missing_ok=True)

    def _note(self, text: str, level: int = logging.WARNING) -> None:
        logger.log(level, "drift alarm: %s", text)
        self._draft.note_tuning(text)


def drift_response(settings: AutoTuneSettings, drafts: PairDrafts) -> Callable[[str], None]:
    """Return the response to the alarm of a class of requests: its draft model is tuned, else the first one.

    The class name starts with its method.
    """
    first = AutoTune(settings, drafts.first)
    others = {
        draft.report.method: AutoTune(replace(settings, folder=f"{settings.folder}/{draft.report.method}"), draft)
        for draft in drafts.by_method.values()
        if draft is not drafts.first
    }
    return lambda name: others.get(name.partition("-")[0], first).on_drift()


@contextmanager
def _lock(file: Path) -> Iterator[bool]:
    """Yield True with the lock, or False if another process has it."""
    with file.open("ab") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def _environment() -> dict[str, str]:
    """Return an environment that lets the trainer find this process's packages, even where Ray has put them."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(each for each in sys.path if each)}
