"""The application on Ray, over HTTP and gRPC: the same tokens after any actor's death, and no leaked blocks.

The tests run in order: a redeploy lets the pair finish its streams, and the last one takes the application down.
"""

import copy
import json
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import httpx
import psutil
import pytest
import ray
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from ray import serve
from safetensors.torch import load_file, save_file

from cluster.deploy_file import DeployFile
from engine.config import CacheConfig, EngineConfig, ModelConfig
from engine.engine_core.loading import load_engine
from protos import outrider_pb2 as pb2
from protos import outrider_pb2_grpc
from protos.errors import ConfigError
from protos.messages import GenerateRequest, SamplingParams
from router.tokenizer.tokenizer_files import load_tokenizer_files
from tests.engine.fixtures.checkpoints import write_checkpoint
from tests.serve.attacks import ATTACKS, Face
from tests.serve.attacks.__main__ import attack
from tests.serve.attacks.other_network import listening_ports, other_network, probe_from_there
from tests.serve.bystanders import Bystanders
from tests.serve.served_pair import MODEL, ServedPair, eventually, once, processes, title

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

LONG = 3000  # tokens of a stream that outlasts a redeploy, or the restart of a killed draft
START = 200  # tokens before a disturbance begins
REST = 1000  # tokens that a stream must still deliver after it


def target_path(served: ServedPair) -> Path:
    return Path(served.file.deployment["applications"][0]["args"]["target"]["path"])


def plain_tokens(path: Path, temperature: float, num_tokens: int, prompt: list[int] | None = None) -> list[int]:
    """Continue a prompt, "hello world" if None, in this process with the target alone: no Ray, no draft."""
    config = EngineConfig(
        ModelConfig(str(path), "float32", num_threads=1), CacheConfig(num_blocks=512, memory_bytes=None)
    )
    core = load_engine(config)
    prompt = prompt or load_tokenizer_files(str(path)).tokenizer.encode("hello world")
    core.add(GenerateRequest("a", tuple(prompt), SamplingParams(4, temperature, max_tokens=num_tokens)))
    token_ids: list[int] = []
    while core.has_work:
        for chunk in core.step():
            token_ids += chunk.token_ids
    return token_ids


@pytest.fixture(scope="module")
def long_text(served: ServedPair) -> list[int]:
    """The target's own tokens: every long stream has them despite disturbances."""
    return plain_tokens(target_path(served), 1.0, LONG)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_served_tokens_are_those_of_the_target_alone(served: ServedPair, temperature: float):
    answer = served.stream(temperature=temperature, max_tokens=200)
    assert answer.token_ids == plain_tokens(target_path(served), temperature, 200)
    assert answer.finish_reason == "length"
    assert answer.speculation["num_accepted_draft_tokens"] > 0


def test_speculation_changes_no_token(served: ServedPair):
    plain = served.stream(temperature=1.0, extra_body={"speculation": {"enabled": False}})
    assert plain.speculation["num_draft_tokens"] == 0
    for number in (1, 2, 4):
        drafted = served.stream(temperature=1.0, extra_body={"speculation": {"num_tokens": number}})
        assert drafted.token_ids == plain.token_ids


def test_many_streams_at_once_do_not_disturb_each_other(served: ServedPair):
    alone = [served.stream(temperature=1.0, seed=seed).token_ids for seed in range(8)]
    together: dict[int, list[int]] = {}

    def run(seed: int) -> None:
        together[seed] = served.stream(temperature=1.0, seed=seed).token_ids

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[seed] for seed in range(8)] == alone


def test_grpc_streams_the_same_tokens_as_http(served: ServedPair):
    expected = served.stream(temperature=1.0).token_ids
    request = pb2.GenerateRequest(
        model=MODEL, prompt="hello world", max_tokens=64, seed=4, temperature=1.0, ignore_eos=True
    )
    with grpc.insecure_channel(f"127.0.0.1:{served.file.grpc_port}") as channel:
        chunks = list(outrider_pb2_grpc.GenerationStub(channel).GenerateStream(request, timeout=60.0))
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60.0)
    assert [token_id for chunk in chunks for token_id in chunk.token_ids] == expected
    assert health.status == health_pb2.HealthCheckResponse.SERVING


