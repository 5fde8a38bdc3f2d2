"""The least cost of a model's step: the bytes it must read and the products it must compute."""

from __future__ import annotations

from dataclasses import dataclass

from bench.wide_fixture import WideShape


@dataclass(frozen=True, slots=True)
class DeviceSpeed:
    """The speed that the device reached when it did nothing else; 0 where it was not measured."""

    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True, slots=True)
class ModelCost:
    """A Llama of this shape with numbers of `itemsize` bytes, its keys and values with `kv_itemsize`."""

    shape: WideShape
    itemsize: int
    kv_itemsize: int

    @property
    def num_weights(self) -> int:
        """Numbers that every pass reads: all matrices except the embedding, where it reads a row per token."""
        shape = self.shape
        heads = shape.head_dim * (2 * shape.num_heads + 2 * shape.num_kv_heads)
        layer = shape.hidden_size * (heads + 3 * shape.mlp_size)
        return shape.num_layers * layer + shape.vocab_size * shape.hidden_size

    @property
    def weight_bytes(self) -> int:
        return self.num_weights * self.itemsize

    @property
    def kv_bytes_per_token(self) -> int:
        shape = self.shape
        return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * self.kv_itemsize

    def step_bytes(self, num_sequences: int, num_rows: int, context: int) -> int:
        """Read by a step of `num_rows` per sequence after `context` tokens: the weights once, and the KV in sight."""
        return self.weight_bytes + num_sequences * (context + num_rows) * self.kv_bytes_per_token

    def step_flops(self, num_sequences: int, num_rows: int, context: int) -> int:
        shape, rows = self.shape, num_sequences * num_rows
        attention = 4 * rows * (context + num_rows) * shape.num_heads * shape.head_dim * shape.num_layers
        return 2 * self.num_weights * rows + attention

    def floor_s(self, speed: DeviceSpeed, num_sequences: int, num_rows: int, context: int) -> float:
        """Return the longer of reading and computing; the two overlap at best."""
        reading = self.step_bytes(num_sequences, num_rows, context) / speed.bytes_per_s
        computing = self.step_flops(num_sequences, num_rows, context) / speed.flops_per_s
        return max(reading, computing)


def most_tokens(memory_bytes: float, cost: ModelCost, draft: ModelCost, other_bytes: float) -> int:
    """Tokens whose KV fits next to both models' weights, where the draft keeps as many tokens as the target."""
    room = memory_bytes - cost.weight_bytes - draft.weight_bytes - other_bytes
    return max(0, int(room // (cost.kv_bytes_per_token + draft.kv_bytes_per_token)))
