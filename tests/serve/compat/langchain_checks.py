"""LangChain's standard tests of a chat model. A model of 135M parameters writes no sensible tool calls on its own."""

import os

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests


class TestServed(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict:
        return {
            "model": os.environ["OUTRIDER_MODEL"],
            "temperature": 0,
            "frequency_penalty": 1,  # such a small model repeats itself endlessly inside a JSON text
            "max_tokens": 512,
            "stream_usage": True,
        }

    @property
    def has_tool_calling(self) -> bool:
        return bool(os.environ.get("OUTRIDER_TOOLS"))

    @property
    def has_structured_output(self) -> bool:
        return True

    @property
    def structured_output_kwargs(self) -> dict:
        return {"method": "json_schema"}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @pytest.mark.xfail(reason="without a schema so small a model writes other keys than it was asked for")
    def test_json_mode(self, model: BaseChatModel) -> None:
        super().test_json_mode(model)

    @pytest.mark.xfail(not os.environ.get("OUTRIDER_TOOLS"), reason="it asks for a tool call")
    def test_structured_output_pydantic_2_v1(self, model: BaseChatModel) -> None:
        super().test_structured_output_pydantic_2_v1(model)
