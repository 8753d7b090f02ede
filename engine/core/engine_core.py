"""Engine core: loads a model and turns requests into outputs, one step at a time.

Owns scheduler, model runner, grammar compilation, adapters, the block store and the rank group. It runs in one thread, which
blocks while a step computes or, without other work, for files.

Async scheduling: while the device computes a step, the next one is planned and started if it needs nothing that the first one
samples. At most one started step has results that are not yet processed, and while there is one, nothing else is planned.

`ModelRunner.start` applies the one-time changes of a plan and starts its step. A step that finds no memory is continued by
`oom_recovery`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import replace
from pathlib import Path

import torch

from windlass.engine.cache.block_store import BlockStore
from windlass.engine.cache.kv_cache_budget import check_tier_options
from windlass.engine.core.adapter_manager import AdapterManager
from windlass.engine.core.engine_builder import EngineBuilder
from windlass.engine.core.flight_recorder import PlanWatcher
from windlass.engine.core.introspection import inspect
from windlass.engine.core.messages import ANNOUNCE_SECONDS, Announce, picklable_error
from windlass.engine.core.oom_recovery import (
    device_memory_guard,
    restart_sequences,
    start_async_step,
    start_step,
)
from windlass.engine.core.ranks import RankProcesses
from windlass.engine.errors import EngineError, QueueFullError, RequestError
from windlass.engine.execution.cuda_graphs import StepFuture
from windlass.engine.execution.dummy_runs import warm_up
from windlass.engine.execution.model_runner import ModelRunner
from windlass.engine.host_resources import threads_per_rank
from windlass.engine.interface.config import EngineConfig
from windlass.engine.interface.introspection import A, AttentionQuery, IntrospectionQuery
from windlass.engine.interface.model_info import AdapterInfo, AdapterSource
from windlass.engine.interface.outputs import EngineStats, PersistStats, RequestOutput
from windlass.engine.interface.request import EngineRequest
from windlass.engine.interface.validation import validate_distance_rules, validate_request, validate_task
from windlass.engine.model.loading.weights import Progress
from windlass.engine.model.lora import Adapter
from windlass.engine.rotary.rotary_policy import RotaryPlan
from windlass.engine.sampling.grammar import CompiledGrammar, GrammarCompiler, GrammarMasks
from windlass.engine.scheduling.scheduler import Scheduler
from windlass.engine.scheduling.scheduler_output import SchedulerOutput

_logger = logging.getLogger("windlass.engine")

_GRAMMAR_WAIT_SECONDS = 0.005  # that an engine without other work waits for a grammar at a time
_RESTORE_WAIT_SECONDS = 0.005  # that an engine without other work waits for files at a time
_STORE_SCAN_SECONDS = 2.0  # that a start may wait for the scan of stored blocks, while gigabytes of weights are hashed
_CAPTURE_SECONDS = 60.0  # for capturing decode steps; the last capture starts before they are over
_CLOSE_SECONDS = 3.0  # for saving blocks; the client waits five seconds for the engine to close


class EngineCore:
    """A loaded model that serves requests, described by `info`. Raises LoadError if it cannot be served as configured."""

    _store: BlockStore | None = None
    _rank_group: RankProcesses | None = None
    _plan_watcher: PlanWatcher | None = None

    def __init__(self, config: EngineConfig, progress: Progress | None = None) -> None:
        started = time.perf_counter()
        has_ranks = config.compute.tensor_parallel > 1
        usual = torch.get_num_threads()
        threads = threads_per_rank(config.compute, None if has_ranks else usual)
        if threads != usual:
            torch.set_num_threads(threads)
        check_tier_options(config)
        if has_ranks:
            self._rank_group = RankProcesses(config)
        try:
            self._load(config, progress, started)
        except BaseException:
            self._close_ranks()
            raise

    def _load(self, config: EngineConfig, progress: Progress | None, started: float) -> None:
        builder = EngineBuilder(config, progress, self._rank_group)
        spec = builder.model.decoder.spec
        self._deterministic = config.compute.deterministic
        self._planner = builder.planner
        self._grammars = GrammarCompiler(Path(config.model), spec.vocab_size, spec.eos_token_ids)
        self._grammar_queue = GrammarQueue(self._grammars, config.scheduling.max_waiting)
        self.adapters = AdapterManager(config.adapters, builder.model)
        adapters = self.adapters.loaded
        self._store = builder.open_block_store()
        self.runner = builder.make_runner(adapters, GrammarMasks(self._grammars), self._store)
        self.blocks = builder.make_blocks(self._store)
        self.info = builder.describe(adapters.infos, time.perf_counter() - started)
        self.scheduler = builder.make_scheduler(self.info, self.blocks, adapters, self._store)
        self._steps = StepExecutor(self.scheduler, self.runner)
        self._is_warm = False

    def prepare(self) -> None:
        """Prepare for the first request. Waits for the scan of stored blocks, so that it finds them.

        Warms up on a GPU, where kernels are compiled and decode steps captured. On a CPU this is left to idle time.
        """
        if self.runner.decoder.device.type != "cpu":
            self.warm_up()
        if self._store is not None:
            self._store.wait_scanned(_STORE_SCAN_SECONDS)

    def warm_up(self, interrupted: Callable[[], bool] = lambda: False, max_seconds: float = 0.5) -> None:
        """Run a few dummy steps, once, while there is no request: see `windlass.engine.execution.dummy_runs`.

        interrupted: asked between steps whether to end. On a device with CUDA graphs decode steps are captured, in addition to
        `max_seconds`.
        """
        if self._is_warm:
            return
        self._is_warm = True
        max_length = min(self.info.max_model_len, min(self.info.num_kv_blocks) * self.info.block_size)
        specs = self._planner.plan(1 if self._planner.auto else max_length, update="frozen").stage(1).specs
        warm_up(self.runner, specs, max_length=max_length, max_seconds=max_seconds, interrupted=interrupted)
        proposer = self.runner.proposer
        for graphs in (self.runner.graphs, None if proposer is None else proposer.graphs):
            if graphs is not None:
                graphs.capture(graphs.sizes, _CAPTURE_SECONDS)

    def prepare_in_idle_time(self) -> None:
        """Prepare the vocabulary for grammars in the background, which would delay other streams with the first grammar."""
        self._grammars.prepare_in_background()

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises RequestError if it cannot run as given, QueueFullError if too many wait."""
        validate_request(request, vocab_size=self.info.vocab_size)
        validate_task(request, self.info)
        self.adapters.check(request.adapter)
        if self._deterministic and request.reuse is not None and request.reuse.is_enabled:
            raise RequestError(
                "cache_reuse is not available on a deterministic server, as reused keys depend on the text that preceded a "
                "passage when it was computed: leave it out",
                "cache_reuse",
                "unsupported_value",
            )
        rotation = self.plan_rotation(request)
        validate_distance_rules(request, rotation)
        grammar = request.sampling.grammar
        compiled = None if grammar is None else self._grammars.known(grammar)
        if grammar is not None and compiled is None:
            self.scheduler.check_waiting_tokens(request, self._grammar_queue.num_tokens)
            self._grammar_queue.add(request, grammar)
        else:
            self.scheduler.add(request, rotation, compiled, self._grammar_queue.num_tokens)

    def plan_rotation(self, request: EngineRequest) -> RotaryPlan:
        """The rotary plan of this request from its first to its last token. Raises RequestError if it does not fit."""
        context_limits = self.info.size(request.context)
        longest = min(len(request.prompt_token_ids) + request.sampling.max_tokens, context_limits.rotary_length)
        return self._planner.plan(longest, request.rope_scaling, request.rope_update, exact=request.rope_exact)

    def abort(self, request_id: str) -> None:
        """Drop a request with all its samples and free its blocks at once; unknown ids are ignored."""
        self._grammar_queue.drop(request_id)
        self.scheduler.abort(request_id)
        self._release_finished()

    def end_sample(self, request_id: str, index: int) -> None:
        """End one sample without an output and free its blocks at once; the others continue. Unknown ones are ignored."""
        self.scheduler.end_sample(request_id, index)
        self._release_finished()

    def has_work(self) -> bool:
        return len(self._grammar_queue) > 0 or self.scheduler.has_work()

    def step(self, announce: Announce | None = None) -> list[RequestOutput]:
        """Plan and run one step, and process its results. Outputs of expired requests come first.

        announce: called with the expected seconds before a step that may take more than a second; None: unknown.
        """
        self.scheduler.wait_for_restore(_RESTORE_WAIT_SECONDS)
        outputs = self._admit_with_grammar() + self.scheduler.expire(time.monotonic())
        if not self.scheduler.has_work():
            self._release_finished()
            return outputs
        outputs += self._steps.step(announce, self._plan_watcher)
        self._release_finished()
        return outputs

    def _admit_with_grammar(self) -> list[RequestOutput]:
        """Queue the requests whose grammars are compiled. The outputs hold the errors of those that cannot run."""
        refused = []
        for request, compiled in self._grammar_queue.finished(pause=not self.scheduler.has_work()):
            try:
                if isinstance(compiled, EngineError):
                    raise compiled
                self.scheduler.add(request, self.plan_rotation(request), compiled, self._grammar_queue.num_tokens)
            except EngineError as error:
                refused.append(RequestOutput(request.request_id, error=error))
            except Exception as error:  # a defect triggered by one request must not end the others, as in `EngineLoop`
                extra = {"request_id": request.request_id}
                _logger.exception("request %s could not be added", request.request_id, extra=extra)
                self.scheduler.abort(request.request_id)
                refused.append(RequestOutput(request.request_id, error=picklable_error(error)))
        return refused

    def stats(self) -> EngineStats:
        """A snapshot that drains the `*_seconds` samples."""
        stats = self.scheduler.stats()
        return replace(
            stats,
            rotary_specs_live=self.runner.tables.num_live,
            num_waiting=stats.num_waiting + len(self._grammar_queue),
            adapters_loaded=len(self.adapters.loaded),
            adapter_bytes=self.adapters.loaded.num_bytes,
            persist=PersistStats() if self._store is None else self._store.stats(),
        )

    def close(self) -> None:
        """Write cached blocks that are not stored yet, within seconds, and end the ranks. Nothing may be called afterwards."""
        if self._store is not None:
            self._store.close(_CLOSE_SECONDS)
        self._close_ranks()

    def watch_plans(self, watcher: PlanWatcher) -> None:
        """Call `watcher` with each plan before it is computed."""
        self._plan_watcher = watcher

    def watch_ranks(self, gone: Callable[[str], None]) -> None:
        """Call `gone` from another thread, with the reason, when a rank has ended; no step succeeds from then on."""
        if self._rank_group is not None:
            self._rank_group.watch(gone)

    def _close_ranks(self) -> None:
        if self._rank_group is not None:
            self._rank_group.close()

    def inspect(self, query: IntrospectionQuery[A]) -> A:
        """Answer a query. Raises RequestError and DeviceMemoryError."""
        if self._rank_group is not None and isinstance(query, AttentionQuery):
            raise RequestError(
                "attention maps are not available for a model that is split over ranks: start without `compute.tensor_parallel`",
                "prompt",
                "unsupported_value",
            )
        with device_memory_guard("this picture"):
            return inspect(query, self.scheduler, self.runner, self._planner)

    def read_adapter(self, source: AdapterSource) -> Future[Adapter]:
        """Read and check an adapter in the background; pass the result to `add_adapter`. The future may fail with RequestError
        or DeviceMemoryError."""
        if self._rank_group is not None:
            refused: Future[Adapter] = Future()
            refused.set_exception(
                RequestError(
                    "adapters are not split over ranks: start without `compute.tensor_parallel`",
                    "model",
                    "unsupported_value",
                )
            )
            return refused
        return self.adapters.read_in_background(source)

    def add_adapter(self, adapter: Adapter) -> AdapterInfo:
        """Make an adapter available to requests. Raises RequestError if too many are loaded."""
        self.runner.join()
        return self.adapters.add(adapter)

    def drop_adapter(self, adapter_id: int) -> None:
        """Refuse further requests for an adapter, and drop it as soon as none runs; unknown ids are ignored."""
        self.adapters.unload(adapter_id)
        self._release_finished()

    def _release_finished(self) -> None:
        """Without work no step informs the runner of ended sequences: do so now, and drop unused adapters."""
        if len(self.runner.input_batch) > 0 and not self.scheduler.has_work():
            self.runner.apply(self.scheduler.schedule())
        if self.adapters.has_unloading:
            self.runner.join()
            waiting = [request.adapter for request in self._grammar_queue.requests]
            self.adapters.unload_unused(waiting + [seq.request.adapter for seq in self.scheduler.live_sequences()])


