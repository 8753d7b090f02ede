"""The order in which a plan moves blocks before it computes, since blocks may be reused at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.engines import greedy, make_core, specs_of
from helpers.little_memory import NO_ROOM
from helpers.tiny_models import make_model

from windlass.engine.cache.cache_operations import BlockCopy, KeyRerotation, LoadedBlock, SavedBlock, SwappedPages
from windlass.engine.cache.host_tier import CPUBlockTransfer, planes_of
from windlass.engine.core.engine_core import EngineCore
from windlass.engine.scheduling.scheduler_output import SchedulerOutput


class _Pages(CPUBlockTransfer):
    """Records the contents of saved blocks."""

    def __init__(self, core: EngineCore) -> None:
        super().__init__(planes_of([core.runner.cache]))
        self.saved: list[int] = []

    def save(self, saved: Sequence[SavedBlock]) -> None:
        self.saved += [self.content(one.block) for one in saved]

    def fill(self, block: int, number: int) -> None:
        for view in self._views[0]:
            view[:, block] = number

    def content(self, block: int) -> int:
        """The value of all of its bytes."""
        (number,) = {int(byte) for plane in self.read_block(0, block, 0.0) for byte in plane.flat}
        return number

    def read(self, number: int) -> int:
        """The handle of a block from a file."""
        planes = tuple(np.full((form.shape[0], form.num_bytes // form.shape[0]), number) for form in self.forms[0])
        ticket = self.stage(0, tuple(plane.astype(np.uint8) for plane in planes), lambda: False)
        assert ticket is not None
        return ticket


@pytest.fixture
def core(tmp_path: Path) -> EngineCore:
    made = make_core(make_model("llama", tmp_path), device="cpu", dtype="float32")
    made.runner._persisted = _Pages(made)
    return made


@torch.inference_mode()
def test_blocks_that_are_taken_from_each_other_within_a_plan(core: EngineCore) -> None:
    runner, pages = core.runner, core.runner._persisted
    assert isinstance(pages, _Pages)
    for block in range(9):
        pages.fill(block, 100 + block)
    step = core.scheduler.schedule().step
    runner.apply(
        SchedulerOutput(
            step,
            saved=(SavedBlock(0, b"", 2, 0), SavedBlock(0, b"", 3, 1)),
            swapped_out=(SwappedPages(7, ((3, 4),)), SwappedPages(8, ((1,),))),
            loaded=tuple(LoadedBlock(0, block, pages.read(block)) for block in (2, 3, 5)),
            swapped_in=(SwappedPages(8, ((4,),)),),  # replaces one that was swapped out
            copies=(BlockCopy(0, 3, 6),),
        )
    )
    assert pages.saved == [102, 103]
    assert [pages.content(block) for block in range(7)] == [100, 101, 2, 3, 101, 5, 3]
    runner.apply(
        SchedulerOutput(
            step + 1,
            loaded=(LoadedBlock(0, 5, pages.read(50)),),
            swapped_in=(SwappedPages(7, ((5, 8),)),),  # the loaded one was evicted again
            copies=(BlockCopy(0, 5, 0),),
        )
    )
    assert [pages.content(block) for block in range(9)] == [103, 101, 2, 3, 101, 103, 3, 107, 104]


@pytest.mark.parametrize("most", [40, 16])
@torch.inference_mode()
def test_keys_turn_by_fewer_at_once_where_there_is_no_memory_for_many(
    core: EngineCore, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (planes,), rotator, backend = core.runner.cache.planes, core.runner._rotator, core.runner.decoder.backend
    for plane in planes:
        plane.copy_(torch.randn_like(plane))  # everywhere: unwritten memory may hold NaNs
    before = [plane.clone() for plane in planes]
    (old,) = specs_of(core, greedy("a", [5, 6]))
    new = replace(old, inv_freq=tuple(frequency / 3 for frequency in old.inv_freq))
    turned = KeyRerotation(0, 5, 75, (0, 1, 2, 3, 4), (8, 7, 12, 6, 9), 100, (old,), (new,))
    rotator.apply(turned)
    right = [plane.clone() for plane in planes]
    turn, layers, failed = backend.rerotate_cached_keys, [0], list[int]()

    def fails(pages: Any, sources: torch.Tensor, *operands: Any, **named: Any) -> None:
        layers[0] += 1
        if len(sources) > most and layers[0] % 3 == 0:
            failed.append(len(sources))
            raise torch.OutOfMemoryError(NO_ROOM)
        turn(pages, sources, *operands, **named)

    monkeypatch.setattr(backend, "rerotate_cached_keys", fails)
    for plane, kept in zip(planes, before, strict=True):
        plane.copy_(kept)
    rotator.apply(turned)
    assert failed and all(torch.equal(plane, wanted) for plane, wanted in zip(planes, right, strict=True))
    most = 0
    with pytest.raises(torch.OutOfMemoryError):  # not even enough memory for one block
        rotator.apply(turned)
