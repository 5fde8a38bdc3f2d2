"""The limits and times in docs equal the code's."""

from __future__ import annotations

from pathlib import Path

import pytest
from ray.serve._private.constants import (
    DEFAULT_UVICORN_KEEP_ALIVE_TIMEOUT_S,
    RAY_SERVE_HAPROXY_TUNE_BUFSIZE,
    REPLICA_HEALTH_CHECK_UNHEALTHY_THRESHOLD,
)

from actors.pair.target_client import PONG_TIMEOUT_S
from actors.target.engine_loop import STEP_TIMEOUT_S
from cluster import app
from cluster.local.serve_environment import _OWN_CLUSTER
from cluster.proxy import haproxy_config
from cluster.schema.replicas import _PACE
from engine.sampling import grammar_compiler, grammar_trial
from protos import client_text
from router import client_limits as limits
from router.config import IngressLimits
from router.grpc_api import api as grpc_api
from router.grpc_api import callers, reading_gate
from router.openai import http_body, response_writer
from router.requests import chat_request, completion_request, json_schema, sequence_requests
from router.routing import load

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "security.md").read_text(encoding="utf-8")
MIB, KIB = 1 << 20, 1 << 10
HTTP = IngressLimits()
GRPC_OF_ADDRESS = limits.MAX_CONNECTIONS_PER_ADDRESS * limits.MAX_GRPC_CONNECTIONS // limits.MAX_HTTP_CONNECTIONS
KEYED, OPEN = callers.ReadingLimits(), reading_gate.OPEN_LIMITS
HAPROXY_CHECK = _OWN_CLUSTER["RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER"]
OPEN_SIZES = list(reading_gate.OPEN_METHODS.values())
BUFFER = f"{RAY_SERVE_HAPROXY_TUNE_BUFSIZE // KIB} KiB"  # HAProxy sees a body's first part
ROWS = [
    f"TLS handshake | {limits.REQUEST_TIMEOUT_S} s | the same, and {limits.MAX_HEAD_BYTES // KIB} KiB of headers |",
    f"| {limits.REQUEST_TIMEOUT_S} s between its parts (HAProxy: {haproxy_config.CLIENT_TIMEOUT_S} s); "
    f"after {limits.BODY_GRACE_S} s "
    f"{limits.MIN_BODY_BYTES_PER_S:,} bytes per second on average; {HTTP.max_body_bytes // MIB} MiB |",
    f"| the first {BUFFER} of a body, of any method | {limits.REQUEST_TIMEOUT_S} s |",
    f"| a body of another method than POST | {BUFFER}, with its length | {HTTP.max_body_bytes // MIB} MiB |",
    "| an answer before the end of its request's body | closes the connection within a second |",  # by tests of both
    f"| {limits.REQUEST_TIMEOUT_S} s, and {DEFAULT_UVICORN_KEEP_ALIVE_TIMEOUT_S} s after an answer "
    f"| {limits.REQUEST_TIMEOUT_S} s, and {limits.KEEP_ALIVE_S} s after an answer |",
    f"does not read | {haproxy_config.CLIENT_TIMEOUT_S} s | {limits.UNREAD_S} s |",
    f"| {limits.MAX_CONNECTIONS_PER_ADDRESS} over HTTP, {GRPC_OF_ADDRESS} over gRPC; a quarter of it while half of",
    f"| {limits.MAX_CONNECTIONS_PER_ADDRESS} over HTTP, none over gRPC | `OUTRIDER_MAX_CONNECTIONS_PER_ADDRESS`",
    f"| {limits.MAX_HTTP_CONNECTIONS} over HTTP, {limits.MAX_GRPC_CONNECTIONS} over gRPC; of "
    f"{limits.MAX_HTTP_CONNECTIONS + limits.MAX_GRPC_CONNECTIONS + limits.NUM_OPERATOR_CONNECTIONS}, ",
    f"| {http_body.BODIES_IN_FLIGHT * HTTP.max_body_bytes // MIB} MiB | the same | "
    f"{http_body.BODIES_IN_FLIGHT} times `ingress.limits.max_body_bytes` |",
    f"| a gRPC message | {reading_gate.MAX_MESSAGE_BYTES // MIB} MiB; {limits.REQUEST_TIMEOUT_S} s for",
    f"| {KEYED.num_places}, of one tenant {KEYED.num_of_caller}, each for {KEYED.read_s:.0f} s, "
    f"for {KEYED.grace_s:.0f} s where others wait |",
    f"| {OPEN.num_places}, of one address {OPEN.num_of_caller}, each for {OPEN.read_s:.0f} s, "
    f"for {OPEN.grace_s} s where others wait |",
    f"| {max(OPEN_SIZES[:3])} bytes, for reflection {max(OPEN_SIZES) // KIB} KiB |",
    f"at once | {limits.MAX_ENDLESS_CALLS} of one address, {reading_gate._MAX_ENDLESS} of all |",
    f"| gRPC calls of one connection | {grpc_api.MAX_STREAMS} |",
    f"| choices of one request | {sequence_requests.MAX_CHOICES} |",
    f"| {completion_request.MAX_PROMPTS:,} and {chat_request.MAX_TOOLS:,} |",
    f"of more than {client_text.MAX_PARTS // KIB} KiB | {client_text.MAX_PARTS:,} lists, objects, fields and "
    f"texts; {client_text._MAX_VALUES:,} values |",
    f"| messages, tools and tool calls of one gRPC message | {client_text.MAX_PARTS:,} |",
    f"| logprobs of one prompt | {sequence_requests.MAX_PROMPT_LOGPROBS:,}, ",
    f"| a JSON schema; the schemas of all tools | {json_schema.MAX_SCHEMA_PARTS:,} fields and items |",
    f"| a grammar | {grammar_compiler.MAX_SOURCE_BYTES // KIB} KiB, {grammar_compiler.MAX_RULES:,} rules, "
    f"{grammar_trial.MAX_COMPILE_S:.0f} s of processor time and {grammar_trial.MAX_COMPILE_BYTES // MIB} MiB to "
    f"compile, {grammar_trial._MASK_ITEMS:,} items for a mask |",
    f"holds its place for {HTTP.max_body_bytes // limits.MIN_BODY_BYTES_PER_S // 60} minutes at most",
]


