import gzip
import importlib.util
import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.simulator.__main__ import main
from bench.simulator.baselines import POLICIES
from bench.simulator.block_cache import BlockCache
from bench.simulator.calibration import at_load
from bench.simulator.channel import ChannelQuality
from bench.simulator.prefill_pool import PrefillPool
from bench.simulator.rates import ServingRates
from bench.simulator.replay import Fleet, replay
from bench.simulator.trace import Trace, TraceRequest, sorted_trace, trace_key
from bench.simulator.trace_file import TraceError, read_trace
from protos.block_keys import join_keys
from protos.cache_delta import CacheDelta

QUIET = ServingRates(prefill_tokens_per_s=1000.0, decode_slowdown=0.0, decode_tokens_per_s=10.0)


def one_request(arrival_s: float, num_blocks: int, name: str = "p", session_id: str = "") -> TraceRequest:
    keys = tuple(trace_key(name, number) for number in range(num_blocks))
    return TraceRequest(arrival_s, session_id, num_blocks * 100 + 50, 10, keys)


def conversations(num_users: int, num_turns: int, seed: int = 0) -> Trace:
    """Sessions that share a first block; prompts grow by four blocks each turn."""
    draw = random.Random(seed)
    requests = []
    for user in range(num_users):
        keys = [trace_key("system"), *(trace_key(user, number) for number in range(4 * num_turns))]
        times = sorted(draw.uniform(0.0, 1000.0) for _ in range(num_turns))
        for turn, time_s in enumerate(times, start=1):
            prompt = tuple(keys[: 1 + 4 * turn])
            requests.append(TraceRequest(time_s, "", len(prompt) * 100 + 7, 20, prompt))
    return sorted_trace("conversations", 100, requests)


def mooncake_line(timestamp: int, num_tokens: int, hash_ids: list[int]) -> dict[str, object]:
    return {"timestamp": timestamp, "input_length": num_tokens, "output_length": 10, "hash_ids": hash_ids}


def write_lines(path: Path, records: list[dict[str, object]]) -> Path:
    text = "\n".join(json.dumps(record) for record in records)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def test_a_queue_is_first_come_first_served_and_a_second_turn_finds_the_first():
    trace = Trace("t", 100, (one_request(0.0, 4), one_request(0.1, 2, "q"), one_request(5.0, 6)))
    result = replay(trace, POLICIES["prefix"], Fleet(1, 100, rates=QUIET))
    assert result.ttft_s == pytest.approx([0.45, 0.45 - 0.1 + 0.25, 0.25])
    assert result.cached_tokens.tolist() == [0, 0, 400]
    assert result.busy_s == pytest.approx([0.95])
    assert result.hit_rate == pytest.approx(400 / 1350)


def test_running_streams_slow_prefill_down():
    trace = Trace("t", 100, (one_request(0.0, 4), one_request(1.0, 4, "q")))
    result = replay(trace, POLICIES["random"], Fleet(1, 100, rates=replace(QUIET, decode_slowdown=1e-3)))
    assert result.ttft_s == pytest.approx([0.45, 0.45 * 1.45])


def test_a_session_waits_for_the_answer_before_it_asks_on():
    trace = Trace("t", 100, (one_request(0.0, 4, session_id="s"), one_request(0.1, 4, session_id="s")))
    result = replay(trace, POLICIES["random"], Fleet(1, 100, rates=QUIET))
    assert result.arrived_s == pytest.approx([0.0, 0.45 + 1.0])
    assert result.ttft_s == pytest.approx([0.45, 0.05])


def test_a_cache_evicts_the_least_recently_used_prompt_from_its_end():
    cache = BlockCache(5)
    old, new = [trace_key("old", n) for n in range(3)], [trace_key("new", n) for n in range(4)]
    assert cache.put(old) == CacheDelta(stored=join_keys(old))
    assert cache.put(new) == CacheDelta(stored=join_keys(new), removed=old[2] + old[1])
    assert len(cache) == 5
    long = [trace_key("long", n) for n in range(9)]
    assert cache.put(long).stored == join_keys(long[:5])


def test_a_prefill_pool_takes_long_prompts_and_counts_the_transfer():
    rates = replace(QUIET, kv_transfer_latency_s=0.1, kv_transfer_tokens_per_s=500.0)
    pool = PrefillPool(1, rates)
    assert pool.take(0.0, 1000) == pytest.approx(2.1)
    assert pool.take(0.0, 0) == pytest.approx(1.1)
    assert pool.busy_s == pytest.approx(1.0)
    trace = Trace("t", 100, (one_request(0.0, 9), one_request(0.0, 9, "q"), one_request(9.0, 9, "q")))
    fleet = Fleet(1, 100, num_prefill_workers=1, rates=replace(QUIET, kv_transfer_latency_s=0.1))
    result = replay(trace, POLICIES["prefix"], fleet)
    assert result.ttft_s == pytest.approx([0.95, 1.05, 0.05])
    assert result.pool_busy_s == pytest.approx(0.95)


