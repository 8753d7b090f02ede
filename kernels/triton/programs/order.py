"""Programs that follow each other: the next one starts while the one before ends, where GPUs can do that (capability 9.0).

`launch` asks for it. So every program says first that the next one may start, and then waits until those before it have ended.
What that brings is that the next one is on the device by then. Nothing was won by reading weights, which nobody writes, before
the wait.
"""

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq


@triton.jit
def follow():
    if cuda_capability_geq(9, 0):
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
