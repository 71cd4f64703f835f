"""Regions of other processes, also of those in another namespace of processes, such as another container."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from quartet.errors import InvalidRequest, ServiceUnavailable
from quartet.weight_transfer import mapped_regions
from quartet.weight_transfer.descriptors import SharedDirectory
from quartet.weight_transfer.mapped_regions import MappedRegions, map_copy_on_write
from quartet.weight_transfer.messages import WeightsRequest
from quartet.weight_transfer.receiver import WeightMirror
from quartet.weight_transfer.shared_memory import Allocator, Region, SharedRegion, machine, region_of
from quartet.weight_transfer.source import WeightSource
from tests.unit.weight_transfer.samples import RUN, assert_equal, history, mapped, opened, pull, weights
from tests.waiting import wait_until

PUBLISHER = """
import signal, sys
from pathlib import Path
from quartet.weight_transfer.source import WeightSource
from quartet.weight_transfer.messages import WeightsRequest
from tests.unit.weight_transfer.samples import weights
source = WeightSource(num_threads=1, directory=Path(sys.argv[1]) if len(sys.argv) > 1 else None)
source.publish(0, weights().items(), run="run")
stream = source.stream(WeightsRequest("run", 0, machine=source.machine))
manifest = next(stream)
(region,) = manifest.regions
print(region.pid, region.fd, region.num_bytes, region.socket, flush=True)
print(source.machine, flush=True)
signal.pause()
"""
ISOLATED = ("unshare", "--user", "--map-current-user", "--pid", "--fork", "--kill-child", "--mount-proc")


@contextmanager
def publisher(*arguments: str, isolated: bool = False) -> Iterator[tuple[subprocess.Popen[str], SharedRegion, str]]:
    """Yield a process that shares version 0, its region, and its machine."""
    if isolated and subprocess.run([*ISOLATED, "true"], capture_output=True).returncode != 0:
        pytest.skip("this system lets no user create a namespace of processes")
    command = [*(ISOLATED if isolated else ()), sys.executable, "-c", PUBLISHER, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        pid, fd, size, *name = process.stdout.readline().split()
        yield process, SharedRegion(int(pid), int(fd), int(size), *name), process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


def assert_contains_the_weights(content: bytes) -> None:
    assert all(content.find(each.data.tobytes()) >= 0 for each in weights().values())


def test_memory_outlives_a_killed_process_only_while_it_is_used() -> None:
    before, regions = (opened(), mapped()), MappedRegions()
    with publisher() as (process, region, _):
        (held,) = regions.map([region])
        process.kill()
        process.wait()
        assert_contains_the_weights(held.tobytes())
        with pytest.raises(ServiceUnavailable, match=f"cannot map the shared memory of process {region.pid}: "):
            regions.map([region])
        del held
        assert (opened(), mapped()) == before


@pytest.mark.parametrize("way", ["proc", "socket"])
def test_the_mappings_of_a_killed_process_end_at_once(way: str, tmp_path: Path) -> None:
    before = opened(), mapped()
    regions = MappedRegions(SharedDirectory(tmp_path))
    with publisher(*([str(tmp_path)] if way == "socket" else [])) as (process, region, _):
        regions.map([region])
        assert mapped() == before[1] + 1
        process.kill()
        wait_until(lambda: (opened(), mapped()) == before)


def test_a_container_maps_the_memory_of_another_one_through_a_directory(tmp_path: Path) -> None:
    before, directory = (opened(), mapped()), SharedDirectory(tmp_path)
    with publisher(str(tmp_path), isolated=True) as (process, region, publishers_machine):
        assert publishers_machine == machine(directory) != machine()
        regions = MappedRegions(directory)
        (held,) = regions.map([region])
        assert_contains_the_weights(held.tobytes())
        assert regions.map([region])[0] is held
        # Its number and its descriptors in /proc are those of another process here, or of none.
        with pytest.raises((ServiceUnavailable, InvalidRequest)):
            regions.map([replace(region, socket="")])
        regions.map([region])
        del held
        process.kill()
        wait_until(lambda: (opened(), mapped()) == before)
        assert os.listdir(tmp_path) == [region.socket]
        with pytest.raises(ServiceUnavailable, match="cannot get the shared memory behind socket weights-"):
            regions.map([region])
    source = WeightSource(num_threads=1, directory=tmp_path)
    assert len(os.listdir(tmp_path)) == 1
    assert os.listdir(tmp_path) != [region.socket]
    source.close()
    assert os.listdir(tmp_path) == []


def test_without_a_directory_another_container_has_another_machine() -> None:
    with publisher(isolated=True) as (_, _, publishers_machine):
        assert publishers_machine.split()[1] != machine().split()[1]


@pytest.mark.parametrize("shared", [True, False])
def test_a_version_is_mapped_where_the_version_before_was(shared: bool, tmp_path: Path) -> None:
    directory = tmp_path if shared else None
    source = WeightSource(num_threads=2, directory=directory)
    mirror = WeightMirror(num_threads=2, directory=directory)
    mappings = set()
    for number, tensors in enumerate(history(4)):
        source.publish(number, tensors.items(), run=RUN)
        result = pull(mirror, source, number, tensors)
        assert result.way == "shared memory"
        assert_equal(result.weight_set, tensors)
        mappings |= {id(each) for each in mirror._mapped._mapped.values()}
        mirror.release()
    assert len(mappings) == 1
    mirror.close()
    source.close()


def test_the_mappings_of_another_process_replace_those_before(tmp_path: Path) -> None:
    before, sources = mapped(), [WeightSource(num_threads=1, directory=tmp_path) for _ in range(2)]
    mirror = WeightMirror(num_threads=1, directory=tmp_path)
    for number, source in enumerate(sources):
        source.publish(number, weights(number).items(), run=RUN)
        assert pull(mirror, source, number, weights(number)).way == "shared memory"
        mirror.release()
        assert mapped() == before + number + 2
    for store in (mirror, *sources):
        store.close()


def test_a_source_that_closes_ends_the_mappings(tmp_path: Path) -> None:
    before, source = mapped(), WeightSource(num_threads=1, directory=tmp_path)
    mirror = WeightMirror(num_threads=1, directory=tmp_path)
    source.publish(0, weights().items(), run=RUN)
    pull(mirror, source, 0, weights())
    mirror.release()
    source.close()
    wait_until(lambda: mapped() == before)
    mirror.close()


def test_without_a_sign_of_its_end_no_mapping_of_a_process_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mapped_regions.os, "pidfd_open")
    before, source, mirror = mapped(), WeightSource(num_threads=1), WeightMirror(num_threads=1)
    source.publish(0, weights().items(), run=RUN)
    result = pull(mirror, source, 0, weights())
    assert (result.way, mapped()) == ("shared memory", before + 2)
    del result
    assert mapped() == before + 1
    mirror.close()
    source.close()


def test_memory_that_is_no_sealed_region_is_refused(tmp_path: Path) -> None:
    file, regions = tmp_path / "file", MappedRegions()
    file.write_bytes(bytes(4096))
    reading, writing = os.pipe()
    with file.open("rb") as opened_file:
        for fd in (opened_file.fileno(), reading):
            with pytest.raises(
                InvalidRequest, match=r"descriptor \d+ of process \d+ is no sealed memory of 4096 bytes"
            ):
                regions.map([SharedRegion(os.getpid(), fd, 4096)])
    os.close(reading)
    os.close(writing)
    with pytest.raises(ServiceUnavailable, match="cannot map the shared memory of process"):
        regions.map([SharedRegion(os.getpid(), 2**20, 4096)])


def test_regions_of_several_processes_are_refused() -> None:
    region = Region(4096)
    places = [SharedRegion(pid, region.fd, 4096) for pid in (os.getpid(), os.getppid())]
    with pytest.raises(InvalidRequest, match="expected regions of one process"):
        MappedRegions().map(places)
    first, second = MappedRegions().map([places[0], places[0]])
    assert len(first) == len(second) == 4096


def test_a_socket_without_the_directory_is_no_way(tmp_path: Path) -> None:
    source = WeightSource(num_threads=1, directory=tmp_path)
    source.publish(0, weights().items(), run=RUN)
    stream = source.stream(WeightsRequest(RUN, 0, machine=source.machine))
    regions = next(stream).regions  # type: ignore[union-attr]
    with pytest.raises(ServiceUnavailable, match="it is shared through a directory that this process does not have"):
        MappedRegions().map(regions)
    with pytest.raises(ServiceUnavailable, match=r"does not share descriptor 1048576"):
        MappedRegions(SharedDirectory(tmp_path)).map([replace(regions[0], fd=2**20)])
    stream.close()
    source.close()


@pytest.mark.parametrize("way", ["proc", "socket"])
def test_mapped_memory_can_be_mapped_by_a_further_process_as_long_as_it_is_used(way: str, tmp_path: Path) -> None:
    regions = MappedRegions(SharedDirectory(tmp_path))
    with publisher(*([str(tmp_path)] if way == "socket" else [])) as (process, region, _):
        (held,) = regions.map([region])
        place = region_of(held[100:200][10:])
        assert place is not None
        assert (place[0].pid, place[0].num_bytes, place[0].socket, place[1]) == (os.getpid(), region.num_bytes, "", 110)
        process.kill()
        process.wait()
        code = (
            "import sys; from quartet.weight_transfer import mapped_regions, shared_memory;"
            "print(mapped_regions.map_copy_on_write(shared_memory.SharedRegion(*map(int, sys.argv[1:]))).tobytes().hex())"
        )
        arguments = [sys.executable, "-c", code, *map(str, (place[0].pid, place[0].fd, place[0].num_bytes))]
        other = subprocess.run(arguments, capture_output=True, text=True, check=True)
        assert bytes.fromhex(other.stdout) == held.tobytes()
        regions.clear()
        del held
        with pytest.raises(ServiceUnavailable):
            map_copy_on_write(place[0])


def test_memory_of_this_process_is_found_as_long_as_it_is_used() -> None:
    (memory,) = Allocator().allocate([1000])
    memory.data[:] = np.arange(1000) % 251
    data, offset = memory.data[100:200][10:], memory.offset + 110
    del memory
    place = region_of(data)
    assert place is not None
    assert place[1] == offset
    assert (map_copy_on_write(place[0])[offset : offset + 90] == data).all()
    del data
    with pytest.raises(ServiceUnavailable):
        map_copy_on_write(place[0])
    assert region_of(np.zeros(10, np.uint8)) is None


def test_what_is_written_to_a_copy_on_write_stays_there() -> None:
    (memory,) = Allocator().allocate([1000])
    memory.data[:] = 1
    place = region_of(memory.data)
    assert place is not None
    held = map_copy_on_write(place[0])
    held[memory.offset] = 2
    assert (held[memory.offset], memory.data[0]) == (2, 1)
    memory.data[10] = 3
    assert map_copy_on_write(place[0])[memory.offset + 10] == 3
