"""Log lines as JSON, with the request that they are about."""

from __future__ import annotations

import json
import logging
import sys

import pytest

from actors.process import FORMAT_VARIABLE, JsonLines, is_json_wanted
from cluster.local.serve_environment import cluster_variables
from protos.errors import ConfigError


def line_of(message: str, *arguments: object, **options: object) -> dict[str, str]:
    record = logging.LogRecord("engine.x", logging.WARNING, "x.py", 1, message, arguments, None)
    record.__dict__.update(options)
    return json.loads(JsonLines().format(record))


def test_a_line_about_a_request_has_its_id_as_a_field():
    line = line_of("request %s: preempted at %d tokens", "cmpl-1", 7)
    assert (line["request_id"], line["message"]) == ("cmpl-1", "request cmpl-1: preempted at 7 tokens")
    assert (line["level"], line["logger"]) == ("WARNING", "engine.x")
    assert line["time"].endswith("+00:00")
    assert "request_id" not in line_of("loaded %s", "model")


def test_an_error_and_a_line_break_stay_in_one_line():
    try:
        raise ValueError("two\nlines")
    except ValueError:
        text = JsonLines().format(
            logging.LogRecord("a", logging.ERROR, "x.py", 1, "it failed\nbadly", (), sys.exc_info())
        )
    assert "\n" not in text
    assert "ValueError: two" in json.loads(text)["error"]


def test_the_environment_chooses_and_a_typo_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(FORMAT_VARIABLE, raising=False)
    assert not is_json_wanted()
    assert FORMAT_VARIABLE not in cluster_variables()
    monkeypatch.setenv(FORMAT_VARIABLE, "json")
    assert is_json_wanted()
    assert cluster_variables()[FORMAT_VARIABLE] == "json"
    monkeypatch.setenv(FORMAT_VARIABLE, "jason")
    with pytest.raises(ConfigError, match="OUTRIDER_LOG_FORMAT is 'jason'; set it to text or json"):
        is_json_wanted()
