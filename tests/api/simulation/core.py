"""The real engine core with its scheduler and paged cache, and a runner that computes numbers instead of tensors.

The model, the rows of the rotary tables, grammars, and the files of adapters are replaced. The process provides simulated time
and faults.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from helpers.cache_invariants import assert_balanced, assert_consistent
from helpers.scripted_engine import model_info
from simulation.faults import INJECTED
from simulation.invariants import check_bounds
from simulation.model import EOS, GROUPS, PLANNER, VOCAB, PagedKeys, draw, frequencies_of, key_of

from windlass.engine.cache.block_manager import BlockManager
from windlass.engine.cache.kv_cache_spec import KVGroupLayout
from windlass.engine.core.adapter_manager import AdapterManager
from windlass.engine.core.engine_core import EngineCore, GrammarQueue, StepExecutor
from windlass.engine.errors import EngineError, RequestError
from windlass.engine.execution.input_batch import InputBatch
from windlass.engine.execution.model_runner import MultiStepState
from windlass.engine.interface.config import EngineConfig
from windlass.engine.interface.model_info import AdapterInfo, AdapterSource, ModelInfo
from windlass.engine.interface.request import EngineRequest
from windlass.engine.model.lora import LoadedAdapters
from windlass.engine.rotary.rope_scaling import RotarySpec
from windlass.engine.scheduling.scheduler import Scheduler
from windlass.engine.scheduling.scheduler_output import ScheduledSequence, SchedulerOutput, StepResult

if TYPE_CHECKING:
    from simulation.engine import EngineProcess
    from simulation.world import Plan


class SimulatedCore(EngineCore):
    """The real core over `simulation.model`."""

    def __init__(self, config: EngineConfig, process: EngineProcess) -> None:
        plan = process.world.plan
        self._deterministic = False
        self._planner = PLANNER
        self._process = process
        self._grammars = _NoGrammars()  # type: ignore[assignment]
        self._grammar_queue = GrammarQueue(self._grammars, config.scheduling.max_waiting)
        self.blocks = BlockManager([KVGroupLayout(plan.num_blocks, None)], plan.block_size)
        self.rows = CountedRows(2 * config.scheduling.max_num_seqs + 2)
        self.info = _info(config, plan)
        self.scheduler = Scheduler(
            config=config.scheduling,
            limits=self.info,
            blocks=self.blocks,
            rotary=self.rows,
            namespace=b"simulated",
            eos_token_ids=(EOS,),
            clock=process.world.loop.time,
            fresh_seed=lambda: 12345,
        )
        self.adapters = SimulatedAdapters(process)
        for source in config.adapters.sources:
            self.adapters.add(adapter_of(source))
        self.runner = SimulatedRunner(process, plan.num_blocks, plan.block_size, self.rows)  # type: ignore[assignment]
        self._steps = StepExecutor(self.scheduler, self.runner)
        self.info = replace(self.info, adapters=self.adapters.loaded.infos)

    def warm_up(self, interrupted: Callable[[], bool] = lambda: False, max_seconds: float = 0.0) -> None:
        """There are no kernels."""

    def add(self, request: EngineRequest) -> None:
        if self._process.world.happens("request has no memory", request.request_id):
            raise MemoryError(f"{INJECTED}: no memory for a request")
        super().add(request)

    def check_books(self) -> list[str]:
        """Return the resources that an engine without work still holds."""
        found = []
        if self.scheduler.has_work() or len(self._grammar_queue):
            found.append(f"{len(self.scheduler.live_sequences())} sequences are left")
        try:
            assert_consistent(self.blocks, (seq.cache for seq in self.scheduler.live_sequences()))
            if not self.scheduler.has_work():
                assert_balanced(self.blocks)
        except AssertionError as error:
            found.append(f"blocks: {error}")
        if self.rows.counts and not self.scheduler.has_work():
            found.append("rotary rows are held")
        if len(self.runner.input_batch) and not self.scheduler.has_work():
            found.append("the runner remembers sequences")
        return found


class _NoGrammars:
    def prepare_in_background(self) -> None:
        pass


class CountedRows:
    """Rows of the rotary tables by reference count."""

    def __init__(self, num_rows: int) -> None:
        self._free = list(range(num_rows))
        self._rows: dict[tuple[RotarySpec, ...], int] = {}
        self.counts: Counter[int] = Counter()

    @property
    def num_live(self) -> int:
        return len(self.counts)

    def acquire(self, specs: tuple[RotarySpec, ...]) -> int:
        if specs not in self._rows:
            self._rows[specs] = self._free.pop()
        self.counts[self._rows[specs]] += 1
        return self._rows[specs]

    def release(self, row: int) -> None:
        self.counts[row] -= 1
        if self.counts[row] == 0:
            del self.counts[row]
            self._rows = {specs: kept for specs, kept in self._rows.items() if kept != row}
            self._free.append(row)


class SimulatedAdapters(AdapterManager):
    """Adapters without files. Reading takes simulated time, and may fail."""

    def __init__(self, process: EngineProcess) -> None:
        self.loaded = LoadedAdapters(4, (), None)  # type: ignore[arg-type]
        self._unloading = set()
        self._world = process.world

    def read_in_background(self, source: AdapterSource) -> Future[Any]:
        found: Future[Any] = Future()

        def read() -> None:
            if self._world.happens("disk fails at an adapter", source.name):
                found.set_exception(RequestError(f"{INJECTED}: Input/output error", "lora_path", "invalid_adapter"))
                return
            found.set_result(adapter_of(source))

        self._world.loop.call_later(self._world.rng.uniform(0.01, 0.5), read)
        return found


@dataclass(frozen=True)
class _Adapter:
    info: AdapterInfo
    parts: tuple[Any, ...] = ()


def adapter_of(source: AdapterSource) -> Any:
    """Return a loaded adapter, which has no weights here."""
    return _Adapter(AdapterInfo(source.adapter_id, source.name, source.path, 8, ("q_proj",), 4096, source.name))


class SimulatedRunner:
    """Applies scheduler outputs as the real runner does, and stores numbers as keys. See `simulation.model`."""

    def __init__(self, process: EngineProcess, num_blocks: int, block_size: int, tables: CountedRows) -> None:
        self._process = process
        self.tables = tables
        self.graphs = None
        self.input_batch = InputBatch(1)
        self._keys = PagedKeys(num_blocks, block_size)
        self._frequencies: dict[int, int] = {}  # by row

    def join(self) -> None:
        """See `RankRunner.join`: no device is used."""

    def apply(self, plan: SchedulerOutput) -> None:
        self.input_batch.apply(plan)
        self._frequencies.update((row.row, frequencies_of(row.specs)) for row in plan.rotary_rows)
        for copy in plan.copies:
            self._keys.copy(copy.source, copy.target)

    def execute(self, plan: SchedulerOutput) -> list[StepResult]:
        world = self._process.world
        assert self._process.core is not None
        check_bounds(world, self._process.core.scheduler)
        self._process.last_planned = {self._process.request_of(item.seq_id) for item in plan.sequences}
        self._process.compute(world.rng.uniform(0.002, 0.04) + 0.0002 * plan.num_tokens)
        self.apply(plan)
        if plan.num_passes == 1:
            return self._pass(plan)
        burst = MultiStepState(plan, self.input_batch)
        while burst.has_next:
            burst.add(self._pass(burst.next_pass))
        return burst.results()

    def _pass(self, plan: SchedulerOutput) -> list[StepResult]:
        for item in plan.sequences:
            self._write(item)
        return [result for item in plan.sequences for result in self._read(item)]

    def _write(self, item: ScheduledSequence) -> None:
        live = self.input_batch.by_id[item.seq_id]
        table = self.input_batch.table(item.seq_id, 0).tolist()
        frequencies = self._frequencies[live.rotary_id]
        tokens = live.token_ids + list(item.draft)
        for position in range(item.start, item.start + item.num_tokens):
            key = key_of(tokens[position], position, frequencies, live.adapter)
            self._keys.write(table, position + live.layout.slot_offset, key)

    def _read(self, item: ScheduledSequence) -> list[StepResult]:
        if not item.samples:
            return []
        table = self.input_batch.table(item.seq_id, 0).tolist()
        if self._process.world.happens("logits are not finite", self._process.request_of(item.seq_id)):
            return [StepResult(seq_id, error=EngineError(f"{INJECTED}: not finite")) for seq_id in item.samples]
        last = item.start + item.num_tokens - len(item.draft)
        results = []
        for seq_id in item.samples:
            slot, drawn = self.input_batch.by_id[seq_id].slot, []
            known = len(slot.token_ids) - slot.num_prompt_tokens
            for count in range(len(item.draft) + 1):
                drawn.append(draw(self._keys.total(table, last + count), slot.seed, slot.index, known + count))
                if count == len(item.draft) or drawn[-1] != item.draft[count]:
                    break
            results.append(StepResult(seq_id, tuple(drawn)))
        return results


def _info(config: EngineConfig, plan: Plan) -> ModelInfo:
    return model_info(
        path=config.model,
        architecture="SimulatedForCausalLM",
        vocab_size=VOCAB,
        max_model_len=plan.max_model_len,
        trained_len=24,
        num_layers=1,
        block_size=plan.block_size,
        num_kv_blocks=(plan.num_blocks,),
        max_num_seqs=config.scheduling.max_num_seqs,
        max_num_batched_tokens=config.scheduling.max_num_batched_tokens,
        eos_token_ids=(EOS,),
        rotary_groups=GROUPS,
        model_rotary_groups=GROUPS,
        fingerprint="simulated",
    )
