"""The base of every request body: strict types, known names; and JSON that comes as a text inside one."""

from __future__ import annotations

import json

from pydantic import BaseModel, ConfigDict

from protos.errors import RequestError
from protos.json_parts import check_parts


class Body(BaseModel):
    """A body whose JSON types are taken as they are; numbers must be finite, unknown names are refused."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True, protected_namespaces=())


def read_json(text: str, name: str, param: str) -> object:
    """Return the value of the JSON `text`, a schema or the arguments of a call; `name` is its name for the client.

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
