import resource

import pytest
import torch

from quartet.models.torch_threads import KEPT_BLOCK_BYTES, keep_freed_memory

PAGES = KEPT_BLOCK_BYTES // resource.getpagesize()


def test_memory_of_freed_tensors_is_used_again_without_page_faults() -> None:
    if not keep_freed_memory():
        pytest.skip("the C library is not glibc")

    faults = [_page_faults_of_two_tensors() for _ in range(4)]

    assert min(faults[1:]) < PAGES // 10


def _page_faults_of_two_tensors() -> int:
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    first, second = (torch.ones(KEPT_BLOCK_BYTES // 4 - 1024) for _ in range(2))
    del first, second
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
