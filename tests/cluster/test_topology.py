"""NVLink groups, read from recorded machines."""

import pytest

from cluster.topology import NodeTopology, read_topology
from tests.cluster.recorded_nvml import RecordedNvml


def recorded(name: str) -> NodeTopology:
    return read_topology(RecordedNvml(name))


def test_an_nvswitch_node_is_one_group():
    assert recorded("nvswitch_8").groups == (tuple(range(8)),)


def test_bridges_make_pairs():
    assert recorded("bridged_pairs").groups == ((0, 1), (2, 3))


def test_without_nvlink_every_device_stands_alone():
    assert recorded("pcie_only").groups == ((0,), (1,), (2,), (3,))


def test_a_machine_without_a_driver_has_no_devices():
    class NoDriver(RecordedNvml):
        def nvmlInit(self) -> None:
            raise self.NVMLError("driver not loaded")

    topology = read_topology(NoDriver("nvswitch_8"))
    assert topology.groups == ()
    assert str(topology) == "no GPU"


def test_a_driver_that_does_not_tell_means_no_nvlink():
    class Silent(RecordedNvml):
        def nvmlDeviceGetP2PStatus(self, left: int, right: int, capability: int) -> int:
            raise self.NVMLError("not supported")

    assert len(read_topology(Silent("nvswitch_8")).groups) == 8


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("bridged_pairs", "4 GPUs (NVIDIA A100 80GB PCIe), NVLink groups {0,1} {2,3}"),
        ("pcie_only", "4 GPUs (NVIDIA L4), NVLink groups {0} {1} {2} {3}"),
    ],
)
def test_topology_describes_itself_for_error_messages(name: str, text: str):
    assert str(recorded(name)) == text
