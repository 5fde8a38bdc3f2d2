"""Bodies that cost a server more than their client, or that no client should send."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import random
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

from tests.serve.attacks.attack import BROKEN, Answers, Face, attack, post_all

_COMPAT = Path(__file__).parents[1] / "compat/run.sh"
_MIB = 1 << 20
_WORDS = ("fn", "x", "{", "}", " ", "\ufffd", "\x00", "é", "😀", "<|end|>", '"', "\\")
_FIELDS = "prompt n temperature top_p top_k stop seed logprobs speculation stream echo min_p logit_bias response_format"
_MORE_FIELDS = "stream_options best_of priority suffix prediction"


@attack("100,000 wrong messages in a body")
async def _wrong_messages(face: Face) -> Answers:
    return await post_all(face, [{"messages": [1] * 100_000}] * 3, "/v1/chat/completions")


@attack("500,000 prompts and a million lists in a body")
async def _many_prompts(face: Face) -> Answers:
    return await post_all(face, [{"prompt": ["a"] * 500_000}, {"prompt": [[5]] * 1_000_000}] * 2)


@attack("JSON 100,000 levels deep, 100,000 unknown fields, not JSON, numbers out of range")
async def _strange_json(face: Face) -> Answers:
    fields = {f"field_{index}": index for index in range(100_000)}
    number = b'{"model": "%s", "prompt": "x", "temperature": 1e999, "max_tokens": 1%s}' % (
        face.model.encode(),
        b"0" * 5000,
    )
    bodies = [b"[" * 100_000, b'{"a":' * 100_000, {"prompt": "x", **fields}, b"\xff\xfe{}", b"", b"null", number]
    return await post_all(face, bodies)


@attack("n = 128, four times, with prompts meanwhile")
async def _many_choices(face: Face) -> Answers:
    return await post_all(face, [{"prompt": "def f", "n": 128, "max_tokens": 16}] * 4 + [{"prompt": "x"}] * 8)


@attack("900 biases with n = 32, 2,048 bad words, 10,000 stops")
async def _many_biases(face: Face) -> Answers:
    biases = {str(index): -1.0 for index in range(900)}
    words = [[index % 900 + 1] * (index % 30 + 1) for index in range(2048)]
    bodies = [{"prompt": "x", "n": 32, "logit_bias": biases}, {"prompt": "x", "stop": [str(i) for i in range(10_000)]}]
    return await post_all(
        face,
        [*bodies, {"prompt": "x", "bad_words_token_ids": words}, {"prompt": "x", "bad_words": ["ab" * 900] * 2048}],
    )


@attack("40 bodies of a kilobyte that expand to a schema of 340,000 lists, or of 12,000")
async def _packed_schemas(face: Face) -> Answers:
    bodies: list[Any] = []
    for size in (340_000, 12_000):
        schema: dict[str, Any] = {"enum": [[]] * size}
        for field in ({"guided_json": schema}, {"response_format": {"type": "json_object", "schema": schema}}):
            body = {"model": face.model, "max_tokens": 8, "prompt": "x", **field}
            bodies += [gzip.compress(json.dumps(body).encode())] * 10
    return await post_all(face, bodies, content_encoding="gzip")


@attack("twelve grammars of 980 rules, two that compile for ever, expressions that explode, deep and circular schemas")
async def _grammars(face: Face) -> Answers:
    rules = "\n".join(f'r{index} ::= "a" r{index + 1} | "b" r{(index * 7) % 980}' for index in range(979))
    grammar = f'root ::= r0\n{rules}\nr979 ::= "c"'
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(200):
        deep = {"type": "array", "items": deep}
    circular = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
    wide = {
        "type": "object",
        "properties": {f"p{i}": {"type": "string", "pattern": "(a|b){1,400}"} for i in range(300)},
    }
    bodies: list[Any] = [{"prompt": "x", "guided_grammar": grammar}] * 12
    bodies += [{"prompt": "x", "guided_regex": "(a{1000}){1000}", "n": 32}]
    bodies += [{"prompt": "x", "guided_regex": regex} for regex in ("((a+)+)+b", "(" * 5000, "[^")]
    endless = [{"allOf": [{"type": "string", "pattern": f".*a.{{{gap}}}b.*"} for gap in range(n)]} for n in (30, 31)]
    bodies += [
        {"prompt": "x", "guided_json": schema} for schema in (*endless, deep, circular, wide, '{"const": "\\ud800"}')
    ]
    return await post_all(face, bodies)


@attack("a prediction of one token 30,000 times, n = 64")
async def _predictions(face: Face) -> Answers:
    return await post_all(
        face, [{"prompt": "a a a a", "n": 64, "prediction": {"type": "content", "content": "a " * 15_000}}] * 2
    )


@attack("a prompt of 7 MiB, a body of 64 MiB, a million ids, a user of 1 MiB, calls of a million lists")
async def _large(face: Face) -> Answers:
    answers = await post_all(
        face, [{"prompt": "word " * (7 * _MIB // 5)}, b" " * (64 * _MIB), {"prompt": "x", "user": "u" * _MIB}]
    )
    answers += await post_all(face, [{"prompt": [5] * 1_200_000, "unknown": 1}] * 2)
    call = {"function": {"name": "f", "arguments": "[" + "[]," * 340_000 + "0]"}}
    answers += await post_all(
        face, [{"messages": [{"role": "assistant", "tool_calls": [call] * 7}]}], "/v1/chat/completions"
    )
    answers += await post_all(face, [{"prompt": "word " * 400_000}], "/tokenize")
    return answers + await post_all(face, [{"tokens": [5] * 1_000_000}], "/detokenize")


@attack("gzip of 512 MiB, truncated gzip, text marked as gzip")
async def _gzip(face: Face) -> Answers:
    bomb = gzip.compress(b"a" * (512 * _MIB), 1)
    return await post_all(face, [bomb, gzip.compress(b'{"model"' * 99)[:40], b"{}"], Content_Encoding="gzip")


@attack("400 random bodies")
async def _random_bodies(face: Face) -> Answers:
    generator = random.Random(7)
    fields = f"{_FIELDS} {_MORE_FIELDS}".split()
    values: list[Any] = [None, True, -1, 0, 1.5, 2**63, "", "x", [], {}, [[]], {"a": 1}, [None], "\ud800", 1e308]
    bodies = [
        {"prompt": "x", **{generator.choice(fields): generator.choice(values) for _ in range(generator.randint(1, 4))}}
        for _ in range(400)
    ]
    answers: Answers = Counter()
    for start in range(0, len(bodies), 40):
        answers += await post_all(face, bodies[start : start + 40])
    return answers


@attack("texts of half characters and marks, in prompts, chats and stops")
async def _strange_texts(face: Face) -> Answers:
    generator = random.Random(8)
    texts = ["".join(generator.choices(_WORDS, k=200)) for _ in range(20)]
    answers = await post_all(face, [{"prompt": text, "stop": [text[:20]]} for text in texts])
    chats = [{"messages": [{"role": "user", "content": text}]} for text in texts]
    return answers + await post_all(face, chats, "/v1/chat/completions")


@attack("schemathesis on OpenAI's document and on ours, right and wrong requests")
async def _schemathesis(face: Face) -> Answers:
    settings = {
        "MODE": "all",
        "CHECKS": "not_a_server_error",
        "EXAMPLES": "10",
        "MAX_TIME": "30",
        "OUTRIDER_URL": face.url,
    }
    process = await asyncio.create_subprocess_exec(
        str(_COMPAT), "schemathesis", env={**os.environ, **settings}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    text = (await process.communicate())[0].decode()
    if process.returncode:
        print(text)
    return Counter(["no 5xx"] if process.returncode == 0 else [f"{BROKEN}5xx, or schemathesis did not run: see above"])
