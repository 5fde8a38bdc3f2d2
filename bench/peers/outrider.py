"""Outrider served over HTTP, with speculation chosen per request."""

from __future__ import annotations

from pathlib import Path

from bench.contenders.contender import Contender
from bench.contenders.http_contender import HttpContender
from bench.peers.process_tree import ProcessTree
from bench.peers.system import Limits, Mode, Pair, Precision
from bench.served.application import ServedApplication
from bench.served.served_pair import HTTP_PORT, MODEL_ID, ServedPair, start_served


class OutriderSystem:
    """One deployment serves both modes."""

    peer = "outrider"

    def __init__(
        self, pair: Pair, precision: Precision, limits: Limits, logs: Path, *, is_deterministic: bool = False
    ) -> None:
        self.name = f"{self.peer} {precision}{', deterministic' if is_deterministic else ''}"
        self._pair = ServedPair(
            pair.target,
            pair.draft,
            precision.dtype,
            limits.num_threads,
            limits.num_draft_tokens,
            is_deterministic,
            quantization=_quantization(precision),
            max_stall_passes=None,
            kv_dtype="int8" if precision.is_quantized else "auto",
        )
        self.settings = (
            f"the root deploy.yaml with dtype {precision.dtype}, target.quantization {_quantization(precision)}, "
            f"cache.dtype {self._pair.kv_dtype}, draft {self._pair.draft_kind}, target.num_threads "
            f"{limits.num_threads}, target.deterministic {str(is_deterministic).lower()}, speculation.num_tokens "
            f"{limits.num_draft_tokens}{'' if pair.draft else ' at most (adaptive)'}; a cache_salt of its own per run, "
            "so nothing is taken from the prefix cache; scheduler.max_stall_passes null, as all prompts come at once"
        )
        self._deadline_s, self._folder = limits.deadline_s, logs / self.name.replace(", ", "-").replace(" ", "-")
        self._application: ServedApplication | None = None
        self._tree: ProcessTree | None = None

    def start(self) -> dict[Mode, Contender]:
        self._application = start_served(self._folder, self._pair)
        self._tree = ProcessTree(self._application.pid, self._deadline_s)
        self._application.wait_until_ready()
        base_url = f"http://127.0.0.1:{HTTP_PORT}/v1"
        return {mode: HttpContender(base_url, MODEL_ID, is_speculating=mode is Mode.DRAFT) for mode in Mode}

    def peak_bytes(self) -> dict[str, int]:
        return self._tree.peak_bytes() if self._tree is not None else {}

    def close(self) -> None:
        """Asks the application to stop, and ends what is left of it."""
        if self._application is None or self._tree is None:
            return
        self._tree.peak_bytes()  # remembers the processes while their parents live
        try:
            self._application.close()
        finally:
            self._tree.close()
            self._application = self._tree = None


def _quantization(precision: Precision) -> str:
    return str(precision) if precision.is_quantized else "none"
