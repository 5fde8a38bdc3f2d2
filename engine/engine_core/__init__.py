"""The engine: requests in, committed tokens out, one `step` at a time.

It needs no Ray and no server:

    from engine.config import EngineConfig, ModelConfig
    from engine.engine_core.loading import load_engine
    from protos.messages import GenerateRequest, SamplingParams

    core = load_engine(EngineConfig(ModelConfig("models/demo/target")))
    prompt_token_ids = (1, 2, 3)  # from the model's tokenizer
    core.add(GenerateRequest("first", prompt_token_ids, SamplingParams(temperature=0.0, max_tokens=8)))
    while core.has_work:
        for chunk in core.step():
            print(chunk.request_id, chunk.token_ids, chunk.finish_reason)
"""

from engine.engine_core.core import EngineCore, Speculation

__all__ = ["EngineCore", "Speculation"]
