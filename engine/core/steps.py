"""Carries out steps: plans them, has them computed, and takes in what they give.

While a device computes a step by itself, the next one is planned and handed to it, where that needs nothing the first one draws.
So there is at most one step under way whose plan's results are not taken in, and while one is, nothing else is planned.

The life of a plan, by who calls what (`shortage` and `ModelRunner` have the methods):

* `start_step` a plan, with none under way. It calls `ModelRunner.start`, once. That follows the plan: what changes once is changed then.
  Where a device goes on by itself, the step that comes back is under way; else its tokens are computed and drawn.
* Where `start` failed for want of memory behind that (`can_retry`), `start_step` takes the newest request out and calls
  `ModelRunner.repeat` with the rest of the same plan, as often as it takes. Nothing else of a plan is ever done twice. Where layers
  may have changed states (`has_changed_states`), the rest is not repeated: its sequences begin again in later steps.
* `start_async_step` a plan whose `ahead` is not 0, behind one that is under way, whose results nobody knows. It calls `start`, once;
  where there is no memory, the plan is given up and nothing is repeated: its tokens are planned again behind the other's. Where
  layers may have changed states, its sequences begin again once those results are taken in.
* `results` of a step, once, before anything else is planned; the one that was begun ahead is the next to give its own.

`ModelRunner.execute` is `start` and its results at once, and `ModelRunner.follow` a plan with nothing to compute.
"""

from __future__ import annotations

import time

from windlass.engine.api.request import RequestOutput
from windlass.engine.core.black_box import PlanWatcher
from windlass.engine.core.forecast import Announce, StepTimeEstimator
from windlass.engine.core.shortage import StartedPlan, restart_sequences, start_async_step, start_step
from windlass.engine.execution.runner import ModelRunner
from windlass.engine.scheduling.plan import SchedulerOutput
from windlass.engine.scheduling.scheduler import Scheduler


class StepExecutor:
    def __init__(self, scheduler: Scheduler, runner: ModelRunner) -> None:
        self._scheduler, self._runner = scheduler, runner
        self._forecast = StepTimeEstimator()
        self._in_flight: StartedPlan | None = None
        self._started_at = 0.0  # when the step that is under way had the device for itself, seconds

    def step(self, announce: Announce | None, watcher: PlanWatcher | None) -> list[RequestOutput]:
        """One step's outputs. watcher: told of each plan before it is computed.

        The next step may be under way afterwards, whether or not anybody is left whom it concerns.
        """
        scheduler, started = self._scheduler, self._in_flight
        self._in_flight = None
        if started is not None and scheduler.ahead.is_surplus(started.plan):
            started = None
        plan = scheduler.schedule() if started is None else started.plan
        self._forecast.announce(plan.num_tokens, announce)
        if started is None:
            self._started_at = time.perf_counter()
            self._notify_watcher(plan, watcher)
            started = start_step(plan, self._runner, scheduler)
        following = scheduler.ahead.plan(started.plan) if started.step.in_flight else None
        if following is not None:
            self._notify_watcher(following, watcher)
            self._in_flight = start_async_step(following, self._runner, scheduler)
        results = started.step.results()
        now = time.perf_counter()
        seconds, self._started_at = now - self._started_at, now
        self._forecast.observe(started.plan.num_tokens, seconds)
        scheduler.observe(started.plan, seconds)
        plan, results = scheduler.ahead.drop_surplus(started.plan, results)
        outputs: list[RequestOutput] = []
        for result in results:
            if result.error is not None:
                outputs += scheduler.fail_sequence(result.seq_id, result.error)
        outputs += started.failed + scheduler.update(plan, results)
        if following is not None and self._in_flight is None:
            restart_sequences(following, self._runner, scheduler)
        return outputs

    def _notify_watcher(self, plan: SchedulerOutput, watcher: PlanWatcher | None) -> None:
        if watcher is not None:
            watcher(plan, self._scheduler.live_sequences)
