"""The system call filter: numbers as libseccomp knows them, and a simulation of the filter on calls."""

from __future__ import annotations

import ctypes
import ctypes.util
import struct
from functools import cache

import pytest

from quartet.verifiers.sandbox.seccomp import ARCHITECTURES, CLONE, CLONE3, SOCKET, SYSTEM_CALLS, filter_program

ALLOW, KILL, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026


@cache
def instructions(machine: str) -> list[tuple[int, int, int, int]]:
    return [(code, yes, no, value) for code, yes, no, value in struct.iter_unpack("=HBBI", filter_program(machine))]


def decide(machine: str, number: int, first_argument: int = 0, architecture: int = 0) -> int:
    """Return what the filter of a machine does with a call, by interpreting its instructions."""
    program = instructions(machine)
    data = {0: number, 4: architecture or ARCHITECTURES[machine][1], 16: first_argument}
    place = value = 0
    while True:
        code, yes, no, operand = program[place]
        place += 1
        if code == 0x20:
            value = data[operand]
        elif code == 0x06:
            return operand
        else:
            holds = {0x15: value == operand, 0x35: value >= operand, 0x45: bool(value & operand)}[code]
            place += yes if holds else no


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_the_filter_refuses_its_calls_and_allows_others(machine: str) -> None:
    column = ARCHITECTURES[machine][0]
    refused = {numbers[column] for numbers in SYSTEM_CALLS.values()} - {None}
    special = {CLONE[column], CLONE3[column], SOCKET[column]}
    for number in range(500):
        if number not in special:
            assert decide(machine, number) == (EPERM if number in refused else ALLOW), number
    assert decide(machine, CLONE3[column]) == ENOSYS
    assert decide(machine, CLONE[column], 0x01200011) == ALLOW  # fork
    assert decide(machine, CLONE[column], 0x003D0F00) == ALLOW  # a thread
    assert decide(machine, CLONE[column], 0x10000011) == EPERM  # a user namespace
    assert decide(machine, CLONE[column], 0x40000011) == EPERM  # a network namespace
    assert decide(machine, SOCKET[column], 1) == ALLOW
    assert decide(machine, SOCKET[column], 2) == EPERM
    assert decide(machine, SOCKET[column], 40) == EPERM  # AF_VSOCK


def test_calls_of_another_architecture_or_of_x32_end_the_program() -> None:
    assert decide("x86_64", 0, architecture=0x40000003) == KILL
    assert decide("x86_64", 0x40000000) == KILL


def test_an_unknown_machine_has_no_filter() -> None:
    assert filter_program("sparc") == b""


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_the_numbers_are_those_of_libseccomp(machine: str) -> None:
    path = ctypes.util.find_library("seccomp")
    if path is None:
        pytest.skip("libseccomp is not installed")
    column, architecture = ARCHITECTURES[machine]
    resolve = ctypes.CDLL(path).seccomp_syscall_resolve_name_arch
    resolve.argtypes = [ctypes.c_uint32, ctypes.c_char_p]
    for name, numbers in {**SYSTEM_CALLS, "socket": SOCKET, "clone": CLONE, "clone3": CLONE3}.items():
        number = resolve(architecture, name.encode())
        # Below 0: the architecture does not have the call, or the library is older than it.
        if number >= 0:
            assert numbers[column] == number, name
