"""Kernel launch: grid, device, programmatic dependent launch (capability 9.0), and tile size helpers.

Every kernel first lets its successor start and then waits for its predecessors (`wait_for_predecessor`).
"""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import cuda_capability_geq


@triton.jit
def wait_for_predecessor():
    if cuda_capability_geq(9, 0):
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def is_last_program(ticket):
    """Whether this is the last of the programs (i, 0), (i, 1) ... that share a ticket (initially 0) to arrive. Loads that
    bypass the L1 cache (`.cg`) then see what the others wrote or added."""
    tl.debug_barrier()
    return tl.atomic_add(ticket, 1, sem="acq_rel") == tl.num_programs(1) - 1


ELEMENT_TYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.uint8: tl.uint8,
    torch.int8: tl.int8,
}


def launch(kernel: Any, grid: tuple[int, ...], on: Tensor, *operands: Any, **sizes: Any) -> None:
    """Run the kernel on a grid, on the device of `on`; no-op for an empty grid."""
    if 0 in grid:
        return
    if on.is_cuda and _next_starts_early(on.device.index):
        sizes["launch_pdl"] = True
    with torch.cuda.device_of(on):  # type: ignore[no-untyped-call]
        kernel[grid](*operands, **sizes)


@functools.cache
def _next_starts_early(device: int) -> bool:
    """Whether kernels overlap with their predecessor (programmatic dependent launch); see the module."""
    return torch.cuda.get_device_capability(device) >= (9, 0)


class Device(NamedTuple):
    """Device properties for tile sizes: multiprocessors, bytes of shared memory per program, compute capability."""

    processors: int = 1
    shared_memory: int = 99 << 10  # of the smaller GPUs
    capability: tuple[int, int] = (8, 0)

    @classmethod
    def of(cls, device: torch.device) -> "Device":
        if device.type != "cuda":
            return SMALL
        found = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
        capability = torch.cuda.get_device_capability(device)
        return cls(found["multiprocessor_count"], found["max_shared_mem"], capability)


SMALL = Device()


@triton.constexpr_function
def power_of_two(size: int, least: int = 1) -> int:
    """The smallest power of two that is at least as large as both, for launches and inside kernels."""
    return max(least, int(triton.next_power_of_2(max(size, 1))))


def strided(x: Tensor) -> Tensor:
    """x [..., D] with a contiguous last dim."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()
