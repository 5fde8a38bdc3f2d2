"""The frontends that take requests, the choice of a pair for each of them, and the log for training."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

from pydantic import Field

from cluster.schema import Section, one_of
from router.config import IngressSettings
from router.generation.tool_formats import FORMATS, PROMPTED
from router.requests.reasoning_format import MARKS
from router.routing.policy import Policy

SERVES_OWN_POLICY = "power_of_two"


class TuneSection(Section):
    """The log of verified positions that `outrider tune` trains on: token ids and the target's likeliest tokens.

    Setting `log`, a folder on every node with pairs, is the deployment's consent. Requests with `store: false`, and
    tenants with `tune_log=false` after their key (docs/security.md), are never logged. Of the other requests those with
    `store: true` are logged, and a tenth of those without `store`. Beyond 1 GiB the oldest files are deleted.

    With `auto`, a drift alarm starts ten minutes of training on the pair's node with its log, next to the running pair.
    A trial then keeps the new draft if it is faster. New drafts are written to the folder `LOG.drafts`.
    """

    log: str | None = Field(default=None, min_length=1)
    auto: bool = False

    @property
    def folder(self) -> Path | None:
        """The log's absolute path."""
        return None if self.log is None else Path(os.path.expanduser(self.log)).absolute()

    def conflicts(self) -> Iterator[str]:
        if self.log is None and (given := self.model_fields_set - {"log"}):
            yield f"{', '.join(sorted(given))} needs a log, and no log is set; set log to a folder, or remove it"
        if self.log is not None and os.path.expanduser(self.log).startswith("~"):
            yield f"log {self.log!r} is the folder of a user that this machine does not know; give a whole path"
        if self.folder is not None and os.path.exists(self.folder) and not os.path.isdir(self.folder):
            yield f"log {self.log!r} is a file; give a folder, which is created if it is missing"
        if self.folder is not None and os.path.isdir(self.folder) and not os.access(self.folder, os.W_OK | os.X_OK):
            yield f"log {self.log!r} is a folder that this user cannot write to; change its owner, or give another"


class RouterSection(Section):
    """The choice of a pair.

    `policy` prefix takes the pair with the least predicted seconds to the first token, given its cached prefixes. load
    does the same as if every cache were empty. round_robin takes pairs in turn. random takes any. power_of_two is Ray
    Serve's own router: of two random pairs it takes the one with fewer requests.

    If the index does not answer within `index_timeout_ms`, the request goes to the pair with the fewest requests.
    """

    policy: Annotated[str, one_of(*Policy, SERVES_OWN_POLICY)] = Policy.PREFIX
    index_timeout_ms: float = Field(default=50.0, gt=0, le=10_000, strict=False)


class IngressSection(IngressSettings, Section):
    """The HTTP and gRPC frontends.

    `model_aliases` are more names of the model, for clients with fixed model names (docs/requests.md).

    `api_keys_file` has one key or its hash per line (docs/security.md). Without it every client is served.
    `open_admin`, for loopback without keys, lets every client kill the draft and see the router's reasons.

    `receipt_key_file` (PEM, Ed25519) signs receipts of answers (docs/requests.md).

    `tool_format` is how the model writes tool calls, and `reasoning_format` how it marks its reasoning; auto follows
    its chat template. prompted describes tools in the system message, for a model whose template has no tools.
    `chat_template` replaces that template: a file's path, or the template itself.

    `strict_fields` refuses a request with an unknown field, and one whose `max_tokens` does not fit the context.
    Otherwise the field is ignored and named in the answer's header X-Ignored-Fields, and the output gets what fits.

    `cors_origins` are the web pages that may call, as scheme://host:port with * for anything. The default is this
    machine's pages. A server on loopback accepts its own host names and `allowed_hosts` (* matches any part). Another
    server accepts any host name, or only `allowed_hosts` if set.

    `tls_certificate_file` (PEM: certificate chain and key) turns TLS on for both frontends. With `tls_client_ca_file` a
    client must have a certificate that this authority has signed.
    """

    num_replicas: int = Field(default=1, ge=1, le=1000)
    tool_format: Annotated[str, one_of("auto", PROMPTED, *FORMATS)] = "auto"
    reasoning_format: Annotated[str, one_of("auto", "none", *MARKS)] = "auto"
    tls_certificate_file: str | None = None
    tls_client_ca_file: str | None = None

    def conflicts(self) -> Iterable[str]:
        if self.open_admin and self.api_keys_file is not None:
            yield "open_admin is for a server without keys; remove it, and write admin=true after a key of the file"
        if self.tls_client_ca_file is not None and self.tls_certificate_file is None:
            yield "tls_client_ca_file is set without tls_certificate_file; set both, or neither"
        if strange := next((host for host in self.allowed_hosts if "/" in host), None):
            yield f"allowed_hosts has {strange!r}, and no client sends such a Host; give a name or an address alone"
        for name in ("tls_certificate_file", "tls_client_ca_file"):
            path = getattr(self, name)
            if path is not None and not os.path.isfile(os.path.expanduser(path)):
                yield f"{name} {path!r} is no file; give the path of a PEM file"
        yield from self._template_conflicts()

    @property
    def chat_template_text(self) -> str | None:
        """The template that replaces the model's; None without one, or if its file is missing."""
        if self.chat_template is None or "{{" in self.chat_template or "{%" in self.chat_template:
            return self.chat_template
        file = os.path.expanduser(self.chat_template)  # os.path.isfile accepts a long name; Path does not
        return Path(file).read_text(encoding="utf-8") if os.path.isfile(file) else None

    def _template_conflicts(self) -> Iterable[str]:
        try:
            is_missing = self.chat_template is not None and self.chat_template_text is None
        except (OSError, UnicodeDecodeError) as error:
            yield f"chat_template {self.chat_template!r} cannot be read: {error}"
            return
        if is_missing:
            yield f"chat_template {self.chat_template!r} is no file; give the path of a template, or its text"
