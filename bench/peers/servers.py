"""The systems that are driven over HTTP: Outrider with its whole application, and llama.cpp's server."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.request
from collections.abc import Sequence as Seq
from pathlib import Path

from bench.contenders.contender import Contender, ContenderRun, Prompts
from bench.contenders.event_streams import Body, run_streams
from bench.contenders.http_contender import HttpContender
from bench.peers.system import DraftingMode, ModelPair, Precision, SystemLimits
from bench.served.application import BASE_URL, MODEL_ID, ServedApplication, ServedPairSettings, start_served

PORT = 8130
START_TIMEOUT_S = 120.0


class OutriderSystem:
    """One deployment serves all modes."""

    def __init__(
        self,
        pair: ModelPair,
        precision: Precision,
        limits: SystemLimits,
        logs: Path,
        *,
        is_deterministic: bool = False,
        has_ray: bool = True,
    ) -> None:
        self.name = (
            f"outrider {precision}{', deterministic' if is_deterministic else ''}{'' if has_ray else ', no Ray'}"
        )
        self._limits = limits
        self._options = () if has_ray else ("--no-ray",)
        quantization = str(precision) if precision.is_quantized else "none"
        self._pair = ServedPairSettings(
            pair.target,
            pair.draft,
            {Precision.F32: "float32", Precision.BF16: "bfloat16"}.get(precision, "auto"),
            limits.num_threads,
            max(limits.draft_lengths),
            is_deterministic,
            quantization=quantization,
            max_stall_passes=None,
            kv_dtype="int8" if precision.is_quantized else "auto",
            is_adaptive=True,
        )
        self.settings = (
            f"the root deploy.yaml with dtype {self._pair.dtype}, target.quantization {quantization}, cache.dtype "
            f"{self._pair.kv_dtype}, draft {self._pair.draft_kind}, target.num_threads {limits.num_threads}, "
            f"target.deterministic {str(is_deterministic).lower()}, speculation.adaptive true; a cache_salt per run, "
            "so that no prefix is cached; scheduler.max_stall_passes null, as all prompts arrive together"
        )
        self._path = logs / f"{self.name.replace(', ', '-').replace(' ', '-')}.yaml"
        self._application: ServedApplication | None = None

    def start(self) -> dict[DraftingMode, dict[str, Contender]]:
        self._application = start_served(self._path, self._pair.change, options=self._options)
        self._application.wait_until_ready()
        kind = self._pair.draft_kind
        methods = {DraftingMode.LOOKUP: ("suffix", "ngram"), DraftingMode.DRAFT: (kind, "hybrid")}
        if kind == "suffix":
            del methods[DraftingMode.DRAFT]
        return {
            DraftingMode.PLAIN: self._contenders([{"enabled": False}]),
            **{mode: self._contenders(self._searched(names)) for mode, names in methods.items()},
        }

    def _searched(self, methods: Seq[str]) -> list[Body]:
        """Return each method with adaptive K, and with each K at most."""
        lengths: list[Body] = [{}, *({"num_tokens": length} for length in self._limits.draft_lengths)]
        return [{"enabled": True, "method": method, **length} for method in methods for length in lengths]

    @staticmethod
    def _contenders(fields: Seq[Body]) -> dict[str, Contender]:
        return {json.dumps({"speculation": each}): HttpContender(BASE_URL, MODEL_ID, each) for each in fields}

    def close(self) -> None:
        if self._application is not None:
            self._application.close()
            self._application = None


class LlamaServerContender:
    """Streams from a llama-server with some options: requests cannot choose them."""

    def __init__(self, system: LlamaServerSystem, options: Seq[str]) -> None:
        self.name = f"{system.name} {' '.join(options)}"
        self._system, self._options = system, options

    def run(self, prompts: Prompts, num_tokens: int) -> ContenderRun:
        self._system.restart(self._options)
        bodies = [_body(prompt, num_tokens) for prompt in prompts]
        streams = run_streams(f"http://127.0.0.1:{PORT}/completion", bodies, self._system.limits.deadline_s)
        return ContenderRun.of_streams(streams, lambda event: event.data.get("tokens") or [])

    def close(self) -> None:
        self._system.close()


class LlamaServerSystem:
    """llama-server plain, with its n-gram modes, and with the draft model; one process at a time."""

    def __init__(
        self, server: Path, pair: ModelPair, limits: SystemLimits, logs: Path, *, weights: str = "bf16"
    ) -> None:
        self.name = f"llama-server {weights}"
        self.limits = limits
        self._command = [str(server), "--model", str(pair.target), *_options(limits)]
        self._pair = pair
        self._log = logs / f"llama-server-{weights}.log"
        self.settings = f"`{' '.join(_options(limits))}`; requests with cache_prompt false; keys and values in float16"
        self._running: Seq[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> dict[DraftingMode, dict[str, Contender]]:
        options: dict[DraftingMode, list[list[str]]] = {
            DraftingMode.PLAIN: [[]],
            DraftingMode.LOOKUP: _lookups(self.limits),
        }
        if self._pair.draft is not None:
            options[DraftingMode.DRAFT] = _drafts(self._pair.draft, self.limits)
        return {
            mode: {" ".join(_shown(each)) or "plain": LlamaServerContender(self, each) for each in searched}
            for mode, searched in options.items()
        }

    def restart(self, options: Seq[str]) -> None:
        """Let a server with these options run. Raises RuntimeError if it does not get ready."""
        if options == self._running:
            return
        self.close()
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen([*self._command, *options], stdout=log, stderr=subprocess.STDOUT)
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s and self._process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=2):
                    self._running = options
                    return
            except OSError:  # not there yet, or 503 while it loads
                time.sleep(0.2)
        raise RuntimeError(f"llama-server was not ready within {START_TIMEOUT_S:.0f} s; see {self._log}")

    def close(self) -> None:
        self._running = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def _body(prompt: list[int], num_tokens: int) -> Body:
    """Return a request; each event of its answer carries one token, also of tokens that were accepted together."""
    return {
        "prompt": prompt,
        "n_predict": num_tokens,
        "temperature": 0.0,
        "samplers": ["temperature"],
        "ignore_eos": True,
        "cache_prompt": False,
        "return_tokens": True,
        "stream": True,
    }


def _options(limits: SystemLimits) -> list[str]:
    """Keys and values stay float16, the default and its fastest; flash attention is `auto` by default."""
    threads = str(limits.num_threads)
    options = ["--host", "127.0.0.1", "--port", str(PORT), "--no-webui"]
    options += ["--threads", threads, "--threads-batch", threads, "--parallel", str(limits.max_streams)]
    options += ["--ctx-size", str(limits.max_streams * limits.max_context), "--ubatch-size", "512"]
    return [*options, "--cache-ram", "0", "--slot-prompt-similarity", "0"]


def _lookups(limits: SystemLimits) -> list[list[str]]:
    """Its n-gram modes: as they are by default, and with shorter matches and each K."""
    types = ("ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod", "ngram-cache")
    sized = [
        ["--spec-type", kind, f"--spec-{kind}-size-n", "3", f"--spec-{kind}-size-m", str(length)]
        for kind in ("ngram-simple", "ngram-map-k")
        for length in limits.draft_lengths
    ]
    return [*(["--spec-type", kind] for kind in types), *sized]


def _drafts(draft: Path, limits: SystemLimits) -> list[list[str]]:
    threads = str(limits.num_threads)
    options = ["--spec-type", "draft-simple", "--model-draft", str(draft)]
    options += ["--spec-draft-threads", threads, "--spec-draft-threads-batch", threads]
    return [[*options, "--spec-draft-n-max", str(length)] for length in limits.draft_lengths]


def _shown(options: Seq[str]) -> list[str]:
    """Options with the names of files alone."""
    return [Path(each).name if each.startswith("/") else each for each in options]
