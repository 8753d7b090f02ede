"""What Python does in a decode step does not grow with the context: counted, not timed."""

from __future__ import annotations

import sys
from collections import UserList
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from helpers.engines import make_core
from helpers.tiny_models import make_model

from windlass.engine.api.request import EngineRequest, SamplingParams
from windlass.engine.core.engine_core import EngineCore
from windlass.engine.execution.block_rows import BlockRows
from windlass.engine.scheduling.plan import ScheduledSequence

LENGTHS = (1024, 8192)


class CountedReads(UserList[int]):
    """A list that counts how many of its elements are read, by index, by slice or one after the other."""

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
        seq.slot = type(seq.slot)(
            **{name: getattr(seq.slot, name) for name in seq.slot.__slots__} | {"token_ids": seq.token_ids}
        )
    lines = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    CountedReads.reads = 0
    sys.settrace(trace)
    try:
        outputs = core.step()
    finally:
        sys.settrace(None)
    assert sum(len(output.token_ids) for output in outputs) == 2
    return CountedReads.reads, lines


GREEDY = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
PENALTIES = SamplingParams(max_tokens=64, temperature=0.0, repetition_penalty=1.1, ignore_eos=True)


@pytest.mark.parametrize(("family", "sampling"), [("llama", GREEDY), ("gemma3", PENALTIES)])
def test_reads_and_lines_are_the_same_at_any_length(family: str, sampling: SamplingParams, tmp_path: Path) -> None:
    directory = make_model(family, tmp_path)
    found = []
    for length in LENGTHS:
        core = make_core(directory, max_model_len=LENGTHS[-1] + 256, kv_cache_memory=128 << 20, max_num_seqs=2)
        decoding(core, length, sampling)
        core.step()
        found.append(count(core))
    (short_reads, short_lines), (long_reads, long_lines) = found
    # A window that moves on now and then costs a read more.
    assert min(short_reads, long_reads) >= 2 and max(short_reads, long_reads) < 40
    assert abs(short_reads - long_reads) <= 4
    # Which tokens are drawn decides over a few lines; a loop over blocks would run hundreds more.
    assert abs(short_lines - long_lines) <= 60


def test_rows_follow_tables_through_everything_that_happens_to_them() -> None:
    """Random lives of random sequences, against tables copied in full."""
    rng = np.random.default_rng(0)
    rows, size, groups = BlockRows(2, 16, num_rows=2), 16, 2
    lives: dict[int, tuple[list[list[int]], int, int]] = {}  # tables, computed tokens, version
    for step in range(600):
        chosen = list(dict.fromkeys(int(x) for x in rng.integers(0, 7, size=rng.integers(1, 6))))
        plan = []
        for seq_id in chosen:
            tables, computed, version = lives.get(seq_id, ([[], []], 0, 0))
            event = rng.random()
            if event < 0.05:  # preempted, perhaps with a prefix found again
                hit = int(rng.integers(0, 4))
                tables = [[int(x) for x in rng.integers(0, 999, hit)] for _ in range(groups)]
                computed, version = hit * size, version + 1
            elif event < 0.1:  # turned: every block is another one
                tables, version = [[int(x) for x in rng.integers(0, 999, len(t))] for t in tables], version + 1
            elif event < 0.2 and tables[1]:  # a window leaves blocks behind
                for i in range(min(computed // size, len(tables[1]))):
                    tables[1][i] = -1
            tokens = int(rng.choice([1, 1, 1, 5, 40]))
            last = (computed + tokens - 1) // size
            for table in tables:
                if computed % size and rng.random() < 0.2:  # the block written to was shared: copied
                    table[computed // size] = int(rng.integers(0, 999))
                table += [int(x) for x in rng.integers(0, 999, max(0, last + 1 - len(table)))]
            plan.append(ScheduledSequence(seq_id, computed, tokens, [], tables, 0, 0, table_version=version))
            lives[seq_id] = (tables, computed + tokens, version)
        width = max(len(s.block_tables[0]) for s in plan)
        found = rows.tables(plan, width)
        assert found.shape == (groups, len(plan), width), step
        for b, item in enumerate(plan):
            for group, table in enumerate(item.block_tables):
                assert found[group, b, : len(table)].tolist() == table, (step, item.seq_id, group)
