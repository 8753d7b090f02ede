"""Programs that follow each other: the next one starts while the one before ends, where GPUs can do that (capability 9.0).

`launch` asks for it. So every program says first that the next one may start, and then waits until those before it have ended. What
it brings is that the next one is on the device by then; weights that nobody writes were read no sooner by reading them before.
"""

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq


@triton.jit
def follow():
    if cuda_capability_geq(9, 0):
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