def test_the_messages_of_vllms_engine_bring_the_same_tokens(served: ServedPair):
    """Two services have a call Generate: one with a single answer, one with a stream."""
    vllm = pytest.importorskip("smg_grpc_proto.generated.vllm_engine_pb2", reason="pip install 'outrider[smg]'")
    stubs = pytest.importorskip("smg_grpc_proto.generated.vllm_engine_pb2_grpc", reason="pip install 'outrider[smg]'")
    common = pytest.importorskip("smg_grpc_proto.generated.common_pb2", reason="pip install 'outrider[smg]'")
    expected = served.stream(temperature=1.0).token_ids
    ours = pb2.GenerateRequest(prompt="hello world", max_tokens=64, seed=4, temperature=1.0, ignore_eos=True)
    sampling = vllm.SamplingParams(temperature=1.0, seed=4, max_tokens=64, ignore_eos=True)
    prompt = load_tokenizer_files(str(target_path(served))).tokenizer.encode("hello world")
    theirs = vllm.GenerateRequest(
        request_id="a", tokenized=vllm.TokenizedInput(input_ids=prompt), sampling_params=sampling, stream=True
    )
    long = vllm.GenerateRequest(tokenized=theirs.tokenized, stream=True)
    long.sampling_params.CopyFrom(sampling)
    long.sampling_params.max_tokens = LONG
    with grpc.insecure_channel(f"127.0.0.1:{served.file.grpc_port}") as channel:
        stub = stubs.VllmEngineStub(channel)
        answers = list(stub.Generate(theirs, timeout=60.0))
        whole = outrider_pb2_grpc.GenerationStub(channel).Generate(ours, timeout=60.0)
        assert stub.HealthCheck(vllm.HealthCheckRequest(), timeout=60.0).healthy
        assert stub.GetModelInfo(vllm.GetModelInfoRequest(), timeout=60.0).served_model_name == MODEL
        sampling.top_p = 2
        for call, request, code in (
            (stub.Generate, vllm.GenerateRequest(text="a", sampling_params=sampling), grpc.StatusCode.INVALID_ARGUMENT),
            (stub.SubscribeKvEvents, None, grpc.StatusCode.UNIMPLEMENTED),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                list(call(request or common.SubscribeKvEventsRequest(), timeout=60.0))
            assert caught.value.code() is code
        broken_off = stub.Generate(long, timeout=60.0)
        next(broken_off)
        broken_off.cancel()
        eventually(lambda: not stub.GetLoads(vllm.GetLoadsRequest(), timeout=60.0).loads[0].num_running_reqs)
    assert [token_id for answer in answers for token_id in answer.chunk.token_ids] == expected
    assert list(answers[-1].complete.output_ids) == list(whole.choices[0].token_ids) == expected


def test_reasoning_steps_of_the_draft_are_marked_and_counted_apart(served: ServedPair):
    """Requests have no seed: approximate text may differ from run to run."""
    num_drafts = served.metric("outrider_spec_decode_num_drafts")
    body = {"model": MODEL, "prompt": "hello world", "max_tokens": 100, "temperature": 0, "ignore_eos": True}
    plain = httpx.post(f"{served.url}/v1/completions", json=body, timeout=120.0).json()
    wish = {"mode": "approximate", "threshold": 0}
    answer = httpx.post(f"{served.url}/v1/completions", json={**body, "speculation": wish}, timeout=120.0).json()
    mark = answer["x_speculation"]
    assert "x_speculation" not in plain
    assert mark["exact"] is False
    assert mark["tokens_from_draft"] > 12
    assert answer["usage"]["completion_tokens"] == 100
    eventually(lambda: served.metric("outrider_reasoning_steps", outcome="accepted") >= mark["steps_from_draft"])
    assert served.metric("outrider_reasoning_step_tokens", outcome="accepted") >= mark["tokens_from_draft"]
    assert served.metric("outrider_spec_decode_num_drafts") > num_drafts, "of the exact request"


def test_a_seed_with_reasoning_steps_is_refused_over_http_and_grpc(served: ServedPair):
    body = {"model": MODEL, "prompt": "a", "seed": 1, "speculation": {"mode": "approximate"}}
    answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=60.0)
    assert answer.status_code == 400
    assert "seed 1" in answer.json()["error"]["message"]
    wish = pb2.Speculation(mode="approximate")
    request = pb2.GenerateRequest(model=MODEL, prompt="a", seed=1, speculation=wish)
    address = f"127.0.0.1:{served.file.grpc_port}"
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as caught:
        outrider_pb2_grpc.GenerationStub(channel).Generate(request, timeout=60.0)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]


