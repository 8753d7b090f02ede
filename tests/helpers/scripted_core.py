"""Engine core without torch that is controlled by the prompt's first token, for tests of the code around an engine.

Token i of every sample is 100 + i. Special first tokens: CRASH raises in the third step, KILL ends the process by
SIGKILL there, HANG sleeps there, SPIN computes there endlessly, REFUSE is a RequestError, BUG an unexpected exception in
`add`, FAIL an error output.
Environment variables (inherited by the child): SCRIPT_STEP_SECONDS, SCRIPT_LOAD_SECONDS, SCRIPT_LOAD_ERROR,
SCRIPT_LOAD_GATE (a file that the load waits for), SCRIPT_STEP_BRAKE (a file: while it exists, a step takes
a quarter of a second more), SCRIPT_RELOAD_FILE (a marker: the second load with it fails), SCRIPT_VOCAB_SIZE.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from windlass.engine.core.flight_recorder import PlanWatcher
from windlass.engine.core.messages import Announce
from windlass.engine.errors import LoadError, QueueFullError, RequestError
from windlass.engine.interface.config import EngineConfig
from windlass.engine.interface.introspection import A, IntrospectionQuery
from windlass.engine.interface.model_info import AdapterInfo, AdapterSource, ModelInfo
from windlass.engine.interface.outputs import EngineStats, RequestOutput
from windlass.engine.interface.request import EngineRequest
from windlass.engine.rotary.rope_scaling import RopeScaling, RotaryBase, RotaryGroup, apply_scaling

CRASH, KILL, HANG, REFUSE, BUG, FAIL, SPIN = 1, 2, 3, 4, 5, 6, 7
FIRST_TOKEN = 100


@dataclass(slots=True)
class _Running:
    request: EngineRequest
    produced: int = 0
    ended: set[int] = field(default_factory=set)


class ScriptedCore:
    def __init__(self, config: EngineConfig, progress: Callable[[str, int, int], None] | None = None) -> None:
        for done in range(3):
            if progress:
                progress("reading weights", done + 1, 3)
            time.sleep(float(os.environ.get("SCRIPT_LOAD_SECONDS", "0")) / 3)
        if gate := os.environ.get("SCRIPT_LOAD_GATE"):
            while not Path(gate).exists():
                time.sleep(0.01)
        if error := os.environ.get("SCRIPT_LOAD_ERROR"):
            raise LoadError(error)
        if marker := os.environ.get("SCRIPT_RELOAD_FILE"):
            if Path(marker).exists():
                raise LoadError("the second load fails")
            Path(marker).touch()
        self._config = config
        self._step_seconds = float(os.environ.get("SCRIPT_STEP_SECONDS", "0"))
        self._running: dict[str, _Running] = {}
        self._steps = 0
        self._tokens = 0
        self._aborts = 0
        self.prepared_ahead = 0
        self._queue_samples: list[float] = []
        self.info = scripted_info(config)

    def add(self, request: EngineRequest) -> None:
        first = request.prompt_token_ids[0]
        if first == REFUSE:
            raise RequestError("no such thing", "prompt", "refused")
        if first == BUG:
            raise KeyError("a defect")
        if len(self._running) >= self._config.scheduling.max_waiting:
            raise QueueFullError("the queue is full", retry_after=7.0)
        self._running[request.request_id] = _Running(request)
        self._queue_samples.append(1.0)

    def read_adapter(self, source: AdapterSource) -> Future[AdapterSource]:
        found: Future[AdapterSource] = Future()
        found.set_result(source)
        return found

    def add_adapter(self, source: AdapterSource) -> AdapterInfo:
        if not readable(source):
            raise RequestError("no adapter", "lora_path", "invalid_adapter")
        return adapter_info(source)

    def drop_adapter(self, adapter_id: int) -> None:
        pass

    def watch_plans(self, watcher: PlanWatcher) -> None:
        pass

    def watch_ranks(self, gone: Callable[[str], None]) -> None:
        pass

    def warm_up(self, interrupted: Callable[[], bool]) -> None:
        pass

    def prepare_in_idle_time(self) -> None:
        self.prepared_ahead += 1

    def close(self) -> None:
        pass

    def abort(self, request_id: str) -> None:
        if self._running.pop(request_id, None):
            self._aborts += 1

    def end_sample(self, request_id: str, index: int) -> None:
        if (running := self._running.get(request_id)) is not None:
            running.ended.add(index)
            if len(running.ended) == running.request.sampling.n:
                del self._running[request_id]

    def has_work(self) -> bool:
        return bool(self._running)

    def step(self, announce: Announce) -> list[RequestOutput]:
        time.sleep(self._step_seconds)
        if (brake := os.environ.get("SCRIPT_STEP_BRAKE")) and Path(brake).exists():
            time.sleep(0.25)
        self._steps += 1
        outputs = []
        for request_id, running in list(self._running.items()):
            first, sampling = running.request.prompt_token_ids[0], running.request.sampling
            token = running.produced
            running.produced += 1
            if token == 2:
                self._act(first)
            if first == FAIL:
                outputs.append(RequestOutput(request_id, error=RequestError("failed in flight")))
                del self._running[request_id]
                continue
            last = running.produced == sampling.max_tokens
            for index in set(range(sampling.n)) - running.ended:
                outputs.append(
                    RequestOutput(request_id, index, (FIRST_TOKEN + token,), finish_reason="length" if last else None)
                )
            self._tokens += sampling.n - len(running.ended)
            if last:
                del self._running[request_id]
        return outputs

    def inspect(self, question: IntrospectionQuery[A]) -> A:
        raise RequestError("there is nothing to see", "prompt", "refused")

    def stats(self) -> EngineStats:
        samples, self._queue_samples = self._queue_samples, []
        return EngineStats(
            num_running=len(self._running),
            num_steps=self._steps,
            generation_tokens=self._tokens,
            recomputed_tokens={"aborts": self._aborts},
            queue_seconds=tuple(samples),
        )

    @staticmethod
    def _act(first: int) -> None:
        if first == CRASH:
            raise ValueError("scripted crash")
        if first == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        if first == HANG:
            time.sleep(1000)
        while first == SPIN:
            pass


def readable(source: AdapterSource) -> bool:
    """Return whether an adapter can be loaded: not from a folder named bad, or with a file that marks it as removed."""
    return not source.path.endswith("bad") and not Path(source.path, "gone").exists()


def adapter_info(source: AdapterSource) -> AdapterInfo:
    return AdapterInfo(source.adapter_id, source.name, source.path, 8, ("q_proj",), 4096, "d")


def scripted_info(config: EngineConfig) -> ModelInfo:
    """Return a plausible model description."""
    groups = (RotaryGroup("full_attention", RotaryBase(10000.0, 32, 32, 512), RopeScaling()),)
    return ModelInfo(
        path=config.model,
        architecture="ScriptedForCausalLM",
        vocab_size=int(os.environ.get("SCRIPT_VOCAB_SIZE", "4096")),
        max_model_len=config.max_model_len or 512,
        shift_context=config.max_model_len or 512,
        trained_len=512,
        dtype="float32",
        weight_dtype="float32",
        kv_cache_dtype="float32",
        quantization=None,
        device="cpu",
        num_parameters=5_400_000,
        num_layers=6,
        block_size=config.cache.block_size,
        num_kv_blocks=(64,),
        kv_cache_bytes=64 * 2**20,
        kv_bytes_per_token=6144,
        max_num_seqs=config.scheduling.max_num_seqs,
        max_num_batched_tokens=config.scheduling.max_num_batched_tokens,
        eos_token_ids=(0,),
        rotary_groups=apply_scaling(groups, config.rotary.scaling),
        model_rotary_groups=groups,
        weight_bytes=20 * 2**20,
        load_seconds=0.1,
        notices=("this model is scripted",),
        adapters=tuple(adapter_info(source) for source in config.adapters.sources if readable(source)),
    )


class SpinningCore(ScriptedCore):
    """Core that produces outputs as fast as possible, to measure the path between the processes."""

    def step(self, announce: Announce) -> list[RequestOutput]:
        self._step_seconds = 0.0
        return super().step(announce)
