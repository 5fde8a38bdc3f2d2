"""Limits of clients that HAProxy, the frontends and the server without Ray share; nothing but constants.

`cluster.proxy.haproxy_config`, which starts before every HAProxy, imports this module: it imports nothing itself.
"""

REQUEST_TIMEOUT_S = 15  # for a request's headers, the next bytes of its body, and a TLS handshake
KEEP_ALIVE_S = 75  # without a request; clients and proxies close after a minute
UNREAD_S = 300  # a client that reads nothing of its waiting answer

# A body may take the first seconds as it likes, and must then keep this pace on average: 8 MiB in 17 minutes at most.
BODY_GRACE_S = REQUEST_TIMEOUT_S
MIN_BODY_BYTES_PER_S = 8192

MAX_HEAD_BYTES = 64 << 10  # of one request: its line and headers

MAX_CONNECTIONS_PER_ADDRESS = 1024  # an IPv6 network of 64 bits counts as one address
# Of the 4096 connections in all, for clients; the rest is kept for the operator's addresses, which ask for health.
MAX_HTTP_CONNECTIONS = 3072
MAX_GRPC_CONNECTIONS = 768
MAX_ENDLESS_CALLS = 64  # of one address at once: gRPC calls without a key that only the client ends
NUM_OPERATOR_CONNECTIONS = 256