def test_health_and_metrics_answer(served: ServedPair):
    assert httpx.get(f"{served.url}/health", timeout=30.0).status_code == 200
    assert served.metric("outrider_kv_cache_blocks") == 512
    assert served.metric("outrider_draft_connected") == 1


def test_all_wait_for_cores_but_the_threads_that_compute(served: ServedPair):
    waiting = ("ServeReplica:", "IndexActor", "ServeController", "ProxyActor", "raylet", "gcs_server", "haproxy")
    assert {name: policies(name) for name in waiting} == {name: {os.SCHED_BATCH} for name in waiting}
    for name in ("TargetActor", "DraftActor"):
        assert policies(name) == {os.SCHED_BATCH, os.SCHED_OTHER}, "Ray's threads wait in that process too"


def policies(name: str) -> set[int]:
    """Return the scheduling policies of all threads of the cluster's processes with `name` in their title."""
    found = [each for each in psutil.Process().children(recursive=True) if name in title(each)]
    return {os.sched_getscheduler(thread.id) for process in found for thread in process.threads()}


def test_no_monitor_of_ray_runs_beside_the_models(served: ServedPair):
    commands = [" ".join(process.cmdline()) for process in psutil.Process().children(recursive=True)]
    assert any("raylet" in command for command in commands)
    assert not [command for command in commands if "monitor.py" in command]


def test_another_network_gets_numbers_of_processes_and_nothing_else(served: ServedPair):
    """Requests that docs/security.md lists are refused there, except to the exporters of metrics."""
    ports, clients = listening_ports(), {served.file.http_port, served.file.grpc_port}
    try:
        with other_network():
            found = probe_from_there(ray.util.get_node_ip_address(), ports | clients)
    except OSError as error:
        pytest.skip(f"no other network can be made here: {error}")
    for port in clients:
        assert found[str(port)]["http"] == [None, None], "a client's port is on loopback"
        assert set(found[str(port)]["grpc"].values()) == {"UNAVAILABLE"}
    answers = [tuple(answer) for each in found.values() for answer in each["http"] if answer is not None]
    assert set(answers) == {(401, "Unauth"), (200, "# HELP")}
    calls = [each["grpc"] for each in found.values()]
    assert {code for each in calls for code in each.values()} >= {"UNAUTHENTICATED", "PERMISSION_DENIED"}
    ours = [set(each.values()) for each in calls if each["outrider.v1.Generation/GetModel"] == "PERMISSION_DENIED"]
    assert len(ours) >= 2, "an ingress, and a proxy of Serve's"
    assert set().union(*ours) == {"PERMISSION_DENIED", "UNIMPLEMENTED"}
    answered = {call.partition("/")[0] for each in calls for call, code in each.items() if code == "OK"}
    assert answered <= {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}, "Ray's own processes"


def test_hostile_clients_change_nothing_for_the_streams_beside_them(served: ServedPair):
    slow = (
        "clients that send",
        "that stop or trickle",
        "nobody reads",
        "64 MiB",
        "gzip of",
        "random bodies",
        "schemathesis",
    )  # minutes
    # A quarter of a minute each: router/backend/test_shared_answer.py and cluster/local/test_http_server.py bound them.
    long = ("no attack", "800 probes", "3,072 connections", "HTTP/2 on")
    names = [name for name in ATTACKS if not any(part in name for part in (*slow, *long))]
    face = Face(served.file.http_host, served.file.http_port, served.file.grpc_port, MODEL)
    with Bystanders(face.url, MODEL) as bystanders:
        outcomes = list(attack(face, bystanders, names))
    assert {each.name: each.faults for each in outcomes if each.faults} == {}
    assert sum(each.stay.num_streams for each in outcomes) > 0


def test_a_server_on_loopback_answers_to_its_own_names_alone(served: ServedPair):
    for host, status in (("foreign.example", 421), ("localhost", 200)):
        assert httpx.get(f"{served.url}/health", headers={"Host": host}, timeout=30.0).status_code == status


