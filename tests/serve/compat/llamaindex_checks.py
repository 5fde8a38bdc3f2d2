"""LlamaIndex's client of OpenAI-like servers: complete, chat, and both streamed."""

import os

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

llm = OpenAILike(
    model=os.environ["OUTRIDER_MODEL"],
    api_base=os.environ["OPENAI_BASE_URL"],
    api_key="none",
    is_chat_model=True,
    temperature=0,
    max_tokens=24,
)
messages = [ChatMessage(role="user", content="Say hello.")]
whole = llm.chat(messages)
assert whole.message.content
streamed = "".join(part.delta or "" for part in llm.stream_chat(messages))
assert streamed
plain = llm.model_copy(update={"is_chat_model": False})
text = plain.complete("Once upon a time").text
assert text
assert "".join(part.delta or "" for part in plain.stream_complete("Once upon a time"))
print("LlamaIndex: chat, complete, and both streamed")
