from pathlib import Path
from typing import ClassVar

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import protos.token_bytes
from cluster.checkpoints import check_models
from cluster.config import parse_config
from engine.model.checkpoint.end_tokens import find_end_tokens, ids_without_token
from protos.token_bytes import shared_tokenizer
from router.tokenizer.tokenizer_files import load_tokenizer_files

TARGET = Path("models/demo/target").resolve()


class Counting:
    """Counts the files that are read as tokenizers."""

    files: ClassVar[list[str]] = []

    @classmethod
    def from_file(cls, file: str) -> Tokenizer:
        cls.files.append(file)
        return Tokenizer.from_file(file)


def test_the_parts_of_a_process_read_a_tokenizer_once(monkeypatch):
    protos.token_bytes.forget_tokenizer()
    monkeypatch.setattr(protos.token_bytes, "TokenizerCore", Counting)
    check_models(parse_config({"model_id": "m", "target": {"path": str(TARGET)}, "draft": {"kind": "none"}}))
    ids_without_token(TARGET, 4096, find_end_tokens(TARGET)[0])
    assert load_tokenizer_files(str(TARGET)).tokenizer.encode("def")
    assert Counting.files == [str(TARGET / "tokenizer.json")]


def test_a_tokenizer_whose_file_has_changed_is_read_again(tmp_path):
    file = tmp_path / "tokenizer.json"
    Tokenizer(WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>")).save(str(file))
    assert shared_tokenizer(file).get_vocab_size() == 2
    Tokenizer(WordLevel({"a": 0, "b": 1, "<unk>": 2}, unk_token="<unk>")).save(str(file))
    assert shared_tokenizer(file).get_vocab_size() == 3
