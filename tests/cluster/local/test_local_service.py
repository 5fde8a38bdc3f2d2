"""A pair and the frontends' service in one process, over HTTP, down to the engine."""

from __future__ import annotations

import os
from pathlib import Path

import httpx
import pytest

from actors.settings import PairSettings, ProcessShare
from cluster.config import parse_config
from cluster.deploy_file import read_deploy_file
from cluster.local import one_process
from cluster.local.local_service import local_settings, running_service
from cluster.local.one_process import serve_in_process
from engine.config import EngineConfig, ModelConfig
from router.api_keys import ApiKeys
from router.openai.api import build_app
from tests.engine.fixtures.byte_tokenizer import BYTE_VOCAB_SIZE, write_tokenizer
from tests.engine.fixtures.checkpoints import write_overflowing

POISON = 77


async def test_a_text_on_which_the_model_overflows_is_a_500_that_is_logged_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_overflowing(tmp_path, "float32", 1e38, POISON, BYTE_VOCAB_SIZE)
    write_tokenizer(tmp_path)
    target = {"path": str(tmp_path), "dtype": "float32", "num_threads": 1}
    config = parse_config({"model_id": "m", "target": target, "cache": {"num_blocks": 32}})
    sound, faulty = ({"prompt": [5, 9, token], "max_tokens": 4, "temperature": 0} for token in (20, POISON))
    async with running_service(config, local_settings(config)) as service:
        transport = httpx.ASGITransport(build_app(service, ApiKeys(None)))
        async with httpx.AsyncClient(transport=transport, base_url="http://outrider", timeout=60.0) as http:
            before = await http.post("/v1/completions", json=sound)
            answer = await http.post("/v1/completions", json=faulty)
            stream = await http.post("/v1/completions", json=faulty | {"stream": True})
            after = await http.post("/v1/completions", json=sound)
            metrics = (await http.get("/metrics")).text.splitlines()
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "non_finite_logits")
    assert answer.json()["error"]["message"].endswith("A retry gives the same"), "float32 has no larger dtype"
    assert "non_finite_logits" in stream.text
    assert before.status_code == after.status_code == 200
    assert before.json()["choices"] == after.json()["choices"]
    assert len([record for record in caplog.records if "NaN or infinite logits" in record.getMessage()]) == 2
    assert 'outrider_num_non_finite_requests{replica="0"} 2.0' in metrics


async def test_the_context_that_clients_see_fits_into_the_cache(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_overflowing(tmp_path, "float32", 1e38, POISON, BYTE_VOCAB_SIZE)
    write_tokenizer(tmp_path)
    target = {"path": str(tmp_path), "dtype": "float32", "num_threads": 1}
    config = parse_config({"model_id": "m", "target": target, "cache": {"num_blocks": 3, "block_size": 16}})
    body = {"prompt": [20] * 48, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    async with running_service(config, local_settings(config)) as service:
        transport = httpx.ASGITransport(build_app(service, ApiKeys(None)))
        async with httpx.AsyncClient(transport=transport, base_url="http://outrider", timeout=60.0) as http:
            model = (await http.get("/v1/models/m")).json()
            refused = await http.post("/v1/completions", json=body)
            cut = await http.post("/v1/completions", json=body | {"truncate_prompt_tokens": -1})
    assert model["max_model_len"] == 48
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert (cut.json()["usage"]["prompt_tokens"], cut.json()["usage"]["completion_tokens"]) == (8, 40)
    assert "the longest text has 48 and not" in caplog.text


def test_openmp_s_threads_sleep_after_microseconds_as_in_a_pair_on_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that spin keep the cores from our kernels: four times the processor time on a busy machine."""
    environments: list[dict[str, str]] = []

    async def note(*_: object) -> None:
        environments.append(dict(os.environ))

    settings = PairSettings(EngineConfig(ModelConfig("m")), target_share=ProcessShare(3))
    monkeypatch.setattr(one_process, "_serve", note)
    monkeypatch.setattr(one_process, "local_settings", lambda config: settings)
    monkeypatch.setattr(os, "environ", {name: value for name, value in os.environ.items() if "OMP_" not in name})
    monkeypatch.setattr("actors.settings.find_spec", lambda name: name)  # with our kernels
    serve_in_process(read_deploy_file(Path(__file__).parents[3] / "deploy.yaml"), lambda: None)
    assert environments[0].items() >= {"OMP_NUM_THREADS": "3", "GOMP_SPINCOUNT": "1000"}.items()
