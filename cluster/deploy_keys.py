"""The table of deploy.yaml's keys in docs/operations.md: `python -m cluster.deploy_keys` writes it anew."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, get_args

from pydantic_core import PydanticUndefined

from cluster.config import DeployConfig
from cluster.schema.section import Section

PAGE = Path(__file__).parent.parent / "docs" / "operations.md"
_BEGIN, _END = "<!-- keys: begin -->\n", "<!-- keys: end -->\n"


def key_table() -> str:
    """Return the Markdown table of every key under `args`, with its default."""
    rows = [f"| `{path}` | {default} |\n" for path, default in _keys(DeployConfig, "")]
    return "".join(["| key | default |\n", "|---|---|\n", *rows])


def with_table(page: str) -> str:
    """Return the page's text with the present table between its two marks."""
    head, _, rest = page.partition(_BEGIN)
    return f"{head}{_BEGIN}\n{key_table()}\n{_END}{rest.partition(_END)[2]}"


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
    return f"`{default.value if isinstance(default, Enum) else default}`" if default != "" else '`""`'


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
