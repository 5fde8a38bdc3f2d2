"""Files of a checkpoint that the frontends read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from protos.errors import ConfigError, RequestError
from router.tokenizer import TokenIdsOnly
from router.tokenizer.tokenizer_files import load_tokenizer_files
from tests.router.conftest import byte_tokenizer_core


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    core = byte_tokenizer_core()
    core.enable_truncation(4)
    core.enable_padding(length=9)
    core.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write_config(folder: Path, **config: object) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def test_a_tokenizer_neither_truncates_nor_pads(folder: Path) -> None:
    tokenizer = load_tokenizer_files(str(folder)).tokenizer
    assert tokenizer.encode("abcdefgh") == [byte + 1 for byte in b"abcdefgh"]
    assert tokenizer.encode("a") == [98]


def test_special_tokens_may_be_written_out(folder: Path) -> None:
    template = "{{ bos_token }}{{ eos_token }} {{ pad_token is defined }}"
    bos_token = {"content": "<s>", "special": True}
    write_config(folder, bos_token=bos_token, eos_token="</s>", pad_token=None, chat_template=template)
    assert load_tokenizer_files(str(folder)).chat_template.render([]) == "<s></s> False"


@pytest.mark.parametrize(
    "template",
    ["{{ bos_token }}x", [{"name": "rag", "template": "r"}, {"name": "default", "template": "{{ bos_token }}x"}]],
)
def test_the_template_comes_from_the_config(folder: Path, template: object) -> None:
    write_config(folder, bos_token="<s>", chat_template=template)
    assert load_tokenizer_files(str(folder)).chat_template.render([]) == "<s>x"


def test_the_template_s_own_file_comes_first(folder: Path) -> None:
    write_config(folder, chat_template="old")
    (folder / "chat_template.jinja").write_text("new", encoding="utf-8")
    assert load_tokenizer_files(str(folder)).chat_template.render([]) == "new"


def test_a_model_without_a_template_has_none(folder: Path) -> None:
    assert load_tokenizer_files(str(folder)).chat_template is None


def test_a_model_without_a_tokenizer_takes_token_ids(tmp_path: Path) -> None:
    tokenizer = load_tokenizer_files(str(tmp_path)).tokenizer
    assert isinstance(tokenizer, TokenIdsOnly)
    assert tokenizer.decode([1, 2]) == ""
    with pytest.raises(RequestError, match="token ids"):
        tokenizer.encode("a")


def test_an_unconverted_tokenizer_is_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(ConfigError, match="save_pretrained"):
        load_tokenizer_files(str(tmp_path))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_broken_file_is_named(folder: Path, name: str) -> None:
    (folder / name).write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match=name):
        load_tokenizer_files(str(folder))


def test_of_several_templates_those_with_two_texts_count(folder: Path) -> None:
    entries = [{"name": "x"}, "x", {"name": "default", "template": 5}, {"name": "rag", "template": "r"}]
    write_config(folder, chat_template=entries)
    assert load_tokenizer_files(str(folder)).chat_template.render([]) == "r"


@pytest.mark.parametrize(
    "entries",
    [[{"name": "x"}], ["x"], [5], [{"template": "x"}], [{"name": ["a"], "template": "x"}]],
)
@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.json"])
def test_templates_without_such_an_entry_are_refused(folder: Path, name: str, entries: object) -> None:
    (folder / name).write_text(json.dumps({"chat_template": entries}), encoding="utf-8")
    with pytest.raises(ConfigError, match="none of its entries has the texts 'name' and 'template'; mend it"):
        load_tokenizer_files(str(folder))


READ = ["tokenizer_config.json", "special_tokens_map.json", "chat_template.json", "chat_template.jinja"]


@pytest.mark.parametrize("name", READ)
def test_a_file_that_cannot_be_read_is_refused(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / name).write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=f"{name}' cannot be read: .*make it readable UTF-8"):
        load_tokenizer_files(str(folder))
    (folder / name).write_text("{}", encoding="utf-8")
    monkeypatch.setattr(Path, "read_text", deny)  # permissions do not hold for root
    with pytest.raises(ConfigError, match=f"{name}' cannot be read: .*Permission denied"):
        load_tokenizer_files(str(folder))


def deny(file: Path, **options: object) -> str:
    raise PermissionError(13, "Permission denied", str(file))


@pytest.mark.parametrize("name", ["tokenizer.json", *READ])
@pytest.mark.parametrize("kind", ["folder", "loop", "broken link"])
def test_what_is_no_file_does_not_pass_for_none(folder: Path, name: str, kind: str) -> None:
    (folder / name).unlink(missing_ok=True)
    if kind == "folder":
        (folder / name).mkdir()
    else:
        (folder / name).symlink_to(name if kind == "loop" else "nowhere")
    with pytest.raises(ConfigError, match=f"{name}' is no file.*fetch it again, or remove it"):
        load_tokenizer_files(str(folder))


@pytest.mark.parametrize("text", ["[" * 100_000, "[1]"])
@pytest.mark.parametrize("name", READ[:3])
def test_json_that_is_no_mapping_is_refused(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=f"{name}' .*; mend it, or fetch it again"):
        load_tokenizer_files(str(folder))


def test_a_path_that_is_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="not-a-folder"):
        load_tokenizer_files("not-a-folder/at-all")
