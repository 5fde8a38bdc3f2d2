"""One recorded pass: computed once on the device's stream, then replayed without the host issuing it again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """Results of a pass: `logits` [R, V] float32, and `features` [T, F] if a head reads them."""

    logits: Tensor
    features: Tensor | None = None

    def head(self, num_logits: int, num_rows: int) -> ForwardOutput:
        """Return the first rows of both, without copying."""
        return ForwardOutput(self.logits[:num_logits], None if self.features is None else self.features[:num_rows])


class CudaGraph:
    """A CUDA graph of `compute`, which must neither wait for the device nor make tensors from the host's numbers."""

    def __init__(self, compute: Callable[[], ForwardOutput], pool: Any, stream: torch.cuda.Stream) -> None:
        """Record on `stream`; `pool` is the memory that graphs share which are never replayed at the same time.

        Raises:
            RuntimeError: `compute` does what cannot be recorded.
        """
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # kernels are compiled and libraries have their workspaces before anything is recorded
                compute()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        # Only this thread's calls are held to the rules of recording: others copy KV blocks meanwhile.
        with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self._output = compute()

    def replay(self) -> ForwardOutput:
        """Compute the pass on the tensors' present contents; the output is valid until the next replay of any graph."""
        self._graph.replay()
        return self._output


class GraphRecorder:
    """Records passes of one model, which share memory and the stream that owns the libraries' workspaces.

    cuBLAS keeps 32 MiB on Hopper for each stream that it was used on.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()

    def __call__(self, compute: Callable[[], ForwardOutput]) -> Callable[[], ForwardOutput]:
        """Return the replay of `compute`; raises RuntimeError where it cannot be recorded."""
        return CudaGraph(compute, self._pool, self._stream).replay
