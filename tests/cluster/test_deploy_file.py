"""The bundled deploy.yaml is sound, and a broken one is refused before anything starts."""

import re
from pathlib import Path

import pytest
import yaml

import outrider
from cluster.app import build
from cluster.cli.__main__ import main
from cluster.deploy_file import read_deploy_file, with_absolute_paths
from cluster.local.serve_environment import FAST_PATH, warn_of_missing_variables
from protos.errors import ConfigError
from router.ingress import GRPC_SERVICER_FUNCTIONS

BUNDLED = Path(__file__).parents[2] / "deploy.yaml"


def test_the_bundled_file_says_what_the_readme_says():
    file = read_deploy_file(BUNDLED)
    assert (file.http_host, file.http_port, file.grpc_port) == ("127.0.0.1", 8000, 9000)
    assert file.config.draft.kind == "model"


def test_a_byte_order_mark_and_line_ends_of_windows_change_nothing(tmp_path: Path):
    path = tmp_path / "deploy.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + BUNDLED.read_bytes().replace(b"\n", b"\r\n"))
    assert read_deploy_file(path) == read_deploy_file(BUNDLED)


def test_the_bundled_file_lists_every_grpc_service():
    options = yaml.safe_load(BUNDLED.read_text())["grpc_options"]
    assert tuple(options["grpc_servicer_functions"]) == GRPC_SERVICER_FUNCTIONS
    assert options["enable_reflection"] is True


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "is not YAML"),
        ("- 1", "holds no mapping"),
        ("args: {model_id: m}", "no list 'applications'; args belong to one of them"),
        ("applications: 5", "Ray Serve does not accept"),
        ("applications: []", "no application with import_path cluster.app:build"),
        ("applications: []\nproxy_location: Disabled\napplications: []", "'applications' is here twice"),
    ],
)
def test_a_file_that_is_no_deployment_is_refused(tmp_path: Path, text: str, message: str):
    path = tmp_path / "deploy.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_deploy_file(path)


@pytest.mark.parametrize(
    ("key", "typo", "message"),
    [
        ("http_options:", "http_option:", "http_option: unknown key; did you mean 'http_options'"),
        ("  port: 8000", "  prot: 8000", "http_options.prot: unknown key; did you mean 'port'"),
        ("  port: 9000", "  portt: 9000", "grpc_options.portt: unknown key; did you mean 'port'"),
        ("route_prefix:", "route_prefx:", "application 'outrider': route_prefx: unknown key; did you mean 'route_pre"),
        (
            "    args:",
            "    deployments: [{name: Pair, num_replica: 2}]\n    args:",
            "application 'outrider': deployment 'Pair': num_replica: unknown key; did you mean 'num_replicas'",
        ),
    ],
)
def test_a_key_that_serve_would_ignore_is_refused(tmp_path: Path, key: str, typo: str, message: str):
    path = tmp_path / "deploy.yaml"
    path.write_text(BUNDLED.read_text().replace(key, typo))
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_deploy_file(path)


def test_the_application_has_two_names(tmp_path: Path):
    path = tmp_path / "deploy.yaml"
    path.write_text(BUNDLED.read_text().replace("cluster.app:build", "outrider:build"))
    assert read_deploy_file(path).config == read_deploy_file(BUNDLED).config
    assert outrider.build is build


def test_a_file_that_is_no_text_is_refused(tmp_path: Path):
    path = tmp_path / "deploy.yaml"
    path.write_bytes(BUNDLED.read_bytes() + b"# caf\xe9")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_deploy_file(path)


def test_a_missing_file_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_deploy_file(tmp_path / "none.yaml")


def test_the_command_line_reports_a_wrong_key_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "mine.yaml"
    path.write_text(BUNDLED.read_text().replace("num_tokens:", "num_token:"))
    assert main(["serve", str(path)]) == 1
    mistake = "args.speculation.num_token: unknown key; did you mean 'num_tokens'?"
    assert f"error: {path} is wrong:\n  {mistake}" in capsys.readouterr().err


def test_missing_fast_path_variables_are_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    for name in FAST_PATH:
        monkeypatch.delenv(name, raising=False)
    warn_of_missing_variables()
    assert "RAY_SERVE_ENABLE_HA_PROXY=1 RAY_SERVE_THROUGHPUT_OPTIMIZED=1" in caplog.text
    caplog.clear()
    for name, value in FAST_PATH.items():
        monkeypatch.setenv(name, value)
    warn_of_missing_variables()
    assert caplog.text == ""


def test_an_admin_without_a_key_is_for_loopback(tmp_path: Path):
    text = BUNDLED.read_text()
    assert read_deploy_file(BUNDLED).config.ingress.open_admin
    path = tmp_path / "deploy.yaml"
    path.write_text(text.replace("host: 127.0.0.1", "host: 0.0.0.0"))
    with pytest.raises(ConfigError, match=r"open_admin is for loopback, and http_options\.host is '0\.0\.0\.0'"):
        read_deploy_file(path)


def test_files_of_this_folder_are_named_from_the_root_and_hub_ids_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "keys").touch()
    ingress = {"api_keys_file": "keys", "chat_template": "{{ messages }}" + " " * 5000}
    args = {"target": {"path": "mine"}, "draft": {"path": "org/small"}, "ingress": ingress}
    deployment = {"applications": [{"args": args}]}
    changed = with_absolute_paths(deployment)["applications"][0]["args"]
    assert changed["target"]["path"] == str(tmp_path / "mine")
    assert changed["draft"]["path"] == "org/small"
    assert changed["ingress"] == ingress | {"api_keys_file": str(tmp_path / "keys")}
    assert args["target"]["path"] == "mine"