@pytest.mark.parametrize("row", ROWS)
def test_a_documented_limit_is_that_of_the_code(row: str) -> None:
    assert row in PAGE


@pytest.mark.parametrize(
    ("page", "words"),
    [
        ("operate", f"takes longer than {response_writer.KEEP_ALIVE_S:.0f} s sends an SSE comment"),
        ("deploy", f"leaving pair has {app._WATCHED['graceful_shutdown_timeout_s']:.0f} seconds for its streams"),
        ("deploy", f"Streams of a removed pair get {app._WATCHED['graceful_shutdown_timeout_s']:.0f} s, then move"),
        ("operate", f"| {load._SILENT_FROM_S:.0f} s after the first request without a report"),
        ("operate", f"(`RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER`, {HAPROXY_CHECK.removesuffix('s')} s)"),
        (
            "operate",
            f"| {PONG_TIMEOUT_S:.0f} s without an answer to a ping, or a step of {STEP_TIMEOUT_S:.0f} s",
        ),
        (
            "operate",
            f"{REPLICA_HEALTH_CHECK_UNHEALTHY_THRESHOLD * sum(app._HEALTH.values()):.0f} s: three health checks of "
            "{health_check_timeout_s:.0f} s, {health_check_period_s:.0f} s apart".format(**app._HEALTH),
        ),
        (
            "deploy",
            "means over {look_back_period_s:.0f} s, adds pairs after {upscale_delay_s:.0f} s and".format(**_PACE),
        ),
    ],
)
def test_a_documented_time_is_that_of_the_code(page: str, words: str) -> None:
    assert words in (DOCS / f"{page}.md").read_text(encoding="utf-8")


def test_every_row_of_the_table_is_held() -> None:
    table = PAGE.partition("## Limits")[2].partition("\n\n")[2].partition("\n\n")[0].splitlines()
    assert [row for row in table[2:] if not any(held in row for held in ROWS)] == []
