"""The page as it is served: its paths, its policy, its size, and that no text can become markup."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import httpx
import pytest

import router
from router.generation.generation_service import GenerationService
from router.openai.api import build_app
from tests.router.fixtures.key_files import api_keys

FOLDER = Path(router.__file__).parent / "page"
FILES = sorted(FOLDER.iterdir())
SCRIPTS = [file for file in FILES if file.suffix == ".js"]
MARKUP = FOLDER / "index.html"
MARKUPS = [file for file in FILES if file.suffix == ".html"]


async def test_the_page_is_served_at_the_root_without_a_key(service: GenerationService) -> None:
    transport = httpx.ASGITransport(build_app(service, api_keys("secret")))
    async with httpx.AsyncClient(transport=transport, base_url="http://outrider") as http:
        answer = await http.get("/")
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert answer.text == MARKUP.read_text()
        for path in re.findall(r'(?:src|href)="(/page/[^"]+)"', answer.text):
            assert (await http.get(path)).status_code == 200
        assert (await http.get("/v1/models")).status_code == 401


@pytest.mark.parametrize("path", ["/", *(f"/page/{file.name}" for file in FILES)])
async def test_every_file_forbids_all_but_its_own_scripts(http: httpx.AsyncClient, path: str) -> None:
    answer = await http.get(path)
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("name", ["..%2Fapi_keys.py", "%2e%2e/config.py", "nothing.js", ""])
async def test_nothing_else_is_served(http: httpx.AsyncClient, name: str) -> None:
    assert (await http.get(f"/page/{name}")).status_code == 404


async def test_an_unchanged_file_is_not_sent_again(http: httpx.AsyncClient) -> None:
    tag = (await http.get("/page/app.js")).headers["etag"]
    again = await http.get("/page/app.js", headers={"If-None-Match": tag})
    assert (again.status_code, again.content) == (304, b"")


def test_the_bundle_is_small_and_complete() -> None:
    assert sum(len(gzip.compress(file.read_bytes())) for file in FILES) < 150_000
    imported = {name for file in SCRIPTS for name in re.findall(r'from "/page/([^"]+)"', file.read_text())}
    assert imported <= {file.name for file in SCRIPTS}
    assert not any("://" in file.read_text() for file in FILES), "the page loads nothing from other servers"


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: file.name)
def test_no_script_writes_markup_or_runs_text(file: Path) -> None:
    ways = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|createContextualFragment|\beval\b|new Function|srcdoc"
    )
    assert not re.search(ways, file.read_text())


@pytest.mark.parametrize("file", MARKUPS, ids=lambda file: file.name)
def test_the_markup_has_no_inline_scripts_or_styles_and_labels_every_field(file: Path) -> None:
    markup = file.read_text()
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=|javascript:", markup)
    assert all(re.search(r'src="/page/', tag) for tag in re.findall(r"<script[^>]*>", markup))
    fields = re.findall(r"<(?:input|textarea|select)\b", markup)
    assert len(re.findall(r"<label[^>]*>[^<]*<(?:input|textarea|select)\b", markup)) == len(fields)
    ids = re.findall(r'\bid="([^"]+)"', markup)
    assert len(ids) == len(set(ids))


def test_scripts_name_elements_that_are_there() -> None:
    ids = {name for file in MARKUPS for name in re.findall(r'\bid="([^"]+)"', file.read_text())}
    used = {name for file in SCRIPTS for name in re.findall(r'byId\("([^"]+)"\)', file.read_text())}
    assert used <= ids
