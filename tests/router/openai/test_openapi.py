"""The OpenAPI document: its examples get the documented answers, and its schemas validate the requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest
from fastapi.routing import APIRoute
from openapi_spec_validator import validate

from router.api_keys import ApiKeys
from router.generation.generation_service import GenerationService
from router.openai.api import build_app
from router.openai.openapi import OPERATIONS, openapi_document

DOCUMENT = openapi_document(is_strict=False)
POSTS = sorted(path for path, operation in OPERATIONS.items() if operation.body and not path.startswith("/admin"))
READ = [path for path, operation in OPERATIONS.items() if operation.body is None and not path.startswith("/admin")]
GETS = sorted(path.replace("{model_id}", "fake") for path in READ)


def schema_of(path: str, status: str = "200", kind: str = "application/json") -> dict[str, Any]:
    [operation] = DOCUMENT["paths"][path.replace("/fake", "/{model_id}")].values()
    return {**operation["responses"][status]["content"][kind]["schema"], "components": DOCUMENT["components"]}


def body_of(path: str) -> dict[str, Any]:
    [content] = DOCUMENT["paths"][path]["post"]["requestBody"]["content"].values()
    return {**content["schema"], "components": DOCUMENT["components"]}


async def test_the_document_is_valid_and_served(http: httpx.AsyncClient) -> None:
    answer = await http.get("/openapi.json")
    assert answer.status_code == 200
    validate(answer.json())


def test_every_endpoint_is_in_the_document(service: GenerationService) -> None:
    routes = [route for route in build_app(service, ApiKeys()).routes if isinstance(route, APIRoute)]
    assert {route.path.replace(":path", "") for route in routes if route.include_in_schema} == set(OPERATIONS)


@pytest.mark.parametrize("path", POSTS)
async def test_an_example_is_answered_as_the_document_says(http: httpx.AsyncClient, path: str) -> None:
    example = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["example"]
    jsonschema.validate(example, body_of(path))
    answer = await http.post(path, json=example)
    assert answer.status_code == 200, answer.text
    jsonschema.validate(answer.json(), schema_of(path))
    refused = await http.post(path, json=[])
    assert refused.status_code == 400
    jsonschema.validate(refused.json(), schema_of(path, "4XX"))


@pytest.mark.parametrize("path", GETS)
async def test_what_is_read_is_as_the_document_says(http: httpx.AsyncClient, path: str) -> None:
    answer = await http.get(path)
    assert answer.status_code == 200
    if path != "/metrics":
        jsonschema.validate(answer.json(), schema_of(path))


def events(text: str) -> Iterator[str]:
    return (line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {"))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_chunks_are_as_the_document_says(http: httpx.AsyncClient, path: str) -> None:
    example = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["example"]
    answer = await http.post(path, json={**example, "stream": True, "stream_options": {"include_usage": True}})
    chunks = [httpx.Response(200, text=event).json() for event in events(answer.text)]
    assert len(chunks) > 2
    for chunk in chunks:
        jsonschema.validate(chunk, schema_of(path, kind="text/event-stream"))


BAD = [
    ("/v1/completions", {"prompt": []}),
    ("/v1/completions", {"prompt": "a", "temperature": 3}),
    ("/v1/completions", {"prompt": "a", "suffix": "b"}),
    ("/v1/completions", {"prompt": "a", "speculation": {"nmu_tokens": 3}}),
    ("/v1/chat/completions", {"messages": []}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": 3}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "tool_choice": 3}),
    ("/v1/responses", {"input": 3}),
    ("/tokenize", {"prompt": 3}),
]


@pytest.mark.parametrize(("path", "body"), BAD)
async def test_what_the_document_excludes_is_refused(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(body, body_of(path))
    assert (await http.post(path, json=body)).status_code == 400


def test_unknown_fields_are_in_the_schema_unless_they_are_refused() -> None:
    body = {"prompt": "a", "no_such_field": 1}
    jsonschema.validate(body, body_of("/v1/completions"))
    strict = openapi_document(is_strict=True)["components"]["schemas"]["CompletionRequest"]
    assert strict["additionalProperties"] is False


async def test_the_page_of_the_api_needs_no_key_and_no_other_server(http: httpx.AsyncClient) -> None:
    answer = await http.get("/docs")
    assert answer.status_code == 200
    assert "/page/docs.js" in answer.text
    assert "://" not in answer.text
    assert "default-src 'none'" in answer.headers["content-security-policy"]
