"""LiteLLM: chat, streamed chat, text completion, JSON schema, and the Responses and Messages APIs through it."""

import json
import os

import litellm

litellm.suppress_debug_info = True
model, base = os.environ["OUTRIDER_MODEL"], os.environ["OPENAI_BASE_URL"]
options = {"api_base": base, "api_key": "none", "max_tokens": 24, "temperature": 0, "num_retries": 0}
messages = [{"role": "user", "content": "Say hello."}]

whole = litellm.completion(model=f"hosted_vllm/{model}", messages=messages, **options)
assert whole.choices[0].message.content
assert whole.usage.completion_tokens > 0
chunks = list(litellm.completion(model=f"openai/{model}", messages=messages, stream=True, **options))
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
text = litellm.text_completion(model=f"text-completion-openai/{model}", prompt="Once upon a time", **options)
assert text.choices[0].text

schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
answer = litellm.completion(model=f"openai/{model}", messages=messages, response_format=form, **options)
assert json.loads(answer.choices[0].message.content)["n"] in (1, 2)

response = litellm.responses(
    model=f"openai/{model}", input="Say hello.", api_base=base, api_key="none", max_output_tokens=24, temperature=0
)
assert response.output[0].content[0].text
message = litellm.completion(
    model=f"anthropic/{model}", messages=messages, **{**options, "api_base": base.removesuffix("/v1")}
)
assert message.choices[0].message.content
try:
    litellm.completion(model=f"openai/{model}", messages=messages, **{**options, "temperature": 3})
except litellm.BadRequestError as error:
    assert "temperature" in str(error)
else:
    raise AssertionError("a temperature of 3 was taken")
print("LiteLLM: chat, stream, completion, JSON schema, responses, messages and an error: as expected")
