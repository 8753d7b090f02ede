"""Rotary rows with reference counts, and cosines and sines at positions beyond the precision of float32."""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.little_memory import NO_ROOM
from torch.utils._python_dispatch import TorchDispatchMode

from windlass.engine.rotary.rope_scaling import RopeScaling, RotaryBase, RotarySpec, resolve
from windlass.engine.rotary.rotary_tables import RotaryTables
from windlass.kernels import select_backend

BASE = RotaryBase(1e6, 128, 128, 4096)


def spec(base: RotaryBase = BASE, **obj: object) -> RotarySpec:
    return resolve(RopeScaling.from_dict(obj or {"rope_type": "default"}), base, 1)


def exact_cos_sin(frequency: float, position: int) -> tuple[float, float]:
    """Compute from the exact rational angle, reduced by 2 pi with 60 digits, rounded only in the last step."""
    two_pi = Fraction("6.28318530717958647692528676655900576839433879875021164194989")
    angle = Fraction(frequency) * position
    rest = float(angle - (angle // two_pi) * two_pi)
    return np.cos(rest), np.sin(rest)


@pytest.mark.parametrize("theta", [1e4, 5e5, 1e6])
def test_angles_are_exact_at_ten_million_tokens(theta: float) -> None:
    base = RotaryBase(theta, 128, 128, 4096)
    tables = RotaryTables(4, [base], select_backend("cpu"))
    row = tables.acquire([spec(base)])
    positions = [0, 1, 4095, 131_071, 1_048_575, 9_999_999, 2**24 + 1, 2**31 + 7]
    out = tables.cos_sin(torch.full((len(positions),), row), torch.tensor(positions))
    worst = 0.0
    for t, position in enumerate(positions):
        for j, frequency in enumerate(spec(base).inv_freq):
            cos, sin = exact_cos_sin(frequency, position)
            worst = max(worst, abs(float(out.cos[0, t, j]) - cos), abs(float(out.sin[0, t, j]) - sin))
    assert worst < 3e-7
    # float32 throughout is wrong in the first decimal, which this test would detect.
    narrow = np.float32(9_999_999) * np.array(spec(base).inv_freq, dtype=np.float32)
    assert np.abs(np.cos(narrow) - out.cos[0, 5].numpy()).max() > 0.1


def test_shapes_dtypes_and_scales() -> None:
    tables = RotaryTables(4, [BASE], select_backend("cpu"))
    plain = tables.acquire([spec()])
    yarn = tables.acquire([spec(rope_type="yarn", factor=4.0)])
    rotation = tables.cos_sin(torch.tensor([yarn, plain, yarn]), torch.tensor([5, 6, 7]))
    assert rotation.cos.shape == rotation.sin.shape == (1, 3, 64)
    assert rotation.q_scale.shape == (1, 3)
    assert {part.dtype for part in rotation} == {torch.float32}
    squared = spec(rope_type="yarn", factor=4.0).rotary_scale ** 2
    assert squared > 1.2
    np.testing.assert_allclose(rotation.q_scale[0], [squared, 1.0, squared], rtol=1e-6)
    # Cosines and sines have unit scale for any attention factor.
    np.testing.assert_allclose(rotation.cos**2 + rotation.sin**2, np.ones((1, 3, 64)), rtol=1e-6)
    empty = tables.cos_sin(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
    assert empty.cos.shape == (1, 0, 64)


def test_a_batch_may_use_several_rows() -> None:
    tables = RotaryTables(8, [BASE], select_backend("cpu"))
    specs = [spec(rope_type="linear", factor=float(f)) for f in (1, 2, 4)]
    rows = [tables.acquire([one]) for one in specs]
    ids, positions = torch.tensor(rows * 3), torch.arange(9) * 1000
    together = tables.cos_sin(ids, positions)
    for t in range(9):
        expected = np.cos(int(positions[t]) * np.array(specs[t % 3].inv_freq))
        np.testing.assert_allclose(together.cos[0, t], expected, atol=2e-7)
        alone = tables.cos_sin(ids[t : t + 1], positions[t : t + 1])
        assert torch.equal(alone.cos[:, 0], together.cos[:, t])
        assert torch.equal(alone.sin[:, 0], together.sin[:, t])


def test_groups_are_padded_with_unrotated_pairs() -> None:
    narrow = RotaryBase(1e4, 64, 32, 4096)
    tables = RotaryTables(4, [BASE, narrow], select_backend("cpu"))
    row = tables.acquire([spec(), spec(narrow)])
    rotation = tables.cos_sin(torch.tensor([row]), torch.tensor([12345]))
    np.testing.assert_allclose(rotation.cos[1, 0, :16], np.cos(12345 * np.array(spec(narrow).inv_freq)), atol=2e-7)
    assert torch.equal(rotation.cos[1, 0, 16:], torch.ones(48))
    assert torch.equal(rotation.sin[1, 0, 16:], torch.zeros(48))


def test_equal_specs_share_a_row_until_the_last_release() -> None:
    tables = RotaryTables(3, [BASE], select_backend("cpu"))
    first = tables.acquire([spec()])
    same = tables.acquire([spec(type="linear", factor=1)])  # another name for the same frequencies
    other = tables.acquire([spec(rope_type="linear", factor=2.0)])
    assert first == same != other
    assert tables.num_live == 2
    tables.release(first)
    assert tables.num_live == 2
    tables.release(first)
    assert tables.num_live == 1
    with pytest.raises(ValueError, match="not in use"):
        tables.release(first)
    expected = spec(rope_type="linear", factor=2.0).inv_freq
    np.testing.assert_array_equal(tables.inv_freq[0, other].numpy(), expected)


def test_a_freed_row_is_reused() -> None:
    narrow = RotaryBase(1e4, 64, 32, 4096)
    tables = RotaryTables(1, [BASE, narrow], select_backend("cpu"))
    for factor in (2.0, 3.0):
        specs = [spec(rope_type="yarn", factor=factor), spec(narrow)]
        row = tables.acquire(specs)
        np.testing.assert_array_equal(tables.inv_freq[0, row].numpy(), specs[0].inv_freq)
        scale = tables.cos_sin(torch.tensor([row]), torch.tensor([1])).q_scale[:, 0].tolist()
        assert scale == pytest.approx([specs[0].rotary_scale ** 2, 1.0])
        tables.release(row)
    assert tables.num_live == 0


class _Full(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuse allocations on a device that is simulated by tensors without data, which can be written and viewed."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for made, said in zip(found if isinstance(found, tuple) else (found,), func._schema.returns, strict=False):
            if isinstance(made, torch.Tensor) and made.device.type == "meta" and said.alias_info is None:
                raise torch.OutOfMemoryError(NO_ROOM)
        return found


def test_a_new_row_allocates_no_device_memory() -> None:
    device: Any = SimpleNamespace(device=torch.device("meta"))
    tables = RotaryTables(2, [BASE, RotaryBase(1e4, 64, 32, 4096)], device)
    with _Full():
        with pytest.raises(torch.OutOfMemoryError):  # it would be noticed
            torch.ones(3).to(device.device)
        assert tables.acquire([spec(rope_type="yarn", factor=4.0), spec(RotaryBase(1e4, 64, 32, 4096))]) == 0
        tables.write(1, [spec(), spec(RotaryBase(1e4, 64, 32, 4096))])


def test_a_full_table_and_invalid_specs_are_refused_without_changes() -> None:
    tables = RotaryTables(1, [BASE], select_backend("cpu"))
    row = tables.acquire([spec()])
    with pytest.raises(RuntimeError, match="all 1 rotary rows"):
        tables.acquire([spec(rope_type="linear", factor=2.0)])
    with pytest.raises(ValueError, match="as many specs"):
        tables.acquire([spec(), spec()])
    assert tables.acquire([spec()]) == row
    wide = RotaryTables(2, [BASE, BASE], select_backend("cpu"))
    with pytest.raises(ValueError, match="64 pairs"):
        wide.acquire([spec(), RotarySpec((1.0,))])
    assert (wide.num_live, tables.num_live) == (0, 1)
