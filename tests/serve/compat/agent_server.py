"""The API over a model that calls an agent's shell once and then reports the result: agent_server.py PORT.

Agents need a model that calls tools and has room for 20,000 tokens of instructions; this one plays it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace

import uvicorn

from protos.messages import GenerateRequest
from router.api_keys import ApiKeys
from router.config import IngressConfig
from router.generation.generation_service import GenerationService
from router.metrics.ingress_metrics import IngressMetrics
from router.openai.api import build_app
from router.tokenizer import Tokenizer
from router.tokenizer.chat_template import ChatTemplate
from router.tokenizer.tokenizer_files import TokenizerFiles
from tests.router.conftest import byte_tokenizer_core
from tests.router.fixtures.fake_backend import CARD, FakeBackend

TEMPLATE = (
    "{% if tools %}<tool_call>{{ tools | map(attribute='function.name') | join(' ') }}\n{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
)
MARK = "outrider was here"
SHELLS = {"exec_command": {"cmd": f"echo {MARK}"}, "Bash": {"command": f"echo {MARK}", "description": "Say it."}}


def next_token(request: GenerateRequest, so_far: Sequence[int]) -> int:
    """Return the next byte of the turn, chosen by the prompt's content."""
    prompt = bytes(token - 1 for token in request.prompt_token_ids if token).decode()
    names = prompt.partition("\n")[0].removeprefix("<tool_call>").split()
    shell = next((name for name in names if name in SHELLS), "")
    text = "There is no shell."
    if "[tool]" in prompt and MARK in prompt.rpartition("[tool]")[2]:
        text = "The shell works."
    elif shell:
        call = {"name": shell, "arguments": SHELLS[shell]}
        text = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
    said = [*(byte + 1 for byte in text.encode()), 0]
    return said[len(so_far) - len(request.prompt_token_ids)]


def main() -> None:
    """Serve until the process is ended."""
    backend = FakeBackend(next_token, tokens_per_step=64, card=replace(CARD, max_model_len=1 << 20))
    files = TokenizerFiles(Tokenizer(byte_tokenizer_core()), ChatTemplate(TEMPLATE, {}))
    service = GenerationService(backend, files, IngressConfig(model_id="fake", model_path="nowhere"), IngressMetrics())
    uvicorn.run(build_app(service, ApiKeys()), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")


if __name__ == "__main__":
    main()
