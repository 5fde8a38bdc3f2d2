"""The race's verdict follows the tokens."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.cli import serve_view


@pytest.mark.parametrize(
    ("drafted", "said"), [([1, 2, 3], "identical tokens, 2.00 times the speed"), ([1, 2, 4], "the texts differ")]
)
def test_tokens_are_called_identical_only_if_they_are(
    drafted: list[int], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def run(client: Any, model: str, num_tokens: int, enabled: bool, deadline_s: float) -> tuple[list[int], float]:
        return (drafted, 0.5) if enabled else ([1, 2, 3], 1.0)

    monkeypatch.setattr(serve_view, "_run", run)
    serve_view.race("http://127.0.0.1:9/v1", "m")
    printed = capsys.readouterr().out
    assert said in printed
    assert ("identical" in printed) == (drafted == [1, 2, 3])
