"""The base of every request body: strict types, known names."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Body(BaseModel):
    """A body whose JSON types are taken as they are; numbers must be finite, unknown names are refused."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True, protected_namespaces=())
