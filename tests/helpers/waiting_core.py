"""Scripted core that runs `max_num_seqs` requests at once, queues the others, and reports its steps like the engine.

The first token POISON ends the process in the request's first step.
"""

from __future__ import annotations

import itertools
import os
import signal
from types import SimpleNamespace

from helpers.scripted_core import ScriptedCore

from windlass.engine.core.flight_recorder import PlanWatcher
from windlass.engine.core.messages import Announce
from windlass.engine.interface.outputs import RequestOutput

POISON = 8


class WaitingCore(ScriptedCore):
    _watcher: PlanWatcher | None = None

    def watch_plans(self, watcher: PlanWatcher) -> None:
        self._watcher = watcher

    def step(self, announce: Announce) -> list[RequestOutput]:
        waiting = dict(self._running)
        self._running = dict(itertools.islice(waiting.items(), self._config.scheduling.max_num_seqs))
        for request_id in self._running:
            del waiting[request_id]
        self._tell()
        if any(running.request.prompt_token_ids[0] == POISON for running in self._running.values()):
            os.kill(os.getpid(), signal.SIGKILL)
        outputs = super().step(announce)
        self._running |= waiting
        return outputs

    def _tell(self) -> None:
        requests = [running.request for running in self._running.values()]
        live = [
            SimpleNamespace(seq_id=number, request=one, index=0, num_prompt_tokens=len(one.prompt_token_ids))
            for number, one in enumerate(requests)
        ]
        planned = [SimpleNamespace(seq_id=seq.seq_id, start=0, num_tokens=1) for seq in live]
        plan = SimpleNamespace(step=self._steps, new=planned, forks=[], sequences=planned, num_tokens=len(planned))
        if self._watcher is not None:
            self._watcher(plan, lambda: live)
