"""The head of a serving pair is exchanged over HTTP while texts run, and no text changes."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cluster.config import parse_config
from cluster.local.local_service import local_settings, running_service
from router.api_keys import ApiKeys
from router.openai.api import build_app

DEMO = Path(__file__).parents[3] / "models" / "demo"
PROMPTS = [f"def add_{name}(items, value):\n    " for name in ("one", "two")]
LONG_PROMPT = PROMPTS[0] + "# a list of values and the names of items\n    " * 8
Tensors = dict[str, Tensor]
pytestmark = pytest.mark.timeout(400)  # the bundled pair, which computes real texts


@asynccontextmanager
async def served(head: Path, kind: str = "eagle3") -> AsyncIterator[httpx.AsyncClient]:
    config = parse_config(
        {
            "model_id": "m",
            "target": {"path": str(DEMO / "target"), "dtype": "float32", "num_threads": 1},
            "draft": {"kind": kind, "path": str(head)},
            "cache": {"num_blocks": 256},
            "speculation": {"adaptive": False, "num_tokens": 3, "method": kind},
            "ingress": {"open_admin": True},
        }
    )
    async with running_service(config, local_settings(config)) as service:
        app = build_app(service, ApiKeys(None, is_open_admin=True))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://m", timeout=60.0) as http:
            yield http


def write_head(folder: Path, change: Callable[[Tensors], Mapping[str, Tensor]], source: str = "eagle3") -> Path:
    """Copy a bundled head with other tensors, in float32."""
    shutil.copytree(DEMO / source, folder)
    file = folder / "model.safetensors"
    tensors = {name: each.float() if each.is_floating_point() else each for name, each in load_file(file).items()}
    save_file({**tensors, **change(tensors)}, file)
    return folder


def other(tensors: Tensors) -> Tensors:
    """Return the tensors of a bad head with other keys and values."""
    return {name: -4.0 * each for name, each in tensors.items() if name.endswith(("v_proj.weight", "k_proj.weight"))}


def overflowing(tensors: Tensors) -> Tensors:
    """Return finite weights with states, keys and values that are not."""
    return {"fc.weight": torch.full_like(tensors["fc.weight"], 1e38)}


async def answer(http: httpx.AsyncClient, prompt: str, temperature: float = 0.0, **more: Any) -> tuple[str, int]:
    """Return the text of a completion and its number of accepted drafts."""
    body = {"prompt": prompt, "temperature": temperature, "seed": 3, "max_tokens": 48, "ignore_eos": True, **more}
    found = await http.post("/v1/completions", json=body)
    assert found.status_code == 200, found.text
    accepted = found.json()["usage"]["completion_tokens_details"]["accepted_draft_tokens"]
    return found.json()["choices"][0]["text"], accepted


async def plain_text(http: httpx.AsyncClient, prompt: str, temperature: float, **more: Any) -> str:
    text, accepted = await answer(http, prompt, temperature, **more, speculation={"enabled": False})
    assert accepted == 0
    return text


async def swap(http: httpx.AsyncClient, head: Path) -> httpx.Response:
    return await http.post("/admin/drafts/swap", json={"path": str(head), "wait_s": 60})


async def running_draft(http: httpx.AsyncClient) -> dict[str, Any]:
    found = (await http.get("/admin/drafts")).json()["drafts"]
    assert len(found) == 1
    return dict(found[0])


async def test_no_text_changes_while_heads_are_exchanged(tmp_path: Path) -> None:
    new = write_head(tmp_path / "new", other)
    kinds = [*zip(PROMPTS, (0.0, 0.7), strict=True)]
    async with served(DEMO / "eagle3") as http:
        plain = await asyncio.gather(*(plain_text(http, *each, max_tokens=320) for each in kinds))
        assert (await running_draft(http))["is_deployed"]
        tasks = [asyncio.create_task(answer(http, *each, max_tokens=320)) for each in kinds]
        for path in (new, DEMO / "eagle3"):
            await asyncio.sleep(0.05)
            swapped = await swap(http, path)
            assert swapped.status_code == 200, swapped.text
            assert swapped.json()["drafts"][0]["path"] == str(path)
        assert not any(task.done() for task in tasks), "texts ran through both exchanges"
        drafted = await asyncio.gather(*tasks)
        assert [text for text, _ in drafted] == plain
        digest = (await running_draft(http))["digest"]
        assert (await swap(http, new)).json()["drafts"][0]["digest"] != digest
        assert (await http.get("/health")).json()["draft"]["name"] == "new"
        again = await asyncio.gather(*(answer(http, *each, max_tokens=320) for each in kinds))
        assert [text for text, _ in again] == plain


async def test_a_new_head_accepts_as_much_as_after_a_restart_even_after_a_cached_prefix(tmp_path: Path) -> None:
    bad = write_head(tmp_path / "bad", other)
    async with served(DEMO / "eagle3") as http:
        alone = await answer(http, LONG_PROMPT)
    async with served(bad) as http:
        before = await answer(http, LONG_PROMPT)
        assert before[0] == alone[0]
        assert before[1] < alone[1] / 2
        assert (await swap(http, DEMO / "eagle3")).status_code == 200
        assert await answer(http, LONG_PROMPT) == alone


async def test_a_head_whose_drafts_are_not_finite_is_rolled_back_at_once_and_leaves_nothing(tmp_path: Path) -> None:
    bad = write_head(tmp_path / "bad", overflowing)
    async with served(DEMO / "eagle3") as http:
        alone = await answer(http, LONG_PROMPT)
        assert (await swap(http, bad)).status_code == 200
        assert (await running_draft(http))["path"] == str(bad)
        text, accepted = await answer(http, LONG_PROMPT)
        assert text == alone[0]
        assert accepted < alone[1] / 2, "n-grams alone"
        assert await answer(http, LONG_PROMPT) == alone, "no key or value of the bad head is read"
        await http.get("/metrics")
        draft = await running_draft(http)
        assert (draft["path"], draft["is_deployed"]) == (str(DEMO / "eagle3"), True)
        assert (draft["canary"]["outcome"], draft["canary"]["reason"]) == ("rolled_back", "its drafts were not finite")
        assert draft["canary"]["name"] == "bad"


async def test_a_head_that_fails_in_its_trial_ends_the_trial(tmp_path: Path) -> None:
    bad = write_head(tmp_path / "bad", overflowing)
    async with served(DEMO / "eagle3") as http:

        async def keep_busy() -> None:
            while True:
                await answer(http, PROMPTS[0], max_tokens=16)

        traffic = asyncio.create_task(keep_busy())
        began = await http.post("/admin/drafts/canary", json={"path": str(bad), "block_s": 0.1})
        assert began.json()["drafts"][0]["canary"]["outcome"] == "running"
        for _ in range(300):
            canary = (await running_draft(http))["canary"]
            if canary["outcome"] != "running":
                break
            await asyncio.sleep(0.2)
        traffic.cancel()
        assert (canary["outcome"], canary["reason"]) == ("rolled_back", "its drafts were not finite")
        assert (await running_draft(http))["path"] == str(DEMO / "eagle3")


async def test_heads_without_keys_draft_for_running_texts_too(tmp_path: Path) -> None:
    def silent(tensors: Tensors) -> Tensors:
        return {name: torch.full_like(each, -30.0) for name, each in tensors.items() if name.endswith(".bias")}

    bad = write_head(tmp_path / "bad", silent, "medusa")
    async with served(bad, "medusa") as http:
        task = asyncio.create_task(answer(http, PROMPTS[0], max_tokens=320))
        await asyncio.sleep(0.05)
        assert (await swap(http, DEMO / "medusa")).status_code == 200
        assert not task.done()
        text, accepted = await task
        assert text == await plain_text(http, PROMPTS[0], 0.0, max_tokens=320)
        assert accepted > 10


def unfit_heads(folder: Path) -> dict[str, tuple[Path, str]]:
    """Return heads that cannot replace the bundled one, each with the reason."""
    config = (DEMO / "eagle3" / "config.json").read_text()

    def changed(name: str, old: str, new: str) -> Path:
        shutil.copytree(DEMO / "eagle3", folder / name)
        assert old in config
        (folder / name / "config.json").write_text(config.replace(old, new))
        return folder / name

    nan = write_head(folder / "nan", lambda tensors: {"fc.weight": tensors["fc.weight"] * torch.nan})
    cut = write_head(folder / "cut", lambda tensors: {"norm.weight": tensors["norm.weight"][:-1]})
    return {
        "no folder": (folder / "none", "has no config.json on node"),
        "another kind": (DEMO / "medusa", "is not an EAGLE-3, DFlash or DSpark head"),
        "not finite": (nan, "of 'fc.weight' in .* are NaN or infinite"),
        "misshapen": (cut, "tensor 'norm.weight' has shape"),
    }


async def test_a_head_that_does_not_fit_is_refused_by_name_and_the_old_one_drafts_on(tmp_path: Path) -> None:
    async with served(DEMO / "eagle3") as http:
        alone = await answer(http, LONG_PROMPT)
        for path, reason in unfit_heads(tmp_path).values():
            refused = await swap(http, path)
            assert refused.status_code == 400, refused.text
            error = refused.json()["error"]
            assert error["param"] == "path"
            assert str(path) in error["message"]
            assert re.search(reason, error["message"]), error["message"]
        assert (await running_draft(http))["is_deployed"]
        assert await answer(http, LONG_PROMPT) == alone
