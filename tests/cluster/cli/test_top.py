"""`outrider top`: figures between two readings, and the screen that shows them."""

from __future__ import annotations

import pytest
from textual.widgets import DataTable, Static

from cluster.cli.__main__ import main
from cluster.cli.server import AnswerError, figures_between, read_metrics
from cluster.cli.top_view import TopView
from cluster.local.serve_environment import free_ports


def exposition(tokens: int, accepted: int, drafted: int, alarm: int = 0, connected: int = 1) -> str:
    class_labels = 'class="greedy-free",method="model",position="0",replica="a"'
    lines = [
        "# TYPE outrider_generation_tokens counter",
        f'outrider_generation_tokens{{ingress="i"}} {tokens}',
        f'outrider_generation_tokens{{ingress="j"}} {tokens}',
        f'outrider_spec_decode_num_drafts{{replica="a"}} {drafted}',
        f'outrider_spec_decode_num_accepted_tokens{{replica="a"}} {accepted}',
        f'outrider_spec_decode_passes{{replica="a",shape="chain"}} {drafted}',
        f'outrider_spec_decode_passes{{replica="a",shape="tree"}} {3 * drafted}',
        f"outrider_spec_decode_class_draft_tokens_per_pos{{{class_labels}}} {drafted}",
        f"outrider_spec_decode_class_accepted_tokens_per_pos{{{class_labels}}} {accepted}",
        f'outrider_spec_decode_drift_alarm{{class="model-greedy-free",replica="a"}} {alarm}',
        'outrider_spec_decode_speedup{class="model-greedy",replica="a"} 1.5',
        'outrider_num_requests_running{replica="a"} 3',
        'outrider_kv_cache_usage{replica="a"} 0.25',
        'outrider_draft_num_connections{replica="a"} 1',
        f'outrider_draft_connected{{replica="a"}} {connected}',
    ]
    return "\n".join(lines) + "\n"


def test_rates_are_of_what_has_grown_in_all_replicas():
    before, now = read_metrics(exposition(100, 10, 20)), read_metrics(exposition(150, 40, 60))
    figures = figures_between(before, now, 2.0)
    assert figures.output_tokens_per_s == 50.0
    assert figures.pairs[0].tokens_per_pass == 1 + 30 / 40
    assert figures.pairs[0].shapes == "chain 25%, tree 75%"
    assert figures.classes[0].acceptance == (30 / 40,)
    assert figures.speedups == {"model-greedy": 1.5}
    assert figures.alarms == ()


def test_a_counter_that_began_again_counts_from_zero():
    figures = figures_between(read_metrics(exposition(900, 90, 90)), read_metrics(exposition(10, 1, 2)), 1.0)
    assert figures.output_tokens_per_s == 20.0
    assert figures.classes[0].acceptance == (0.5,)


async def test_the_screen_follows_the_readings_and_tells_of_alarms():
    texts = iter([exposition(0, 0, 0), exposition(500, 40, 80, alarm=1, connected=0)])
    app = TopView(lambda: read_metrics(next(texts)), interval_s=3600.0)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        while app.query_one("#pairs", DataTable).row_count == 0:
            await pilot.pause()
        assert str(app.query_one("#alarms", Static).render()) == "no alarms"
        await app.refresh_figures()
        await pilot.pause()
        assert app.query_one("#pairs", DataTable).get_row_at(0)[1:] == [
            "3",
            "0",
            "25%",
            "1.50",
            "away",
            "chain 25%, tree 75%",
        ]
        assert str(app.query_one("#classes", DataTable).get_row_at(0)[1]) == "50%"
        said = str(app.query_one("#alarms", Static).render())
        assert "acceptance of model-greedy-free is far below" in said
        assert "draft of pair a is away" in said
        await pilot.press("q")
    assert app.return_code == 0


async def test_a_server_that_goes_away_is_told_of_and_does_not_end_the_view():
    readings = iter([read_metrics(exposition(1, 0, 0))])

    def read():
        try:
            return next(readings)
        except StopIteration:
            raise AnswerError("connection refused") from None

    app = TopView(read, interval_s=3600.0)
    async with app.run_test() as pilot:
        while app.query_one("#pairs", DataTable).row_count == 0:
            await pilot.pause()
        await app.refresh_figures()
        await pilot.pause()
        assert "no metrics: connection refused" in str(app.query_one("#alarms", Static).render())


def test_no_server_is_said_before_the_screen_opens(capsys: pytest.CaptureFixture[str]):
    assert main(["top", "--url", f"http://127.0.0.1:{free_ports(1)[0]}/v1"]) == 1
    assert "cannot get metrics from" in capsys.readouterr().err
