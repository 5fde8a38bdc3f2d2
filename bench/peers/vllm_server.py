"""vLLM's server on processors. A process has one way of drafting, so each setting has a process of its own.

Compiled by torch: eager and zentorch were slower on a Zen 5.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Sequence as Seq
from contextlib import suppress
from pathlib import Path

from bench.contenders.contender import Contender, ContenderRun, Prompts
from bench.contenders.event_streams import Body, Event, run_streams
from bench.peers.system import DraftingMode, Precision, SystemLimits
from cluster.local.serve_environment import free_port

# The wheel's program looks for a package of another name. -P: nothing is imported from the folder that it runs in.
VLLM_MODULE = ("-P", "-m", "vllm.entrypoints.openai.api_server")
START_TIMEOUT_S = 300.0  # the model is compiled
CLOSE_TIMEOUT_S = 10.0
MAX_SERVERS = 5  # of some 3 GB each
CACHE_BYTES = 512 << 20
MATCH = {"prompt_lookup_min": 1, "prompt_lookup_max": 3}  # lengths of the text before a draft
_DTYPES = {Precision.F32: "float32"}


class VllmSystem:
    """vLLM plain and with drafts looked up in the text; processes that have begun stay, idle, for later runs.

    `command` starts the server, `preload` is the OpenMP library that it is made for.
    """

    def __init__(
        self, command: Seq[str], preload: Path, target: Path, precision: Precision, limits: SystemLimits, logs: Path
    ) -> None:
        self.name = f"vllm {precision}"
        self.limits = limits
        self._log = logs / f"vllm-{precision}.log"
        self._command = [*command, "--model", str(target.resolve()), *_options(precision, limits)]
        self._environment = _environment(preload, limits, logs.parent / "vllm-compiled")
        self.settings = (
            f"`{' '.join(_options(precision, limits))}`, compiled by default; "
            f"OpenMP threads bound to {limits.num_threads} cores, keys and values in the dtype of the model"
        )
        self._servers: dict[str, _Server] = {}

    def start(self) -> dict[DraftingMode, dict[str, Contender]]:
        settings: dict[DraftingMode, list[Body]] = {
            DraftingMode.PLAIN: [{}],
            DraftingMode.LOOKUP: _lookups(self.limits),
        }
        self.server({})
        return {
            mode: {json.dumps(each): VllmContender(self, each) for each in searched}
            for mode, searched in settings.items()
        }

    def server(self, drafting: Body) -> _Server:
        """Return the server with this way of drafting; it begins if need be, and the longest unused one may end.

        Raises RuntimeError.
        """
        key = json.dumps(drafting)
        if (running := self._servers.pop(key, None)) is not None:
            self._servers[key] = running
            return running
        while len(self._servers) >= MAX_SERVERS:
            self._servers.pop(next(iter(self._servers))).close()
        options = ["--speculative-config", key] if drafting else []
        self._servers[key] = begun = _Server([*self._command, *options], self._environment, self._log)
        begun.wait_until_ready()
        return begun

    def close(self) -> None:
        while self._servers:
            self._servers.popitem()[1].close()


class VllmContender:
    """Streams from the server with one way of drafting."""

    def __init__(self, system: VllmSystem, drafting: Body) -> None:
        self.name = f"{system.name} {json.dumps(drafting)}"
        self._system, self._drafting = system, drafting

    def run(self, prompts: Prompts, num_tokens: int) -> ContenderRun:
        url = f"{self._system.server(self._drafting).url}/v1/completions"
        bodies = [_body(prompt, num_tokens) for prompt in prompts]
        return ContenderRun.of_streams(run_streams(url, bodies, self._system.limits.deadline_s), _token_ids)

    def close(self) -> None:
        pass


class _Server:
    """A server with its engine and its worker, all in a process group of their own."""

    def __init__(self, command: Seq[str], environment: dict[str, str], log: Path) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [*command, "--port", str(port)],
                stdout=output,
                stderr=output,
                env=environment,
                cwd=log.parent,
                start_new_session=True,
            )

    def wait_until_ready(self) -> None:
        """Wait at most `START_TIMEOUT_S`. Raises RuntimeError if the server ends or is not ready."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s and self._process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=2):
                    return
            except OSError:
                time.sleep(0.2)
        status = self._process.poll()
        reason = f"was not ready within {START_TIMEOUT_S:.0f} s" if status is None else f"ended with {status}"
        raise RuntimeError(f"vllm {reason}; see {self._log}")

    def close(self) -> None:
        """End the server, which removes its shared memory, and kill the rest of its group."""
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_TIMEOUT_S)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _options(precision: Precision, limits: SystemLimits) -> list[str]:
    options = ["--dtype", _DTYPES.get(precision, "bfloat16"), "--max-num-seqs", str(limits.max_streams)]
    options += ["--kv-cache-memory-bytes", str(CACHE_BYTES), "--max-model-len", "auto"]
    return [*options, "--no-enable-prefix-caching", "--generation-config", "vllm"]


def _environment(preload: Path, limits: SystemLimits, compiled: Path) -> dict[str, str]:
    """Return the environment without PYTHONPATH, whose packages are not vLLM's."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{limits.num_threads - 1}",
        "VLLM_CACHE_ROOT": str(compiled.resolve()),
        "TORCHINDUCTOR_CACHE_DIR": str(compiled.resolve() / "inductor"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "LD_PRELOAD": str(preload.resolve()),
    }


def _lookups(limits: SystemLimits) -> list[Body]:
    """Its n-gram drafts with each K, and its suffix drafts, whose length follows the text.

    Suffixes are of the stream's own text: with a cache of earlier answers the measured text would be known.
    """
    ngrams = [{"method": "ngram", "num_speculative_tokens": length, **MATCH} for length in limits.draft_lengths]
    return [*ngrams, {"method": "suffix", "suffix_decoding_max_cached_requests": 0}]


def _body(prompt: list[int], num_tokens: int) -> Body:
    return {
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0.0,
        "stream": True,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def _token_ids(event: Event) -> list[int]:
    return [token for choice in event.data.get("choices", ()) for token in choice.get("token_ids") or ()]
