"""The keys of deploy.yaml, for docs/deploy.md and for editors, and the metrics of docs/operate.md.

`python -m cluster.deploy_keys` writes them all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, get_args

from pydantic_core import PydanticUndefined

from cluster.config import DeployConfig
from cluster.metric_table import metric_table

DOCS = Path(__file__).parent.parent / "docs"
SCHEMA = DOCS / "deploy.schema.json"
_BEGIN, _END = "<!-- {}: begin -->\n", "<!-- {}: end -->\n"


def key_table() -> str:
    """Return the Markdown table of every key under `args` with its default, a row per section."""
    rows = [f"| {_name(path)} | {', '.join(keys)} |\n" for path, keys in _sections(DeployConfig, "")]
    return "".join(["| section | keys and defaults |\n", "|---|---|\n", *rows])


def key_names() -> set[str]:
    """Return every key under `args`, with its sections: `cache.block_size`."""
    words = ((path, re.findall(r"`(\w+)", key)[0]) for path, keys in _sections(DeployConfig, "") for key in keys)
    return {f"{path}.{word}" if path else word for path, word in words}


def generated_pages() -> dict[Path, str]:
    """Return the pages with a generated table, with the present table between its two marks."""
    tables = ((DOCS / "deploy.md", "keys", key_table()), (DOCS / "operate.md", "metrics", metric_table()))
    return {page: _with_table(page.read_text(encoding="utf-8"), name, table) for page, name, table in tables}


def schema_text() -> str:
    """Return the JSON schema of a whole deploy.yaml; Serve's own keys are left open."""
    args = DeployConfig.model_json_schema()
    definitions = args.pop("$defs")
    application = {"type": "object", "required": ["import_path", "args"], "properties": {"args": args}}
    applications = {"type": "array", "minItems": 1, "items": application}
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "deploy.yaml of Outrider",
        "type": "object",
        "required": ["applications"],
        "properties": {"applications": applications},
        "$defs": definitions,
    }
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def _with_table(page: str, name: str, table: str) -> str:
    begin, end = _BEGIN.format(name), _END.format(name)
    head, _, rest = page.partition(begin)
    return f"{head}{begin}\n{table}\n{end}{rest.partition(end)[2]}"


def _sections(section: Any, path: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the path of each section and its own keys with their defaults, as Markdown."""
    inner = {name: _section(field.annotation) for name, field in section.model_fields.items()}
    own = [_key(name, field.default) for name, field in section.model_fields.items() if inner[name] is None]
    if own:
        yield path, own
    for name, each in inner.items():
        if each is not None:
            yield from _sections(each, f"{path}.{name}" if path else name)


def _name(path: str) -> str:
    return f"`{path}`" if path else ""


def _key(name: str, default: Any) -> str:
    if default is PydanticUndefined:
        return f"`{name}` (required)"
    return f"`{name}`" if default is None else f"`{name}: {_text(default)}`"


def _section(annotation: Any) -> Any:
    candidates = (annotation, *get_args(annotation))
    return next((each for each in candidates if hasattr(each, "model_fields")), None)


def _text(default: Any) -> str:
    """Return a default in deploy.yaml's form."""
    value = default.value if isinstance(default, Enum) else default
    value = list(value) if isinstance(value, tuple) else value
    return value if isinstance(value, str) and re.fullmatch(r"[\w.:/-]+", value) else json.dumps(value)


if __name__ == "__main__":
    for page, text in generated_pages().items():
        page.write_text(text, encoding="utf-8")
    SCHEMA.write_text(schema_text(), encoding="utf-8")
