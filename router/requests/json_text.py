"""JSON that a client sends as a text inside its body: a schema, the arguments of a call."""

from __future__ import annotations

import json

from protos.errors import RequestError
from protos.json_parts import check_parts


def read_json(text: str, name: str, param: str) -> object:
    """Return the value of the JSON `text`; `name` is its name for the client.

    Raises:
        RequestError: it is not JSON, or is nested deeper than Python reads, or holds too much.
    """
    check_parts(text.encode(errors="replace"), name)
    try:
        return json.loads(text)
    except ValueError as error:
        raise RequestError(f"{name} is not valid JSON: {error}.", param=param) from None
    except RecursionError:
        raise RequestError(f"{name} is nested too deeply; send a flatter value.", param=param) from None
