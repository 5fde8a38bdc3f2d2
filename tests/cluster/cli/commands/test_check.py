"""`outrider check` of the bundled pair, with settings and files of an operator's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import LlamaConfig, PreTrainedConfig

from cluster.cli.__main__ import main
from cluster.cli.deployment import deployment_of, to_yaml
from engine.model import paged_model
from tests.engine.fixtures.byte_tokenizer import write_tokenizer
from tests.engine.fixtures.families import PLAIN, REFUSED, write_family
from tests.engine.fixtures.hybrids import HYBRIDS


def check(folder: Path, **settings: object) -> int:
    """Check the bundled pair with settings named section__key."""
    written = tuple(f"{name.replace('__', '.')}={json.dumps(value)}" for name, value in settings.items())
    file = folder / "deploy.yaml"
    file.write_text(to_yaml(deployment_of("demo", settings=written)))
    return main(["check", str(file)])


@pytest.mark.parametrize("is_file", [True, False])
def test_a_chat_template_is_a_file_or_a_text(tmp_path: Path, capsys: pytest.CaptureFixture[str], is_file: bool):
    template = "{% for message in messages %}{{ message.content }}{% endfor %}" + " " * 5000
    (tmp_path / "mine.jinja").write_text(template)
    assert check(tmp_path, ingress__chat_template=str(tmp_path / "mine.jinja") if is_file else template) == 0
    assert "is valid: model 'outrider-demo'" in " ".join(capsys.readouterr().out.split())


def test_chats_that_the_template_refuses_are_named_with_what_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    template = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}{{ m.content }}"
    assert check(tmp_path, ingress__chat_template=template + "{% endfor %}") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "note: the chat template: system messages are not taken: their text goes before the first user's" in said
    assert "written as text, in Hermes's form" in said


def test_a_chat_template_that_is_no_text_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "mine.jinja").write_bytes(b"\xff\xfe")
    assert check(tmp_path, ingress__chat_template=str(tmp_path / "mine.jinja")) == 1
    assert "mine.jinja' cannot be read: 'utf-8' codec" in " ".join(capsys.readouterr().err.split())


BUNDLED = Path(__file__).parents[4] / "deploy.yaml"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("model_id: outrider-demo", "model_id: 2024-13-45", "is not YAML: it has no value: month must be in 1..12"),
        ("model_id: outrider-demo", "model_id: !!int abc", "is not YAML: it has no value: invalid literal"),
        ("model_id: outrider-demo", f"model_id: {'[' * 3000}", "is not YAML: it is nested too deeply"),
        ("port: 8000", "port: 70000", "http_options.port is 70000; it must be 1 to 65535"),
        ("port: 9000", "port: 8000", "http_options.port and grpc_options.port are both 8000"),
        ("Generation", "Generatoin", "there is no such function"),
        ("model_id: outrider-demo", f"model_id: {[0] * 9999}", "and it is [0, 0, 0"),
    ],
)
def test_a_file_that_cannot_work_is_refused_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, said: str
):
    file = tmp_path / "deploy.yaml"
    text = BUNDLED.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    assert main(["check", str(file)]) == 1
    error = " ".join(capsys.readouterr().err.split())
    assert said in error
    assert len(error) < 2000


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"cache__memory_gib": 1e300}, "less than or equal to 1048576"),
        ({"pair__num_replicas": 10**400}, "less than or equal to 10000"),
        ({"ingress__open_admin": False, "ingress__api_keys_file": "~nobody-here/keys"}, "there is no such file"),
        ({"ingress__open_admin": False, "ingress__api_keys_file": "/dev/zero"}, "there is no such file"),
        ({"ingress__receipt_key_file": "/dev/null"}, "openssl genpkey"),
        ({"ingress__tls_certificate_file": "~nobody-here/pem"}, "is no file"),
        ({"tune__log": "~nobody-here/log"}, "a user that this machine does not know"),
        ({"tune__log": "a" * 300}, "cannot be used"),
    ],
    ids=str,
)
def test_a_setting_that_cannot_work_is_refused_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: dict[str, object], said: str
):
    assert check(tmp_path, **settings) == 1
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("path", ["models/demo/draft", "models/demo/target"])
def test_a_mistyped_path_is_refused_though_it_has_the_form_of_a_hub_id(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, path: str
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    file = tmp_path / "deploy.yaml"
    file.write_text(BUNDLED.read_text().replace(path, "modls/demo"))
    assert main(["check", str(file)]) == 1
    assert "'modls/demo' is not a local folder, and the Hub" in " ".join(capsys.readouterr().err.split())


def test_what_a_start_would_refuse_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert check(tmp_path, cache__dtype="fp8") == 1
    assert "cache.dtype is 'fp8', which the Triton kernel on GPUs reads" in " ".join(capsys.readouterr().err.split())
    assert check(tmp_path, scheduler__max_model_len=1 << 20) == 1
    assert "max_model_len is 1048576, but the model has" in " ".join(capsys.readouterr().err.split())
    assert check(tmp_path, cache__memory_gib=None, cache__num_blocks=1 << 40) == 1
    assert "GiB of memory are needed" in " ".join(capsys.readouterr().err.split())


DRAFTERS = """
class Silent:
    def open(self, sequence): ...
    def commit(self, sequences): ...
    def close(self, request_id): ...
    def propose(self, queries): ...

