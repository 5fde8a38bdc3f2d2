"""`outrider serve --no-ray`: the same answers at both frontends, from one process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest

from cluster.cli.__main__ import main
from cluster.cli.deployment import deployment_of
from cluster.deploy_file import checked_deployment
from cluster.local.local_service import check_one_process
from cluster.local.serve_environment import free_ports
from protos import outrider_pb2, outrider_pb2_grpc
from protos.errors import ConfigError
from tests.serve.tiny_models import write_pair

pytestmark = pytest.mark.timeout(400)
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[range]:
    folder = tmp_path_factory.mktemp("tiny")
    write_pair(folder)
    ports = free_ports(2)
    options = ["--draft", str(folder / "draft"), "--model-id", "tiny", "--set", "cache.num_blocks=64"]
    options += ["--set", "cache.memory_gib=null", "--port", str(ports[0]), "--grpc-port", str(ports[1])]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-m", "cluster.cli", "serve", str(folder / "target"), "--no-ray", *options], env=environment
    )
    try:
        wait_healthy(process, ports[0])
        yield ports
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()


def wait_healthy(process: subprocess.Popen[bytes], port: int) -> None:
    end_s = time.monotonic() + 300  # it competes with all other tests for cores
    while time.monotonic() < end_s:
        assert process.poll() is None, "the server has ended"
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.1)
    pytest.fail("not healthy in time")


def complete(port: int, **fields: object) -> httpx.Response:
    body = {"model": "tiny", "prompt": [3, 4, 5], "max_tokens": 12, "seed": 7, "temperature": 1.0, "ignore_eos": True}
    body |= fields
    return httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60)


def test_an_audit_finds_nothing(ports: range, capsys: pytest.CaptureFixture[str]):
    """Texts and logprobs of repeated requests; all checks take minutes, and a toy server is audited by each."""
    assert main(["audit", f"http://127.0.0.1:{ports[0]}", "--only", "second-ask"]) == 0
    assert "1 holds, 0 found" in capsys.readouterr().out


def test_both_frontends_give_the_same_tokens_with_and_without_drafts(ports: range):
    drafted = complete(ports[0], return_token_ids=True).json()
    plain = complete(ports[0], return_token_ids=True, speculation={"enabled": False}).json()
    assert drafted["usage"]["completion_tokens"] == 12
    assert drafted["choices"][0]["token_ids"] == plain["choices"][0]["token_ids"]
    request = outrider_pb2.GenerateRequest(
        model="tiny", prompt_token_ids=[3, 4, 5], max_tokens=12, seed=7, temperature=1.0, ignore_eos=True
    )
    with grpc.insecure_channel(f"127.0.0.1:{ports[1]}") as channel:
        chunks = list(outrider_pb2_grpc.GenerationStub(channel).GenerateStream(request, timeout=60))
    assert [token for chunk in chunks for token in chunk.token_ids] == drafted["choices"][0]["token_ids"]


def test_requests_keep_their_id_the_host_must_be_ours_and_the_pair_is_measured(ports: range):
    answer = httpx.get(f"http://127.0.0.1:{ports[0]}/health", headers={"X-Request-Id": "mine"})
    assert answer.headers["x-request-id"] == "mine"
    assert httpx.get(f"http://127.0.0.1:{ports[0]}/health", headers={"Host": "foreign.example"}).status_code == 421
    complete(ports[0])
    metrics = httpx.get(f"http://127.0.0.1:{ports[0]}/metrics").text
    assert "outrider_spec_decode_num_drafts" in metrics
    assert "outrider_time_to_first_token_seconds" in metrics


@pytest.mark.parametrize("way", [["--concurrency", "2"], ["--rate", "50"]])
def test_bench_measures_a_server_under_either_load(ports: range, way: list[str], capsys: pytest.CaptureFixture[str]):
    url = f"http://127.0.0.1:{ports[0]}"
    assert main(["bench", "--url", url, "-n", "4", "--max-tokens", "5", "--prompt-words", "3", *way]) == 0
    rows = {
        row.split("│")[1].strip(): row.split("│")[2].strip()
        for row in capsys.readouterr().out.splitlines()
        if "│" in row
    }
    assert rows["failed"] == "0"
    assert float(rows["first token (ms)"]) > 0


def test_a_server_without_the_model_is_refused_by_name(ports: range, capsys: pytest.CaptureFixture[str]):
    assert main(["chat", "--url", f"http://127.0.0.1:{ports[0]}/v1", "--model", "big"]) == 1
    assert "has no model 'big'; it has tiny" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("pair.num_replicas=2", "pair asks for 2 replicas"),
        ("prefill.num_replicas=1", "prefill asks for 1 replicas"),
        ("speculation.mode=async", "speculation.mode is 'async'"),
        ("draft.gpu=own", "draft.gpu is 'own'"),
        ("target.tensor_parallel_size=2", "tensor_parallel_size is 2"),
    ],
)
def test_more_than_one_process_is_refused(setting: str, message: str):
    deployment = deployment_of("demo", settings=(setting,))
    with pytest.raises(ConfigError, match=message):
        check_one_process(checked_deployment(deployment, "demo").config)


def test_a_stored_answer_is_proved_again_and_a_forged_one_is_not(
    ports: range, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    request = {"prompt": [3, 4, 5], "max_tokens": 8, "seed": 7, "temperature": 1.0, "ignore_eos": True}
    response = complete(ports[0], **request, return_token_ids=True).json()
    assert response["choices"][0]["prompt_token_ids"] == [3, 4, 5]
    file, url = tmp_path / "stored.json", ["--url", f"http://127.0.0.1:{ports[0]}/v1"]
    file.write_text(json.dumps({"request": request, "response": response}))
    assert main(["replay", str(file), *url]) == 0
    assert "the same tokens, 8 tokens" in capsys.readouterr().out
    response["choices"][0]["token_ids"][3] += 1
    file.write_text(json.dumps({"request": request, "response": response}))
    assert main(["replay", str(file), *url]) == 1
    said = capsys.readouterr().out
    assert "choice 0 differs from 3 on" in said
    assert "no digest has changed" in said
