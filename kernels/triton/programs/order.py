"""Programs that follow each other: the next one starts while the one before ends, where GPUs can do that (capability 9.0).

`launch` asks for it. So every program says first that the next one may start, and then waits until those before it have ended.
What that brings is that the next one is on the device by then. Nothing was won by reading weights, which nobody writes, before
the wait. Of the programs of one launch, the last to end can go on with what all of them have made, which spares a launch.
"""

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq


@triton.jit
def wait_for_predecessor():
    if cuda_capability_geq(9, 0):
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def is_last_program(ticket):
    """Whether the programs (i, 0), (i, 1) ... that share a ticket, 0 at first, have come here before this one: what they wrote or
    added before is seen by loads past the processor's own cache (`.cg`)."""
    tl.debug_barrier()
    return tl.atomic_add(ticket, 1, sem="acq_rel") == tl.num_programs(1) - 1
