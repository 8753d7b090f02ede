"""Programs that follow each other: the next one starts while the one before ends, where GPUs can do that (capability 9.0).

`launch` asks for it. So every program says first that the next one may start, and reads nothing that another one wrote before it
has waited for that one.
"""

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq


@triton.jit
def let_next_start():
    if cuda_capability_geq(9, 0):
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_last():
    """Until all programs that were started before have ended."""
    if cuda_capability_geq(9, 0):
        tl.extra.cuda.gdc_wait()


@triton.jit
def follow():
    let_next_start()
    wait_for_last()
