"""A tokenizer whose ids differ from the rows of its model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken, Tokenizer

from cluster.checkpoints import check_models
from cluster.config import parse_config
from engine.batch.span import Span
from engine.config import CacheConfig, ModelConfig
from engine.model.runner.model_runner import ModelRunner
from protos.errors import ConfigError
from tests.engine.fixtures.byte_tokenizer import BYTE_VOCAB_SIZE, write_tokenizer
from tests.engine.fixtures.checkpoints import write_checkpoint

TEMPLATE = "{% for m in messages %}<|mark|>{{ m.content }}{% endfor %}"


def write(folder: Path, num_rows: int, *, template: str = "") -> Path:
    """Write a model with `num_rows` rows, and a tokenizer of 300 tokens and three more."""
    write_checkpoint(folder, seed=0, vocab_size=num_rows)
    core: Tokenizer = write_tokenizer(folder)
    core.add_tokens([AddedToken(name, special=True) for name in ("<|mark|>", "<pad>", "<other>")])
    core.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template} if template else {}))
    return folder


def load(folder: Path) -> ModelRunner:
    return ModelRunner(ModelConfig(str(folder), dtype="float32", device="cpu"), CacheConfig(num_blocks=4))


def check(folder: Path) -> list[str]:
    draft = {"kind": "none"}
    return check_models(parse_config({"model_id": "m", "target": {"path": str(folder)}, "draft": draft}))


@pytest.mark.parametrize("look", [load, check])
def test_a_template_that_writes_a_token_without_a_row_is_refused(
    look: Callable[[Path], object], tmp_path: Path
) -> None:
    write(tmp_path, BYTE_VOCAB_SIZE, template=TEMPLATE)
    with pytest.raises(ConfigError, match=r"writes '<\|mark\|>' \(id 300\), but the model has 300 rows: every chat"):
        look(tmp_path)


def test_other_tokens_without_a_row_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, BYTE_VOCAB_SIZE + 1, template=TEMPLATE)
    said = "the tokenizer has '<pad>' (id 301), '<other>' (id 302), but the model has 301 rows: texts with them are"
    assert any(said in note for note in check(tmp_path))
    load(tmp_path)
    assert said in caplog.text


@pytest.mark.parametrize("look", [load, check])
def test_a_token_that_the_template_writes_for_images_alone_is_no_reason(
    look: Callable[[Path], object], tmp_path: Path
) -> None:
    template = "{% for m in messages %}{% if m.image %}<|mark|>{% endif %}{{ m.content }}{% endfor %}"
    look(write(tmp_path, BYTE_VOCAB_SIZE, template=template))


def test_a_token_that_begins_the_answer_is_one_that_the_template_writes(tmp_path: Path) -> None:
    template = "{{ messages[0].content }}{% if add_generation_prompt %}{{ '<|ma' + 'rk|>' }}{% endif %}"
    with pytest.raises(ConfigError, match=r"writes '<\|mark\|>' \(id 300\)"):
        check(write(tmp_path, BYTE_VOCAB_SIZE, template=template))


def test_padded_rows_have_no_chance(tmp_path: Path) -> None:
    num_tokens, num_rows = BYTE_VOCAB_SIZE + 3, 384
    runner = load(write(tmp_path, num_rows))
    span = Span([5, 6, 7], 0, [0], 3)
    masked = runner.forward([span]).clone()
    assert masked.shape == (3, num_rows)
    assert torch.isneginf(masked[:, num_tokens:]).all()
    assert masked[:, :num_tokens].isfinite().all()
    (tmp_path / "tokenizer.json").unlink()
    plain = load(tmp_path).forward([span])
    assert torch.equal(plain[:, :num_tokens], masked[:, :num_tokens])
    assert plain.isfinite().all()
