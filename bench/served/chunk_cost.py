"""The cost of a chunk of a stream outside the engine: processor time by process, per chunk that clients get.

    python -m bench.served.chunk_cost deploy.yaml --streams 16 --seconds 20

Clients stream over HTTP from a process of their own, all the time, without drafts: a chunk is a token then. The
target's own time is beside it: what it needs for the tokens themselves.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import time
from collections import defaultdict
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from bench.served.application import ServedApplication
from bench.served.memory import name_of
from cluster.local.ports import free_port

_FOLDER = Path(".cache/bench/chunk-cost")
_WARM_S = 8.0
_MAX_TOKENS = 400


def main() -> None:
    """Serve the file, keep the streams running, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("deploy", nargs="?", type=Path, default=Path("deploy.yaml"))
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    file, url = _own_file(options.deploy)
    application = ServedApplication(file, url)
    try:
        application.wait_until_ready()
        seconds, num_chunks = measure(application.pid, url, options.streams, options.seconds)
    finally:
        application.close()
    print(f"\n{options.deploy}, {options.streams} streams: {num_chunks} chunks in {options.seconds:.0f} s")
    for name, cpu_s in sorted(seconds.items(), key=lambda each: -each[1]):
        if cpu_s / num_chunks > 1e-5:
            print(f"{1e3 * cpu_s / num_chunks:7.3f} ms  {name}")


def measure(pid: int, url: str, num_streams: int, length_s: float) -> tuple[dict[str, float], int]:
    """Return processor seconds by process name, less those of an idle time as long, and the chunks that came."""
    model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    time.sleep(_WARM_S)
    idle = _spent(pid, length_s)
    counter = multiprocessing.Value("q", 0)
    clients = multiprocessing.Process(target=_clients, args=(url, model, num_streams, counter), daemon=True)
    clients.start()
    try:
        time.sleep(_WARM_S)
        began = counter.value
        seconds = _spent(pid, length_s)
        above = {name: cpu_s - idle.get(name, 0.0) for name, cpu_s in seconds.items()}
        return above, counter.value - began
    finally:
        clients.kill()
        clients.join()


def _spent(pid: int, length_s: float) -> dict[str, float]:
    """Return what a process and all below it spend in the time to come."""
    root = psutil.Process(pid)
    processes = [root, *root.children(recursive=True)]
    before = _cpu_by_name(processes)
    time.sleep(length_s)
    return {name: cpu_s - before.get(name, 0.0) for name, cpu_s in _cpu_by_name(processes).items()}


def _own_file(deploy: Path) -> tuple[Path, str]:
    args = yaml.safe_load(deploy.read_text())
    args["http_options"]["port"], args["grpc_options"]["port"] = port, _ = free_port(), free_port()
    _FOLDER.mkdir(parents=True, exist_ok=True)
    file = _FOLDER / deploy.name
    file.write_text(yaml.safe_dump(args, sort_keys=False))
    return file, f"http://127.0.0.1:{port}"


def _cpu_by_name(processes: list[psutil.Process]) -> dict[str, float]:
    seconds: dict[str, float] = defaultdict(float)
    for process in processes:
        times = process.cpu_times()
        seconds[name_of(process)] += times.user + times.system
    return seconds


def _clients(url: str, model: str, num_streams: int, counter: Synchronized[int]) -> None:
    asyncio.run(_stream_all(url, model, num_streams, counter))


async def _stream_all(url: str, model: str, num_streams: int, counter: Synchronized[int]) -> None:
    limits = httpx.Limits(max_connections=num_streams)
    async with httpx.AsyncClient(base_url=url, timeout=120.0, limits=limits) as client:
        await asyncio.gather(*(_stream(client, model, each, counter) for each in range(num_streams)))


async def _stream(client: httpx.AsyncClient, model: str, seed: int, counter: Synchronized[int]) -> None:
    body: dict[str, Any] = {"model": model, "prompt": f"def f_{seed}(", "max_tokens": _MAX_TOKENS, "stream": True}
    body |= {"ignore_eos": True, "speculation": {"enabled": False}}
    while True:
        seed += 1000
        async with client.stream("POST", "/v1/completions", json=body | {"seed": seed}) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    counter.value += 1


if __name__ == "__main__":
    main()
