"""llama.cpp's HTTP server as its wheel has it. Runs as a script in an environment with xllamacpp.

    python llama_server.py '{"model": {"path": "model.gguf"}, "port": 8130}'

The argument has fields of its parameters by name; an object sets the fields of a part.
"""

import json
import signal
import sys
from typing import Any

import xllamacpp


def main() -> None:
    """Serve until a signal comes."""
    params = xllamacpp.CommonParams()
    _set(params, json.loads(sys.argv[1]))
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    signal.pause()


def _set(part: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        if isinstance(value, dict):
            _set(getattr(part, name), value)
        elif name == "types":
            setattr(part, name, [getattr(xllamacpp.common_speculative_type, each) for each in value])
        elif hasattr(part, name):
            setattr(part, name, value)
        else:
            raise SystemExit(f"xllamacpp has no parameter {name}")


if __name__ == "__main__":
    main()
