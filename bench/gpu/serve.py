"""`python -m bench.gpu.serve`: one served pair on a card, by HTTP and without Ray, with drafts on and off.

    python -m bench.gpu.serve --out results                     on a GPU: Llama-3's 8 B and 1 B shapes
    python -m bench.gpu.serve --device cpu --smoke              the same code with a tiny pair, to see that it runs

The application is as in `outrider serve --no-ray`: target, draft and frontends in one process. Each
line is one load: streams, drafts on or off, tokens per second, first tokens and gaps, and whether the seeded texts are
those without drafts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import httpx
import torch
import uvicorn

from bench.gpu.table import NOT_MEASURED
from bench.wide_fixture import LLAMA_3_1B, LLAMA_3_8B, WideShape, build_wide_fixture
from cluster.config import DeployConfig
from cluster.local.local_service import local_settings, running_service
from router.api_keys import ApiKeys
from router.openai.api import build_app

DEMO = Path(__file__).parents[2] / "models" / "demo"
SMOKE_TARGET = WideShape(288, 13, 800, 8, 2, 64, 4160)
SMOKE_DRAFT = WideShape(160, 3, 400, 8, 2, 64, 4160)
PROMPTS = ("def read_lines(path):\n", "class Stack:\n    def __init__(self", "import json\n\n", "for index in range(")
READ_TIMEOUT_S = 120.0


@dataclass(slots=True)
class StreamedText:
    """One streamed answer: its text, and the time of each chunk."""

    text: str = ""
    num_tokens: int = 0
    times_s: list[float] = field(default_factory=list)

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.times_s, self.times_s[1:], strict=False)]


def main(arguments: list[str] | None = None) -> None:
    """Serve the pair, send every load, and write the lines."""
    args = _parse_args(arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        print(f"no GPU here: {NOT_MEASURED}")
        return
    lines = asyncio.run(_measure(_config(args), args.streams, args.max_tokens))
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "serve.json").write_text(json.dumps(lines, indent=1) + "\n", encoding="utf-8")


def _parse_args(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--smoke", action="store_true", help="a tiny pair: proves that it runs")
    parser.add_argument("--out", type=Path, default=Path(".cache/bench-gpu"), help="folder of the results")
    parser.add_argument(
        "--work", type=Path, help="folder of the built models (20 GB); default: the folder of the results"
    )
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--max-tokens", type=int, default=128)
    return parser.parse_args(arguments)


def _config(args: argparse.Namespace) -> DeployConfig:
    device, dtype = torch.device(args.device), torch.bfloat16 if args.device == "cuda" else torch.float32
    shapes = (SMOKE_TARGET, SMOKE_DRAFT) if args.smoke else (LLAMA_3_8B, LLAMA_3_1B)
    folders = []
    for role, shape in zip(("target", "draft"), shapes, strict=True):
        folder = (args.work or args.out) / f"serve-{role}-{shape.hidden_size}-{shape.num_layers}"
        if not (folder / "tokenizer.json").exists():
            build_wide_fixture(DEMO / role, folder, shape, device, dtype)
        folders.append(folder)
    if args.device == "cuda":
        torch.cuda.empty_cache()  # of the models built here, before the pool is sized by the free memory
    target, draft = ({"path": str(folder), "dtype": str(dtype).removeprefix("torch.")} for folder in folders)
    speculation = {"num_tokens": 4}
    section = {"model_id": "pair", "target": target, "draft": draft, "speculation": speculation}
    return DeployConfig.model_validate(section)


async def _measure(config: DeployConfig, streams: list[int], max_tokens: int) -> list[dict[str, object]]:
    lines: list[dict[str, object]] = []
    async with running_service(config, local_settings(config)) as service:
        app = build_app(service, ApiKeys(None))
        async with _listening(app) as url, httpx.AsyncClient(base_url=url, timeout=READ_TIMEOUT_S) as client:
            await _load(client, 1, 8, has_drafts=True)  # warm
            for num_streams in streams:
                plain_texts: list[str] = []
                for has_drafts in (False, True):
                    began_s = time.perf_counter()
                    answers = await _load(client, num_streams, max_tokens, has_drafts=has_drafts)
                    seconds = time.perf_counter() - began_s
                    texts = [answer.text for answer in answers]
                    line = _line(answers, seconds, began_s, has_drafts=has_drafts)
                    if has_drafts:
                        line["equal_texts"] = sum(map(str.__eq__, texts, plain_texts))
                    plain_texts = texts
                    print("  ".join(f"{name} {value}" for name, value in line.items()), flush=True)
                    lines.append(line)
    return lines


def _line(answers: list[StreamedText], seconds: float, began_s: float, *, has_drafts: bool) -> dict[str, object]:
    gaps = sorted(gap for answer in answers for gap in answer.gaps_s) or [0.0]
    return {
        "streams": len(answers),
        "drafts": has_drafts,
        "tokens_per_s": round(sum(answer.num_tokens for answer in answers) / seconds, 1),
        "first_token_ms": round(1e3 * median(answer.times_s[0] - began_s for answer in answers), 1),
        "gap_p50_ms": round(1e3 * median(gaps), 2),
        "gap_p99_ms": round(1e3 * gaps[int(0.99 * (len(gaps) - 1))], 2),
    }


async def _load(
    client: httpx.AsyncClient, num_streams: int, max_tokens: int, *, has_drafts: bool
) -> list[StreamedText]:
    tasks = (_stream(client, index, max_tokens, has_drafts=has_drafts) for index in range(num_streams))
    return list(await asyncio.gather(*tasks))


async def _stream(client: httpx.AsyncClient, index: int, max_tokens: int, *, has_drafts: bool) -> StreamedText:
    """Read one seeded stream; its own salt keeps its prompt out of the prefix cache."""
    body = {
        "prompt": PROMPTS[index % len(PROMPTS)],
        "max_tokens": max_tokens,
        "temperature": 0.7,
        "seed": index,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_salt": f"{index} {max_tokens} {has_drafts}",
        "speculation": {"enabled": has_drafts},
    }
    answer = StreamedText()
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                _take(answer, json.loads(line.removeprefix("data: ")))
    return answer


def _take(answer: StreamedText, chunk: dict[str, object]) -> None:
    choices, usage = chunk.get("choices"), chunk.get("usage")
    if isinstance(choices, list) and choices and choices[0]["text"]:
        answer.text += choices[0]["text"]
        answer.times_s.append(time.perf_counter())
    if isinstance(usage, dict):
        answer.num_tokens = usage["completion_tokens"]


@asynccontextmanager
async def _listening(app: object) -> AsyncIterator[str]:
    """Yield the address of a server on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))  # type: ignore[arg-type]  # an ASGI application
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:  # noqa: ASYNC110  # uvicorn has no event
            await asyncio.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        await serving


if __name__ == "__main__":
    main()
