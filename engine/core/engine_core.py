"""The engine core: one object that loads a model and turns requests into outputs, one step at a time.

It holds the parts together (`parts` makes them): scheduler and runner, grammars that are compiled, adapters, blocks that are
kept elsewhere, and the other ranks of the model, whose processes it starts and ends. It runs in one thread, which blocks while
a step computes or, without other work, for files; and it knows no text.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import torch

from windlass.engine.api.adapters import AdapterInfo, AdapterSource
from windlass.engine.api.config import EngineConfig
from windlass.engine.api.looks import A, AttentionQuery, IntrospectionQuery
from windlass.engine.api.request import EngineRequest, EngineStats, PersistStats, RequestOutput
from windlass.engine.api.validation import validate_distance_rules, validate_request, validate_task
from windlass.engine.cache.persist.folder import check_tier_options
from windlass.engine.cache.persist.store import BlockStore
from windlass.engine.core.adapter_shelf import AdapterManager
from windlass.engine.core.black_box import PlanWatcher
from windlass.engine.core.compiling import GrammarQueue
from windlass.engine.core.description import describe
from windlass.engine.core.forecast import Announce
from windlass.engine.core.looking import inspect
from windlass.engine.core.pages import plan_kv_cache
from windlass.engine.core.parts import (
    allocate_cache,
    load_models,
    make_blocks,
    make_context_limits,
    make_planner,
    make_runner,
    make_scheduler,
    make_store,
    rotary_rows,
)
from windlass.engine.core.ranks.others import RankProcesses
from windlass.engine.core.ranks.room import group_kv_memory
from windlass.engine.core.shortage import device_memory_guard
from windlass.engine.core.steps import StepExecutor
from windlass.engine.core.threads import threads_per_rank
from windlass.engine.core.wire import picklable_error
from windlass.engine.errors import EngineError, RequestError
from windlass.engine.execution.warm_up import warm_up
from windlass.engine.model.adapters.adapter import Adapter
from windlass.engine.model.context_refusals import context_refusals
from windlass.engine.model.loading.weights import Progress
from windlass.engine.rotary.policy import RotaryPlan
from windlass.engine.sampling.grammar.compiler import GrammarCompiler
from windlass.engine.sampling.grammar.masks import GrammarMasks
from windlass.engine.sampling.sampler import Sampler

_logger = logging.getLogger("windlass.engine")

_RESTORE_WAIT_SECONDS = 0.005  # seconds that an engine without other work waits for files at a time
_STORE_SCAN_SECONDS = (
    2.0  # that a start may wait to know what files hold; the weights of some gigabytes are hashed meanwhile
)
_CAPTURE_SECONDS = 60.0  # in which decode steps are captured, the last one begun before they are over
_CLOSE_SECONDS = 3.0  # for what shall outlive it; whoever closes it waits for five


class EngineCore:
    """See the module. `info` describes what was loaded. Raises LoadError when the model cannot be served as configured."""

    _store: BlockStore | None = None
    _rank_group: RankProcesses | None = None  # the other ranks of the model
    _plan_watcher: PlanWatcher | None = None

    def __init__(self, config: EngineConfig, progress: Progress | None = None) -> None:
        started = time.perf_counter()
        several = config.compute.tensor_parallel > 1
        usual = torch.get_num_threads()
        threads = threads_per_rank(config.compute, None if several else usual)
        if threads != usual:
            torch.set_num_threads(threads)
        check_tier_options(config)
        if several:
            self._rank_group = RankProcesses(config)
        try:
            self._load(config, progress, started)
        except BaseException:
            self._close_ranks()
            raise

    def _load(self, config: EngineConfig, progress: Progress | None, started: float) -> None:
        others = self._rank_group
        models = load_models(config, progress, others)
        model, spec = models.model, models.model.decoder.spec
        plan = plan_kv_cache(config, model, models.draft, group_kv_memory(config, model, models.draft, others))
        self._deterministic = config.compute.deterministic
        self._planner = make_planner(config, model, plan)
        pages = allocate_cache(config, models, plan)
        self._grammars = GrammarCompiler(Path(config.model), spec.vocab_size, spec.eos_token_ids)
        self._grammar_queue = GrammarQueue(self._grammars, config.scheduling.max_waiting)
        self.adapters = AdapterManager(config.adapters, model)
        self._store = make_store(config, models, pages)
        self.runner = make_runner(
            config,
            model,
            plan,
            pages,
            sampler=Sampler(spec.vocab_size, model.decoder.backend, GrammarMasks(self._grammars)),
            adapters=self.adapters.loaded,
            store=self._store,
            send_command=None if others is None else others.send_command,
        )
        if others is not None:
            others.allocate_cache(plan, rotary_rows(config))
        self.blocks = make_blocks(config, spec, plan, self._store)
        self._limits = make_context_limits(config, spec, plan)
        self.scheduler = make_scheduler(
            config,
            models,
            self._limits,
            self.blocks,
            tables=pages.tables,
            adapters=self.adapters.loaded,
            store=self._store,
            alone=others is None,
        )
        self._steps = StepExecutor(self.scheduler, self.runner)
        self.info = replace(
            describe(config, model, models.draft, plan, time.perf_counter() - started),
            weight_bytes=models.weight_bytes,
            shift_context=self._limits.shift_context,
            max_total_tokens=self._limits.max_total_tokens,
            **context_refusals(spec),
            rotary_ladder=self._planner.ladder,
            rotary_auto=self._planner.auto,
            adapters=self.adapters.loaded.infos,
        )

    def warm_up(self, max_seconds: float = 0.5) -> None:
        """Run a few steps that nobody sees, before the first request: see `windlass.engine.execution.warm_up`.

        Decode steps are captured, where the device has graphs: for that no time is set here. Where blocks are kept in files, the
        first request finds them.
        """
        max_length = min(self.info.max_model_len, min(self.info.num_kv_blocks) * self.info.block_size)
        specs = self._planner.plan(1 if self._planner.auto else max_length, update="frozen").stage(1).specs
        warm_up(
            self.runner,
            specs,
            num_groups=len(self.blocks.pools),
            block_size=self.info.block_size,
            max_length=max_length,
            max_seconds=max_seconds,
        )
        proposer = self.runner.proposer
        for graphs in (self.runner.graphs, None if proposer is None else proposer.graphs):
            if graphs is not None:
                graphs.capture(graphs.sizes, _CAPTURE_SECONDS)
        if self._store is not None:
            self._store.wait_scanned(_STORE_SCAN_SECONDS)

    def prepare_in_idle_time(self) -> None:
        """Have the vocabulary for grammars made in the background: it would hold up the streams beside the first grammar."""
        self._grammars.prepare_in_background()

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises RequestError when it cannot run as given, QueueFullError when too many wait."""
        validate_request(request, vocab_size=self.info.vocab_size)
        validate_task(request, self.info)
        self.adapters.check(request.adapter)
        if self._deterministic and request.reuse is not None and request.reuse.is_enabled:
            raise RequestError(
                "cache_reuse: this server is deterministic, and what stood before a passage when it was computed would "
                "show in the answer: leave it out",
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
        """The rotation of this request from its first to its last token. Raises RequestError where it does not fit."""
        context_limits = self._limits.context_limits(request.context)
        longest = min(len(request.prompt_token_ids) + request.sampling.max_tokens, context_limits.rotary_length)
        return self._planner.plan(longest, request.rope_scaling, request.rope_update, exact=request.rope_exact)

    def abort(self, request_id: str) -> None:
        """Drop a request with all its samples and free what it holds at once; unknown ids are ignored."""
        self._grammar_queue.drop(request_id)
        self.scheduler.abort(request_id)
        self._release_finished()

    def end_sample(self, request_id: str, index: int) -> None:
        """End one sample, without an output, and free what it holds at once; the others go on. Unknown ones are ignored."""
        self.scheduler.end_sample(request_id, index)
        self._release_finished()

    def has_work(self) -> bool:
        return len(self._grammar_queue) > 0 or self.scheduler.has_work()

    def step(self, announce: Announce | None = None) -> list[RequestOutput]:
        """Plan, run and account for one step. Outputs of requests whose deadline has passed come first. announce: see `Core`."""
        self.scheduler.wait_for_restore(_RESTORE_WAIT_SECONDS)
        outputs = self._admit_with_grammar() + self.scheduler.expire(time.monotonic())
        if not self.scheduler.has_work():
            self._release_finished()
            return outputs
        outputs += self._steps.step(announce, self._plan_watcher)
        self._release_finished()
        return outputs

    def _admit_with_grammar(self) -> list[RequestOutput]:
        """Queue the requests whose grammars are compiled; the outputs say why some of them cannot run."""
        refused = []
        for request, compiled in self._grammar_queue.finished(pause=not self.scheduler.has_work()):
            try:
                if isinstance(compiled, EngineError):
                    raise compiled
                self.scheduler.add(request, self.plan_rotation(request), compiled, self._grammar_queue.num_tokens)
            except EngineError as reason:
                refused.append(RequestOutput(request.request_id, error=reason))
            except Exception as defect:  # met by one request, it must not end the others: as where a request is added
                known = {"request_id": request.request_id}
                _logger.exception("request %s could not be added", request.request_id, extra=known)
                self.scheduler.abort(request.request_id)
                refused.append(RequestOutput(request.request_id, error=picklable_error(defect)))
        return refused

    def stats(self) -> EngineStats:
        """A snapshot; the `*_seconds` samples are handed out once."""
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
        """Write what cached blocks are not in files yet, as far as there is time. The engine is used no more."""
        if self._store is not None:
            self._store.close(_CLOSE_SECONDS)
        self._close_ranks()

    def watch_plans(self, watcher: PlanWatcher) -> None:
        """See `Core`."""
        self._plan_watcher = watcher

    def watch_ranks(self, gone: Callable[[str], None]) -> None:
        """See `Core`."""
        if self._rank_group is not None:
            self._rank_group.watch(gone)

    def _close_ranks(self) -> None:
        if self._rank_group is not None:
            self._rank_group.close()

    def inspect(self, question: IntrospectionQuery[A]) -> A:
        """See `windlass.engine.core.looking`; raises DeviceMemoryError besides."""
        if self._rank_group is not None and isinstance(question, AttentionQuery):
            raise RequestError(
                "attention is not shown where a model is split over ranks: start without `compute.tensor_parallel`",
                "prompt",
                "unsupported_value",
            )
        with device_memory_guard("this picture"):
            return inspect(question, self.scheduler, self.blocks, self.runner, self._planner)

    def read_adapter(self, source: AdapterSource) -> Future[Adapter]:
        """Read and check an adapter beside the steps; `add_adapter` takes the result. It fails with RequestError or
        DeviceMemoryError."""
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
        """Let requests use it from now on. Raises RequestError where there are too many."""
        self.runner.join()
        return self.adapters.add(adapter)

    def drop_adapter(self, adapter_id: int) -> None:
        """Take no further requests for it, and drop it as soon as none runs; unknown ids are ignored."""
        self.adapters.unload(adapter_id)
        self._release_finished()

    def _release_finished(self) -> None:
        """Without work no step comes that tells the runner who has ended: tell it now, so that it keeps nothing of them."""
        if len(self.runner.sequences) > 0 and not self.scheduler.has_work():
            self.runner.apply(self.scheduler.schedule())
        if self.adapters.has_unloading:
            self.runner.join()
            waiting = [request.adapter for request in self._grammar_queue.requests]
            self.adapters.unload_unused(waiting + [seq.request.adapter for seq in self.scheduler.live_sequences()])
