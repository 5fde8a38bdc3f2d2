"""The requests of `vllm bench serve` (vllm/benchmarks/lib/endpoint_request_func.py), and its parsing of answers.

vllm itself cannot be installed here: its wheel requires CUDA.
"""

import json
import os
import urllib.request

url, model = os.environ["OUTRIDER_URL"], os.environ["OUTRIDER_MODEL"]


def events(path: str, body: dict) -> list[dict]:
    headers = {"Content-Type": "application/json", "Authorization": "Bearer none", "x-request-id": "bench-1"}
    request = urllib.request.Request(f"{url}{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        lines = [line.decode().strip().removeprefix("data: ") for line in answer if line.strip()]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as answer:
    [served] = json.load(answer)["data"]
assert served["id"] == model
assert served["root"]
common = {"model": model, "temperature": 0.0, "repetition_penalty": 1.0, "stream": True}
common |= {"stream_options": {"include_usage": True}, "ignore_eos": True}
completion = {"prompt": "Once upon a time", "max_tokens": 16, "logprobs": None}
chat = {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], "max_completion_tokens": 16}
for path, body in (("/v1/completions", completion), ("/v1/chat/completions", chat)):
    chunks = events(path, common | body)
    said = [chunk["choices"][0] for chunk in chunks if chunk.get("choices")]
    assert "".join(each.get("text") or each.get("delta", {}).get("content") or "" for each in said)
    assert chunks[-1]["usage"]["completion_tokens"] == 16
print("vllm bench serve: its two request shapes stream 16 tokens each, usage last")
