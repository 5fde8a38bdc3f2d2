"""The keys of deploy.yaml, for docs/operations.md and for editors; the page's table of metrics.

`python -m cluster.deploy_keys` writes all of it anew.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, get_args

from pydantic_core import PydanticUndefined

from cluster.config import DeployConfig
from cluster.metric_table import metric_table
from cluster.schema.section import Section

PAGE = Path(__file__).parent.parent / "docs" / "operations.md"
SCHEMA = PAGE.parent / "deploy.schema.json"
_BEGIN, _END = "<!-- {}: begin -->\n", "<!-- {}: end -->\n"


def key_table() -> str:
    """Return the Markdown table of every key under `args`, with its default."""
    rows = [f"| `{path}` | {default} |\n" for path, default in _keys(DeployConfig, "")]
    return "".join(["| key | default |\n", "|---|---|\n", *rows])


def with_tables(page: str) -> str:
    """Return the page's text with the present tables of keys and metrics, each between its two marks."""
    for name, table in (("keys", key_table()), ("metrics", metric_table())):
        begin, end = _BEGIN.format(name), _END.format(name)
        head, _, rest = page.partition(begin)
        page = f"{head}{begin}\n{table}\n{end}{rest.partition(end)[2]}"
    return page


def schema_text() -> str:
    """Return the JSON schema of a whole deploy.yaml; what is Serve's own is left open."""
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


def _keys(section: type[Section], prefix: str) -> Iterator[tuple[str, str]]:
    for name, field in section.model_fields.items():
        inner = _section(field.annotation)
        if inner is None or field.default is None:
            yield prefix + name, _text(field.default)
        if inner is not None:
            yield from _keys(inner, f"{prefix}{name}.")


def _section(annotation: Any) -> type[Section] | None:
    candidates = (annotation, *get_args(annotation))
    return next((each for each in candidates if isinstance(each, type) and issubclass(each, Section)), None)


def _text(default: Any) -> str:
    if default is PydanticUndefined:
        return "required"
    if default is None:
        return "none"
    text = str(default.value if isinstance(default, Enum) else default)
    return f"`{text}`" if text and "\n" not in text else f"`{json.dumps(text)}`"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    SCHEMA.write_text(schema_text(), encoding="utf-8")
