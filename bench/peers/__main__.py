"""`make bench-peers`: install the peers, convert the pair for each, run them and us in turn, write docs/peers.md.

python -m bench.peers --peers outrider openvino --streams 1 8 --rounds 2 --tokens 48
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable
from pathlib import Path

from bench.contenders.prompts import PROMPT_TOKENS
from bench.padded_pair import DEMO, padded_target
from bench.peers.convert import gguf_pair, openvino_pair
from bench.peers.install import install_llama_server, install_openvino
from bench.peers.llama_server import LlamaServerSystem
from bench.peers.outrider import OutriderSystem
from bench.peers.page import Conditions, write
from bench.peers.plot import draw
from bench.peers.reference import reference_of
from bench.peers.rounds import Plan, hold
from bench.peers.rows import rows_of
from bench.peers.system import Limits, Mode, Pair, Precision, System
from bench.peers.worker_systems import openvino_system, transformers_system


def main() -> None:
    """Install, convert, measure and write the page."""
    args = _parse_args()
    logging.basicConfig(level=logging.WARNING)
    load_before = os.getloadavg()[0]
    pair = Pair(args.fixture or padded_target(), DEMO / "draft")
    limits = _limits(args)
    systems = [system for peer in args.peers for system in PEERS[peer](pair, limits, args)]
    if args.install_only:
        return
    reference = reference_of(DEMO / "target", limits.max_streams, args.tokens)
    outcome = hold(systems, reference.prompts, Plan(args.streams, args.tokens, args.rounds, 60 * args.minutes))
    conditions = Conditions(pair.target.name, outcome.num_rounds, args.tokens, PROMPT_TOKENS, limits, load_before)
    rows = rows_of(outcome, reference)
    write(args.out, rows, outcome, systems, conditions)
    draw(rows, args.out / "peers.png")
    print(f"{args.out / 'peers.md'} is written")


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=list(PEERS), help="who takes part")
    parser.add_argument(
        "--precisions", nargs="+", type=Precision, default=list(Precision), help="of outrider and openvino: bf16, f32"
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
    parser.add_argument("--out", type=Path, default=Path("docs"), help="folder of peers.md, peers.json and peers.png")
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
    if Precision.BF16 in args.precisions:
        systems.append(OutriderSystem(pair, Precision.BF16, limits, logs, is_deterministic=True))
    return systems


def _openvino(pair: Pair, limits: Limits, args: argparse.Namespace) -> list[System]:
    programs = install_openvino(args.cache)
    converted = openvino_pair(programs, pair, args.cache)
    return [
        openvino_system(programs / "python", converted, precision, mode, limits, args.cache / "logs")
        for precision in args.precisions
        for mode in Mode
    ]


def _llama_server(pair: Pair, limits: Limits, args: argparse.Namespace) -> list[System]:
    llama = install_llama_server(args.cache)
    converted = gguf_pair(llama, pair, args.cache)
    return [LlamaServerSystem(llama.server, converted, mode, limits, args.cache / "logs") for mode in Mode]


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
