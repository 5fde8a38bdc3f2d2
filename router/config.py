"""What an ingress replica is built from; `cluster` fills it from deploy.yaml."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class IngressLimits:
    """Bounds of what one request may ask for and of how long an answer is waited for."""

    max_body_bytes: int = 8 << 20
    max_choices: int = 128  # prompts times n of one request
    first_token_timeout_s: float = 600.0  # includes the wait in the pair's queue
    inter_token_timeout_s: float = 30.0  # a pair that is silent for so long is given up, and the stream moves
    migration_deadline_s: float = 60.0  # a broken stream must go on within this
    max_migrations: int = 64  # attempts within the deadline


@dataclass(frozen=True, slots=True)
class IngressConfig:
    """Everything an ingress replica needs to know.

    `tool_format` is how the model writes tool calls: hermes, llama, or auto for what its chat template shows.
    `model_path` is the folder or Hub id whose tokenizer is used, the target's. `api_keys_file` holds one key per
    line; None serves anybody.
    """

    model_id: str
    model_path: str
    api_keys_file: str | None = None
    tool_format: str = "auto"
    limits: IngressLimits = field(default_factory=IngressLimits)


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """How the ingress chooses a pair; equal in every process of an application.

    An index that does not answer within `index_timeout_s` is passed over, and the request goes by load.
    """

    block_size: int
    policy: str = "prefix"
    others_weight: float = 1.5
    index_timeout_s: float = 0.05
