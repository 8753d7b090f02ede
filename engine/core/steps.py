"""Carries out steps: plans them, has them computed, and takes in what they give.

While a device computes a step by itself, the next one is planned and handed to it, where that needs nothing the first one draws.
So there is at most one step under way whose plan's results are not taken in, and while one is, nothing else is planned.

The life of a plan, by who calls what (`shortage` and `Runner` have the methods):

* `begin` a plan, with none under way. It calls `Runner.start`, once. That follows the plan: what changes once is changed then.
  Where a device goes on by itself, the step that comes back is under way; else its tokens are computed and drawn.
* Where `start` failed for want of memory behind that (`can_repeat`), `begin` takes the newest request out and calls
  `Runner.repeat` with the rest of the same plan, as often as it takes. Nothing else of a plan is ever done twice. Where layers
  may have changed states (`has_changed_states`), the rest is not repeated: its sequences begin again in later steps.
* `begin_ahead` a plan whose `ahead` is not 0, behind one that is under way, whose results nobody knows. It calls `start`, once;
  where there is no memory, the plan is given up and nothing is repeated: its tokens are planned again behind the other's. Where
  layers may have changed states, its sequences begin again once those results are taken in.
* `results` of a step, once, before anything else is planned; the one that was begun ahead is the next to give its own.

`Runner.execute` is `start` and its results at once, and `Runner.follow` a plan with nothing to compute.
"""

from __future__ import annotations

import time

from windlass.engine.api.request import RequestOutput
from windlass.engine.core.black_box import PlanWatcher
from windlass.engine.core.forecast import Announce, StepForecast
from windlass.engine.core.shortage import Begun, begin, begin_again, begin_ahead
from windlass.engine.execution.runner import Runner
from windlass.engine.scheduling.plan import SchedulerOutput
from windlass.engine.scheduling.scheduler import Scheduler


class EngineSteps:
    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self._scheduler, self._runner = scheduler, runner
        self._forecast = StepForecast()
        self._under_way: Begun | None = None
        self._began = 0.0  # when the step that is under way had the device for itself, seconds

    def step(self, announce: Announce | None, watcher: PlanWatcher | None) -> list[RequestOutput]:
        """One step's outputs. watcher: told of each plan before it is computed.

        The next step may be under way afterwards, whether or not anybody is left whom it concerns.
        """
        scheduler, begun = self._scheduler, self._under_way
        self._under_way = None
        if begun is not None and scheduler.ahead.concerns_nobody(begun.plan):
            begun = None
        plan = scheduler.schedule() if begun is None else begun.plan
        self._forecast.announce(plan.num_tokens, announce)
        if begun is None:
            self._began = time.perf_counter()
            self._tell(plan, watcher)
            begun = begin(plan, self._runner, scheduler)
        following = scheduler.ahead.plan(begun.plan) if begun.step.under_way else None
        if following is not None:
            self._tell(following, watcher)
            self._under_way = begin_ahead(following, self._runner, scheduler)
        results = begun.step.results()
        now = time.perf_counter()
        seconds, self._began = now - self._began, now
        self._forecast.observe(begun.plan.num_tokens, seconds)
        scheduler.observe(begun.plan, seconds)
        plan, results = scheduler.ahead.without_surplus(begun.plan, results)
        outputs: list[RequestOutput] = []
        for result in results:
            if result.error is not None:
                outputs += scheduler.fail_sequence(result.seq_id, result.error)
        outputs += begun.failed + scheduler.update(plan, results)
        if following is not None and self._under_way is None:
            begin_again(following, self._runner, scheduler)
        return outputs

    def _tell(self, plan: SchedulerOutput, watcher: PlanWatcher | None) -> None:
        if watcher is not None:
            watcher(plan, self._scheduler.live_sequences)
