"""A stand-in for the pynvml module that answers from a recorded topology."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

RECORDS = Path(__file__).parent / "topologies"


class RecordedNvml:
    """The calls that `cluster.topology` makes, on a machine we saw, or one made after the documentation."""

    NVML_P2P_CAPS_INDEX_NVLINK = 2
    NVML_P2P_STATUS_OK = 0
    NVMLError = RuntimeError

    def __init__(self, name: str) -> None:
        self._record = json.loads((RECORDS / f"{name}.json").read_text())

    def nvmlInit(self) -> None:
        pass

    def nvmlShutdown(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return self._record["num_devices"]

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return self._of(handle)["name"].encode()

    def nvmlDeviceGetUUID(self, handle: int | tuple[int, int]) -> str:
        return f"GPU-{handle}" if isinstance(handle, int) else f"MIG-{handle[0]}-{handle[1]}"

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: int) -> int:
        return 7 if self._record.get("num_instances") else 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: int, index: int) -> tuple[int, int]:
        if index >= self._record["num_instances"]:
            raise self.NVMLError("not found")
        return handle, index

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return self._record.get("cuda_version", 13000)

    def nvmlDeviceGetMemoryInfo(self, handle: int | tuple[int, int]) -> SimpleNamespace:
        if isinstance(handle, int):
            return SimpleNamespace(total=self._of(handle)["memory_bytes"])
        return SimpleNamespace(total=self._record["memory_bytes"] // self._record["num_instances"])

    def nvmlDeviceGetP2PStatus(self, left: int, right: int, capability: int) -> int:
        assert capability == self.NVML_P2P_CAPS_INDEX_NVLINK
        return 0 if [left, right] in self._record["nvlinks"] else 6

    def _of(self, index: int) -> dict[str, Any]:
        """The record of one device: that of all, but where it is of another kind."""
        return self._record.get("other_kinds", {}).get(str(index), self._record)
