"""Code of docs/guide/: its output is the one shown, and its formulas are those of the engine, the kernels and transformers."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch
from helpers.doc_examples import ROOT, run_page
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from windlass.engine.rotary.rope_scaling import RopeScaling, RotaryBase, resolve
from windlass.kernels.torch.reference import rotate_half_split
from windlass.lab.gallery_subject import LLAMA_2

GUIDE = ROOT / "docs" / "guide"
WITH_CODE = {"order.md": 2, "rotation.md": 7, "by-hand.md": 1, "cache.md": 2, "scaling.md": 3, "without.md": 2}


@pytest.mark.parametrize(("name", "least"), WITH_CODE.items())
def test_the_output_of_code_is_the_one_shown(name: str, least: int) -> None:
    results, _ = run_page(GUIDE / name)
    assert len(results) >= least
    for block, out in results:
        assert out == (block.printed or ""), f"{name}, line {block.line}"


def test_both_forms_of_the_rotation_equal_the_kernels_and_transformers() -> None:
    _, names = run_page(GUIDE / "rotation.md")
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


def test_scalings_equal_those_of_the_engine() -> None:
    _, names = run_page(GUIDE / "scaling.md")
    scaled, s = names["scaled"], names["s"]
    assert set(scaled) == {"linear", "ntk", "yarn", "llama3"}  # type: ignore[call-overload]
    for kind, speeds in scaled.items():  # type: ignore[attr-defined]
        fields: dict[str, object] = {"rope_type": kind, "factor": s}
        if kind == "llama3":
            fields |= {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 4096}
        spec = resolve(RopeScaling.from_dict(fields), LLAMA_2, 100_000)
        np.testing.assert_allclose(speeds, spec.inv_freq, rtol=1e-12)


def test_partial_rotation_and_p_rope_equal_those_of_the_engine() -> None:
    _, names = run_page(GUIDE / "without.md")
    partial = RotaryBase(rope_theta=1e4, head_dim=128, rotary_dim=32, trained_len=4096)
    np.testing.assert_allclose(names["partial"], resolve(RopeScaling(), partial, 1).inv_freq)
    gemma = RotaryBase(rope_theta=1e4, head_dim=128, rotary_dim=128, trained_len=4096, rotating_pairs=16)
    spec = resolve(RopeScaling.from_dict({"rope_type": "proportional"}), gemma, 1)
    np.testing.assert_allclose(spec.inv_freq, [*names["p_rope"], *[0.0] * 48])  # type: ignore[misc]


def test_the_animation_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("make_walk", ROOT / "tools" / "docs" / "make_walk.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.picture() == (GUIDE / "walk.svg").read_text(encoding="utf-8"), "run tools/docs/make_walk.py"
