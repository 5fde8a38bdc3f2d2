"""The cost of a served application: proportional memory by process after a first answer, and processor time when idle.

    python -m bench.served.memory deploy.yaml models/published/smollm2.deploy.yaml

Proportional: a page that processes share counts once. Ray is included, and every process that the command starts.
"""

from __future__ import annotations

import argparse
import re
import time
from collections import Counter
from pathlib import Path

import psutil
import yaml
from openai import OpenAI

from bench.served.application import ServedApplication
from cluster.local.ports import free_port

_FOLDER = Path(".cache/bench/memory")
_PSS = re.compile(r"^Pss:\s+(\d+) kB", re.MULTILINE)
_NUM_TOKENS = 100
_IDLE_S = 15.0
_SETTLE_S = 5.0


def main() -> None:
    """Serve each file in turn and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("deploy", nargs="*", type=Path, default=[Path("deploy.yaml")])
    for path in parser.parse_args().deploy:
        sizes, idle = measure(path)
        print(f"\n{path}: {sizes.total() / 1e6:.0f} MB in {len(sizes)} kinds of processes, idle {idle:.0%} of a core")
        for name, size in sizes.most_common():
            print(f"{size / 1e6:7.0f}  {name}")


def measure(path: Path) -> tuple[Counter[str], float]:
    """Return bytes by process name once an answer has come, and the part of a core that idle serving takes then."""
    deploy = yaml.safe_load(path.read_text())
    deploy["http_options"]["port"], deploy["grpc_options"]["port"] = port, _ = free_port(), free_port()
    file = _FOLDER / path.name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(deploy, sort_keys=False))
    url = f"http://127.0.0.1:{port}"
    application = ServedApplication(file, url)
    try:
        application.wait_until_ready()
        client = OpenAI(base_url=f"{url}/v1", api_key="none")
        model = client.models.list().data[0].id
        client.completions.create(model=model, prompt="def fibonacci(n):", max_tokens=_NUM_TOKENS)
        time.sleep(_SETTLE_S)
        root = psutil.Process(application.pid)
        processes = [root, *root.children(recursive=True)]
        sizes: Counter[str] = Counter()
        for process in processes:
            sizes[name_of(process)] += _proportional_bytes(process)
        before_s = _cpu_s(processes)
        time.sleep(_IDLE_S)
        return sizes, (_cpu_s(processes) - before_s) / _IDLE_S
    finally:
        application.close()


def name_of(process: psutil.Process) -> str:
    """Return the script or the actor that a process is."""
    words = process.cmdline() or [process.name()]
    script = next((word for word in words[1:] if word.endswith(".py")), words[0])
    return words[0] if words[0].startswith("ray") else Path(script).name


def _proportional_bytes(process: psutil.Process) -> int:
    found = _PSS.search(Path(f"/proc/{process.pid}/smaps_rollup").read_text())
    return 1024 * int(found[1]) if found else 0


def _cpu_s(processes: list[psutil.Process]) -> float:
    return sum(times.user + times.system for process in processes for times in [process.cpu_times()])


if __name__ == "__main__":
    main()
