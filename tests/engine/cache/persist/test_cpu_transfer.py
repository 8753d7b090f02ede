"""Transfer of blocks out of pages in main memory."""

import numpy as np
import pytest
import torch

from windlass.engine.cache.host_tier import CPUBlockTransfer


@pytest.mark.parametrize("layers", [1, 2])
def test_a_copy_stays_as_it_was_when_the_page_changes(layers: int) -> None:
    planes = [torch.zeros(layers, 8, 4, 3), torch.zeros(layers, 8, 4, dtype=torch.int8)]
    copies = CPUBlockTransfer([planes]).read_block(0, 5, 0.0)
    for plane, copy in zip(planes, copies, strict=True):
        assert copy.shape == (layers, plane[0, 0].nbytes) and copy.flags.c_contiguous
        assert not np.shares_memory(copy, plane.view(torch.uint8).numpy())
        plane.fill_(1)
        assert not copy.any()
