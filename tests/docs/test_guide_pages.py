"""Code of docs/internals/rotary-embeddings.md, compared with the output shown, the engine, the kernels and transformers.

Also the pictures and tables that tools/docs generates for pages in docs/internals.
"""

from __future__ import annotations

import importlib.util
import json
from types import ModuleType

import numpy as np
import pytest
import torch
from helpers.doc_examples import ROOT, Block, run_page
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from windlass.engine.rotary.rope_scaling import RopeScaling, RotaryBase, resolve
from windlass.kernels.torch.reference import rotate_half_split
from windlass.lab.gallery_subject import LLAMA_2

Run = tuple[list[tuple[Block, str]], dict[str, object]]

PAGE = ROOT / "docs" / "internals" / "rotary-embeddings.md"


@pytest.fixture(scope="module")
def page() -> Run:
    """Blocks of the page with their output, and the names that they define."""
    return run_page(PAGE)


def test_the_output_of_code_is_the_one_shown(page: Run) -> None:
    results, _ = page
    assert len(results) >= 13
    assert sum(bool(block.printed) for block, _ in results) >= 12
    for block, out in results:
        assert out == (block.printed or ""), f"line {block.line}"


def test_both_forms_of_the_rotation_equal_the_kernels_and_transformers(page: Run) -> None:
    _, names = page
    x = np.random.default_rng(3).standard_normal(64)
    for position in (0, 1, 777):
        angles = position * 500_000.0 ** (-np.arange(32) / 32)
        cos, sin = (torch.tensor(f(angles)[None], dtype=torch.float32) for f in (np.cos, np.sin))
        given = torch.tensor(x[None, None], dtype=torch.float32)
        kernel = rotate_half_split(given, cos, sin)[0, 0].numpy()
        theirs, _ = apply_rotary_pos_emb(given[None], given[None], torch.cat((cos, cos), -1), torch.cat((sin, sin), -1))
        for form in ("rotate", "rotate_complex"):
            found = names[form](x, position, 500_000.0)  # type: ignore[operator]
            np.testing.assert_allclose(found, kernel, atol=1e-5)
            np.testing.assert_allclose(found, theirs[0, 0, 0].numpy(), atol=1e-5)


def test_scalings_equal_those_of_the_engine(page: Run) -> None:
    _, names = page
    scaled, s = names["scaled"], names["s"]
    assert set(scaled) == {"linear", "ntk", "yarn", "llama3"}  # type: ignore[call-overload]
    for kind, frequencies in scaled.items():  # type: ignore[attr-defined]
        fields: dict[str, object] = {"rope_type": kind, "factor": s}
        if kind == "llama3":
            fields |= {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 4096}
        spec = resolve(RopeScaling.from_dict(fields), LLAMA_2, 100_000)
        np.testing.assert_allclose(frequencies, spec.inv_freq, rtol=1e-12)


def test_partial_rotation_and_p_rope_equal_those_of_the_engine(page: Run) -> None:
    _, names = page
    partial = RotaryBase(rope_theta=1e4, head_dim=128, rotary_dim=32, trained_len=4096)
    np.testing.assert_allclose(names["partial"], resolve(RopeScaling(), partial, 1).inv_freq)
    gemma = RotaryBase(rope_theta=1e4, head_dim=128, rotary_dim=128, trained_len=4096, rotating_pairs=16)
    spec = resolve(RopeScaling.from_dict({"rope_type": "proportional"}), gemma, 1)
    np.testing.assert_allclose(spec.inv_freq, [*names["p_rope"], *[0.0] * 48])  # type: ignore[misc]


def generator(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_animation_is_up_to_date() -> None:
    shown = (PAGE.parent / "pictures" / "walk.svg").read_text(encoding="utf-8")
    assert generator("make_walk").picture() == shown, "run tools/docs/make_walk.py"


def test_the_tables_of_conformance_checks_are_up_to_date() -> None:
    report = json.loads((ROOT / "benchmarks" / "results" / "conformance.json").read_text(encoding="utf-8"))
    module = generator("conformance_table")
    page = module.PAGE.read_text(encoding="utf-8")
    assert module.tables(report) in page, "run tools/docs/conformance_table.py benchmarks/results/conformance.json"
    assert module.updated(page, report) == page
