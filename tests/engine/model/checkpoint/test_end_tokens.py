"""End tokens come from every file of a checkpoint and from its chat template."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel

from engine.batch.span import Span
from engine.config import CacheConfig, ModelConfig
from engine.model.checkpoint import end_tokens
from engine.model.checkpoint.end_tokens import find_end_tokens
from engine.model.runner.model_runner import ModelRunner
from protos.errors import ConfigError
from tests.engine.fixtures.families import SERVED, VOCAB_SIZE, write_family

TEMPLATES = Path("tests/router/generation/templates")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|end|>", "<|user|>", "<|assistant|>", "<end_of_turn>", "</s>")


def write(folder: Path, **files: object) -> Path:
    """Write files of these stems; `chat_template` is a text, and others are JSON."""
    for stem, content in files.items():
        is_text = stem == "chat_template"
        name = "chat_template.jinja" if is_text else f"{stem}.json"
        (folder / name).write_text(str(content) if is_text else json.dumps(content))
    return folder


def write_tokenizer(folder: Path, marks: tuple[str, ...] = MARKS, *, special: bool = True) -> dict[str, int]:
    """Write a tokenizer of two words and `marks`, whose ids come from 2 on."""
    core = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    core.add_tokens([AddedToken(mark, special=special) for mark in marks])
    core.save(str(folder / "tokenizer.json"))
    return {mark: 2 + index for index, mark in enumerate(marks)}


def write_model(folder: Path) -> None:
    """Write a model whose config.json names no end token."""
    config = SERVED["llama"]()
    config.eos_token_id = None
    write_family(folder, config)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, ()),
        ({"generation_config": {"temperature": 0.6}, "config": {"eos_token_id": 5}}, (5,)),
        ({"generation_config": {"eos_token_id": None}, "config": {"eos_token_id": [5, 6]}}, (5, 6)),
        ({"generation_config": {"eos_token_id": [7, 5]}, "config": {"eos_token_id": 5}}, (7, 5)),
        ({"generation_config": {"eos_token_id": 7}, "config": {"eos_token_id": 5, "pad_token_id": 5}}, (7, 5)),
        ({"config": {"text_config": {"eos_token_id": 6}}}, (6,)),
        ({"config": {"eos_token_id": 5, "text_config": {"eos_token_id": [6, 5]}}}, (5, 6)),
        ({"generation_config": {"eos_token_id": -1}, "config": {"eos_token_id": []}}, ()),
    ],
)
def test_they_are_of_both_configurations(files: dict[str, object], expected: tuple[int, ...], tmp_path: Path) -> None:
    assert find_end_tokens(write(tmp_path, **files))[0] == expected


@pytest.mark.parametrize("eos", ["</s>", {"content": "</s>", "special": True}])
@pytest.mark.parametrize("file", ["tokenizer_config", "special_tokens_map"])
def test_the_tokenizers_is_one_of_them(file: str, eos: object, tmp_path: Path) -> None:
    ids = write_tokenizer(tmp_path)
    write(tmp_path, config={"eos_token_id": 1}, **{file: {"eos_token": eos}})
    assert find_end_tokens(tmp_path)[0] == (1, ids["</s>"])


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize(
    ("template", "mark"),
    [
        (CHATML, "<|im_end|>"),
        ("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}<|endoftext|>", "<|end|>"),
        ("{% for m in messages %}{{ m.content }}<end_of_turn></s>\n{% endfor %}", "</s>"),
        ("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}", None),  # the next turn begins
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", None),
        ("{{ raise_exception('no') }}", None),
        ("{{ messages[0].content }}", None),
        ("{% for %}", None),
    ],
)
def test_the_templates_end_of_a_turn_is_one_of_them(
    template: str, mark: str | None, special: bool, tmp_path: Path
) -> None:
    ids = write_tokenizer(tmp_path, special=special)
    write(tmp_path, generation_config={"eos_token_id": 1}, chat_template=template)
    assert find_end_tokens(tmp_path)[0] == (1, *([ids[mark]] if mark else []))


@pytest.mark.parametrize(
    ("name", "mark"),
    [
        ("qwen3", "<|im_end|>"),
        ("llama3.1", "<|eot_id|>"),
        ("seed_oss", "<seed:eos>"),
        ("hunyuan", None),
        ("gpt_oss", None),  # <|end|> ends a thought too, and <|return|> is in its configuration
        ("glm_4.6", None),
    ],
)
def test_of_published_templates(name: str, mark: str | None, tmp_path: Path) -> None:
    source = (TEMPLATES / f"{name}.jinja").read_text()
    marks = ("<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<seed:eos>")
    ids = write_tokenizer(tmp_path, (*marks, "<|end|>", "<|return|>", "<|start|>", "<|user|>", "<|assistant|>"))
    tokens = {"bos_token": "<|im_start|>", "eos_token": "<seed:eos>"} if name == "seed_oss" else {"bos_token": "b"}
    write(tmp_path, chat_template=source, tokenizer_config=tokens)
    assert find_end_tokens(tmp_path)[0] == ((ids[mark],) if mark else ())


def test_a_template_in_place_of_the_models_own_has_its_end_of_a_turn(tmp_path: Path) -> None:
    write_model(tmp_path)
    ids = write_tokenizer(tmp_path)
    write(tmp_path, generation_config={"eos_token_id": 1}, chat_template=CHATML)
    other = CHATML.replace("<|im_end|>", "<|end|>")
    model = ModelConfig(str(tmp_path), dtype="float32", chat_template=other)
    assert ModelRunner(model, CacheConfig(num_blocks=4)).eos_token_ids == (1, ids["<|end|>"])


@pytest.mark.parametrize("content", ["{", "[]", "", '{"eos_token_id": 5'])
def test_a_generation_config_that_cannot_be_read_is_refused(content: str, tmp_path: Path) -> None:
    """Transformers ignores it, and so its end tokens would be lost."""
    write(tmp_path, config={"eos_token_id": 1})
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"generation_config\.json' holds no mapping in JSON"):
        find_end_tokens(tmp_path)


def test_an_empty_generation_config_is_read(tmp_path: Path) -> None:
    write(tmp_path, config={"eos_token_id": 1})
    (tmp_path / "generation_config.json").write_text("{ }\n")
    assert find_end_tokens(tmp_path)[0] == (1,)


def test_an_end_that_the_tokenizer_lacks_is_not_masked(tmp_path: Path) -> None:
    """Some checkpoints name it in their configuration alone. Masked, it would never end a text."""
    write_model(tmp_path)
    write_tokenizer(tmp_path)
    write(tmp_path, generation_config={"eos_token_id": 90})
    runner = ModelRunner(ModelConfig(str(tmp_path), dtype="float32"), CacheConfig(num_blocks=4))
    logits = runner.forward([Span([2, 3, 4], 0, [0], 1)])[0]
    assert runner.eos_token_ids == (90,)
    assert logits.isfinite().nonzero().flatten().tolist() == [*range(2 + len(MARKS)), 90]


def test_a_template_without_an_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(end_tokens, "_RENDER_LIMIT_S", 0.2)
    write_tokenizer(tmp_path)
    loops = "{% for a in range(300) %}" * 3 + "{% endfor %}" * 3
    write(tmp_path, chat_template=loops)
    with pytest.raises(ConfigError, match=r"chat template ran for 0\.2 s on two messages"):
        find_end_tokens(tmp_path)


@pytest.mark.parametrize("value", ["</s>", [1, "2"], True, 1.5, {}])
def test_what_is_no_id_is_refused_by_its_file(value: object, tmp_path: Path) -> None:
    write(tmp_path, config={"eos_token_id": value})
    with pytest.raises(ConfigError, match=r"config\.json has eos_token_id .*; it must be a token id or a list"):
        find_end_tokens(tmp_path)


def test_ids_that_the_model_has_not_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, config={"eos_token_id": [5, 96, 6]})
    assert find_end_tokens(tmp_path, vocab_size=96) == ((5, 6), (96,))


@pytest.mark.parametrize(
    ("stated", "tokens", "said"),
    [
        ({"temperature": 0.6}, (5,), "end tokens are [5]"),
        ({"eos_token_id": [7, 1000]}, (7, 5), "end tokens [1000] are left out: the model has 96 tokens"),
    ],
)
def test_a_runner_has_them_and_says_so(
    stated: dict[str, object], tokens: tuple[int, ...], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = SERVED["llama"]()
    config.eos_token_id = 5
    write_family(tmp_path, config)
    write(tmp_path, generation_config=stated)
    with caplog.at_level(logging.INFO):
        runner = ModelRunner(ModelConfig(str(tmp_path), dtype="float32"), CacheConfig(num_blocks=4))
    assert runner.vocab_size == VOCAB_SIZE
    assert runner.eos_token_ids == tokens
    assert said in caplog.text


def test_none_at_all_is_said_at_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = SERVED["llama"]()
    config.eos_token_id = None
    write_family(tmp_path, config)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    runner = ModelRunner(ModelConfig(str(tmp_path), dtype="float32"), CacheConfig(num_blocks=4))
    assert runner.eos_token_ids == ()
    assert "names no end token" in caplog.text
