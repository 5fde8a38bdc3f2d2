"""Configuration of an ingress replica; `cluster` fills it from deploy.yaml."""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict, Field


class IngressLimits(BaseModel):
    """Bounds of one client request.

    `max_choices` bounds prompts times n. If `max_tokens` exceeds the room in the context, a request gets what fits;
    with `strict_max_tokens` it is refused.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    max_body_bytes: int = Field(default=8 << 20, ge=1024)
    max_choices: int = Field(default=128, ge=1)
    strict_max_tokens: bool = False


@dataclass(frozen=True, slots=True)
class IngressConfig:
    """Everything that an ingress replica is configured by.

    `model_aliases` are more names of the model, for clients that ask for one of their own.
    `tool_format` and `reasoning_format` name the forms of the model's tool calls and thoughts; auto takes the form in
    its chat template. `chat_template` is a text that replaces the model's own template.
    `prompt_tools` describes tools in the system message where the template has none. `model_path` is the folder or
    Hub id of the tokenizer, the target's. `api_keys_file` holds one key per line; None serves every client.
    `open_admin` gives every client of a server without keys an admin's rights. `vllm_grpc` adds the service of vLLM's
    engine to ours. `strict_fields` refuses fields that no schema has; else they are ignored and named in a header.
    `cors_origins` are the origins of web pages that may call; a star matches anything. `allowed_hosts` are the names
    that the server answers to (on loopback, in addition to its own); if empty, it answers to any name elsewhere.
    `min_pairs` is the expected number of pairs, the minimum if it autoscales.
    """

    model_id: str
    model_path: str
    model_aliases: tuple[str, ...] = ()
    api_keys_file: str | None = None
    open_admin: bool = False
    tool_format: str = "auto"
    reasoning_format: str = "auto"
    chat_template: str | None = None
    prompt_tools: bool = False
    vllm_grpc: bool = False
    strict_fields: bool = False
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    min_pairs: int = 1
    limits: IngressLimits = field(default_factory=IngressLimits)


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
