"""Work in a decode step, counted: it grows neither with the context nor with the number of rotary scalings."""

from __future__ import annotations

import gc
import sys
from collections import Counter, UserList
from dataclasses import replace
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.device import DEVICE
from helpers.engines import greedy, make_core
from helpers.marks import slow_after, slow_but
from helpers.tiny_models import make_model
from torch.utils._python_dispatch import TorchDispatchMode

from windlass.engine.cache.prefix_cache import HashChain
from windlass.engine.cache.sequence_cache import BlockTable, SequenceCache
from windlass.engine.core.engine_core import EngineCore
from windlass.engine.execution.input_batch import InputBatch
from windlass.engine.interface.context import ContextRule
from windlass.engine.interface.request import EngineRequest, SamplingParams
from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.engine.scheduling.scheduler_output import PlannedChunk, SchedulerOutputBuilder
from windlass.kernels import Backend, select_backend

LENGTHS = (1024, 8192)


class CountedReads(UserList[int]):
    """List that counts the elements read by index, slice or iteration."""

    reads = 0

    def __getitem__(self, index: Any) -> Any:
        found = self.data[index]
        CountedReads.reads += len(found) if isinstance(index, slice) else 1
        return found

    def __iter__(self) -> Any:
        for i in range(len(self.data)):
            yield self[i]


def decoding(core: EngineCore, length: int, sampling: SamplingParams) -> None:
    for i in range(2):
        prompt = [3 + (7 * j + i) % 50 for j in range(length + 4)]
        core.add(EngineRequest(f"{length}-{i}", prompt, sampling))
    while any(seq.num_output_tokens < 2 for seq in core.scheduler.live_sequences()):
        core.step()


def count(core: EngineCore) -> tuple[int, int]:
    """Elements of token lists and block tables read, and Python lines run, by one step."""
    for seq in core.scheduler.live_sequences():
        for table in seq.cache.tables:
            table.blocks = CountedReads(table.blocks)
        seq.token_ids = CountedReads(seq.token_ids)
        live = core.runner.input_batch.by_id[seq.seq_id]
        live.token_ids = CountedReads(live.token_ids)
        live.slot = replace(live.slot, token_ids=live.token_ids)
    lines = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    CountedReads.reads = 0
    gc.collect()
    gc.disable()  # garbage collection is not work of the step
    sys.settrace(trace)
    try:
        outputs = core.step()
    finally:
        sys.settrace(None)
        gc.enable()
    assert sum(len(output.token_ids) for output in outputs) == 2
    return CountedReads.reads, lines


GREEDY = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
PENALTIES = SamplingParams(max_tokens=64, temperature=0.0, repetition_penalty=1.1, ignore_eos=True)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "sampling"), slow_after(1, [("gemma3", PENALTIES), ("llama", GREEDY)]))
def test_reads_and_lines_do_not_grow_with_the_context(family: str, sampling: SamplingParams, tmp_path: Path) -> None:
    directory = make_model(family, tmp_path)
    found = []
    for length in LENGTHS:
        core = make_core(directory, max_model_len=LENGTHS[-1] + 256, kv_cache_memory=128 << 20, max_num_seqs=2)
        decoding(core, length, sampling)
        core.step()
        found.append(count(core))
    (short_reads, short_lines), (long_reads, long_lines) = found
    # A moving window sometimes needs one more read.
    assert min(short_reads, long_reads) >= 2 and max(short_reads, long_reads) < 40
    assert abs(short_reads - long_reads) <= 4
    # The sampled tokens change a few lines; a loop over blocks would run hundreds more.
    assert abs(short_lines - long_lines) <= 120


