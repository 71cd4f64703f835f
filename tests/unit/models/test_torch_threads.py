import subprocess
import sys

import pytest

from quartet.models.torch_settings import keep_freed_memory

PROGRAM = """
import ctypes, resource
from quartet.models.torch_settings import set_up_torch

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]

def page_faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [libc.malloc(2**24) for _ in range(6)]
    for block in blocks:
        ctypes.memset(block, 1, 2**24)
    for block in blocks:
        libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

set_up_torch(1)
print(min(page_faults() for _ in range(10)))
"""


@pytest.mark.slow
def test_freed_memory_is_used_again_without_page_faults() -> None:
    if not keep_freed_memory():
        pytest.skip("the C library is not glibc")

    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)

    assert int(result.stdout) < 100