def test_a_disconnected_stream_frees_its_blocks(served: ServedPair):
    stream = served.client.completions.create(
        model=MODEL, prompt="hello", max_tokens=LONG, stream=True, extra_body={"ignore_eos": True}
    )
    next(stream)
    eventually(lambda: served.metric("outrider_kv_cache_used_blocks") > 0)
    stream.close()
    eventually(lambda: served.metric("outrider_kv_cache_used_blocks") == 0)
    assert served.metric("outrider_num_requests_running") == 0


def test_a_disconnected_client_stops_an_answer_that_is_not_streamed(served: ServedPair):
    plain = {"speculation": {"enabled": False}, "ignore_eos": True}  # a step for each token
    body = json.dumps({"model": MODEL, "prompt": "hello", "max_tokens": LONG, **plain}).encode()
    head = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    num_steps = served.metric("outrider_num_steps")
    with socket.create_connection((served.file.http_host, served.file.http_port)) as client:
        client.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}\r\n\r\n".encode())
        time.sleep(0.2)  # most clients send the body after the headers
        client.sendall(body)
        eventually(lambda: served.metric("outrider_kv_cache_used_blocks") > 0)
    eventually(lambda: served.metric("outrider_kv_cache_used_blocks") == 0)
    assert served.metric("outrider_num_steps") - num_steps < LONG - 1


def test_a_killed_draft_costs_no_token_and_comes_back(served: ServedPair, long_text: list[int]):
    num_connections = served.metric("outrider_draft_num_connections")
    actual = served.stream(once(START, lambda: served.kill("DraftActor")), temperature=1.0, max_tokens=LONG)
    assert actual.token_ids == long_text
    eventually(lambda: served.metric("outrider_draft_num_connections") > num_connections)
    eventually(lambda: served.stream(temperature=1.0).speculation["num_accepted_draft_tokens"] > 0)


def test_drafts_are_exchanged_and_an_unfit_one_refused_while_streams_go_on(served: ServedPair, tmp_path: Path):
    """The tokens of every stream during the exchange equal the target's own.

    The other draft stays for later tests: no text depends on it.
    """
    draft, other, spoilt = target_path(served).parent / "draft", tmp_path / "other", tmp_path / "spoilt"
    write_changed(draft, other, lambda weight: weight + 0.02 * torch.randn_like(weight))
    write_changed(draft, spoilt, lambda weight: weight * torch.nan)
    plain = served.stream(temperature=1.0, max_tokens=REST, extra_body={"speculation": {"enabled": False}})
    before = httpx.get(f"{served.url}/health", timeout=30.0).json()["draft"]
    with streaming(served) as streams:
        refused = swap(served, spoilt)
        num_connections = served.metric("outrider_draft_num_connections")
        answer = swap(served, other)
        eventually(lambda: served.metric("outrider_draft_num_connections") > num_connections)
        fingerprint = served.client.completions.create(model=MODEL, prompt="a", max_tokens=1).system_fingerprint
    assert refused.status_code == 400
    assert "NaN" in refused.json()["error"]["message"]
    [exchanged] = answer.json()["drafts"]
    assert (exchanged["path"], exchanged["is_deployed"]) == (str(other), False)
    assert exchanged["digest"] in (fingerprint or "")
    assert exchanged["digest"] != before["digest"]
    assert [tokens == plain.token_ids for tokens in streams] == [True] * len(streams)
    assert len(streams) > 1


def test_a_killed_target_costs_a_pause_and_no_token(served: ServedPair, long_text: list[int]):
    actual = served.stream(once(START, lambda: served.kill("TargetActor")), temperature=1.0, max_tokens=START + REST)
    assert actual.token_ids == long_text[: START + REST]
    assert actual.finish_reason == "length"


