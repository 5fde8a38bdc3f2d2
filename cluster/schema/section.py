"""What every section of deploy.yaml has: strict, frozen, and closed to keys it does not know."""

from __future__ import annotations

from pydantic import AfterValidator, BaseModel, ConfigDict


class Section(BaseModel):
    """A mapping of deploy.yaml."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def one_of(*available: str) -> AfterValidator:
    """A field that takes these values, and names them where it is given another."""

    def check(value: str) -> str:
        if value not in available:
            raise ValueError(f"{value!r} is not available; this version offers {', '.join(available)}")
        return value

    return AfterValidator(check)
