"""A change of load: who asks when, and the speeds that are read from it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count, repeat

import pytest

from bench.served.load_change import run_change, run_steady

NUM_STREAMS = 4
PHASE_S = 1.0
LATE_S = 0.5  # the server is slow so long after the first of the others came


class _StreamHandler(BaseHTTPRequestHandler):
    """Sends tokens one by one, all streams as fast, and slowly just after the first second stream."""

    num_running = 0
    slow_until = 0.0

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        kind = type(self)
        kind.num_running += 1
        if kind.num_running == 2 and not kind.slow_until:
            kind.slow_until = time.monotonic() + LATE_S
        self.send_response(200)
        self.end_headers()
        for token in range(8):
            time.sleep(0.05 if time.monotonic() < kind.slow_until else 0.01)
            event = {"choices": [{"token_ids": [token]}]}
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        kind.num_running -= 1

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _StreamHandler)
    _StreamHandler.slow_until = 0.0
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1/completions"
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_steady_load_has_the_speed_of_all_its_streams(url: str) -> None:
    _StreamHandler.slow_until = 1e-9  # never
    one, many = (run_steady(url, ({"max_tokens": 8} for _ in count()), number, 2.0) for number in (1, NUM_STREAMS))
    assert one < 100  # a token in 10 ms
    assert 2 * one < many < 100 * NUM_STREAMS


def test_each_phase_has_its_streams_and_a_late_speed_is_seen(url: str) -> None:
    first, many, last = run_change(url, repeat({}), NUM_STREAMS, PHASE_S)
    assert [phase.num_streams for phase in (first, many, last)] == [1, NUM_STREAMS, 1]
    assert many.tokens_per_second > 2 * max(first.tokens_per_second, last.tokens_per_second)
    assert 0.0 < many.followed_s <= LATE_S + 0.25
    at_first = [phase.first_tokens_per_second / phase.tokens_per_second for phase in (first, many, last)]
    assert at_first[1] < 0.7
    assert at_first[1] < min(at_first[0], at_first[2])  # where the machine is busy, no phase is even
