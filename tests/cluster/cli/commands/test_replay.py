"""Stored requests: some cannot run again, and digests name the changed ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.cli.__main__ import main
from cluster.cli.commands.replay import changed_choices, changed_digests, read_records
from protos.fingerprint import FingerprintPart, digest, read_fingerprint, with_tokenizer, write_fingerprint
from tests.cluster.cli.fake_server import answering

REQUEST = {"prompt": "a", "seed": 3}


def fingerprint(**changed: str) -> str:
    parts = {part: digest(changed.get(part, part)) for part in FingerprintPart}
    tokenizer = parts.pop(FingerprintPart.TOKENIZER)
    return with_tokenizer(write_fingerprint(parts), tokenizer)


def answer(*token_ids: int, system_fingerprint: str = fingerprint(), prompt: list[int] | None = None) -> dict:
    choice = {"index": 0, "text": "a", "token_ids": list(token_ids), "prompt_token_ids": prompt or [1, 2]}
    usage = {"prompt_tokens": 2, "completion_tokens": len(token_ids)}
    return {
        "object": "text_completion", "choices": [choice], "usage": usage, "system_fingerprint": system_fingerprint
    }  # fmt: skip


@pytest.mark.parametrize("part", FingerprintPart)
def test_the_part_that_has_changed_is_named(part: FingerprintPart):
    [line] = changed_digests(answer(1), answer(1, system_fingerprint=fingerprint(**{part: "other"})))
    assert line.startswith(f"{part} differ: {digest(part)} was, {digest('other')} is")


def test_a_fingerprint_of_another_server_is_compared_whole():
    assert read_fingerprint("fp_123") is None
    [line] = changed_digests(answer(1, system_fingerprint="fp_123"), answer(1))
    assert line.startswith("system_fingerprint differs: fp_123 was")


def test_another_prompt_is_another_request():
    [line] = changed_digests(answer(1), answer(1, prompt=[1, 3]))
    assert line.startswith("request differs")
    old = answer(1)
    del old["choices"][0]["prompt_token_ids"]
    assert not list(changed_digests(old, answer(1, prompt=[1, 3])))


def test_the_first_token_that_differs_is_named():
    assert list(changed_choices(answer(4, 5, 6), answer(4, 5, 6))) == []
    assert list(changed_choices(answer(4, 5, 6), answer(4, 7, 6))) == ["choice 0 differs from 1 on: 5 was, 7 is"]
    assert list(changed_choices(answer(4, 5), answer(4))) == ["choice 0 differs from 1 on: 5 was, the end is"]


def test_records_stand_alone_in_a_list_or_on_lines(tmp_path: Path):
    record = {"request": REQUEST, "response": answer(1)}
    texts = [
        json.dumps(record),
        json.dumps([record, record], indent=1),
        f"{json.dumps(record)}\n\n{json.dumps(record)}\n",
    ]
    for rank, text in enumerate(texts):
        (tmp_path / "file").write_text(text)
        assert len(read_records(str(tmp_path / "file"))) == (1 if rank == 0 else 2)


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"request": {"prompt": "a"}, "response": answer(1)}, "has no seed"),
        ({"request": REQUEST}, '"response", the answer'),
        ({"request": REQUEST, "response": {"object": "message"}}, "response.object is 'message'"),
        ([], "holds no records"),
        (None, "cannot be read"),
    ],
)
def test_what_cannot_be_run_again_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], record: object, said: str
):
    (tmp_path / "file").write_text("{" if record is None else json.dumps(record))
    assert main(["replay", str(tmp_path / "file")]) == 1
    assert said in capsys.readouterr().err


def run_again(file: Path, *records: object, answered: object) -> int:
    file.write_text("\n".join(json.dumps(record) for record in records))
    text = answered if isinstance(answered, str) else json.dumps(answered)
    with answering(text) as url:
        return main(["replay", str(file), "--url", url])


GOOD = {"request": REQUEST, "response": answer(1)}


@pytest.mark.parametrize(
    "answered",
    ["<html>", "", "{}", {**answer(1), "choices": [{"index": 0, "text": "a"}]}, {**answer(1), "usage": None}],
)
def test_an_answer_that_is_none_has_failed_and_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], answered: object
):
    assert run_again(tmp_path / "file", GOOD, GOOD, answered=answered) == 1
    printed = capsys.readouterr().out
    assert printed.count("the server's answer has an unexpected form: ") == 2
    assert "0 of 2 the same" in printed


@pytest.mark.parametrize(
    "record",
    [
        {"request": REQUEST, "response": {**answer(1), "choices": [1]}},
        {"request": REQUEST, "response": {**answer(1), "choices": [{}]}},
        {"request": REQUEST, "response": {**answer(1), "choices": [{"index": 0, "message": None}]}},
        {"request": {**REQUEST, "top_p": float("nan")}, "response": answer(1)},
        {"request": {**REQUEST, "prompt": "\ud800"}, "response": answer(1)},
    ],
)
def test_a_record_that_is_none_has_failed_and_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], record: object
):
    assert run_again(tmp_path / "file", record, GOOD, answered=answer(1)) == 1
    printed = capsys.readouterr().out
    assert "record 1: the record has an unexpected form: " in printed
    assert "1 of 2 the same" in printed


def test_a_record_need_not_tell_its_usage(tmp_path: Path):
    record = {**GOOD, "response": {**answer(1), "usage": None}}
    assert run_again(tmp_path / "file", record, answered=answer(1)) == 0


@pytest.mark.parametrize(
    "text", ["[" * 100_000, json.dumps({"request": REQUEST, "response": {"object": []}})], ids=["deep", "object"]
)
def test_records_of_another_form_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str):
    (tmp_path / "file").write_text(text)
    assert main(["replay", str(tmp_path / "file")]) == 1
    assert "error: " in capsys.readouterr().err
