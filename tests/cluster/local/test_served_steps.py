"""Reasoning steps over HTTP, under every method of a draft model: the answers and the metrics agree."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from cluster.cli.server import read_metrics
from cluster.config import parse_config
from cluster.local.local_service import local_settings, running_service
from router.api_keys import ApiKeys
from router.openai.api import build_app
from tests.engine.fixtures.byte_tokenizer import write_byte_pair
from tests.engine.fixtures.checkpoints import Folders

PROMPT = [5, 9, 33, 7] * 3  # it repeats itself, so suffixes draft
MAX_TOKENS = 240  # the question of `rating` has some hundred tokens here


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return write_byte_pair(tmp_path_factory.mktemp("pair"))


@pytest.mark.parametrize("judge", ["rating", "likelihood"])
@pytest.mark.parametrize(
    "options",
    [
        {"method": "hybrid"},
        {"method": "hybrid", "adaptive": False},
        {"method": "hybrid", "tree": {"num_nodes": 6}},
        {"method": "hybrid", "verify": "rejection"},
        {"method": "suffix"},
        {"method": "auto"},
    ],
    ids=str,
)
async def test_steps_are_taken_and_counted_and_other_texts_stay(
    options: dict[str, Any], judge: str, pair: Folders
) -> None:
    config = parse_config(
        {
            "model_id": "m",
            "target": {"path": str(pair.target), "dtype": "float32", "num_threads": 1},
            "draft": {"kind": "model", "path": str(pair.draft), "dtype": "float32"},
            "cache": {"num_blocks": 64},
            "speculation": {"steps": {"judge": judge}, **options},
        }
    )
    async with running_service(config, local_settings(config)) as service:
        transport = httpx.ASGITransport(build_app(service, ApiKeys(None)))
        async with httpx.AsyncClient(transport=transport, base_url="http://m", timeout=60.0) as http:

            async def ask(**speculation: Any) -> dict[str, Any]:
                body = {"prompt": PROMPT, "temperature": 0, "max_tokens": MAX_TOKENS, "ignore_eos": True}
                sources = {"return_token_ids": True, "return_token_sources": True}
                found = await http.post("/v1/completions", json=body | sources | {"speculation": speculation})
                assert found.status_code == 200, found.text
                return dict(found.json())

            plain = await ask(enabled=False)
            before = await ask()
            any_step = await ask(mode="approximate", threshold=0)
            no_step = await ask(mode="approximate", threshold=9)
            after = await ask()
            counts = read_metrics((await http.get("/metrics")).text)
    assert ids(plain) == ids(before) == ids(after) == ids(no_step)
    assert "x_speculation" not in before
    told = [each["x_speculation"] for each in (any_step, no_step)]
    assert told[0]["steps_from_draft"] > 0
    assert told[0]["steps_rejected"] == 0
    if judge == "rating":
        assert told[1]["steps_from_draft"] == 0
        assert told[1]["steps_rejected"] > 0
    assert any_step["choices"][0]["token_sources"].count("step") == told[0]["tokens_from_draft"]
    outcomes = {dict(key)["outcome"]: value for key, value in counts["outrider_reasoning_steps"].items()}
    assert outcomes["accepted"] == sum(each["steps_from_draft"] for each in told)
    assert outcomes["rejected"] == sum(each["steps_rejected"] for each in told)
    assert all(len(ids(each)) == MAX_TOKENS for each in (any_step, no_step))


def ids(answer: dict[str, Any]) -> list[int]:
    return list(answer["choices"][0]["token_ids"])
