"""The correctness part of benchmarks/rope_formulations.py on a small tensor, with torch alone: the script must not rot."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

SHAPE = (96, 256)


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType]:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    return importlib.import_module("rope_formulations"), importlib.import_module("rope_variants")


def test_every_torch_form_is_what_it_says(modules: tuple[ModuleType, ModuleType]) -> None:
    bench, forms = modules
    variants = forms.torch_variants(SHAPE)
    for variant in variants:
        bench.verify(variant, SHAPE)
    kinds = [variant.expects for variant in variants]
    assert kinds.count("as written") == 2
    assert kinds.count("rotation") >= 8
    for variant in variants:
        if variant.expects == "as written":
            assert variant.checks["pair_norm_change"] > 0.1
            assert variant.checks["score_spread"] > 0.05
    bench.measure(variants, SHAPE, rounds=1, calls=1)
    rows = bench.summary(variants, SHAPE)
    assert all(0 < row["min_ms"] <= row["median_ms"] <= row["max_ms"] for row in rows)
    assert set(bench.complex_over_real(rows)["torch eager"]) == {"as written", "corrected"}


def test_float64_form_agrees_with_a_rotation_by_hand(modules: tuple[ModuleType, ModuleType]) -> None:
    bench, _ = modules
    x, rows = torch.rand(5, 8), torch.tensor([0, 3, 4])
    out = bench.float64_form(x, "rotation", rows, heads=2)
    angle = torch.tensor([3.0, 3.0 * 10000.0**-0.5], dtype=torch.float64)
    a, b = x[3, 4:6].double(), x[3, 6:8].double()
    by_hand = torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()))
    torch.testing.assert_close(out[1, 4:], by_hand)
    torch.testing.assert_close(out[0], x[0].double())


def _wrong_results(good: Tensor) -> dict[str, Tensor]:
    unwritten, late = good.clone(), good.clone()
    unwritten[-1, -1] = float("nan")
    late[1:] = good[:-1]
    return {"unwritten": unwritten, "positions off by one": late, "negated": -good}


@pytest.mark.parametrize("fault", ["unwritten", "positions off by one", "negated"])
def test_a_wrong_result_is_refused(modules: tuple[ModuleType, ModuleType], fault: str) -> None:
    bench, forms = modules
    variant = next(v for v in forms.torch_variants(SHAPE) if v.name == "real, corrected")
    right = variant.call
    wrong = dataclasses.replace(variant, call=lambda x: _wrong_results(right(x))[fault])
    with pytest.raises(ValueError, match="off by"):
        bench.verify(wrong, SHAPE)
    with pytest.raises(ValueError, match="timed result"):
        bench.turn(wrong, [torch.rand(SHAPE)] * 2, torch.arange(SHAPE[0]))


def test_what_cannot_be_compiled_is_left_out(
    modules: tuple[ModuleType, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As without a C++ compiler: torch.compile says so when what it made is first called."""
    _, forms = modules

    def compile_later(function: object, **_: object) -> object:
        def call(*_: Tensor) -> Tensor:
            raise RuntimeError("InvalidCxxCompiler: No working C++ compiler found\n\nSet TORCHDYNAMO_VERBOSE=1")

        return call

    monkeypatch.setattr(torch, "compile", compile_later)
    monkeypatch.setattr(importlib, "import_module", _nothing_is_installed)
    variants, missing = forms.all_variants(SHAPE)
    assert [v.name for v in variants] == [v.name for v in forms.torch_variants(SHAPE)]
    assert "torch.compile (InvalidCxxCompiler: No working C++ compiler found): it needs a C++ compiler" in missing


def _nothing_is_installed(name: str) -> ModuleType:
    raise ImportError(name)


def test_the_published_form_does_not_pass_as_a_rotation(modules: tuple[ModuleType, ModuleType]) -> None:
    bench, forms = modules
    written = next(v for v in forms.torch_variants(SHAPE) if v.expects == "as written")
    with pytest.raises(ValueError, match="off by"):
        bench.verify(dataclasses.replace(written, expects="rotation"), SHAPE)
    # Even where nothing compares it with a rotation, its lengths and scores give it away.
    with pytest.raises(ValueError, match="lengths of pairs"):
        bench.verify(dataclasses.replace(written, expects="rotation", tolerance=10.0), SHAPE)