# -- parts of the core -------------------------------------------------------------------------------------------------
class StepTimeEstimator:
    """The slowest step of each size; 2^k to 2^(k+1) - 1 tokens are one size."""

    __slots__ = ("_slowest",)

    def __init__(self) -> None:
        self._slowest: dict[int, float] = {}

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Record the duration of a step."""
        size = num_tokens.bit_length()
        self._slowest[size] = max(seconds, self._slowest.get(size, 0.0))

    def announce(self, num_tokens: int, emit: Announce | None) -> None:
        """Call `emit` with the expected seconds of a step if they are unknown or more than ANNOUNCE_SECONDS."""
        seconds = self.seconds(num_tokens)
        if emit is not None and (seconds is None or seconds > ANNOUNCE_SECONDS):
            emit(seconds)

    def seconds(self, num_tokens: int) -> float | None:
        """The slowest step of this or a smaller size, or, if that is more, the slowest step of the nearest smaller size, doubled
        for each size in between. None if no step of this or a smaller size has been seen.
        """
        size = num_tokens.bit_length()
        known = [(seen, seconds) for seen, seconds in self._slowest.items() if seen <= size]
        if not known:
            return None
        nearest, seconds = max(known)
        return max(seconds * (1 << (size - nearest)), max(seconds for _, seconds in known))


class GrammarQueue:
    """Requests that wait for their grammar to be compiled, at most `max_waiting` at once."""

    def __init__(self, compiler: GrammarCompiler, max_waiting: int) -> None:
        self._compiler, self._max_waiting = compiler, max_waiting
        self._waiting: dict[str, tuple[EngineRequest, Future[CompiledGrammar]]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def requests(self) -> list[EngineRequest]:
        """The waiting requests."""
        return [request for request, _ in self._waiting.values()]

    @property
    def num_tokens(self) -> int:
        """Tokens of all waiting prompts."""
        return sum(len(request.prompt_token_ids) for request, _ in self._waiting.values())

    def add(self, request: EngineRequest, grammar: str) -> None:
        """Start to compile a request's grammar. Raises QueueFullError, and RequestError for an id that is waiting already."""
        if request.request_id in self._waiting:
            raise RequestError(f"request id {request.request_id!r} is in use", "request_id", "duplicate_request_id")
        if len(self._waiting) >= self._max_waiting:
            raise QueueFullError(
                f"{len(self._waiting)} requests are already waiting for their grammars: try again later"
            )
        self._waiting[request.request_id] = (request, self._compiler.compile_in_background(grammar, request.caller))

    def drop(self, request_id: str) -> None:
        """Remove a request; unknown ids are ignored."""
        if request_id in self._waiting:
            self._waiting.pop(request_id)[1].cancel()

    def finished(self, *, pause: bool) -> Iterator[tuple[EngineRequest, CompiledGrammar | EngineError]]:
        """Remove and yield the requests whose grammar is compiled or failed, oldest first.

        pause: wait a moment for the oldest one, since there is nothing else to do.
        """
        if pause and self._waiting:
            wait([next(iter(self._waiting.values()))[1]], _GRAMMAR_WAIT_SECONDS)
        for request_id, (request, compiled) in list(self._waiting.items()):
            if compiled.done():
                del self._waiting[request_id]
                yield request, _result_of(compiled)


