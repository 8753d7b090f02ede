"""Blocks swapped out to main memory and back, with little device memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.little_memory import NO_ROOM
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from windlass.engine.cache import kv_cache
from windlass.engine.cache.cache_operations import SwappedPages
from windlass.engine.cache.kv_cache import KVCache
from windlass.engine.cache.kv_cache_spec import KVGroupSpec
from windlass.kernels import select_backend

_BLOCKS = 24


class _Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the size of the largest tensor for gathering or scattering blocks."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "index" in func.name():
            moved = args[2] if "put" in func.name() else result
            self.most = max([self.most, *(x.nbytes for x in tree_flatten(moved)[0] if isinstance(x, torch.Tensor))])
        return result


class _NoRoom(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses memory for gathering or scattering blocks, except for the first few times."""

    def __init__(self, there_is: int) -> None:
        super().__init__()
        self.there_is = there_is

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "index" in func.name():
            self.there_is -= 1
            if self.there_is < 0:
                raise torch.OutOfMemoryError(NO_ROOM)
        return func(*args, **(kwargs or {}))


def _filled(dtype: torch.dtype) -> tuple[KVCache, list[list[torch.Tensor]]]:
    """Pages of two KV groups with random bytes, and a copy of them."""
    groups = [KVGroupSpec((0, 2, 3), 2, 8, None, 4), KVGroupSpec((1,), 1, 8, 40)]
    pages = KVCache(groups, [_BLOCKS, _BLOCKS], 16, dtype, select_backend("cpu"))
    before = []
    for planes in pages.planes:
        for plane in planes:
            plane.view(torch.uint8).random_(0, 255)
        before.append([plane.clone() for plane in planes])
    return pages, before


@pytest.mark.parametrize("there_is", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_they_come_and_go_without_memory_of_the_device(
    dtype: torch.dtype, there_is: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_cache, "_SWAP_CHUNK_BYTES", 7000)
    pages, before = _filled(dtype)
    blocks, others = ((7, 3, 5, 20, 2), (1, 0, 9)), ((11, 12, 3, 0, 23), (9, 1, 2))
    with _NoRoom(there_is):
        pages.swap_out(SwappedPages(4, blocks))
    for planes in pages.planes:
        for plane in planes:
            plane.view(torch.uint8).zero_()
    with _NoRoom(there_is):
        pages.swap_in(SwappedPages(4, others))
    for planes, held, sources, targets in zip(pages.planes, before, blocks, others, strict=True):
        for plane, kept in zip(planes, held, strict=True):
            assert torch.equal(plane[:, list(targets)].view(torch.uint8), kept[:, list(sources)].view(torch.uint8))
            assert not plane[:, [b for b in range(_BLOCKS) if b not in targets]].view(torch.uint8).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("at_once", [1, 7000, 8 << 20])
def test_every_bit_comes_back_in_pieces(dtype: torch.dtype, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "_SWAP_CHUNK_BYTES", at_once)
    pages, before = _filled(dtype)
    blocks, others = ((7, 3, 5, 20, 2), (1, 0, 9)), ((11, 12, 3, 0, 23), (9, 1, 2))
    with _Largest() as moved:
        pages.swap_out(SwappedPages(4, blocks))
        for planes in pages.planes:
            for plane in planes:
                plane.view(torch.uint8).zero_()
        pages.swap_in(SwappedPages(4, others))
    largest = max(plane[:, :1].nbytes for planes in pages.planes for plane in planes)
    assert 0 < moved.most <= max(at_once, largest)
    for planes, held, sources, targets in zip(pages.planes, before, blocks, others, strict=True):
        for plane, kept in zip(planes, held, strict=True):
            assert torch.equal(plane[:, list(targets)].view(torch.uint8), kept[:, list(sources)].view(torch.uint8))
            untouched = [block for block in range(_BLOCKS) if block not in targets]
            assert not plane[:, untouched].view(torch.uint8).any()
    with pytest.raises(KeyError):
        pages.swap_in(SwappedPages(4, others))
