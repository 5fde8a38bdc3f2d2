"""API keys of a file: hashed, read again when the file changes, each with its tenant and its rate of tokens."""

from __future__ import annotations

import codecs
import hashlib
import hmac
import logging
import math
import os
import re
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path

from protos.errors import AuthenticationError, ConfigError, PermissionDeniedError, RateLimitError

logger = logging.getLogger(__name__)

_SCHEME = "bearer "
_NUMBER = re.compile(r"\d{1,9}(\.\d{1,9})?")
_OPTIONS: dict[str, Callable[[str], bool]] = {  # after a key, each with the test of its value
    "tenant": bool,
    "tokens_per_minute": lambda value: value.isdecimal() and int(value) > 0,
    "weight": lambda value: bool(_NUMBER.fullmatch(value)) and float(value) > 0,
    "max_priority": lambda value: value.removeprefix("-").isdecimal(),
    "admin": lambda value: value == "true",
    "tune_log": lambda value: value == "false",
    "receipts": lambda value: value == "true",
}
_HASH_MARK = "sha256:"
_HASH = re.compile(r"[0-9a-fA-F]{64}")


class TokenRate:
    """A budget of tokens that fills up once a minute; a request may overdraw it, and the next ones wait for that."""

    def __init__(self, tokens_per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = tokens_per_minute
        self._clock = clock
        self._level = float(tokens_per_minute)
        self._read_s = clock()

    def take(self, num_tokens: int) -> None:
        """Spend tokens. Raises RateLimitError while the budget is overdrawn."""
        self.check()
        self._level -= num_tokens

    def charge(self, num_tokens: int) -> None:
        """Spend tokens, also of a budget that is overdrawn."""
        self._level -= num_tokens

    def check(self) -> None:
        """Raise RateLimitError while the budget is overdrawn."""
        now_s = self._clock()
        self._level = min(self._limit, self._level + (now_s - self._read_s) * self._limit / 60)
        self._read_s = now_s
        if self._level <= 0:
            raise RateLimitError(
                f"This API key may use {self._limit} tokens per minute, and has used them; wait, or ask for more.",
                retry_after_s=(1 - self._level) * 60 / self._limit,
            )


@dataclass(frozen=True, slots=True)
class Client:
    """The sender of a request. Clients of one tenant share cached prefixes and their rate, others nothing.

    Where tenants wait, each gets tokens in proportion to its `weight`. `max_priority` is the lowest number (lower is
    sooner) that it may ask for, any if None. Unless `is_logged`, no token of its requests is written to a log. With
    `has_receipts`, its answers carry receipts unless a request declines.
    """

    tenant: str = ""
    rate: TokenRate | None = None
    is_admin: bool = False
    weight: float = 1.0
    max_priority: int | None = None
    is_logged: bool = True
    has_receipts: bool = False

    @property
    def tenant_id(self) -> str:
        """The tenant's name beyond this process."""
        return digest(self.tenant)

    def secret(self, text: str) -> str:
        """Return a client's salt or name of a conversation such that no other tenant can have the same one."""
        if not self.tenant:
            return text
        return hmac.new(self.tenant.encode(), text.encode(errors="surrogatepass"), hashlib.sha256).hexdigest()

    def take(self, num_tokens: int) -> None:
        """Count the tokens of a request. Raises RateLimitError if the tenant's rate is used up."""
        if self.rate is not None:
            self.rate.take(num_tokens)

    def check_rate(self) -> None:
        """Raise RateLimitError if the tenant's rate is used up; asked before anything of a request is read."""
        if self.rate is not None:
            self.rate.check()

    def charge_refusal(self, num_bytes: int) -> None:
        """Count a request that was refused, which cost work all the same: a token for every few bytes."""
        if self.rate is not None:
            self.rate.charge(1 + num_bytes // 4)  # 4 bytes of English text are about a token

    def require_admin(self) -> None:
        """Raise PermissionDeniedError for a client that may not see or change the server's inside."""
        if not self.is_admin:
            raise PermissionDeniedError(
                "This needs an API key with admin=true after it in the file; a server on loopback without keys may set "
                "ingress.open_admin: true."
            )


def digest(name: str) -> str:
    """Return a short name in place of one that may be long: the index remembers 100,000 of them."""
    return hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:32] if name else ""


ANYONE = Client()
current_client: ContextVar[Client] = ContextVar("current_client", default=ANYONE)


class ApiKeys:
    """The clients by the hash of their key; without any every client is admitted.

    Args:
        path: of the file, one key per line (`_client_of`); empty lines and lines that start with # do not count. None
            admits every client.
        clock: seconds.
        is_open_admin: clients of a server without keys may do what needs an admin's key elsewhere.

    Raises:
        ConfigError: the file cannot be read, or holds no key (which would admit every client by mistake).
    """

    def __init__(
        self, path: str | None = None, clock: Callable[[], float] = time.monotonic, *, is_open_admin: bool = False
    ) -> None:
        self._anyone = replace(ANYONE, is_admin=is_open_admin)
        self._path = None if path is None else Path(os.path.expanduser(path))
        self._clock = clock
        self._rates: dict[str, tuple[int, TokenRate]] = {}
        self._stamp: tuple[int, ...] | None = None  # of the file when it was read; None forces a read at the next check
        self._looked_s = self._known_s = clock()
        self._logged_s = -math.inf
        self._wrong_lines: tuple[str, ...] = ()
        self._clients: dict[str, Client] = {}
        if self._path is not None:
            self._read(self._path)
            if self._wrong_lines:
                raise ConfigError(self._wrong_lines[0])

    def check(self, authorization: str | None, x_api_key: str | None = None) -> Client:
        """Return the client of an `Authorization` or `x-api-key` header, and remember it as the current one.

        Raises:
            AuthenticationError: the key is missing or unknown.
        """
        client = self._find(authorization, x_api_key)
        current_client.set(client)
        return client

    @property
    def age_s(self) -> float:
        """Seconds since the file was last seen as it is known here; it grows while the file cannot be read."""
        self._look_again()
        return 0.0 if self._path is None else self._clock() - self._known_s

    @property
    def num_wrong_lines(self) -> int:
        """The lines of the file that admit nobody, as they are wrong."""
        return len(self._wrong_lines)

    def _find(self, authorization: str | None, x_api_key: str | None) -> Client:
        self._look_again()
        if self._path is None:
            return self._anyone
        keys = [] if x_api_key is None else [x_api_key]
        if authorization is not None and authorization.lower().startswith(_SCHEME):
            keys.insert(0, authorization[len(_SCHEME) :])
        for key in keys:
            # The time of a look-up depends on hashes only, and a hash reveals no key.
            if (client := self._clients.get(_hash_of(key.strip()))) is not None:
                return client
        if keys:
            raise AuthenticationError("The API key is not known here.")
        raise AuthenticationError(
            "This server needs an API key: send it as 'Authorization: Bearer KEY' or as 'x-api-key: KEY'."
        )

    def _look_again(self) -> None:
        """Read the file again if it has changed; one that cannot be read leaves the keys as they are.

        It is tried again at every look, so a failure lasts no longer than its cause.
        """
        if self._path is None or self._clock() - self._looked_s < 1.0:
            return
        self._looked_s = self._clock()
        known, wrong_lines = self._clients, self._wrong_lines
        try:
            if self._stamp is None or _stamp_of(self._path.stat()) != self._stamp:
                self._read(self._path)
        except (OSError, ConfigError) as error:
            if self._clock() - self._logged_s >= 60.0:
                self._logged_s = self._clock()
                logger.error("the API keys stay as they were %.0f s ago: %s", self._clock() - self._known_s, error)
            return
        self._known_s, self._logged_s = self._clock(), -math.inf
        if known.keys() != self._clients.keys():
            logger.info("%d API keys were read again", len(self._clients))
        for line in self._wrong_lines if wrong_lines != self._wrong_lines else ():
            logger.error("%s; this line admits nobody", line)

    def _read(self, path: Path) -> None:
        """Take the keys of the file in, its right lines without the wrong ones. Raises ConfigError if it has none."""
        name = f"ingress.api_keys_file {str(path)!r}"
        try:
            if not path.is_file():
                raise FileNotFoundError("there is no such file")
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                lines = file.read().removeprefix(codecs.BOM_UTF8).splitlines()
        except OSError as error:
            raise ConfigError(f"{name} cannot be read: {error}") from error
        # A wrong line costs only its own key.
        clients: dict[str, Client] = {}
        wrong_lines = []
        for number, line in enumerate(lines, start=1):
            try:
                self._add_line(line, clients)
            except ConfigError as error:
                wrong_lines.append(f"{name}, line {number}, {error}")
        if not clients and not wrong_lines:
            raise ConfigError(f"{name} holds no key; put one per line, or leave the setting out")
        if not clients and self._clients:
            raise ConfigError(wrong_lines[0])
        self._clients, self._wrong_lines = _with_refusals(clients), tuple(wrong_lines)
        # A file that is still being written may change without a new time, so it is read again at the next check.
        is_settled = abs(time.time() - status.st_mtime) > 2.0
        self._stamp = _stamp_of(status) if is_settled else None

    def _add_line(self, line: bytes, clients: dict[str, Client]) -> None:
        try:
            entry = line.decode().strip()
        except UnicodeDecodeError as error:
            raise ConfigError(f"is not UTF-8: {error.reason} at byte {error.start}") from None
        if not entry or entry.startswith("#"):
            return
        digest, client = self._client_of(entry)
        if clients.setdefault(digest, client) != client:
            raise ConfigError("has the key of an earlier line with other options; write each key once")

    def _client_of(self, entry: str) -> tuple[str, Client]:
        """Read `KEY` or `sha256:HASH`, then options (`_OPTIONS`) as `NAME=VALUE`."""
        key, *options = entry.split()
        digest = _hash_of(key)
        if key.startswith(_HASH_MARK):
            digest = key.removeprefix(_HASH_MARK).lower()
            if not _HASH.fullmatch(digest):
                raise ConfigError(
                    f"has a key that starts with {_HASH_MARK} and goes on with {len(digest)} characters; a "
                    "hash has 64 hexadecimal digits, as `printf %s KEY | sha256sum` prints them"
                )
        # The options after the key.
        given = dict(option.partition("=")[::2] for option in options)
        if wrong := [name for name, value in given.items() if name not in _OPTIONS or not _OPTIONS[name](value)]:
            # Show nothing of an unknown option: it may be a key.
            shown = f"{wrong[0]}={given[wrong[0]]}" if wrong[0] in _OPTIONS else f"option ({len(wrong[0])} characters)"
            raise ConfigError(
                f"has a wrong {shown} after a key; it may have tenant=NAME, tokens_per_minute=N, weight=N (more than "
                "0), max_priority=N, admin=true, tune_log=false and receipts=true"
            )
        tenant = given.get("tenant", digest)
        limit = given.get("tokens_per_minute")
        return digest, Client(
            tenant,
            None if limit is None else self._rate(tenant, int(limit)),
            is_admin="admin" in given,
            weight=float(given.get("weight", 1.0)),
            max_priority=int(given.get("max_priority", 0)),
            is_logged="tune_log" not in given,
            has_receipts="receipts" in given,
        )

    def _rate(self, tenant: str, limit: int) -> TokenRate:
        """Return the tenant's rate, the one there is while its limit is the same."""
        known = self._rates.get(tenant)
        if known is None or known[0] != limit:
            known = self._rates[tenant] = (limit, TokenRate(limit, self._clock))
        return known[1]


def _with_refusals(clients: dict[str, Client]) -> dict[str, Client]:
    """Turn logging off for every key of a tenant if one of its keys turns it off."""
    refusing = {client.tenant for client in clients.values() if not client.is_logged}
    return {digest: replace(client, is_logged=client.tenant not in refusing) for digest, client in clients.items()}


def _stamp_of(status: os.stat_result) -> tuple[int, ...]:
    return status.st_mtime_ns, status.st_ctime_ns, status.st_dev, status.st_ino, status.st_size


def _hash_of(key: str) -> str:
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()
