"""Another server's fields that affect the answer are translated, or refused by name; never ignored."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from protos.messages import GrammarKind
from router.requests.foreign_fields import ALIASES, REFUSED
from tests.router.fixtures.fake_backend import FakeBackend

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
PATHS = {
    "/v1/completions": {"prompt": "abc", "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
}
EVERYWHERE = {
    **PATHS,
    "/v1/responses": {"input": "hi", "max_output_tokens": 4},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fields", "kind", "source"),
    [
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, GrammarKind.JSON_SCHEMA, '"properties"'),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, GrammarKind.JSON_SCHEMA, '"properties"'),
        ({"response_format": {"type": "regex", "pattern": "a+"}}, GrammarKind.REGEX, "a+"),
        ({"response_format": {"type": "grammar", "grammar": 'root ::= "a"'}}, GrammarKind.GRAMMAR, "root"),
        ({"json_schema": SCHEMA}, GrammarKind.JSON_SCHEMA, '"properties"'),
        ({"json_schema": json.dumps(SCHEMA)}, GrammarKind.JSON_SCHEMA, '"properties"'),
        ({"format": SCHEMA}, GrammarKind.JSON_SCHEMA, '"properties"'),
        ({"format": "json"}, GrammarKind.JSON_SCHEMA, '"object"'),
        ({"regex": "a+"}, GrammarKind.REGEX, "a+"),
        ({"ebnf": 'root ::= "a"'}, GrammarKind.GRAMMAR, "root"),
        ({"grammar": 'root ::= "a"'}, GrammarKind.GRAMMAR, "root"),
    ],
)
async def test_a_constraint_of_another_server_s_spelling_is_in_force(
    http: httpx.AsyncClient, backend: FakeBackend, path: str, fields: dict[str, Any], kind: GrammarKind, source: str
) -> None:
    answer = await http.post(path, json={**PATHS[path], **fields})
    assert answer.status_code == 200, answer.text
    assert "x-ignored-fields" not in answer.headers
    grammar = backend.requests[-1].sampling.grammar
    assert grammar is not None
    assert grammar.kind is kind
    assert source in grammar.source


@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "structural_tag", "structures": []},
        {"type": "json_object", "scheme": SCHEMA},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "x", "parameters": SCHEMA}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}, "schema": SCHEMA},
        {"type": "text", "schema": SCHEMA},
        {"type": "regex"},
        {"type": "regex", "grammar": "x"},
        {"type": "json_object", "pattern": "x"},
    ],
)
async def test_a_format_that_is_not_understood_is_refused(
    http: httpx.AsyncClient, response_format: dict[str, Any]
) -> None:
    for path, body in PATHS.items():
        answer = await http.post(path, json={**body, "response_format": response_format})
        assert answer.status_code == 400
        assert "response_format" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", EVERYWHERE)
@pytest.mark.parametrize("name", sorted(REFUSED))
async def test_what_is_not_served_is_refused_by_name_unless_it_is_off(
    http: httpx.AsyncClient, path: str, name: str
) -> None:
    own = name in ("text", "output_config", "best_of") and path not in ("/v1/chat/completions",)
    if own:
        return  # a field of that endpoint, or of one like it
    body = EVERYWHERE[path]
    value: Any = False if name == "do_sample" else {"x": 0.5}
    answer = await http.post(path, json={**body, name: value})
    assert answer.status_code == 400, answer.text
    assert name in answer.json()["error"]["message"]
    for off in (None, *REFUSED[name][0]):
        answer = await http.post(path, json={**body, name: off})
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-ignored-fields"] == name


@pytest.mark.parametrize("path", EVERYWHERE)
@pytest.mark.parametrize(
    "name", ["guided_json", "logit_bias", "presence_penalty", "min_p", "n", "responseFormat", "maxTokens"]
)
async def test_a_field_of_chats_is_in_force_or_refused_at_every_endpoint(
    http: httpx.AsyncClient, path: str, name: str
) -> None:
    values = {"guided_json": SCHEMA, "logit_bias": {"5": 1}, "n": 2}
    answer = await http.post(path, json={**EVERYWHERE[path], name: values.get(name, 0.5)})
    is_served = path in PATHS and name.islower()
    assert answer.status_code == (200 if is_served else 400), answer.text
    if not is_served:
        assert answer.json()["error"]["message"].startswith(name)


@pytest.mark.parametrize("path", EVERYWHERE)
@pytest.mark.parametrize("name", [name for name, own in ALIASES.items() if own[0] == "max_tokens"])
async def test_a_length_has_many_names(http: httpx.AsyncClient, backend: FakeBackend, path: str, name: str) -> None:
    body = {key: value for key, value in EVERYWHERE[path].items() if not key.startswith("max_")}
    assert (await http.post(path, json={**body, name: 3})).status_code == 200
    assert backend.requests[-1].sampling.max_tokens == 3
    assert (await http.post(path, json={**body, name: -1})).status_code == 200
    assert backend.requests[-1].sampling.max_tokens > 100, "-1 asks for what fits"
    both = await http.post(path, json={**EVERYWHERE[path], name: 3})
    assert both.status_code == (200 if name in EVERYWHERE[path] else 400), both.text


async def test_a_field_of_no_server_is_ignored_and_a_small_one_beside_aliases_stays_in_force(
    http: httpx.AsyncClient, backend: FakeBackend
) -> None:
    body = {**PATHS["/v1/chat/completions"], "mood": 1, "regex": "a+", "random_seed": 0, "cache_prompt": True}
    answer = await http.post("/v1/chat/completions", json=body)
    assert answer.headers["x-ignored-fields"] == "mood, cache_prompt"
    assert backend.requests[-1].sampling.seed == 0
    assert backend.requests[-1].sampling.grammar is not None


async def test_two_constraints_under_any_names_are_refused(http: httpx.AsyncClient) -> None:
    for more in (
        {"guided_regex": "b"},
        {"ebnf": "x"},
        {"response_format": {"type": "json_object"}},
        {"format": "json"},
    ):
        answer = await http.post("/v1/completions", json={**PATHS["/v1/completions"], "regex": "a", **more})
        assert answer.status_code == 400, more


async def test_ollama_s_format_is_refused_where_it_cannot_be_read(http: httpx.AsyncClient) -> None:
    for path in ("/v1/responses", "/v1/messages"):
        assert (await http.post(path, json={**EVERYWHERE[path], "format": "json"})).status_code == 400
    for value in ("yaml", ["json"], 1):
        answer = await http.post("/v1/completions", json={**PATHS["/v1/completions"], "format": value})
        assert answer.json()["error"]["param"] == "format"


@pytest.mark.parametrize("name", ["schema", "json", "guided_decoding", "structured_output", "gbnf", "lark", "choices"])
async def test_a_constraint_under_a_name_that_is_not_read_is_refused(http: httpx.AsyncClient, name: str) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], name: {"type": "object"}}
    answer = await http.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
