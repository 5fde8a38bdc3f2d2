"""Records a pass on a GPU, so that its kernels are issued at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.config import GraphKind


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """Results of a pass: `logits` [R, V] float32, and `features` [T, F] if a head reads them."""

    logits: Tensor
    features: Tensor | None = None

    def head(self, num_logits: int, num_rows: int) -> ForwardOutput:
        """Return the first rows of both, without copying."""
        return ForwardOutput(self.logits[:num_logits], None if self.features is None else self.features[:num_rows])


Compute = Callable[[], ForwardOutput]
Record = Callable[[Compute], Compute]


def recorder_of(kind: GraphKind, device: torch.device) -> Record | None:
    """Return what records passes on `device`; None if they are computed call by call."""
    return None if kind is GraphKind.EAGER or device.type != "cuda" else graph_recorder()


def graph_recorder() -> Record:
    """Return a function that records passes of one model.

    They share memory and the stream that owns the libraries' workspaces: cuBLAS keeps 32 MiB on Hopper for each stream
    that it was used on.
    """
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def record(compute: Compute) -> Compute:
        """Return the replay of `compute`, which must neither wait for the device nor make tensors from host numbers.

        A replay computes on the tensors' present contents. Its output is valid until the next replay of any graph.

        Raises:
            RuntimeError: `compute` does what cannot be recorded.
        """
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # kernels are compiled and libraries have their workspaces before anything is recorded
                compute()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Only this thread's calls are held to the rules of recording: others copy KV blocks meanwhile.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            output = compute()

        def replay() -> ForwardOutput:
            graph.replay()
            return output

        return replay

    return record