def test_input_rows_equal_the_tables_after_random_events() -> None:
    """Random events of random sequences, against copies of the entire tables."""
    rng = np.random.default_rng(0)
    size, groups = 16, 2
    writer, sequences = SchedulerOutputBuilder(), InputBatch(groups, num_rows=2)
    stage = SimpleNamespace(specs=())
    lives: dict[int, Any] = {}

    def block() -> int:
        return int(rng.integers(0, 999))

    for step in range(600):
        chosen = list(dict.fromkeys(int(x) for x in rng.integers(0, 7, size=rng.integers(1, 6))))
        chunks = []
        for seq_id in chosen:
            if seq_id not in lives:
                lives[seq_id] = SimpleNamespace(
                    seq_id=seq_id,
                    index=0,
                    request=SimpleNamespace(sampling=GREEDY, context=ContextRule(), adapter=None, pooling=None),
                    seed=0,
                    num_prompt_tokens=0,
                    stop_ids=(),
                    token_ids=[],
                    num_tokens=0,
                    cache=SequenceCache(HashChain(b"root", size), ()),
                    rotary_id=0,
                    stage=stage,
                )
                lives[seq_id].cache.hold([BlockTable() for _ in range(groups)], 0, 0)
            seq = lives[seq_id]
            cache = seq.cache
            event = rng.random()
            if event < 0.05:  # restarted, perhaps with a cached prefix
                hit = int(rng.integers(0, 4))
                cache.release()
                cache.hold([BlockTable([block() for _ in range(hit)]) for _ in range(groups)], hit * size, hit)
                if event < 0.02:  # and preempted before
                    writer.remove(seq_id)
            elif event < 0.1:  # re-rotated: every block is another one
                for table in cache.tables:
                    for i in range(table.num_dropped, len(table.blocks)):
                        table.replace(i, block())
            elif event < 0.2:  # a window drops blocks
                table = cache.tables[1]
                table.drop(max(table.num_dropped, min(cache.num_computed_tokens // size, len(table.blocks))))
            tokens = int(rng.choice([1, 1, 1, 5, 40]))
            last = (cache.num_computed_tokens + tokens - 1) // size
            for table in cache.tables:
                if cache.num_computed_tokens % size and rng.random() < 0.2:  # the block was shared, so it is copied
                    table.replace(cache.num_computed_tokens // size, block())
                while len(table.blocks) < last + 1 + 2 * (rng.random() < 0.1):
                    table.append(block())
            chunks.append(PlannedChunk(seq, cache.num_computed_tokens, tokens))
        writer.chunks = chunks
        sequences.apply(writer.build())
        tables = [chunk.seq.cache.block_tables for chunk in chunks]
        width = max(len(blocks) for group in tables for blocks in group)
        found = sequences.tables([sequences.by_id[chunk.seq.seq_id].row for chunk in chunks], width)
        assert found.shape == (groups, len(chunks), width), step
        for b, chunk in enumerate(chunks):
            cache = chunk.seq.cache
            for group, table in enumerate(cache.tables):
                assert found[group, b, : len(table.blocks)].tolist() == table.blocks, (step, chunk.seq.seq_id, group)
                assert sequences.table(chunk.seq.seq_id, group).tolist() == table.blocks
            cache.num_computed_tokens += chunk.num_tokens
            for table in cache.tables:  # blocks of rejected tokens are released
                while len(table.blocks) > -(-cache.num_computed_tokens // size):
                    table.pop()


KINDS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "ntk", "factor": 3.0},
    {"rope_type": "ntk", "factor": 5.0},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": 8.0, "mscale": 1.0, "mscale_all_dim": 0.5},
    {"rope_type": "default", "rope_theta": 77_000.0},
]


class CountOperations(TorchDispatchMode):
    """Count torch operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def step_calls(core: EngineCore, calls: Counter[str]) -> tuple[Counter[str], Counter[str]]:
    calls.clear()
    with CountOperations() as operations:
        core.step()
    return Counter(calls), operations.counts


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("family", slow_but(["llama", "gemma3"], "gemma3"))
def test_eight_scalings_need_no_more_calls_than_one(
    family: str, deterministic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Counter[str] = Counter()
    backend = type(select_backend(DEVICE, deterministic=deterministic))
    for name, operation in vars(Backend).items():
        if name.startswith("_") or not callable(operation):
            continue
        original = getattr(backend, name)

        def counting(*args: Any, _name: str = name, _original: Any = original, **kwargs: Any) -> Any:
            calls[_name] += 1
            return _original(*args, **kwargs)

        monkeypatch.setattr(backend, name, counting)
    directory = make_model(family, tmp_path)
    found = []
    for kinds in ([KINDS[3]] * 8, KINDS):
        core = make_core(directory, deterministic=deterministic)
        for i, kind in enumerate(kinds):
            core.add(greedy(str(i), range(3 + i, 23 + i), 8, rope_scaling=RopeScaling.from_dict(kind)))
        prefill, decode = step_calls(core, calls), step_calls(core, calls)
        assert core.stats().rotary_specs_live == len({str(kind) for kind in kinds})
        assert core.stats().generation_tokens == 16  # the second step decodes every sequence
        found.append((prefill[0], decode))  # at admission each new scaling is written to the tables
    assert found[0] == found[1]
    decode = found[1][1]
    layers = len(core.runner.decoder.layers)
    assert decode[0]["rotate_and_append"] == decode[0]["paged_attention"] == layers
    if DEVICE == "cpu":
        assert decode[0]["rotary_angles"] == 0  # one call fills all rows, allocated once
        assert decode[0]["linear"] == 4 * layers + 1
    assert sum(decode[1].values()) > layers
