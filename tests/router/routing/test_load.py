import numpy as np
import pytest

from protos.block_keys import WorkerLoad
from router.routing.load import LoadTable, SentWork


def signal(
    worker_id: str, at_s: float, tokens: int, *, epoch: int = 0, rate: float = 100.0, requests: int = 0
) -> WorkerLoad:
    return WorkerLoad(
        worker_id,
        epoch,
        at_s,
        num_waiting_requests=requests,
        num_running_requests=0,
        queued_prefill_tokens=tokens,
        running_decode_tokens=0,
        prefill_tokens_per_s=rate,
    )


def backlog(table: LoadTable, worker_id: str, now_s: float) -> float:
    return float(table.view([worker_id], now_s).backlog_tokens[0])


def test_a_backlog_drains_at_the_workers_own_rate_between_signals():
    table = LoadTable()
    table.update(signal("a", 10.0, 500))
    assert backlog(table, "a", 10.0) == 500
    assert backlog(table, "a", 12.0) == 300
    assert backlog(table, "a", 99.0) == 0


def test_decoding_slows_the_drain():
    table = LoadTable()
    table.update(WorkerLoad("a", 0, 0.0, 0, 1, 500, 1000, prefill_tokens_per_s=100.0, decode_slowdown=1e-3))
    assert backlog(table, "a", 2.0) == 400


def test_a_burst_between_two_signals_sees_its_own_weight():
    table = LoadTable()
    table.update(signal("a", 0.0, 0))
    for number in range(3):
        table.sent("a", SentWork(str(number), 200, sent_at_s=1.0))
    assert backlog(table, "a", 1.0) == 600
    assert table.view(["a"], 1.0).num_requests[0] == 3


def test_work_sent_to_an_idle_worker_drains_from_the_moment_of_sending():
    table = LoadTable()
    table.update(signal("a", 0.0, 100))
    table.sent("a", SentWork("r", 200, sent_at_s=5.0))
    assert backlog(table, "a", 6.0) == 100


def test_a_signal_replaces_what_it_has_seen_and_keeps_what_was_sent_later():
    table = LoadTable(transit_s=0.0)
    table.sent("a", SentWork("seen", 1000, sent_at_s=1.0))
    table.sent("a", SentWork("later", 200, sent_at_s=3.0))
    table.update(signal("a", 2.0, 700, requests=1))
    assert backlog(table, "a", 3.0) == 600 + 200
    assert table.view(["a"], 3.0).num_requests[0] == 2


def test_a_request_still_under_way_is_not_lost_to_a_signal():
    table = LoadTable(transit_s=0.1)
    table.sent("a", SentWork("r", 200, sent_at_s=1.95))
    table.update(signal("a", 2.0, 0))
    assert backlog(table, "a", 2.0) == 200
    table.update(signal("a", 2.1, 150))
    assert backlog(table, "a", 2.1) == 150


def test_an_older_signal_changes_nothing():
    table = LoadTable()
    table.update(signal("a", 5.0, 100))
    table.update(signal("a", 4.0, 900))
    table.update(signal("a", 9.0, 900, epoch=-1))
    assert backlog(table, "a", 5.0) == 100


def test_a_restarted_worker_has_none_of_the_work_sent_before():
    table = LoadTable(transit_s=10.0)
    table.sent("a", SentWork("r", 500, sent_at_s=1.0))
    table.update(signal("a", 1.5, 500, epoch=0))
    table.update(signal("a", 2.0, 0, epoch=1))
    assert backlog(table, "a", 2.0) == 0


def test_refused_work_is_withdrawn():
    table = LoadTable()
    table.update(signal("a", 0.0, 100))
    table.sent("a", SentWork("kept", 50, sent_at_s=0.5))
    table.sent("a", SentWork("refused", 400, sent_at_s=0.5))
    table.withdraw("a", "refused")
    table.withdraw("a", "never sent")
    table.withdraw("nobody", "refused")
    assert backlog(table, "a", 0.5) == 100


def test_an_unmeasured_worker_is_taken_to_be_as_fast_as_the_others():
    table = LoadTable(default_prefill_tokens_per_s=7.0)
    assert table.view(["new"], 0.0).prefill_tokens_per_s[0] == 7.0
    table.update(signal("a", 0.0, 0, rate=100.0))
    table.update(signal("b", 0.0, 0, rate=300.0))
    assert table.view(["a", "b", "new"], 0.0).prefill_tokens_per_s.tolist() == [100.0, 300.0, 200.0]


def test_a_forgotten_worker_comes_back_idle():
    table = LoadTable()
    for name in "abcdefghij":
        table.update(signal(name, 0.0, 100))
    names = tuple("abcdefghij")
    table.view(names, 0.0)
    table.forget("c")
    table.sent("k", SentWork("r", 300, sent_at_s=0.0))
    view = table.view(names, 0.0)
    assert view.backlog_tokens.tolist() == [100, 100, 0, 100, 100, 100, 100, 100, 100, 100]
    assert backlog(table, "k", 0.0) == 300


def test_many_workers_keep_their_own_rows():
    table = LoadTable()
    names = [f"w{number}" for number in range(100)]
    for number, name in enumerate(names):
        table.update(signal(name, 0.0, number))
    view = table.view(names[::-1], 0.0)
    assert view.backlog_tokens.tolist() == list(range(99, -1, -1))
    assert view.rows["w7"] == 92
    assert len(np.unique(view.hashes)) == 100


def test_a_view_does_not_change_when_the_table_does():
    table = LoadTable()
    table.update(signal("a", 0.0, 100))
    before = table.view(["a"], 0.0)
    table.sent("a", SentWork("r", 100, sent_at_s=0.0))
    assert before.backlog_tokens[0] == pytest.approx(100)
    assert before.num_requests[0] == 0
