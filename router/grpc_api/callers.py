"""The callers that gRPC admits: a key where keys are asked for, and no stranger around the proxy.

Serve's gRPC servers listen on all addresses of a node, whatever address clients are given. In a cluster of one machine
the proxy calls them over loopback, and `LOCAL_PROXY` says so.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Protocol

from protos.errors import PermissionDeniedError
from router.api_keys import ApiKeys

LOCAL_PROXY = "OUTRIDER_LOCAL_PROXY"
# Gives the place of the current call's message to another one; to be called when the message is checked, or refused.
leave_place: ContextVar[Callable[[], object]] = ContextVar("leave_place", default=lambda: None)
_LOOPBACK = ("ipv4:127.", "ipv6:[::1]", "ipv6:%5B::1%5D", "unix:")


class Caller(Protocol):
    """The part of a call's context that says where it comes from."""

    def invocation_metadata(self) -> Any: ...
    def peer(self) -> str: ...


def authenticate(api_keys: ApiKeys, context: Caller) -> None:
    """Remember the caller as the current client.

    Raises:
        AuthenticationError: the key is missing or unknown.
        PermissionDeniedError: the call comes from another machine, and not through this one's proxy.
    """
    if os.environ.get(LOCAL_PROXY) == "1" and not context.peer().startswith(_LOOPBACK):
        raise PermissionDeniedError(
            f"This port is for the proxy of this machine, and the call comes from {context.peer()}; use the gRPC port "
            "of the server, or run a cluster of several machines with `outrider env`."
        )
    metadata = dict(context.invocation_metadata() or ())
    api_keys.check(metadata.get("authorization"), metadata.get("x-api-key"))
