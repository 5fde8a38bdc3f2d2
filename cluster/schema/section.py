"""The base of every section of deploy.yaml: strict, frozen, and closed to keys it does not know."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

from protos.errors import ConfigError


class Section(BaseModel):
    """A mapping of deploy.yaml."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    def conflicts(self) -> Iterable[str]:
        """Yield contradictions in this section, each with its remedy; the first is reported."""
        return ()

    def check(self) -> None:
        """Raise ValueError for the first conflict."""
        for conflict in self.conflicts():
            raise ValueError(conflict)

    @model_validator(mode="after")
    def _is_accepted(self) -> Self:
        self.check()
        return self


class EngineSection(Section):
    """A section that becomes one of the engine's dataclasses, which check their own constraints."""

    def to_engine(self) -> Any:
        """Return the engine's dataclass. Raises ConfigError if the engine refuses a value."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise ValueError for the engine's first refusal, then for the first conflict."""
        with reported():
            self.to_engine()
        super().check()


@contextmanager
def reported() -> Iterator[None]:
    """Turn a ConfigError into the ValueError that pydantic collects with the path of the section."""
    try:
        yield
    except ConfigError as error:
        raise ValueError(str(error)) from None


def one_of(*choices: str) -> BeforeValidator:
    """Make a field accept these values, and name them in the error for another value.

    Text becomes the member of an enum where `choices` are members. YAML's `off` without quotes, which it reads as
    false, is the text.
    """
    by_text = {str(choice): choice for choice in choices}

    def check(value: Any) -> str:
        if value is False and "off" in by_text:
            return by_text["off"]
        if not isinstance(value, str) or value not in by_text:
            raise ValueError(f"{value!r} is not available; this version offers {', '.join(by_text)}")
        return by_text[value]

    return BeforeValidator(check)
