"""Kernels before and after the layers of a decode step, against numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from windlass.kernels import PersistentBuffers
from windlass.kernels.cpu import elementwise_bindings, library, load
from windlass.kernels.torch import reference
from windlass.kernels.torch.torch_backend import buffer_filler as plain_filler

needs_kernels = pytest.mark.skipif(library.unavailable_reason() is not None, reason="no compiled kernels")


def step(rng: np.random.Generator, groups: int, rows: int, blocks: int, block_size: int) -> tuple[np.ndarray, ...]:
    """Return metadata of some rows, and tables with their blocks."""
    metadata = np.zeros((5, rows), dtype=np.int64)
    metadata[0] = rng.integers(0, 1000, rows)
    metadata[1] = rng.integers(0, blocks * block_size, rows)
    metadata[2] = rng.integers(0, 100_000, rows)
    metadata[3] = rng.integers(0, 6, rows)
    metadata[4] = rng.permutation(rows + 3)[:rows]
    tables = rng.integers(0, 500, (groups, rows + 3, blocks + 5)).astype(np.int32)
    return metadata, tables


@needs_kernels
@pytest.mark.parametrize(("groups", "rows", "block_size"), [(1, 1, 16), (2, 8, 16), (1, 33, 8)])
def test_buffers_equal_those_of_numpy(groups: int, rows: int, block_size: int) -> None:
    rng = np.random.default_rng(rows)
    inv_freq = torch.rand(2, 6, 12, dtype=torch.float64)
    scale, whole = torch.rand(2, 6), torch.rand(6)
    blocks = 7
    ours, theirs = (PersistentBuffers.zeros(groups, rows, 64, 2, 12) for _ in range(2))
    fill = elementwise_bindings.CompiledBufferFiller(load(), ours, inv_freq, scale, whole, block_size)

    def angles(ids: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return reference.rotary_angles(inv_freq, ids, positions)

    expected = plain_filler(theirs, scale, whole, block_size, angles)
    for _ in range(3):  # the tables are another array each time, as after they have grown
        metadata, tables = step(rng, groups, rows, blocks, block_size)
        scale.uniform_(), whole.uniform_()
        ours.metadata[...], theirs.metadata[...] = metadata, metadata
        fill(tables, blocks)
        expected(tables, blocks)
        for name in ("positions", "lengths", "slots", "tables"):
            assert np.array_equal(getattr(ours, name), getattr(theirs, name)), name
        for name in ("cos", "sin", "q_scale", "score_scale"):
            assert torch.allclose(getattr(ours, name), getattr(theirs, name), rtol=0, atol=1e-6), name
        assert torch.equal(ours.score_scale, whole[torch.from_numpy(metadata[3])])
        assert ours.positions.tolist() == [int(i + first) for i, first in zip(metadata[1], metadata[2], strict=True)]
        block = tables[groups - 1, metadata[4][-1], metadata[1][-1] // block_size]
        assert ours.slots[-1, -1] == block * block_size + metadata[1][-1] % block_size


@needs_kernels
@pytest.mark.parametrize("make", [elementwise_bindings.CompiledBufferFiller, None])
def test_missing_blocks_and_rows_are_refused(make: object) -> None:
    rows, inv_freq, scale = (
        PersistentBuffers.zeros(1, 2, 64, 1, 4),
        torch.rand(1, 3, 4, dtype=torch.float64),
        torch.ones(1, 3),
    )
    if make is None:
        fill = plain_filler(rows, scale, torch.ones(3), 16, lambda ids, at: reference.rotary_angles(inv_freq, ids, at))
    else:
        fill = elementwise_bindings.CompiledBufferFiller(load(), rows, inv_freq, scale, torch.ones(3), 16)
    tables = np.full((1, 4, 64), 9, dtype=np.int32)
    rows.metadata[1], rows.metadata[4] = (15, 31), (2, 3)
    fill(tables, 2)
    assert rows.slots.tolist() == [[9 * 16 + 15, 9 * 16 + 15]]
    tables[0, 3, 1] = -1
    with pytest.raises(IndexError, match="no block"):
        fill(tables, 2)
    tables[0, 3, 1] = 9
    with pytest.raises(IndexError):
        fill(tables, 1)  # the second row's block is the second
    rows.metadata[3, 0] = 3
    with pytest.raises((IndexError, RuntimeError), match=r"outside|out of"):
        fill(tables, 2)


def test_unsuitable_operands_are_refused() -> None:
    if library.unavailable_reason() is not None:
        pytest.skip("no compiled kernels")
    rows, scale = PersistentBuffers.zeros(1, 2, 64, 1, 4), torch.ones(1, 3)
    with pytest.raises(ValueError, match="float64"):
        elementwise_bindings.CompiledBufferFiller(load(), rows, torch.rand(1, 3, 4), scale, torch.ones(3), 16)
    with pytest.raises(ValueError, match="do not fit"):
        elementwise_bindings.CompiledBufferFiller(
            load(), rows, torch.rand(1, 3, 5, dtype=torch.float64), scale, torch.ones(3), 16
        )
    fill = elementwise_bindings.CompiledBufferFiller(
        load(), rows, torch.rand(1, 3, 4, dtype=torch.float64), scale, torch.ones(3), 16
    )
    with pytest.raises(ValueError, match="tables"):
        fill(np.zeros((1, 4, 64), dtype=np.int64), 1)  # type: ignore[arg-type]


@needs_kernels
@pytest.mark.parametrize("vocab", [1, 7, 8, 9, 300, 8192, 8193, 49152, 50001])
def test_row_maxima_are_the_first_of_the_largest(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = torch.from_numpy(rng.standard_normal((6, vocab + 3), dtype=np.float32))[:, :vocab]
    logits[1] = 2.0  # all equal
    logits[2] = -math.inf
    logits[3, vocab // 2 :] = math.inf
    logits[4, [vocab // 3, vocab - 1]] = 50.0  # two of them
    logits[5, vocab - 1] = math.nan
    logits[5, vocab // 2] = math.nan
    ids, values = elementwise_bindings.row_maxima(load(), logits)
    assert ids.tolist() == np.argmax(logits.numpy(), axis=1).tolist()
    assert ids[4] == vocab // 3 and ids[1] == ids[2] == 0
    largest = logits.numpy()[np.arange(6), ids.numpy()]
    assert np.array_equal(values.numpy(), largest, equal_nan=True)
    with pytest.raises(ValueError, match="adjacent"):
        elementwise_bindings.row_maxima(load(), torch.zeros(4, 6)[:, ::2])