class NoStart(Silent):
    def __init__(self):
        raise ValueError("no table")

class NoProposer: ...
"""


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("my_drafters:Silent", ""),
        ("my_drafter:Silent", "No module named 'my_drafter'; install it, or name its folder in PYTHONPATH where"),
        ("my_drafters:Silence", "AttributeError: module 'my_drafters' has no attribute 'Silence'"),
        ("my_drafters:NoStart", "'my_drafters:NoStart' cannot be loaded: ValueError: no table"),
        ("my_drafters:NoProposer", "has no open, propose, commit, close; a proposer has open, propose, commit, close"),
    ],
)
def test_a_class_that_drafts_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, code: str, said: str
):
    (tmp_path / "my_drafters.py").write_text(DRAFTERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert check(tmp_path, draft={"kind": "python", "code": code}) == bool(said)
    assert said in " ".join(capsys.readouterr().err.split())


def check_model(folder: Path, config: PreTrainedConfig, **settings: object) -> int:
    """Check a deployment of a tiny model of this configuration, without drafts."""
    write_family(folder / "model", config)
    return check(
        folder,
        target__path=str(folder / "model"),
        draft={"kind": "none"},
        speculation={},
        cache__memory_gib=0.01,
        **settings,
    )


@pytest.mark.parametrize("family", ["falcon", "bloom", "gptj", "mamba", "glm_moe_dsa"])
def test_a_family_that_cannot_be_served_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str):
    assert check_model(tmp_path, REFUSED[family]()) == 1
    assert f"model type '{family}' cannot be served" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"speculation__tree": {"num_nodes": 8}}, "speculation.tree is set, but {} has recurrent layers, whose states"),
        ({"speculation__steps": {}}, "speculation.steps is set, but {} has recurrent layers, which would keep a state"),
        ({"target__tensor_parallel_size": 2}, "tensor_parallel_size is 2, but model type 'lfm2' runs on one device"),
        (
            {"draft__path": "{}", "speculation__tree": {"num_nodes": 8}},
            "speculation.tree is set, but the draft {} has recurrent layers",
        ),
    ],
    ids=["trees", "steps", "ranks", "draft's trees"],
)
def test_recurrent_layers_are_refused_what_they_do_not_support(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: dict[str, Any], said: str
):
    hybrid = tmp_path / "hybrid"
    write_family(hybrid, HYBRIDS["lfm2"]())
    path = "draft__path" if "draft__path" in settings else "target__path"
    assert check(tmp_path, **{"cache__memory_gib": 0.01} | settings | {path: str(hybrid)}) == 1
    assert said.format(repr(str(hybrid))) in " ".join(capsys.readouterr().err.split())


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (lambda: LlamaConfig(**PLAIN), ["the longest text has 128 tokens", "names no end token"]),
        (lambda: LlamaConfig(**PLAIN, eos_token_id=[7, 500]), ["end tokens are [7]", "end tokens [500] are left out"]),
        (lambda: LlamaConfig(**{**PLAIN, "max_position_embeddings": 40}, rope_scaling=YARN), ["text has 128 tokens"]),
        (lambda: LlamaConfig(**PLAIN, rope_scaling={**YARN, "rope_type": "dynamic"}), ["text has 32 tokens"]),
        (lambda: LlamaConfig(**PLAIN, local_attention_length=7), ["config.json has local_attention_length 7, which"]),
    ],
    ids=["plain", "ends", "yarn", "dynamic", "unread"],
)
def test_lengths_and_end_tokens_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: Callable[[], PreTrainedConfig], said: list[str]
):
    made = config()
    if made.eos_token_id == LlamaConfig().eos_token_id:
        made.eos_token_id = None
    assert check_model(tmp_path, made) == 0
    out = " ".join(capsys.readouterr().out.split())
    for each in said:
        assert each in out


def test_a_longer_text_than_the_scaling_gives_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = LlamaConfig(**PLAIN, rope_scaling={**YARN, "rope_type": "dynamic"})
    assert check_model(tmp_path, config, scheduler__max_model_len=33) == 1
    assert "max_model_len is 33, but the model has 32 positions" in " ".join(capsys.readouterr().err.split())


def test_the_end_of_a_turn_is_of_the_template_that_is_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = tmp_path / "model"
    folder.mkdir()
    core = write_tokenizer(folder)
    core.add_tokens([AddedToken("<turn>", special=True)])
    core.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }}<turn>{% endfor %}"
    config = LlamaConfig(**{**PLAIN, "vocab_size": 304}, eos_token_id=7)
    assert check_model(tmp_path, config, ingress__chat_template=template) == 0
    assert f"end tokens are [7, {core.token_to_id('<turn>')}]" in " ".join(capsys.readouterr().out.split())


def test_full_compares_the_models_although_a_start_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("OUTRIDER_CACHE_GIB", "1")
    file = tmp_path / "deploy.yaml"
    file.write_text(to_yaml(deployment_of("demo")))
    compare, compared = paged_model.PagedModel._check_agreement, []
    monkeypatch.setattr(
        paged_model.PagedModel, "_check_agreement", lambda *a, **k: (compared.append(a), compare(*a, **k))
    )
    for count in (1, 2):
        assert main(["check", str(file), "--full"]) == 0
        assert len(compared) == 2 * count  # the target and its draft
    assert "agrees with its stock model, quantization none" in " ".join(capsys.readouterr().out.split())