def test_the_pace_is_set_so_that_random_routing_has_the_wanted_load():
    fleet = Fleet(4, 200, rates=QUIET)
    trace = at_load(conversations(60, 5), fleet, 0.7).trace
    result = replay(trace, POLICIES["random"], fleet)
    assert result.load(4) == pytest.approx(0.7, rel=0.02)


def test_a_load_that_few_sessions_cannot_give_is_reported_as_such():
    requests = [one_request(float(turn), 4, session_id="s") for turn in range(5)]
    calibration = at_load(Trace("t", 100, tuple(requests)), Fleet(4, 200, rates=QUIET), 0.7)
    assert not calibration.is_reached
    assert calibration.measured_load < 0.3


def test_prefix_routing_beats_the_blind_and_does_not_collapse_like_longest_prefix():
    fleet = Fleet(4, 200, rates=QUIET)
    trace = at_load(conversations(100, 6), fleet, 0.7).trace
    results = {name: replay(trace, POLICIES[name], fleet) for name in ("prefix", "least_work", "p2c", "longest_prefix")}
    mean = {name: result.ttft_s.mean() for name, result in results.items()}
    assert mean["prefix"] < 0.6 * mean["p2c"]
    assert mean["prefix"] < mean["least_work"] < mean["p2c"] < mean["longest_prefix"]
    assert results["prefix"].hit_rate > 1.5 * results["least_work"].hit_rate
    assert results["prefix"].imbalance < 1.3
    assert results["longest_prefix"].imbalance > 3.5


def test_a_late_load_signal_and_lost_events_cost_little():
    fleet = Fleet(4, 200, rates=QUIET)
    trace = at_load(conversations(100, 6), fleet, 0.7).trace
    exact = replay(trace, POLICIES["prefix"], fleet)
    late = replace(fleet, events=ChannelQuality(0.2, 0.02), loads=ChannelQuality(1.0, 0.05))
    doubtful = replay(trace, POLICIES["prefix"], late)
    assert doubtful.ttft_s.mean() < 1.25 * exact.ttft_s.mean()
    assert doubtful.hit_rate > 0.9 * exact.hit_rate


def test_a_replay_is_reproducible():
    fleet = Fleet(3, 100, rates=QUIET, events=ChannelQuality(0.1, 0.1), loads=ChannelQuality(0.1, 0.1))
    trace = conversations(20, 4)
    first, second = (replay(trace, POLICIES["prefix"], fleet) for _ in range(2))
    assert np.array_equal(first.ttft_s, second.ttft_s)


def test_the_audit_sees_what_balancing_gave_up():
    fleet = Fleet(4, 200, rates=QUIET)
    result = replay(at_load(conversations(60, 5), fleet, 0.7).trace, POLICIES["prefix"], fleet)
    assert result.audit.num_requests == len(result.trace.requests)
    assert result.audit.num_achieved_blocks * 100 == result.cached_tokens.sum()
    assert 0.5 < result.audit.efficiency <= 1.0


def test_mooncake_lines_keep_full_blocks_and_spread_over_their_tick(tmp_path: Path):
    records = [mooncake_line(3000 * tick, 1100, [0, 10 * tick + n, 99]) for tick in range(4) for n in range(1, 6)]
    trace = read_trace(write_lines(tmp_path / "m.jsonl.gz", records))
    assert trace.block_size == 512
    assert all(len(request.keys) == 2 for request in trace.requests)
    assert len({request.arrival_s for request in trace.requests}) == 20
    assert 6.0 < trace.span_s < 12.0


def test_mooncake_times_that_are_exact_stay_so(tmp_path: Path):
    records = [mooncake_line(1000 * n, 600, [n, 99]) for n in range(5)]
    trace = read_trace(write_lines(tmp_path / "m.jsonl", records))
    assert [request.arrival_s for request in trace.requests] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_agent_sessions_are_expanded_with_their_subagents_and_without_long_pauses(tmp_path: Path):
    turns = [
        {"t": 0.0, "type": "n", "in": 64 * 20, "out": 5, "runs": [[1, 20]]},
        {"t": 4.0, "type": "subagent", "requests": [{"t": 1.0, "type": "n", "in": 640, "out": 5, "runs": [[50, 10]]}]},
        {"t": 90_000.0, "type": "n", "in": 64 * 25 + 3, "out": 5, "runs": [[1, 16], [70, 9]]},
    ]
    session = {"block_size": 64, "requests": turns}
    records = [session | {"id": "one"}, session | {"id": "two"}]
    trace = read_trace(write_lines(tmp_path / "c.jsonl", records))
    assert trace.block_size == 512
    assert len(trace.requests) == 6
    assert trace.span_s < 700.0
    first, last = [request for request in trace.requests if request.session_id == "one"]
    assert [len(first.keys), len(last.keys)] == [2, 3]
    assert first.keys == last.keys[:2]
    assert not {k for r in trace.requests if r.session_id == "two" for k in r.keys} & set(last.keys)


