"""Names of devices on the command line."""

from __future__ import annotations

import pytest

from quartet.errors import ConfigError
from quartet.planner.gpus import GPUS, parse_gpus


def test_a_name_gives_the_number_and_kind_of_devices() -> None:
    cluster = parse_gpus("8xH100-80GB", 2)
    assert (cluster.device, cluster.per_node, cluster.total) == (GPUS["H100-80GB"], 8, 16)
    assert parse_gpus("L4-24GB").total == 1
    assert str(cluster) == "2 nodes of 8xH100-80GB"


BAD_NAMES = (
    *("", "8", "8x", "H100", "8xH100", "8xh100-80gb", "0xH100-80GB", "-1xH100-80GB", " H100-80GB", "8xH100-80GBx"),
    *("8 x H100-80GB", "08xH100-80GB", "H100-96GB", "cpus", "2xcpu", "8xH100-80GB\n"),
)


@pytest.mark.parametrize("text", BAD_NAMES)
def test_other_names_are_errors_that_list_the_known_ones(text: str) -> None:
    with pytest.raises(
        ConfigError,
        match=r"--gpus .*expected cpu, or COUNTxNAME, with COUNT of at least 1 and NAME one of B200-180GB, ",
    ) as raised:
        parse_gpus(text)
    assert all(name in str(raised.value) for name in GPUS)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "nodes", "message"),
    [
        ("H100-80GB", 0, "--nodes 0: expected 1 to 128"),
        ("H100-80GB", 129, "--nodes 129: expected 1 to 128"),
        ("1025xH100-80GB", 1, "1025 devices"),
        ("512xH100-80GB", 3, "1536 devices"),
        ("cpu", 2, "cpu is this machine"),
    ],
)
def test_too_many_devices_are_an_error(text: str, nodes: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_gpus(text, nodes)


def test_every_name_says_the_memory_of_the_device() -> None:
    for name, device in GPUS.items():
        assert device.memory / 10**9 == pytest.approx(int(name.partition("-")[2].removesuffix("GB")), rel=0.075), name


def test_the_peak_of_the_cpu_is_measured() -> None:
    device = parse_gpus("cpu").device
    assert device.is_cpu
    assert device.memory > 2**28
    assert device.float_flops == device.half_flops > 1e8
    assert device.bandwidth > 1e8
