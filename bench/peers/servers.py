"""The systems that are driven over HTTP: Outrider with its whole application, and llama.cpp's server."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.request
from collections.abc import Sequence as Seq
from pathlib import Path

from bench.contenders.contender import Contender, ContenderRun, Prompts
from bench.contenders.event_streams import Body, Event, run_streams
from bench.contenders.prompts import PROMPT_TOKENS
from bench.peers.system import DraftingMode, ModelPair, Precision, SystemLimits
from bench.served.application import BASE_URL, MODEL_ID, DeployArgs, ServedApplication, start_served

LLAMA_SCRIPT = Path(__file__).parent / "llama_server.py"
PORT = 8130
START_TIMEOUT_S = 120.0
NO_ID = -1  # of a token whose id is unknown


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
        drafts_itself: bool = True,
    ) -> None:
        self.name = (
            f"outrider {precision}{', deterministic' if is_deterministic else ''}{'' if has_ray else ', no Ray'}"
        )
        self._limits = limits
        self._options = () if has_ray else ("--no-ray",)
        drafts_itself = drafts_itself and precision is not Precision.INT4
        self._draft_kind = "model" if pair.draft else "self" if drafts_itself else "suffix"
        self._target: Body = {
            "path": str(pair.target.resolve()),
            "dtype": {Precision.F32: "float32", Precision.BF16: "bfloat16"}.get(precision, "auto"),
            "num_threads": limits.num_threads,
            "deterministic": is_deterministic,
            "quantization": str(precision) if precision.is_quantized else "none",
        }
        self._draft: Body = {"kind": self._draft_kind}
        if pair.draft is not None:
            self._draft |= {"path": str(pair.draft.resolve()), "dtype": self._target["dtype"]}
        self._kv_dtype = "int8" if precision.is_quantized else "auto"
        self.settings = (
            f"the root deploy.yaml with dtype {self._target['dtype']}, target.quantization "
            f"{self._target['quantization']}, cache.dtype {self._kv_dtype}, draft {self._draft_kind}, "
            f"target.num_threads {limits.num_threads}, target.deterministic {str(is_deterministic).lower()}, "
            "speculation.adaptive true; a cache_salt per run, so that no prefix is cached; "
            "scheduler.max_stall_passes null, as all prompts arrive together"
        )
        self._path = logs / f"{self.name.replace(', ', '-').replace(' ', '-')}.yaml"
        self._application: ServedApplication | None = None

    def start(self) -> dict[DraftingMode, dict[str, Contender]]:
        self._application = start_served(self._path, self._change, self._options)
        self._application.wait_until_ready()
        methods = {DraftingMode.LOOKUP: ("suffix", "ngram"), DraftingMode.DRAFT: (self._draft_kind, "hybrid")}
        if self._draft_kind == "suffix":
            del methods[DraftingMode.DRAFT]
        return {
            DraftingMode.PLAIN: self._contenders([{"enabled": False}]),
            **{mode: self._contenders(self._searched(names)) for mode, names in methods.items()},
        }

    def _change(self, args: DeployArgs) -> None:
        """Apply the settings to the args of a deploy.yaml."""
        args |= {"model_id": MODEL_ID, "target": self._target, "draft": self._draft}
        speculation = {"num_tokens": max(self._limits.draft_lengths), "mode": "sync", "adaptive": True}
        args["speculation"] = {**args.get("speculation", {}), **speculation}
        args["scheduler"]["max_stall_passes"] = None
        args["cache"] = {"memory_gib": 0.5, "dtype": self._kv_dtype}

    def _searched(self, methods: Seq[str]) -> list[Body]:
        """Return each method with adaptive K, and with each K at most."""
        lengths: list[Body] = [{}, *({"num_tokens": length} for length in self._limits.draft_lengths)]
        return [{"enabled": True, "method": method, **length} for method in methods for length in lengths]

    @staticmethod
    def _contenders(fields: Seq[Body]) -> dict[str, Contender]:
        return {json.dumps({"speculation": each}): OutriderContender(each) for each in fields}

    def close(self) -> None:
        if self._application is not None:
            self._application.close()
            self._application = None


class OutriderContender:
    """Streams from the running application; `speculation` is that field of each request."""

    def __init__(self, speculation: Body) -> None:
        self.name = f"outrider {json.dumps(speculation)}"
        self._speculation = speculation
        self._num_runs = 0

    def run(self, prompts: Prompts, num_tokens: int) -> ContenderRun:
        self._num_runs += 1
        bodies = [self._body(prompt, num_tokens) for prompt in prompts]
        return ContenderRun.of_streams(run_streams(f"{BASE_URL}/completions", bodies, 600.0), _token_ids)

    def _body(self, prompt: list[int], num_tokens: int) -> Body:
        return {
            "model": MODEL_ID,
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": 0.0,
            "stream": True,
            "ignore_eos": True,
            "repetition_penalty": 1.0,
            "return_token_ids": True,
            "cache_salt": f"{self._speculation} {self._num_runs}",
            "speculation": self._speculation,
        }

    def close(self) -> None:
        pass


def _token_ids(event: Event) -> list[int]:
    return [token for choice in event.data.get("choices", ()) for token in choice.get("token_ids") or ()]


class LlamaServerContender:
    """Streams from a llama-server with some parameters: requests cannot choose them.

    It has as many slots as streams, since it reserves the context of each.
    """

    def __init__(self, system: LlamaServerSystem, params: Body) -> None:
        self.name = f"{system.name} {json.dumps(params)}"
        self._system, self._params = system, params

    def run(self, prompts: Prompts, num_tokens: int) -> ContenderRun:
        self._system.restart(self._params, len(prompts), max(map(len, prompts)))
        bodies = [_body(prompt, num_tokens) for prompt in prompts]
        streams = run_streams(f"http://127.0.0.1:{PORT}/completion", bodies, self._system.limits.deadline_s)
        run = ContenderRun.of_streams(streams, lambda event: event.data.get("tokens") or [])
        for output, events in zip(run.outputs, streams.events, strict=True):
            # The last event counts all tokens: parts of a character have no id in the stream.
            output += [NO_ID] * (events[-1].data["tokens_predicted"] - len(output))
        return run

    def close(self) -> None:
        self._system.close()


class LlamaServerSystem:
    """llama-server plain, with its n-gram modes, and with the draft model; one process at a time."""

    def __init__(
        self, command: Seq[str], pair: ModelPair, limits: SystemLimits, logs: Path, *, weights: str = "bf16"
    ) -> None:
        self.name = f"llama-server {weights}"
        self.limits = limits
        self._command = command
        self._pair = pair
        self._log = logs / f"llama-server-{weights}.log"
        self.settings = (
            f"`{json.dumps(_fixed(limits))}` and a slot for each stream; requests with cache_prompt false; keys and "
            "values in float16"
        )
        self._running: Body | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> dict[DraftingMode, dict[str, Contender]]:
        self.restart({}, 1, PROMPT_TOKENS)
        params: dict[DraftingMode, list[Body]] = {
            DraftingMode.PLAIN: [{}],
            DraftingMode.LOOKUP: _lookups(self.limits),
        }
        if self._pair.draft is not None:
            params[DraftingMode.DRAFT] = _drafts(self._pair.draft, self.limits)
        return {
            mode: {json.dumps(_shown(each)): LlamaServerContender(self, each) for each in searched}
            for mode, searched in params.items()
        }

    def restart(self, params: Body, num_streams: int, num_prompt_tokens: int) -> None:
        """Let a server with these parameters run. Raises RuntimeError if it does not get ready."""
        num_tokens = max(num_prompt_tokens, PROMPT_TOKENS) + self.limits.max_new_tokens
        slots = {"n_parallel": num_streams, "n_ctx": num_streams * num_tokens}
        wanted = {"model": {"path": str(self._pair.target)}, **_fixed(self.limits), **slots, **params}
        if wanted == self._running:
            return
        self.close()
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen([*self._command, json.dumps(wanted)], stdout=log, stderr=subprocess.STDOUT)
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline_s and self._process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=2):
                    self._running = wanted
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


def _fixed(limits: SystemLimits) -> Body:
    """Keys and values stay float16, the default and its fastest; flash attention is `auto` by default."""
    threads = {"n_threads": limits.num_threads}
    return {
        "port": PORT,
        "cpuparams": threads,
        "cpuparams_batch": threads,
        "n_ubatch": 512,
        "cache_ram_mib": 0,
        "slot_prompt_similarity": 0.0,
    }


def _lookups(limits: SystemLimits) -> list[Body]:
    """Its n-gram modes: as they are by default, and with shorter matches and each K."""

    def mode(name: str, **sizes: int) -> Body:
        types = [f"COMMON_SPECULATIVE_TYPE_{name.upper()}"]
        return {"speculative": {"types": types, **({name: sizes} if sizes else {})}}

    return [
        *(mode(name) for name in ("ngram_simple", "ngram_map_k", "ngram_map_k4v", "ngram_mod", "ngram_cache")),
        *(
            mode(name, size_n=3, size_m=length)
            for name in ("ngram_simple", "ngram_map_k")
            for length in limits.draft_lengths
        ),
    ]


def _drafts(draft: Path, limits: SystemLimits) -> list[Body]:
    threads = {"n_threads": limits.num_threads}
    model = {"mparams": {"path": str(draft)}, "cpuparams": threads, "cpuparams_batch": threads}
    types = ["COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE"]
    return [{"speculative": {"types": types, "draft": {**model, "n_max": length}}} for length in limits.draft_lengths]


def _shown(params: Body) -> Body:
    """The parameters with the names of files alone."""
    if "draft" not in params.get("speculative", {}):
        return params
    draft = params["speculative"]["draft"]
    shown = {**draft, "mparams": {"path": Path(draft["mparams"]["path"]).name}}
    return {"speculative": {**params["speculative"], "draft": shown}}