def test_agent_text_shares_the_keys_of_equal_prefixes(tmp_path: Path):
    text = "".join(chr(97 + n % 26) for n in range(2000))
    records: list[dict[str, object]] = [
        {"timestamp": 1_000_000, "input": text[:1000], "output": "x" * 40, "session_id": "s"},
        {"timestamp": 3_500_000, "input": text, "output": "", "session_id": "s"},
    ]
    first, second = read_trace(write_lines(tmp_path / "a.jsonl", records)).requests
    assert (first.num_tokens, first.num_output_tokens, second.arrival_s) == (250, 10, 2.5)
    assert first.keys == second.keys[: len(first.keys)]
    assert len(second.keys) == 2000 // 256


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "no line"),
        ("nonsense", "line 1: not JSON"),
        ("[1]", "a list where an object was expected"),
        ('{"question": 1}', "unknown trace format with fields"),
        ('{"input_length": 5, "hash_ids": [1], "output_length": 1}', "record 1 lacks the field 'timestamp'"),
        (
            '{"input_length": 5, "hash_ids": [1], "output_length": 1, "timestamp": "a"}',
            "record 1 is not one of Mooncake",
        ),
        ('{"input_length": 5, "hash_ids": 7, "output_length": 1, "timestamp": 0}', "record 1 is not one of Mooncake"),
        (
            '{"id": "a", "block_size": 0, "requests": [{"t": 0, "in": 1, "out": 1, "runs": []}]}',
            "record 1 is not one of",
        ),
        ('{"id": "a", "block_size": 64, "requests": []}', "no session has a request"),
        ('{"timestamp": 1, "input": [{"role": "user", "content": "hi"}]}', "record 1 is not one of agent text"),
        ('{"input_length": 5, "hash_ids": [1], "output_length": 1, "timestamp": 0}', "all come at one moment"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_with_its_reason(tmp_path: Path, text: str, complaint: str):
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError, match=complaint):
        read_trace(path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("cut.jsonl.gz", gzip.compress(b'{"input": "a", "timestamp": 1}\n' * 99)[:-9]),
        ("plain.jsonl.gz", b"{}"),
        ("other.jsonl", b"\xff\xfe"),
    ],
)
def test_a_broken_file_is_refused(tmp_path: Path, name: str, content: bytes):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(TraceError, match="broken behind"):
        read_trace(path)


def test_a_session_without_requests_is_passed_over(tmp_path: Path):
    turns = [{"t": time, "in": 640, "out": 5, "runs": [[1, 10]]} for time in (0.0, 9.0)]
    sessions: list[dict[str, object]] = [
        {"id": "idle", "block_size": 64, "requests": []},
        {"id": "busy", "block_size": 64, "requests": turns},
    ]
    assert len(read_trace(write_lines(tmp_path / "c.jsonl", sessions)).requests) == 2


def test_the_command_writes_one_row_per_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    records = [mooncake_line(500 * n, 2100, [0, n % 7 + 1, n % 7 + 10, n + 100, n + 200]) for n in range(60)]
    path = write_lines(tmp_path / "m.jsonl.gz", records)
    out = tmp_path / "rows.json"
    main(
        [
            str(path),
            "--workers",
            "2",
            "--cache-blocks",
            "20",
            "--policies",
            "prefix,p2c,longest_prefix",
            "--json",
            str(out),
        ]
    )
    rows = json.loads(out.read_text())
    assert [row["policy"] for row in rows] == ["prefix", "p2c", "longest_prefix"]
    assert set(rows[0]) == {
        "policy",
        "hit_rate",
        "ttft_mean_s",
        "ttft_p50_s",
        "ttft_p95_s",
        "ttft_p99_s",
        "imbalance",
    }
    assert "prefix, load 1000 ms old" in capsys.readouterr().out
    assert importlib.util.find_spec("matplotlib") is None or (tmp_path / "rows.png").exists()


def test_the_plot_is_drawn(tmp_path: Path):
    pytest.importorskip("matplotlib")
    records = [mooncake_line(500 * n, 2100, [0, n % 7 + 1, n % 7 + 10, n + 100, n + 200]) for n in range(30)]
    path = write_lines(tmp_path / "m.jsonl", records)
    main([str(path), "--workers", "2", "--cache-blocks", "20", "--policies", "p2c", "--plot", str(tmp_path / "p.png")])
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--policies", "best"], "unknown policy best; known are prefix"),
        (["--workers", "0"], "0 is less than 1"),
        (["--load", "0"], "0.0 is not above 0"),
        (["--load", "inf"], "inf is not above 0, or not finite"),
        (["--prefill-workers", "-1"], "-1 is below 0"),
        (["--json", "/no/such/folder/rows.json"], "in a folder that does not exist"),
        (["--event-loss", "1"], "1.0 is not in [0, 1)"),
        ([], "No such file"),
    ],
)
def test_wrong_arguments_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
):
    with pytest.raises(SystemExit):
        main([str(tmp_path / "missing.jsonl"), *arguments])
    assert complaint in capsys.readouterr().err
