"""The demo pair: its tokenizer, and the shapes, initial weights and hidden states of its two Llamas.

The tokenizer is a byte-level BPE of 4,096 entries with a chat template. Its saved folder serves both
`tokenizers.Tokenizer.from_file` and `AutoTokenizer`. The target is deep and narrow on purpose: at this size the layers
determine the cost of a step, so a two-layer draft is cheap.
"""

import copy
import json
from collections.abc import Iterable
from pathlib import Path

import jinja2
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

VOCAB_SIZE = 4096
END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|end|>"
SPECIAL_TOKENS = (END_OF_TEXT, "<|system|>", "<|user|>", "<|assistant|>", END_OF_TURN)
MAX_CONTEXT_TOKENS = 8192
# Tools and their calls have Hermes's format; a tool's answer is a user's turn, as in Qwen.
CHAT_TEMPLATE = (
    "{% if tools %}<|system|>"
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}\n\n{% endif %}"
    "You may call one or more of these functions to answer the user:\n<tools>\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "</tools>\nFor each call write a JSON object with its name and arguments between these tags:\n"
    '<tool_call>\n{"name": <name>, "arguments": <arguments>}\n</tool_call><|end|>'
    "{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}"
    "<|user|><tool_response>\n{{ message['content'] }}\n</tool_response><|end|>"
    "{% elif not (tools and loop.first and message['role'] == 'system') %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}"
    '\n<tool_call>\n{"name": {{ call["function"]["name"] | tojson }}, '
    '"arguments": {{ call["function"]["arguments"] | tojson }}}\n</tool_call>'
    "{% endfor %}<|end|>"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Runs of spaces stay with their line break, so one token is an indentation; at most three digits are one token.
SPLIT_PATTERN = r"\n[ ]*| ?[A-Za-z]+|\d{1,3}| ?[^\sA-Za-z\d]+|[^\S\n]+(?=\S)|\s+|[^\s]"


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Return a byte-level BPE learned from `texts`: any text round-trips, special tokens take the first ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = _byte_level_splitter()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _byte_level_splitter() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": list(SPECIAL_TOKENS[1:]),
        "model_max_length": MAX_CONTEXT_TOKENS,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer saved in `folder`."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def render_chat(messages: list[dict[str, str]], add_generation_prompt: bool = False) -> str:
    """Return the text of a chat under the tokenizer's template."""
    return str(jinja2.Template(CHAT_TEMPLATE).render(messages=messages, add_generation_prompt=add_generation_prompt))


REPETITION_PENALTY = 1.2  # for generation_config.json: small models fall into loops on their own text
END_OF_TEXT_ID, END_OF_TURN_ID = map(SPECIAL_TOKENS.index, (END_OF_TEXT, END_OF_TURN))


def llama_config(num_layers: int, hidden_size: int, mlp_size: int, num_heads: int, num_kv_heads: int) -> LlamaConfig:
    """Return a Llama over the demo vocabulary with heads of 64 and tied embeddings."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=mlp_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=64,
        max_position_embeddings=MAX_CONTEXT_TOKENS,
        rope_parameters={"rope_type": "default", "rope_theta": 50_000.0},
        tie_word_embeddings=True,
        bos_token_id=END_OF_TEXT_ID,
        eos_token_id=END_OF_TEXT_ID,
        pad_token_id=None,
    )
    config._attn_implementation = "sdpa"
    return config


def target_config() -> LlamaConfig:
    """12 layers of width 256: 10.5 M parameters."""
    return llama_config(num_layers=12, hidden_size=256, mlp_size=768, num_heads=4, num_kv_heads=2)


def draft_config() -> LlamaConfig:
    """2 layers of width 128: 1.0 M parameters; four heads, because so small a model mostly copies."""
    return llama_config(num_layers=2, hidden_size=128, mlp_size=384, num_heads=4, num_kv_heads=2)


def new_model(config: LlamaConfig, seed: int, device: torch.device | None = None) -> LlamaForCausalLM:
    """Return a fresh float32 model; the last projection of each branch is zero, so a layer starts as identity."""
    torch.manual_seed(seed)
    with device or torch.device("cpu"):
        model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return model


def hidden_states(model: LlamaForCausalLM, ids: Tensor, positions: Tensor) -> Tensor:
    """Return the normed last hidden states [B, T, hidden] under plain causal attention.

    `positions` [B, T] may skip (`tokens.skipped_positions`); LlamaModel.forward would treat a skip as the border of a
    document.
    """
    trunk = model.model
    hidden = trunk.embed_tokens(ids)  # [B, T, hidden]
    position_embeddings = trunk.rotary_emb(hidden, position_ids=positions)
    for layer in trunk.layers:
        hidden = layer(hidden, attention_mask=None, position_embeddings=position_embeddings)
    normed: Tensor = trunk.norm(hidden)
    return normed


def compile_layers(model: LlamaForCausalLM) -> None:
    """Compile the decoder layer once for all layers of the model; each new shape is traced again."""
    for layer in model.model.layers:
        layer.compile(dynamic=False)


def num_parameters(model: LlamaForCausalLM) -> int:
    """Parameters, the tied embedding counted once."""
    return sum(parameter.numel() for parameter in model.parameters())


def save_checkpoint(model: LlamaForCausalLM, folder: Path, repetition_penalty: float | None = None) -> None:
    """Write a bfloat16 copy of the model into `folder`, with these sampling defaults.

    The model itself keeps its dtype.
    """
    rounded = LlamaForCausalLM(copy.deepcopy(model.config)).bfloat16()
    rounded.load_state_dict(model.state_dict())
    rounded.generation_config = GenerationConfig(
        bos_token_id=END_OF_TEXT_ID,
        eos_token_id=[END_OF_TEXT_ID, END_OF_TURN_ID],
        pad_token_id=END_OF_TEXT_ID,
        repetition_penalty=repetition_penalty,
    )
    folder.mkdir(parents=True, exist_ok=True)
    rounded.save_pretrained(folder)


def load_checkpoint(
    folder: Path, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> LlamaForCausalLM:
    """Return the model saved in `folder`, in evaluation mode."""
    with device or torch.device("cpu"):
        loaded: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        return loaded