def bad_deployments(good: Path, folder: Path) -> Iterator[tuple[dict[str, object], str]]:
    """Changes to `args` that no replica could start with, each with the reason.

    One for each step: the file, the node's files, its memory, the models there. tests/cluster/test_node_check.py has
    more.
    """
    shutil.copytree(good / "target", folder / "header")
    (folder / "header/model.safetensors").write_text("no header")
    target = {"path": str(folder / "header"), "dtype": "float32", "num_threads": 1}
    write_checkpoint(folder / "other", seed=1, vocab_size=90)
    other = {"kind": "model", "path": str(folder / "other"), "dtype": "float32", "num_threads": 1}
    yield {"target": {"path": "modls/target"}}, "'modls/target' is not a local folder, and the Hub does not provide it"
    yield {"target": target}, "is not a whole safetensors file"
    yield {"cache": {"memory_gib": 4000}}, "may get a replica of pair, which takes about 50"
    yield {"draft": other}, "the draft's vocabulary has 90 tokens and the target's 16"


def test_what_could_not_start_is_refused_while_the_running_pair_answers(served: ServedPair, tmp_path: Path):
    before, answer = pair_ids(), served.stream(temperature=1.0).token_ids
    for changes, reason in bad_deployments(target_path(served).parent, tmp_path):
        with pytest.raises(ConfigError, match=re.escape(reason)):
            redeploy(served, **changes)
        (application,) = serve.status().applications.values()
        assert application.status == "DEPLOY_FAILED"
        assert reason in application.message
        assert served.stream(temperature=1.0).token_ids == answer
    assert pair_ids() == before


def test_an_address_that_a_running_server_would_not_take_is_refused(served: ServedPair):
    deployment = copy.deepcopy(served.file.deployment)
    deployment["http_options"]["port"] += 1
    with pytest.raises(ConfigError, match=r"http_options\.port is \d+, and Serve runs with \d+ until"):
        served.cluster.deploy(replace(served.file, deployment=deployment))


def pair_ids() -> set[int]:
    return {each.pid for name in ("TargetActor", "DraftActor") for each in processes(name)}


def test_a_stream_outlives_a_redeploy_and_health_watches_end(served: ServedPair, long_text: list[int]):
    done = threading.Event()

    def deploy() -> None:
        redeploy(served, speculation={"num_tokens": 2})
        done.set()

    with grpc.insecure_channel(f"127.0.0.1:{served.file.grpc_port}") as channel:
        watching = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=300.0)
        assert next(watching).status == health_pb2.HealthCheckResponse.SERVING
        deploying = threading.Thread(target=deploy)
        assert served.stream(once(START, deploying.start), temperature=1.0, max_tokens=LONG).token_ids == long_text
        list(watching)  # it ends
    assert done.wait(120.0)
    assert served.stream(temperature=1.0).token_ids == long_text[:64]


def test_a_stream_outlives_the_shutdown(served: ServedPair, long_text: list[int]):
    num_tokens = START + 300  # a loaded machine ends it within the pair's grace, which is short here
    stopping = threading.Thread(target=served.cluster.stop)
    actual = served.stream(once(START, stopping.start), temperature=1.0, max_tokens=num_tokens)
    stopping.join()
    assert actual.token_ids == long_text[:num_tokens]


def swap(served: ServedPair, folder: Path) -> httpx.Response:
    body = {"path": str(folder), "wait_s": 120}
    return httpx.post(f"{served.url}/admin/drafts/swap", json=body, timeout=300.0)


def write_changed(source: Path, folder: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Copy a checkpoint, with its embeddings changed."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"] = change(tensors["model.embed_tokens.weight"])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@contextmanager
def streaming(served: ServedPair) -> Iterator[list[list[int]]]:
    """Stream the same text again and again meanwhile; the list grows by the tokens of each stream that has ended."""
    ended: list[list[int]] = []
    is_over = threading.Event()

    def run() -> None:
        while not is_over.is_set():
            ended.append(served.stream(temperature=1.0, max_tokens=REST).token_ids)

    with ThreadPoolExecutor() as pool:
        running = pool.submit(run)
        try:
            yield ended
        finally:
            is_over.set()
    running.result()


def redeploy(served: ServedPair, **changes: object) -> None:
    deployment = copy.deepcopy(served.file.deployment)
    (application,) = deployment["applications"]
    application["args"].update(changes)
    del application["deployments"]  # a pair that stops may finish its streams: at shutdown no other pair can take them
    file = served.file
    served.cluster.deploy(DeployFile(deployment, file.http_host, file.http_port, file.grpc_port, file.config))
    served.cluster.wait_running(lambda status: None)
