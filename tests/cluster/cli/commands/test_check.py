"""`outrider check` of the bundled pair, with a chat template of an operator's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.cli.__main__ import main
from cluster.cli.deployment import ServeOptions, deployment_of, to_yaml


def check(folder: Path, chat_template: str) -> int:
    setting = f"ingress.chat_template={json.dumps(chat_template)}"
    file = folder / "deploy.yaml"
    file.write_text(to_yaml(deployment_of("demo", ServeOptions(settings=(setting,)))))
    return main(["check", str(file)])


@pytest.mark.parametrize("is_file", [True, False])
def test_a_chat_template_is_a_file_or_a_text(tmp_path: Path, capsys: pytest.CaptureFixture[str], is_file: bool):
    template = "{% for message in messages %}{{ message.content }}{% endfor %}" + " " * 5000
    (tmp_path / "mine.jinja").write_text(template)
    assert check(tmp_path, str(tmp_path / "mine.jinja") if is_file else template) == 0
    assert "is fine: model 'outrider-demo'" in " ".join(capsys.readouterr().out.split())


def test_a_chat_template_that_is_no_text_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "mine.jinja").write_bytes(b"\xff\xfe")
    assert check(tmp_path, str(tmp_path / "mine.jinja")) == 1
    assert "mine.jinja' cannot be read: 'utf-8' codec" in " ".join(capsys.readouterr().err.split())
