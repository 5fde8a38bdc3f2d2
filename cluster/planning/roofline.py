"""The seconds of one pass of a model on devices: bytes over bandwidth, operations over speed.

The larger of both if a device reads and computes at the same time, else their sum.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.planning.model_shape import ModelShape, entry_of


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """One device: memory in GiB, GB/s, TFLOP/s by dtype, a pass's shares of both, USD per hour.

    `overlaps` is True if a pass reads and computes at the same time. `host_ms` is the host's cost of a pass.
    """

    name: str
    memory_gib: float
    bandwidth_gb_s: float
    peak_tflops: dict[str, float]
    link_gb_s: float
    bandwidth_use: float
    flops_use: float
    host_ms: float
    overlaps: bool
    price_usd_per_hour: float
    source: str
    date: str

    @classmethod
    def of(cls, name: str) -> DeviceSpec:
        """Return a device of the table.

        Raises:
            ConfigError: the table has no such device.
        """
        entry = entry_of("hardware", name, "or take the nearest and give its figures by --bandwidth, --tflops, --price")
        return cls(name=name.lower(), **{**entry, "date": str(entry["date"])})

    def bytes_per_s(self, num_devices: int) -> float:
        """Return the bytes per second that a pass reads on `num_devices` devices."""
        return self.bandwidth_gb_s * 1e9 * self.bandwidth_use * num_devices

    def flops_per_s(self, dtype: str, num_devices: int) -> float:
        """Return the operations per second of products in `dtype`, or in bf16 if the table lacks `dtype`."""
        return self.peak_tflops.get(dtype, self.peak_tflops["bf16"]) * 1e12 * self.flops_use * num_devices

    def all_reduce_s(self, num_bytes: float, num_devices: int) -> float:
        """Return the seconds of one sum among the devices of a replica, 0 with one."""
        if num_devices == 1:
            return 0.0
        # 10 us: assumed latency of one all-reduce between GPUs of a group.
        return 10e-6 + 2 * (num_devices - 1) / num_devices * num_bytes / (self.link_gb_s * 1e9)


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
