"""OOM recovery: a step without enough device memory fails its newest request and is computed again without it.

Keys may be rotated before a step. Without memory for that, the request that owns the keys fails; its blocks were never
shared. A plan's one-time changes have been made by then, so the plan stays the same except for that request's sequences. An
async step cannot be repeated, because its inputs are unknown: it is abandoned, no request fails, and its tokens are planned
again after the step before it; with recurrent state its sequences restart. Other errors of a step are defects or a lost device
and are not caught. `device_memory_guard` covers work outside of steps.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from windlass.engine.errors import OUT_OF_MEMORY, OUT_OF_MEMORY_ROTATING, DeviceMemoryError
from windlass.engine.execution.cuda_graphs import StepFuture
from windlass.engine.execution.model_runner import ModelRunner
from windlass.engine.interface.outputs import RequestOutput
from windlass.engine.scheduling.scheduler import Scheduler
from windlass.engine.scheduling.scheduler_output import ScheduledSequence, SchedulerOutput
from windlass.engine.scheduling.sequence import Sequence
from windlass.kernels import is_out_of_memory

_logger = logging.getLogger("windlass.engine")


def start_step(plan: SchedulerOutput, runner: ModelRunner, scheduler: Scheduler) -> StepFuture:
    """Start a plan; its newest requests fail while the device has no memory for it. If recurrent state may have changed, the
    other sequences restart in later steps from cached blocks. Raises any other error of the step."""
    failed: list[RequestOutput] = []
    step = _try_step(runner, plan, first=True)
    while step is None:
        # The error has been dropped, and with its traceback the tensors of the failed step.
        failed += _fail_unrotated(runner, scheduler) or _fail_newest(plan, scheduler)
        remaining = _live_items(plan, scheduler)
        if restart_sequences(plan, runner, scheduler):
            remaining = ()
        plan = replace(plan, sequences=remaining)
        _release_device_memory(runner)
        step = _try_step(runner, plan, first=False) if remaining else StepFuture(plan, [])
    step.failed = failed
    return step


def start_async_step(plan: SchedulerOutput, runner: ModelRunner, scheduler: Scheduler) -> StepFuture | None:
    """Start the plan of an async step; None if the device has no memory for it and it was abandoned."""
    step = _try_step(runner, plan, first=True)
    if step is not None:
        return step
    if runner.graphs is not None:
        runner.graphs.rows.record_end()  # work submitted before the failure still runs
    _release_device_memory(runner)
    pause = scheduler.async_scheduling.cancel_step(plan, has_changed_states=runner.has_changed_states)
    _logger.warning("the device had no memory for an async step: the next %d steps run synchronously", pause)
    return None


def restart_sequences(plan: SchedulerOutput, runner: ModelRunner, scheduler: Scheduler) -> bool:
    """Restart the remaining sequences of a failed plan in later steps if their recurrent state may have changed."""
    if runner.has_changed_states:
        scheduler.restart_sequences([item.seq_id for item in _live_items(plan, scheduler)])
    return runner.has_changed_states


@contextmanager
def device_memory_guard(what: str) -> Iterator[None]:
    """Raise DeviceMemoryError if the block runs out of device memory. what: named in the message."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise DeviceMemoryError(f"the device has no memory left for {what}: try again later") from None


def _live_items(plan: SchedulerOutput, scheduler: Scheduler) -> tuple[ScheduledSequence, ...]:
    """The scheduled sequences of a plan that have not ended."""
    live = {seq.seq_id for seq in scheduler.live_sequences()}
    return tuple(item for item in plan.sequences if item.seq_id in live)


def _release_device_memory(runner: ModelRunner) -> None:
    if (memory := runner.decoder.backend.device_memory) is not None:
        memory.release_cached()


def _try_step(runner: ModelRunner, plan: SchedulerOutput, *, first: bool) -> StepFuture | None:
    """The step, None if there was no memory for it."""
    try:
        if first and runner.graphs is not None:
            return runner.start(plan)
        return StepFuture(plan, runner.execute(plan) if first else runner.retry(plan))
    except Exception as error:
        if not is_out_of_memory(error) or not runner.can_retry(plan):
            raise
        return None


def _fail_unrotated(runner: ModelRunner, scheduler: Scheduler) -> list[RequestOutput]:
    """Fail the requests whose keys could not be rotated; empty if there are none, or they have failed already."""
    failed: list[RequestOutput] = []
    for seq in scheduler.live_sequences():
        if seq.seq_id in runner.failed_rerotations:
            failed += _fail(seq, scheduler, OUT_OF_MEMORY_ROTATING, "to rotate its keys")
    return failed


def _fail_newest(plan: SchedulerOutput, scheduler: Scheduler) -> list[RequestOutput]:
    planned = {item.seq_id for item in plan.sequences}
    newest = max(
        (seq for seq in scheduler.live_sequences() if seq.seq_id in planned), key=lambda seq: seq.arrival_number
    )
    return _fail(newest, scheduler, OUT_OF_MEMORY, f"for a step of {plan.num_tokens} tokens in which it is the newest")


def _fail(seq: Sequence, scheduler: Scheduler, error: str, purpose: str) -> list[RequestOutput]:
    request_id = seq.request.request_id
    extra = {"request_id": request_id}
    _logger.warning("request %s failed: the device has no memory %s", request_id, purpose, extra=extra)
    return scheduler.fail(request_id, DeviceMemoryError(error))
