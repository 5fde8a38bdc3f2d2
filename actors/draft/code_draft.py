"""A class of the operator's that drafts (`draft.kind: python`), in a process that may fail or hang.

`python -m actors.draft.code_draft SOCKET MODULE:CLASS` is that process. An exception of the class ends it; `CodeDraft`
in the target's process starts it, and ends it if it hangs.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence as Seq
from itertools import islice
from numbers import Integral
from pathlib import Path
from tempfile import TemporaryDirectory

from actors.draft.channel_proposer import ChannelProposer
from actors.draft.draft_link import DRAFT_SOCKET
from actors.draft.draft_server import DraftServer
from actors.process import configure_logging
from actors.process.frames import FrameListener
from engine.batch.draft import Draft
from engine.proposer import Proposer
from engine.sequence.batch import DraftQuery
from protos.backoff import Backoff
from protos.errors import ConfigError
from protos.linux import die_with_parent

logger = logging.getLogger(__name__)

READY = "ready"

_METHODS = ("open", "propose", "commit", "close")
_LOAD_TIMEOUT_S = 120.0


class ChainsOf:
    """Implements `Proposer` by another one, and keeps only the tokens of its drafts.

    A draft without a distribution is verified as certain. So every verifier stays exact, whatever the class draws.
    """

    def __init__(self, proposer: Proposer, name: str) -> None:
        """`name` names the class in errors."""
        self._proposer, self._name = proposer, name
        self.open, self.commit, self.close = proposer.open, proposer.commit, proposer.close

    def propose(self, queries: Seq[DraftQuery]) -> list[Draft]:
        drafts = self._proposer.propose(queries)
        if not isinstance(drafts, (list, tuple)) or len(drafts) != len(queries):
            raise TypeError(f"{self._name}.propose returned {drafts!r:.200} for {len(queries)} queries")
        return [self._chain(draft, query) for draft, query in zip(drafts, queries, strict=True)]

    def _chain(self, draft: object, query: DraftQuery) -> Draft:
        """Return the draft's tokens up to an impossible id; the target rejects one that it does not know."""
        if not isinstance(draft, Draft) or draft.parents:
            raise TypeError(f"{self._name}.propose returned {draft!r:.200}; it must return chains, each a Draft")
        token_ids: list[int] = []
        for token_id in islice(draft.token_ids, query.max_draft_tokens):
            if isinstance(token_id, bool) or not isinstance(token_id, Integral) or not 0 <= token_id < 1 << 31:
                logger.warning("%s drafted %r, which is no token id", self._name, token_id)
                break
            token_ids.append(int(token_id))
        return Draft(tuple(token_ids))


def proposer_of(name: str) -> Proposer:
    """Return an object of the class `module:Class`. Raises ConfigError for a class that is missing or no proposer."""
    module, _, class_name = name.partition(":")
    try:
        proposer: Proposer = getattr(importlib.import_module(module), class_name)()
    except Exception as error:  # whatever the class does
        is_absent = isinstance(error, ModuleNotFoundError) and module.split(".")[0] == (error.name or "").split(".")[0]
        remedy = "; install it, or name its folder in PYTHONPATH where the pairs run" if is_absent else ""
        raise ConfigError(f"draft.code {name!r} cannot be loaded: {type(error).__name__}: {error}{remedy}") from error
    missing = [method for method in _METHODS if not callable(getattr(proposer, method, None))]
    if missing:
        raise ConfigError(f"draft.code {name!r} has no {', '.join(missing)}; a proposer has {', '.join(_METHODS)}")
    return proposer


def main() -> None:
    """Load the class, report on stdout, and draft until this process is killed."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the target decides
    configure_logging()
    report = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the class may print
    path, name = Path(sys.argv[1]), sys.argv[2]
    try:
        proposer = ChainsOf(proposer_of(name), name)
    except ConfigError as error:
        print(error.message.replace("\n", " "), file=report, flush=True)
        return
    server = DraftServer(FrameListener(path), proposer, name)
    print(READY, file=report, flush=True)
    try:
        server.run()
    except Exception:
        logger.exception("draft.code %s failed and is started again; plain decoding continues", name)
        sys.exit(1)


class CodeDraft(ChannelProposer):
    """Starts the process, and starts it again when it has ended or hangs. Each failure in a row doubles the pause.

    A process hangs if passes have waited for its answers for `silent_s`.
    """

    def __init__(self, folder: Path, name: str, *, silent_s: float = 10.0, pause_s: float = 1.0) -> None:
        """Return when the class `name` drafts.

        Raises:
            ConfigError: it cannot be loaded.
        """
        folder.mkdir(mode=0o700, exist_ok=True)
        self._socket = folder / DRAFT_SOCKET
        super().__init__(self._socket)
        self._name, self._silent_limit_s, self._pause_s = name, silent_s, pause_s
        self._closing = threading.Event()
        self._process = self._started()
        threading.Thread(target=self._watch, name="draft-watch", daemon=True).start()

    def close_process(self) -> None:
        """End the process for good."""
        self._closing.set()
        self._process.kill()
        self._process.wait()

    def _started(self) -> subprocess.Popen[str]:
        self._socket.unlink(missing_ok=True)
        self._num_before = self.stats.num_connections
        return _start(self._socket, self._name)

    def _watch(self) -> None:
        backoff = Backoff(self._pause_s, 300.0)
        while not self._closing.is_set():
            ran_s = self._wait_for_end()
            if self._closing.is_set():
                return
            if ran_s > 60.0:
                backoff.reset()
            pause_s = backoff.next()
            logger.error("draft.code %s is started again in %.0f s", self._name, pause_s)
            if self._closing.wait(pause_s):
                return
            try:
                self._process = self._started()
            except ConfigError as error:
                logger.error("%s", error.message)

    def _wait_for_end(self) -> float:
        """Wait until the process has ended, by itself or because it hung; return the seconds that it ran."""
        ran_s, period_s = 0.0, min(0.2, self._silent_limit_s)
        while True:
            try:
                code = self._process.wait(period_s)
            except subprocess.TimeoutExpired:
                ran_s += period_s
                stats = self.stats
                if stats.num_connections > self._num_before and stats.silent_s > self._silent_limit_s:
                    logger.error("draft.code %s hangs: no answer for %.0f s", self._name, stats.silent_s)
                    self._process.kill()
                continue
            logger.error("the process of draft.code %s ended with code %d", self._name, code)
            return ran_s


def check_code(name: str, timeout_s: float = _LOAD_TIMEOUT_S) -> None:
    """Load the class `name` in a process of its own, as a pair does, and end the process.

    Raises:
        ConfigError: it cannot be loaded.
    """
    with TemporaryDirectory() as folder:
        process = _start(Path(folder) / DRAFT_SOCKET, name, timeout_s)
        process.kill()
        process.wait()


def _start(socket: Path, name: str, timeout_s: float = _LOAD_TIMEOUT_S) -> subprocess.Popen[str]:
    """Return the process of the class `name` when it listens at `socket`; raises ConfigError if it cannot be loaded."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "actors.draft.code_draft", str(socket), name],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None, "it is a pipe"
    timer = threading.Timer(timeout_s, process.kill)
    timer.start()
    report = process.stdout.readline().strip()
    timer.cancel()
    process.stdout.close()
    if report == READY:
        return process
    process.kill()
    process.wait()
    raise ConfigError(report or f"draft.code {name!r} was not loaded within {timeout_s:g} s, or its process ended")


if __name__ == "__main__":
    main()
