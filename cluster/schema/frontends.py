"""The frontends that take requests, and the choice of a pair for each request."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from pydantic import Field

from cluster.schema.section import Section, one_of
from router.generation.tool_formats.find_format import FORMATS
from router.requests.reasoning_format import MARKS
from router.routing.policy import Policy

SERVES_OWN_POLICY = "power_of_two"


class RouterSection(Section):
    """The choice of a pair.

    `policy` prefix: by predicted seconds to the first token, with what each pair has cached. load: the same with every
    cache taken as empty. round_robin: in turn. random. power_of_two: Ray Serve's own router, which takes the pair with
    fewer requests of two.

    `others_weight` is the weight of the work a request brings for those behind it (docs/routing.md). The index has
    `index_timeout_ms` to answer; after that the request goes to the pair with the fewest requests.
    """

    policy: Annotated[str, one_of(*Policy, SERVES_OWN_POLICY)] = Policy.PREFIX
    others_weight: float = Field(default=1.5, ge=0, le=100, strict=False)
    index_timeout_ms: float = Field(default=50.0, gt=0, le=10_000, strict=False)


class LimitsSection(Section):
    """Bounds of one client request and of the wait for its answer (`router.config.IngressLimits`).

    All bodies that an ingress replica is reading and checking hold at most `max_body_bytes_in_flight`. A request whose
    `max_tokens` is more than the context has room for gets what fits, or is refused with `strict_max_tokens`.
    """

    max_body_bytes: int = Field(default=8 << 20, ge=1024)
    max_body_bytes_in_flight: int = Field(default=128 << 20, ge=1024)
    max_choices: int = Field(default=128, ge=1)
    strict_max_tokens: bool = False
    first_token_timeout_s: float = Field(default=600.0, gt=0, strict=False)
    inter_token_timeout_s: float = Field(default=30.0, gt=0, strict=False)
    migration_deadline_s: float = Field(default=60.0, gt=0, strict=False)
    max_migrations: int = Field(default=64, ge=0)

    def conflicts(self) -> Iterable[str]:
        if self.max_body_bytes_in_flight < self.max_body_bytes:
            yield (
                f"max_body_bytes_in_flight is {self.max_body_bytes_in_flight}, less than max_body_bytes, "
                f"{self.max_body_bytes}: no such body could be read; raise the one or lower the other"
            )


class IngressSection(Section):
    """The HTTP and gRPC frontends.

    `model_aliases` are more names of the model, for clients that ask for one of their own (docs/requests.md).
    `api_keys_file` has one key or its hash per line (docs/security.md); without it every client is served, and may
    kill the draft and see the router's reasons if `open_admin` is set, which only loopback allows. `tool_format` is
    how the model writes tool calls, `reasoning_format` how it marks its thoughts; auto follows its chat template, in
    whose place `chat_template` may put another: a file's path, or the template itself. `prompt_tools` describes tools
    in the system message for a model whose template has none. `vllm_grpc` puts vLLM's engine service on the gRPC
    port, for the smg router; grpc_options.grpc_servicer_functions lists it too (docs/requests.md). `strict_fields`
    refuses a request with a field that is not known here; else the field is ignored, and named in the answer's header
    X-Ignored-Fields. `cors_origins` are the web pages that may call, as scheme://host:port with * for anything; those
    of this machine by default. A server on loopback answers to its own names and to `allowed_hosts` (a star stands for
    any part); elsewhere to any, or to these alone where there are some. `tls_certificate_file` (PEM: certificate chain
    and key) turns TLS on for both frontends; with `tls_client_ca_file` a client must show a certificate that is
    signed by it.
    """

    num_replicas: int = Field(default=1, ge=1, le=1000)
    model_aliases: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False)] = ()
    api_keys_file: str | None = None
    open_admin: bool = False
    tool_format: Annotated[str, one_of("auto", *FORMATS)] = "auto"
    reasoning_format: Annotated[str, one_of("auto", "none", *MARKS)] = "auto"
    chat_template: str | None = None
    prompt_tools: bool = False
    vllm_grpc: bool = False
    strict_fields: bool = False
    cors_origins: Annotated[tuple[str, ...], Field(strict=False)] = (
        "http://localhost",
        "http://localhost:*",
        "http://127.0.0.1",
        "http://127.0.0.1:*",
    )
    allowed_hosts: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False)] = ()
    tls_certificate_file: str | None = None
    tls_client_ca_file: str | None = None
    limits: LimitsSection = LimitsSection()

    def conflicts(self) -> Iterable[str]:
        if self.open_admin and self.api_keys_file is not None:
            yield "open_admin is for a server without keys; remove it, and write admin=true behind a key of the file"
        if self.tls_client_ca_file is not None and self.tls_certificate_file is None:
            yield "tls_client_ca_file is set without tls_certificate_file; set both, or neither"
        if strange := next((host for host in self.allowed_hosts if "/" in host), None):
            yield f"allowed_hosts has {strange!r}, and no client sends such a Host; give a name or an address alone"
        files = {
            "tls_certificate_file": "a PEM file",
            "tls_client_ca_file": "a PEM file",
        }
        for name, kind in files.items():
            path = getattr(self, name)
            if path is not None and not os.path.isfile(os.path.expanduser(path)):
                yield f"{name} {path!r} is no file; give the path of {kind}"
        yield from self._template_conflicts()
        if self.prompt_tools and self.tool_format not in {"auto", "hermes"}:
            yield f"prompt_tools has tools called in the form hermes, tool_format is {self.tool_format}; remove one"

    @property
    def chat_template_text(self) -> str | None:
        """The template in place of the model's own; None without one, or where its file is missing."""
        if self.chat_template is None or "{{" in self.chat_template or "{%" in self.chat_template:
            return self.chat_template
        file = os.path.expanduser(self.chat_template)  # of os.path: a long name is no error there
        return Path(file).read_text(encoding="utf-8") if os.path.isfile(file) else None

    def _template_conflicts(self) -> Iterable[str]:
        try:
            is_missing = self.chat_template is not None and self.chat_template_text is None
        except (OSError, UnicodeDecodeError) as error:
            yield f"chat_template {self.chat_template!r} cannot be read: {error}"
            return
        if is_missing:
            yield f"chat_template {self.chat_template!r} is no file; give the path of a template, or its text"
