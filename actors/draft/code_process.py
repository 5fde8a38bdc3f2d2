"""`python -m actors.draft.code_process SOCKET MODULE:CLASS`: drafts by a class of the operator's, in its own process.

`actors.target.code_draft` starts it, and ends it if it hangs. An exception of the class ends it too.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
from collections.abc import Sequence as Seq
from itertools import islice
from numbers import Integral
from pathlib import Path

from actors.draft.draft_server import DraftServer
from actors.process.frames import FrameListener
from actors.process.process_logging import configure_logging
from engine.batch.draft import Draft
from engine.proposer import Proposer
from engine.sequence.batch import DraftQuery
from engine.sequence.sequence import RequestTokens
from protos.errors import ConfigError
from protos.linux import die_with_parent

READY = "ready"

_METHODS = ("open", "propose", "commit", "close")

logger = logging.getLogger(__name__)


class ChainsOf:
    """Implements `Proposer` by another one, and keeps only the tokens of its drafts.

    A draft without a distribution is verified as certain. So every verifier stays exact, whatever the class draws.
    """

    def __init__(self, proposer: Proposer, name: str) -> None:
        """`name` names the class in errors."""
        self._proposer, self._name = proposer, name

    def open(self, sequence: RequestTokens) -> None:
        self._proposer.open(sequence)

    def propose(self, queries: Seq[DraftQuery]) -> list[Draft]:
        drafts = self._proposer.propose(queries)
        if not isinstance(drafts, (list, tuple)) or len(drafts) != len(queries):
            raise TypeError(f"{self._name}.propose returned {drafts!r:.200} for {len(queries)} queries")
        return [self._chain(draft, query) for draft, query in zip(drafts, queries, strict=True)]

    def commit(self, sequences: Seq[RequestTokens]) -> None:
        self._proposer.commit(sequences)

    def close(self, request_id: str) -> None:
        self._proposer.close(request_id)

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


if __name__ == "__main__":
    main()
