"""Configuration of an ingress replica; `cluster` fills it from deploy.yaml."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

_CHECKED = ConfigDict(extra="forbid", frozen=True, strict=True)
_Names = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False)]
_THIS_MACHINE = ("http://localhost", "http://localhost:*", "http://127.0.0.1", "http://127.0.0.1:*")


class IngressLimits(BaseModel):
    """Bounds of one client request."""

    model_config = _CHECKED

    max_body_bytes: int = Field(default=8 << 20, ge=1024)


class IngressSettings(BaseModel):
    """The keys of deploy.yaml's `ingress` that an ingress replica reads; `IngressSection` explains them."""

    model_config = _CHECKED

    model_aliases: _Names = ()
    api_keys_file: str | None = None
    receipt_key_file: str | None = None
    open_admin: bool = False
    tool_format: str = "auto"
    reasoning_format: str = "auto"
    chat_template: str | None = None
    strict_fields: bool = False
    cors_origins: Annotated[tuple[str, ...], Field(strict=False)] = _THIS_MACHINE
    allowed_hosts: _Names = ()
    limits: IngressLimits = IngressLimits()


class IngressConfig(IngressSettings):
    """Everything that an ingress replica is configured by.

    `chat_template` is a text. `model_path` is the folder or Hub id of the tokenizer, the target's. `min_pairs` is the
    expected number of pairs, the minimum if it autoscales.
    """

    model_id: str
    model_path: str
    min_pairs: int = 1


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """The choice of a pair; equal in every process of an application.

    A token whose KV another worker holds costs `fetch_share` of a computed one; at 1 workers have nothing from others.

    An index that does not answer within `index_timeout_s` is passed over, and the request goes by load.
    """

    block_size: int
    policy: str = "prefix"
    fetch_share: float = 1.0
    index_timeout_s: float = 0.05
