"""Ctrl-C and SIGTERM: the first ends what waits, the second everything."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.cli.__main__ import main
from cluster.cli.commands.serve import Interrupt, InterruptedStartError


@pytest.fixture
def interrupt() -> Iterator[Interrupt]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield Interrupt()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_insists(interrupt: Interrupt, number: int):
    os.kill(os.getpid(), number)
    assert interrupt.is_set.is_set()
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), number)


def test_a_signal_that_ray_has_taken_is_heard_again(interrupt: Interrupt):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    interrupt.listen()
    os.kill(os.getpid(), signal.SIGTERM)
    assert interrupt.is_set.is_set()


def wait_interrupted(interrupt: Interrupt) -> None:
    with interrupt.breaking():
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("waited on")


def test_the_deployment_is_not_waited_for_any_more(interrupt: Interrupt):
    with pytest.raises(InterruptedStartError):
        wait_interrupted(interrupt)
    with pytest.raises(InterruptedStartError), interrupt.breaking():
        pytest.fail("began in spite of it")


def test_check_measures_quality_where_it_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.py"
    text.write_text("def add(a, b):\n    return a + b\n" * 20, encoding="utf-8")
    assert main(["check", "deploy.yaml", "--quality", str(text)]) == 0
    assert "perplexity" in capsys.readouterr().out
    assert main(["check", "deploy.yaml", "--quality", str(tmp_path / "missing")]) == 1
    assert "--quality cannot read its text" in capsys.readouterr().err
