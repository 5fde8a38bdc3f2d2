"""pydantic-ai: text, a stream, and an output type, over the Chat, Responses and Messages APIs."""

import os
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


class Colour(BaseModel):
    colour: Literal["red", "blue"]


name, url = os.environ["OUTRIDER_MODEL"], os.environ["OPENAI_BASE_URL"]
openai = OpenAIProvider(base_url=url, api_key="none")
anthropic = AnthropicProvider(base_url=url.removesuffix("/v1"), api_key="none")
models = [
    OpenAIChatModel(name, provider=openai),
    OpenAIResponsesModel(name, provider=openai),
    AnthropicModel(name, provider=anthropic),
]
settings = {"max_tokens": 24, "temperature": 0.0}
assert all(Agent(model, model_settings=settings).run_sync("Say hello.").output for model in models)
profile = {"supports_json_schema_output": True}
model = OpenAIChatModel(name, provider=openai, profile=profile)
agent = Agent(model, output_type=NativeOutput(Colour), model_settings=settings)
assert agent.run_sync("Choose a colour.").output.colour in ("red", "blue")
print("pydantic-ai: three APIs, and an output type that is kept")
