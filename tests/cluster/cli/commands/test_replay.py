"""Stored requests: some cannot run again, and digests name the changed ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from cluster.cli.__main__ import main
from cluster.cli.commands.replay import changed_choices, changed_digests, read_records
from protos.served_model import FingerprintPart, digest, read_fingerprint, with_tokenizer, write_fingerprint
from router.generation.receipts import Receipt, ReceiptChoice, digest_of_ids, read_private_key, sign
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
    assert line.startswith(f"{part} differ: was {digest(part)}, is {digest('other')}")


def test_a_fingerprint_of_another_server_is_compared_whole():
    assert read_fingerprint("fp_123") is None
    [line] = changed_digests(answer(1, system_fingerprint="fp_123"), answer(1))
    assert line.startswith("system_fingerprint differs: was fp_123")


def test_another_prompt_is_another_request():
    [line] = changed_digests(answer(1), answer(1, prompt=[1, 3]))
    assert line.startswith("request differs")
    old = answer(1)
    del old["choices"][0]["prompt_token_ids"]
    assert not list(changed_digests(old, answer(1, prompt=[1, 3])))


def test_the_first_token_that_differs_is_named():
    assert list(changed_choices(answer(4, 5, 6), answer(4, 5, 6))) == []
    assert list(changed_choices(answer(4, 5, 6), answer(4, 7, 6))) == ["choice 0 differs from 1 on: was 5, is 7"]
    assert list(changed_choices(answer(4, 5), answer(4))) == ["choice 0 differs from 1 on: was 5, is the end"]


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
    ],
)
def test_a_record_that_is_none_has_failed_and_ends_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], record: object
):
    assert run_again(tmp_path / "file", record, GOOD, answered=answer(1)) == 1
    printed = capsys.readouterr().out
    assert "record 1: the record has an unexpected form: " in printed
    assert "1 of 2 the same" in printed


def test_a_request_that_is_no_utf_8_has_failed_and_ends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    record = {"request": {**REQUEST, "prompt": "\ud800"}, "response": answer(1)}
    assert run_again(tmp_path / "file", record, GOOD, answered=answer(1)) == 1
    printed = capsys.readouterr().out
    assert "record 1: the request is not UTF-8 text: " in printed
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


PARTS = ("weights", "draft", "kernels", "settings", "tokenizer", "template", "sampling")


def signed(folder: Path, *token_ids: int, seed: int = 1, **changed: str) -> dict[str, Any]:
    """An answer with a receipt of the operator whose key is the seed, and their public key in a file."""
    key = Ed25519PrivateKey.from_private_bytes(bytes([seed]) * 32)
    private, public = folder / f"{seed}.pem", folder / f"{seed}.pub"
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    tokens = {"tokens": digest_of_ids(token_ids), "num_tokens": len(token_ids)}
    choices = [ReceiptChoice(index=0, sample=0, prompt=digest_of_ids([1, 2]), **tokens)]
    digests = {part: digest(part) for part in PARTS} | changed
    receipt = Receipt(version=1, id="i", created=1, model="m", seed=9, choices=choices, **digests)
    return answer(*token_ids) | {"receipt": sign(receipt, read_private_key(str(private))).model_dump()}


def replayed(folder: Path, stored: dict[str, Any], answered: dict[str, Any], *options: str) -> int:
    (folder / "file").write_text(json.dumps({"request": {"prompt": "a"}, "response": stored}))
    with answering(json.dumps(answered)) as url:
        return main(["replay", str(folder / "file"), "--url", url, *options])


def test_an_answer_with_a_receipt_needs_no_seed_and_replays(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    stored, again = signed(tmp_path, 4, 5), signed(tmp_path, 4, 5, seed=2)
    key = ("--receipt-key", str(tmp_path / "1.pub"))
    assert replayed(tmp_path, stored, again, *key) == 0
    assert "the same tokens" in capsys.readouterr().out
    [record] = read_records(str(tmp_path / "file"))
    assert record.body == {"prompt": "a", "return_token_ids": True, "seed": 9, "receipt": True}
    assert replayed(tmp_path, stored, again) == 0
    assert "--receipt-key FILE checks it" in capsys.readouterr().out


@pytest.mark.parametrize("part", PARTS)
def test_the_digest_of_a_receipt_that_differs_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], part: str):
    assert replayed(tmp_path, signed(tmp_path, 4, 5), signed(tmp_path, 4, 6, **{part: "other"})) == 1
    printed = capsys.readouterr().out
    assert "choice 0 differs from 1 on: was 5, is 6" in printed
    assert f"{part} differ: was {digest(part)}, is other" in printed
    assert sum(f"{each} differ" in printed for each in PARTS) == 1


def test_tokens_that_were_not_stored_are_compared_by_the_receipt(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    stored, again = signed(tmp_path, 4, 5), signed(tmp_path, 4, 6)
    del stored["choices"][0]["token_ids"]
    assert replayed(tmp_path, stored, again) == 1
    assert "the tokens differ from the receipt's" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"receipt": {"seed": 10}}, "not what its key has signed"),
        ({"choices": [{"index": 0, "text": "a", "token_ids": [4, 6]}]}, "other tokens than choice 0"),
        ({"choices": [{"index": 1, "text": "a", "token_ids": [4, 5]}]}, "of other choices"),
    ],
)
def test_a_forged_receipt_fails_even_where_the_tokens_come_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], reason: str
):
    stored = signed(tmp_path, 4, 5)
    forged = stored | change | {"receipt": stored["receipt"] | change.get("receipt", {})}
    assert replayed(tmp_path, forged, stored | {"choices": forged["choices"]}) == 1
    assert reason in capsys.readouterr().out


@pytest.mark.parametrize("token_ids", [[-1], [1 << 32], ["a"], 5, [None]], ids=str)
def test_tokens_that_are_none_fail_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str], token_ids: object):
    stored = signed(tmp_path, 4, 5)
    stored["choices"][0]["token_ids"] = token_ids
    assert replayed(tmp_path, stored, stored) == 1
    assert "the record has an unexpected form: " in capsys.readouterr().out


def test_a_receipt_of_another_operator_and_an_answer_without_one_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    stored = signed(tmp_path, 4, 5)
    signed(tmp_path, 4, 5, seed=2)
    assert replayed(tmp_path, stored, stored, "--receipt-key", str(tmp_path / "2.pub")) == 1
    assert "signed by another key" in capsys.readouterr().out
    bare = {"request": REQUEST, "response": answer(1)}
    (tmp_path / "file").write_text(json.dumps(bare))
    with answering(json.dumps(answer(1))) as url:
        assert main(["replay", str(tmp_path / "file"), "--url", url, "--receipt-key", str(tmp_path / "2.pub")]) == 1
    assert "the answer has no receipt" in capsys.readouterr().out


def test_a_receipt_of_another_form_is_refused_and_a_server_without_one_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    stored = signed(tmp_path, 4, 5)
    assert replayed(tmp_path, stored | {"receipt": stored["receipt"] | {"version": 2}}, stored) == 1
    assert "receipt.version is not as in version 1" in capsys.readouterr().err
    assert replayed(tmp_path, stored, answer(4, 5)) == 1
    assert "0 of 1 the same" in capsys.readouterr().out
