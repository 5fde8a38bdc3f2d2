"""`python -m engine.model.runner.rank_process FD`: a rank of a sharded model other than the first.

`engine.model.runner.tensor_parallel_runner` starts it. It computes all that rank 0 computes, in the same order, without
knowledge of requests. It ends with rank 0.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from multiprocessing.connection import Connection

import torch

from engine.model.runner.model_runner import ModelRunner
from engine.model.runner.tensor_parallel_runner import (
    RankMessage,
    join_ranks,
    rank_device,
    receive,
    send,
)
from engine.model.tensor_parallel import Rank
from protos.errors import EngineError
from protos.linux import die_with_parent

logger = logging.getLogger(__name__)


def main() -> None:
    """Load, then follow until rank 0 exits."""
    die_with_parent()
    if sys.platform == "linux" and os.getppid() == 1:
        raise EngineError("rank 0 exited before this rank started")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; rank 0 decides
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    connection = Connection(int(sys.argv[1]))
    try:
        message: RankMessage = receive(connection)
        send(connection, None)
        runner = _load(message, connection)
        _follow(runner, connection)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # rank 0 has exited
    except Exception:
        logger.exception("a rank of the target failed")
        os._exit(1)  # even while a collective still waits
    os._exit(0)


def _load(message: RankMessage, connection: Connection) -> ModelRunner:
    is_past_barrier = False

    def barrier() -> None:
        nonlocal is_past_barrier
        send(connection, None)
        receive(connection)
        is_past_barrier = True

    try:
        device = rank_device(message.model, message.index)
        join_ranks(message, device)
        rank = Rank(message.index, message.model.tensor_parallel_size, device, barrier)
        return ModelRunner(message.model, message.cache, message.max_model_len, message.head, rank)
    except Exception as error:
        if not is_past_barrier:
            send(connection, str(error))
        raise


def _follow(runner: ModelRunner, connection: Connection) -> None:
    while True:
        method, arguments = receive(connection)
        if method == "import_blocks":  # rank 0 sends the bytes separately
            block_ids = arguments[0]
            blocks = torch.empty(len(block_ids), runner.bytes_per_block, dtype=torch.uint8)
            runner.import_blocks(block_ids, blocks)
        else:
            getattr(runner, method)(*arguments)


if __name__ == "__main__":
    main()