def _result_of(compiled: Future[CompiledGrammar]) -> CompiledGrammar | EngineError:
    error = compiled.exception()
    if error is None:
        return compiled.result()
    if isinstance(error, EngineError):
        return error
    return EngineError(f"the grammar could not be compiled: {type(error).__name__}")


class StepExecutor:
    """Runs steps. With async scheduling it starts the next one before it takes the results of the current one."""

    def __init__(self, scheduler: Scheduler, runner: ModelRunner) -> None:
        self._scheduler, self._runner = scheduler, runner
        self._estimator = StepTimeEstimator()
        self._in_flight: StepFuture | None = None
        self._started_at = 0.0  # seconds; when the device began to compute only the step in flight

    def step(self, announce: Announce | None, watcher: PlanWatcher | None) -> list[RequestOutput]:
        """Outputs of one step. watcher: called with each plan before it is computed.

        The next step may be in flight afterwards, even if all its sequences have ended.
        """
        scheduler, started = self._scheduler, self._in_flight
        self._in_flight = None
        if started is not None and scheduler.async_scheduling.is_surplus(started.plan):
            started = None
        plan = scheduler.schedule() if started is None else started.plan
        self._estimator.announce(plan.num_tokens, announce)
        if started is None:
            self._started_at = time.perf_counter()
            self._notify_watcher(plan, watcher)
            started = start_step(plan, self._runner, scheduler)
        following = scheduler.async_scheduling.plan(started.plan) if started.in_flight else None
        if following is not None:
            self._notify_watcher(following, watcher)
            self._in_flight = start_async_step(following, self._runner, scheduler)
        results = started.results()
        now = time.perf_counter()
        seconds, self._started_at = now - self._started_at, now
        self._estimator.observe(started.plan.num_tokens, seconds)
        scheduler.observe(started.plan, seconds)
        plan, results = scheduler.async_scheduling.drop_surplus(started.plan, results)
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
