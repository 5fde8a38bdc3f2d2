"""The seconds of one pass of a model on devices: bytes over bandwidth, operations over speed.

The larger of both if a device reads and computes at the same time, else their sum.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.planning.hardware import DeviceSpec
from cluster.planning.model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class PassCost:
    """A pass: the bytes it reads, the operations it computes, and the seconds of each."""

    weight_bytes: float
    kv_bytes: float
    flops: float
    bytes_s: float
    flops_s: float
    overlaps: bool
    extra_s: float  # sums between devices, and the host

    @property
    def seconds(self) -> float:
        busy_s = max(self.bytes_s, self.flops_s) if self.overlaps else self.bytes_s + self.flops_s
        return busy_s + self.extra_s

    @property
    def is_memory_bound(self) -> bool:
        return self.bytes_s >= self.flops_s


def pass_cost(
    shape: ModelShape, device: DeviceSpec, num_devices: int, num_rows: int, num_streams: int, context: int
) -> PassCost:
    """Return the cost of a pass: `num_rows` rows in all, and `context` tokens per stream.

    The keys and values of a stream are read once, however many rows it has.
    """
    weight_bytes = shape.read_bytes(num_rows)
    kv_bytes = num_streams * context * shape.kv_bytes
    flops = num_rows * (shape.row_flops + context * shape.attention_flops)
    sums = 2 * shape.num_layers * device.all_reduce_s(2.0 * num_rows * shape.hidden_size, num_devices)
    return PassCost(
        weight_bytes=weight_bytes,
        kv_bytes=kv_bytes,
        flops=flops,
        bytes_s=(weight_bytes + kv_bytes) / device.bytes_per_s(num_devices),
        flops_s=flops / device.flops_per_s(shape.dtype, num_devices),
        overlaps=device.overlaps,
        extra_s=sums + device.host_ms / 1000,
    )
