from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from quartet.contract.status import DeviceReading
from quartet.system.devices import CpuReader, DeviceMonitor, GpuReader
from tests.waiting import wait_until

GIB = 2**30
GPUS = {"GPU-aaaa-1": "H100", "GPU-bbbb-2": "H100", "MIG-cccc-3": "H100 MIG"}
"""Names of the devices by UUID. NVML numbers the first two; the third is an instance of a GPU."""


class NVMLError(Exception):
    pass


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return a module in the place of NVML's, with the devices in GPUS. Its handles are their UUIDs."""
    module, uuids = ModuleType("pynvml"), list(GPUS)

    def by_uuid(uuid: str) -> str:
        if uuid not in GPUS:
            raise NVMLError("not found")
        return uuid

    def of_whole_gpus(value: object) -> object:
        def read(uuid: str) -> object:
            if uuid.startswith("MIG"):
                raise NVMLError("not supported")
            return value

        return read

    module.__dict__.update(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: uuids[index],
        nvmlDeviceGetHandleByUUID=by_uuid,
        nvmlDeviceGetUUID=lambda uuid: uuid,
        nvmlDeviceGetName=lambda uuid: GPUS[uuid],
        nvmlDeviceGetUtilizationRates=of_whole_gpus(SimpleNamespace(gpu=43)),
        nvmlDeviceGetPowerUsage=of_whole_gpus(312_500),
        nvmlDeviceGetMemoryInfo=lambda uuid: SimpleNamespace(used=(1 + uuids.index(uuid)) * GIB, total=80 * GIB),
    )
    monkeypatch.setitem(sys.modules, "pynvml", module)
    # The tests' own torch has no CUDA device.
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: False)))
    return module


def used(environment: dict[str, str], *indices: int) -> list[int | None]:
    """Return the used memory in GiB of devices, which tells them apart. None: NVML does not know the device."""
    readings = GpuReader(indices, environment).read()
    return [None if each.memory_used_bytes is None else each.memory_used_bytes // GIB for each in readings]


def test_a_gpu_reports_how_busy_it_is_its_memory_and_its_power(nvml: ModuleType) -> None:
    assert GpuReader([0], {}).read() == (DeviceReading("cuda:0", 0.43, GIB, 80 * GIB, 312.5),)


@pytest.mark.parametrize(
    ("visible", "indices", "expected"),
    [
        (None, (0, 1), [1, 2]),
        ("1,0", (0, 1), [2, 1]),
        ("1", (0, 1), [2, None]),
        ("GPU-bbbb", (0,), [2]),
        ("MIG-cccc-3,GPU-aaaa-1", (0, 1), [3, 1]),
        ("GPU-unknown", (0,), [None]),
        ("", (0,), [None]),
        ("nothing", (0,), [None]),
    ],
)
def test_devices_are_matched_by_what_cuda_may_see(
    nvml: ModuleType, visible: str | None, indices: tuple[int, ...], expected: list[int | None]
) -> None:
    assert used({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}, *indices) == expected


def test_the_uuid_of_torch_counts_more_than_the_index(nvml: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimpleNamespace(
        is_initialized=lambda: True, get_device_properties=lambda index: SimpleNamespace(uuid="bbbb-2")
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    assert used({}, 0) == [2]


def test_unequal_gpus_are_matched_by_index_only_in_the_order_of_the_bus(
    nvml: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(GPUS, "GPU-bbbb-2", "L4")
    assert used({}, 1) == [None]
    assert used({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, 1) == [2]


def test_what_a_mig_instance_does_not_report_is_absent(nvml: ModuleType) -> None:
    (reading,) = GpuReader([0], {"CUDA_VISIBLE_DEVICES": "MIG-cccc-3"}).read()
    assert reading == DeviceReading("cuda:0", None, 3 * GIB, 80 * GIB, None)


def test_without_a_driver_a_gpu_has_no_values(nvml: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise NVMLError("driver not loaded")

    monkeypatch.setattr(nvml, "nvmlInit", fail)
    assert GpuReader([0], {}).read() == (DeviceReading("cuda:0"),)


def test_a_process_that_computes_is_busy_and_has_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quartet.system.devices.available_cores", lambda: 2)
    now = [0.0]
    reader = CpuReader(clock=lambda: now[0])
    end = time.process_time() + 0.02
    while time.process_time() < end:
        pass
    now[0] = 0.1
    (reading,) = reader.read()
    assert reading.name == "cpu"
    assert reading.busy is not None
    assert 0.1 <= reading.busy < 0.5
    if sys.platform == "linux":
        assert reading.memory_used_bytes is not None
        assert 10 * 2**20 < reading.memory_used_bytes < reading.memory_total_bytes
    assert reading.power_watts is None


def test_the_limit_of_a_control_group_is_the_memory_of_the_process(tmp_path: Path) -> None:
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("12345\n")
    (reading,) = CpuReader(tmp_path).read()
    assert reading.memory_total_bytes == 12345
    assert reading.memory_used_bytes is None


def test_a_monitor_keeps_the_last_readings() -> None:
    monitor = DeviceMonitor(interval=0.01)
    try:
        deadline = time.monotonic() + 30
        while not monitor.readings() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert [reading.name for reading in monitor.readings()] == ["cpu"]
    finally:
        monitor.close()


def test_devices_that_cannot_be_read_are_no_longer_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, broken = DeviceReading("cpu", 0.5, 1, 2), threading.Event()

    def read(_: CpuReader) -> tuple[DeviceReading, ...]:
        if broken.is_set():
            raise OSError("gone")
        return (reading,)

    monkeypatch.setattr(CpuReader, "read", read)
    monitor = DeviceMonitor(interval=0.001)
    wait_until(lambda: monitor.readings() == (reading,))
    broken.set()
    wait_until(lambda: monitor.readings() == ())
    monitor.close()
