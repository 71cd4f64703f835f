from __future__ import annotations

import time

import pytest

from quartet.contract.status import DeviceReading
from quartet.services.orchestrator.telemetry.device_samples import MAX_SAMPLES, DeviceSample, DeviceSampler


@pytest.fixture
def sampler() -> DeviceSampler:
    return DeviceSampler(dict)


def test_a_service_of_two_gpus_has_their_mean_use_and_the_sums_of_memory_and_power() -> None:
    readings = (DeviceReading("cuda:0", 0.5, 10, 80, 300.0), DeviceReading("cuda:1", 1.0, 30, 80, 500.0))
    assert DeviceSample.of(2.0, readings) == DeviceSample(2.0, 0.75, 40, 800.0)


def test_what_no_device_reports_is_absent_and_not_zero(sampler: DeviceSampler) -> None:
    sampler.add("actor", DeviceSample.of(2.0, (DeviceReading("cuda:0", None, 10, 80, None),)))
    assert sampler.metrics() == {"device_memory_bytes_actor": 10}


def test_a_step_has_means_over_its_samples_and_over_generators(sampler: DeviceSampler) -> None:
    sampler.add("actor", DeviceSample(10.0, 0.2, 5, None))
    sampler.add("actor", DeviceSample(11.0, 0.4, 7, None))
    sampler.add("generator h:1", DeviceSample(11.0, 1.0, 1, 100.0))
    sampler.add("generator h:2", DeviceSample(11.0, 0.5, 2, 200.0))
    metrics = sampler.metrics()
    assert metrics["device_busy_actor"] == pytest.approx(0.3)
    assert metrics["device_memory_bytes_actor"] == 7
    assert metrics["device_busy_generator"] == 0.75
    assert metrics["device_power_watts_generator"] == 150.0


def test_the_timeline_takes_each_sample_once_and_a_short_step_keeps_the_last_metrics(sampler: DeviceSampler) -> None:
    sampler.add("actor", DeviceSample(9.0, 0.1, 5, None))
    sampler.add("actor", DeviceSample(10.5, 0.2, 6, None))
    assert sampler.take(10.0) == [{"service": "actor", "samples": [[0.5, 0.2, 6, None]]}]
    assert sampler.take(11.0) == []
    assert sampler.metrics()["device_busy_actor"] == 0.2


def test_a_long_step_has_a_bounded_number_of_samples(sampler: DeviceSampler) -> None:
    for at in range(10 * MAX_SAMPLES):
        sampler.add("actor", DeviceSample(float(at), 0.5, None, None))
    [actor] = sampler.take(0.0)
    assert MAX_SAMPLES / 2 <= len(actor["samples"]) <= MAX_SAMPLES


def test_a_service_that_does_not_answer_has_no_samples_and_delays_nobody() -> None:
    sampler = DeviceSampler(lambda: {"actor": "127.0.0.1:1"})
    begin = time.perf_counter()
    sampler._ask()
    sampler._ask()
    assert time.perf_counter() - begin < 5
    assert sampler.metrics() == {}
