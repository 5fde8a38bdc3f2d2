"""Devices that a plan may use, from `hardware.yaml`."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.planning.tables import entry_of

_LINK_LATENCY_S = 10e-6  # of one all-reduce between GPUs of a group, assumed


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
        return _LINK_LATENCY_S + 2 * (num_devices - 1) / num_devices * num_bytes / (self.link_gb_s * 1e9)
