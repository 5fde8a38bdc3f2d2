"""The client of benchmarks: events with their times, from answers in chunks cut anywhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import h11
import pytest

from bench.contenders.contender import ContenderRun
from bench.contenders.event_streams import run_streams

PAUSE_S = 0.05


class _StreamHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        if self.path == "/refused":
            self.send_error(503, "no place")
            return
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        parts = [b'data: {"tokens": [1', b", 2]}\n\n", b'data: {"tokens": []}\n\ndata: {"tokens": [3]}\n\n']
        if self.path == "/failed":
            parts.append(b'data: {"error": {"message": "no pair is left"}}\n\n')
        for part in parts:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
            time.sleep(PAUSE_S)
        if self.path != "/cut":
            self.wfile.write(b"12\r\ndata: [DONE]\n\ndata\r\n0\r\n\r\n")
        self.close_connection = True

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _StreamHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_events_have_the_time_of_their_last_byte_and_streams_run_side_by_side(url: str) -> None:
    streams = run_streams(f"{url}/answer", [{"prompt": [number]} for number in range(3)], timeout_s=20.0)
    assert len(streams.events) == 3
    for events in streams.events:
        assert [event.data["tokens"] for event in events] == [[1, 2], [], [3]]
        assert events[0].seconds >= PAUSE_S  # its second half came that late
        assert events[1].seconds == events[2].seconds >= 2 * PAUSE_S
    run = ContenderRun.of_streams(streams, lambda event: event.data["tokens"])
    assert run.outputs == [[1, 2, 3]] * 3
    assert [len(arrivals) for arrivals in run.arrivals or ()] == [2, 2, 2]
    assert run.seconds >= 3 * PAUSE_S


def test_another_status_an_error_in_a_stream_and_an_answer_that_is_cut_are_errors(url: str) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)/refused: status 503: .*no place"):
        run_streams(f"{url}/refused", [{}], timeout_s=20.0)
    with pytest.raises(RuntimeError, match=r"/failed: .*no pair is left"):
        run_streams(f"{url}/failed", [{}], timeout_s=20.0)
    with pytest.raises(h11.RemoteProtocolError, match="peer closed connection"):
        run_streams(f"{url}/cut", [{}], timeout_s=20.0)
