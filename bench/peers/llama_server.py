"""llama.cpp's server, driven over HTTP with token ids and streaming."""

from __future__ import annotations

import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

from bench.contenders.contender import Contender, Prompts, Run
from bench.contenders.event_streams import Body, run_streams
from bench.peers.process_tree import ProcessTree
from bench.peers.system import Limits, Mode, Pair

PORT = 8130
START_TIMEOUT_S = 120.0
UBATCH_TOKENS = 512


class LlamaServerContender:
    """Streams from a running llama-server."""

    def __init__(self, name: str, base_url: str, timeout_s: float) -> None:
        self.name = name
        self._base_url = base_url
        self._timeout_s = timeout_s

    def run(self, prompts: Prompts, num_tokens: int) -> Run:
        bodies = [_body(prompt, num_tokens) for prompt in prompts]
        streams = run_streams(f"{self._base_url}/completion", bodies, self._timeout_s)
        return Run.of_streams(streams, lambda event: event.data.get("tokens") or [])

    def close(self) -> None:
        pass


class LlamaServerSystem:
    """A llama-server with or without the draft model: it cannot be switched per request."""

    peer = "llama-server"

    def __init__(
        self, server: Path, pair: Pair, mode: Mode, limits: Limits, logs: Path, *, weights: str = "bf16"
    ) -> None:
        self.name = f"{self.peer} {weights}"
        self._command = [str(server), *_options(pair, mode, limits)]
        self._mode, self._limits = mode, limits
        self._log = logs / f"llama-server-{weights}-{mode.name.lower()}.log"
        options = _options(Pair(Path(pair.target.name), pair.draft and Path(pair.draft.name)), mode, limits)
        self.settings = f"{mode}: `{' '.join(options)}`; requests with cache_prompt false; keys and values in float16"
        self._process: subprocess.Popen[bytes] | None = None
        self._tree: ProcessTree | None = None

    def start(self) -> dict[Mode, Contender]:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=subprocess.STDOUT)
        self._tree = ProcessTree(self._process.pid, self._limits.deadline_s)
        base_url = f"http://127.0.0.1:{PORT}"
        self._wait_until_ready(self._process, base_url)
        name = f"{self.name}, {self._mode}"
        return {self._mode: LlamaServerContender(name, base_url, self._limits.deadline_s)}

    def _wait_until_ready(self, process: subprocess.Popen[bytes], base_url: str) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and process.poll() is None:
            try:
                with urllib.request.urlopen(f"{base_url}/health", timeout=2) as answer:
                    if answer.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        raise RuntimeError(f"llama-server was not ready within {START_TIMEOUT_S:.0f} s; see {self._log}")

    def peak_bytes(self) -> dict[str, int]:
        return self._tree.peak_bytes() if self._tree is not None else {}

    def close(self) -> None:
        if self._tree is not None and self._process is not None:
            self._tree.close()
            self._process.wait()
            self._tree = None


def _body(prompt: list[int], num_tokens: int) -> Body:
    """Return a request, whose events carry one token each, also those of tokens that were accepted together."""
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


def _options(pair: Pair, mode: Mode, limits: Limits) -> list[str]:
    """Keys and values stay float16, the default and its fastest; `-fa auto` chooses flash attention itself."""
    threads = str(limits.num_threads)
    options = ["--model", str(pair.target), "--host", "127.0.0.1", "--port", str(PORT), "--no-webui"]
    options += ["--threads", threads, "--threads-batch", threads, "--parallel", str(limits.max_streams)]
    options += ["--ctx-size", str(limits.max_streams * limits.max_context), "--ubatch-size", str(UBATCH_TOKENS)]
    options += ["--cache-ram", "0", "--slot-prompt-similarity", "0"]
    if mode is Mode.DRAFT:
        options += ["--spec-type", "draft-simple", "--model-draft", str(pair.draft)]
        options += ["--spec-draft-n-max", str(limits.num_draft_tokens)]
        options += ["--spec-draft-threads", threads, "--spec-draft-threads-batch", threads]
    return options
