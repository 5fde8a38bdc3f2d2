"""The callers that gRPC admits: with a key if keys are required, and only through the proxy.

Serve's gRPC servers listen on all addresses of a node, even if clients get only one. In a cluster of one machine the
proxy calls them over loopback, and `LOCAL_PROXY` is set.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Callable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import unquote

from protos.errors import PermissionDeniedError
from router.api_keys import ApiKeys, Client

if TYPE_CHECKING:  # the command line takes a name from here
    import grpc

LOCAL_PROXY = "OUTRIDER_LOCAL_PROXY"
FORWARDED_FOR = "x-forwarded-for"  # set by the proxy: its caller's address
# Releases the place of the current call's message; called once the message is checked or refused.
leave_place: ContextVar[Callable[[], object]] = ContextVar("leave_place", default=lambda: None)
_LOOPBACK = ("ipv4:127.", "ipv6:[::1]", "ipv6:%5B::1%5D", "unix:")


class CallContext(Protocol):
    """The parts that `grpc.aio.ServicerContext` and `RayServegRPCContext` share."""

    def invocation_metadata(self) -> Any: ...
    def peer(self) -> str: ...
    def set_code(self, code: grpc.StatusCode) -> None: ...
    def set_details(self, details: str) -> None: ...
    def set_trailing_metadata(self, trailing_metadata: Any) -> None: ...


def check_peer(context: CallContext) -> None:
    """Raise PermissionDeniedError for a call from another machine that bypasses this machine's proxy."""
    if os.environ.get(LOCAL_PROXY) == "1" and not context.peer().startswith(_LOOPBACK):
        raise PermissionDeniedError(
            f"This port accepts this machine's proxy only, but the call comes from {context.peer()}; use the gRPC port "
            "of the server, or run a cluster of several machines with `outrider env`."
        )


def authenticate(api_keys: ApiKeys, context: CallContext) -> Client:
    """Set the caller as the current client, and return it.

    Raises:
        AuthenticationError: the key is missing or unknown.
        PermissionDeniedError: the call comes from another machine and bypasses this one's proxy.
    """
    check_peer(context)
    metadata = dict(context.invocation_metadata() or ())
    return api_keys.check(metadata.get("authorization"), metadata.get("x-api-key"))


def address(context: CallContext, *, has_proxy: bool) -> str:
    """Return the address of the caller (in IPv6 its network); through a proxy, the address that the proxy names."""
    peer = unquote(context.peer())
    if has_proxy:
        metadata = dict(context.invocation_metadata() or ())
        peer = str(metadata.get(FORWARDED_FOR, peer))
    host = peer.removeprefix("ipv4:").removeprefix("ipv6:")
    host = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0] if "." in host else host
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return "unknown"  # callers without an address share one
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is None:
        return str(ipaddress.ip_network((found, 64), strict=False))  # one client owns all addresses of such a network
    return str(getattr(found, "ipv4_mapped", None) or found)
