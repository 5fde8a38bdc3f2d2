"""The root deploy.yaml with another pair in the demo pair's place, served on ports of its own for a benchmark."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bench.served.application import ServedApplication
from engine.config import SchedulerConfig

HTTP_PORT = 8100
GRPC_PORT = 9100
CACHE_BYTES = 1 << 29
MODEL_ID = "bench"


@dataclass(frozen=True, slots=True)
class ServedPair:
    """The settings of a benchmark; with a draft model K is the same for every pass, as it is for its contenders.

    Threads that are None are left to the placement. Without a draft the target's own weights in int4 draft, or, where
    they are int4 already, the suffixes of text seen; K is adaptive then, as an operator has it.
    """

    target: Path
    draft: Path | None
    dtype: str = "bfloat16"
    num_threads: int | None = 2
    num_draft_tokens: int = 4
    is_deterministic: bool = False
    num_draft_threads: int | None = None
    mode: str = "sync"
    quantization: str = "none"
    max_stall_passes: float | None = SchedulerConfig().max_stall_passes
    kv_dtype: str = "auto"

    @property
    def draft_kind(self) -> str:
        """The value of `draft.kind`."""
        if self.draft is not None:
            return "model"
        return "suffix" if self.quantization == "int4" else "self"

    def deploy(self) -> dict[str, Any]:
        """Return the root deploy.yaml, changed."""
        deploy = yaml.safe_load(Path("deploy.yaml").read_text())
        deploy["http_options"]["port"] = HTTP_PORT
        deploy["grpc_options"]["port"] = GRPC_PORT
        args = deploy["applications"][0]["args"]
        args["model_id"] = MODEL_ID
        args["target"] = {
            "path": str(self.target.resolve()),
            "dtype": self.dtype,
            "num_threads": self.num_threads,
            "deterministic": self.is_deterministic,
            "quantization": self.quantization,
        }
        args["draft"] = {"kind": self.draft_kind} if self.draft is None else self._draft_model(self.draft)
        args["speculation"] = {
            **args.get("speculation", {}),
            "num_tokens": self.num_draft_tokens,
            "mode": self.mode,
            "adaptive": self.draft is None,
        }
        args["scheduler"]["max_stall_passes"] = self.max_stall_passes
        args["cache"] = {"memory_gib": CACHE_BYTES / (1 << 30), "dtype": self.kv_dtype}
        return deploy  # type: ignore[no-any-return]  # YAML

    def _draft_model(self, path: Path) -> dict[str, Any]:
        threads = self.num_draft_threads
        return {"kind": "model", "path": str(path.resolve()), "dtype": self.dtype, "num_threads": threads}


def start_served(folder: Path, pair: ServedPair) -> ServedApplication:
    """Start serving from `folder`/deploy.yaml; the caller waits until it is ready, and closes it."""
    path = folder / "deploy.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(pair.deploy(), sort_keys=False))
    return ServedApplication(path, f"http://127.0.0.1:{HTTP_PORT}")


def served_on(folder: Path, pair: ServedPair, stack: ExitStack) -> str:
    """Return the OpenAI base URL of the pair, served until `stack` unwinds."""
    application = start_served(folder, pair)
    stack.callback(application.close)
    application.wait_until_ready()
    return f"http://127.0.0.1:{HTTP_PORT}/v1"
