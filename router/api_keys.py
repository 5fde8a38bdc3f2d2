"""API keys of a file, compared in constant time."""

from __future__ import annotations

import hmac
from pathlib import Path

from protos.errors import AuthenticationError, ConfigError

_SCHEME = "bearer "


class ApiKeys:
    """A set of keys; an empty set admits every client."""

    def __init__(self, keys: frozenset[str] = frozenset()) -> None:
        self._keys = [key.encode() for key in keys]

    @classmethod
    def from_file(cls, path: str | None) -> ApiKeys:
        """Read one key per line; empty lines and lines that start with # do not count. None is the empty set.

        Raises:
            ConfigError: the file cannot be read, or holds no key (which would admit every client by mistake).
        """
        if path is None:
            return cls()
        try:
            lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"ingress.api_keys_file {path!r} cannot be read: {error}") from error
        keys = frozenset(line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))
        if not keys:
            raise ConfigError(
                f"ingress.api_keys_file {path!r} holds no key; put one per line, or leave the setting out"
            )
        return cls(keys)

    def check(self, authorization: str | None) -> None:
        """Check the value of an `Authorization` header. Raises `AuthenticationError` for a missing or unknown key."""
        if not self._keys:
            return
        if authorization is None or not authorization.lower().startswith(_SCHEME):
            raise AuthenticationError("This server needs an API key: send it as 'Authorization: Bearer KEY'.")
        offered = authorization[len(_SCHEME) :].strip().encode()
        matches = [
            hmac.compare_digest(offered, key) for key in self._keys
        ]  # all of them: the time is independent of the key
        if not any(matches):
            raise AuthenticationError("The API key is not known here.")
