"""A pair and the frontends' service in one process, over HTTP, down to the engine."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from cluster.config import parse_config
from cluster.local.local_service import local_settings, running_service
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
