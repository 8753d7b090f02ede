"""docs/guide/: its code runs and prints what is shown, and its numbers are those of the engine, the kernels and transformers."""

from __future__ import annotations

import importlib.util
import math
import re

import numpy as np
import pytest
import torch
from helpers.doc_examples import ROOT, run_page
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from windlass.engine.rotary.rope_scaling import RopeScaling, RotaryBase, resolve
from windlass.kernels.torch.reference import rotate_half_split
from windlass.lab.gallery_subject import LLAMA_2

GUIDE = ROOT / "docs" / "guide"
PAGES = sorted(GUIDE.glob("*.md"))
WITH_CODE = {"order.md": 2, "rotation.md": 7, "by-hand.md": 1, "cache.md": 2, "scaling.md": 3, "without.md": 2}


@pytest.mark.parametrize(("name", "least"), WITH_CODE.items())
def test_code_prints_what_the_page_shows(name: str, least: int) -> None:
    results, _ = run_page(GUIDE / name)
    assert len(results) >= least
    for block, out in results:
        assert out == (block.printed or ""), f"{name}, line {block.line}"


def rotation() -> dict[str, object]:
    return run_page(GUIDE / "rotation.md")[1]


def test_both_forms_of_rotation_are_those_of_the_kernels_and_of_transformers() -> None:
    names = rotation()
    x = np.random.default_rng(3).standard_normal(64)
    for place in (0, 1, 777):
        angles = place * 500_000.0 ** (-np.arange(32) / 32)
        cos, sin = (torch.tensor(f(angles)[None], dtype=torch.float32) for f in (np.cos, np.sin))
        given = torch.tensor(x[None, None], dtype=torch.float32)
        kernel = rotate_half_split(given, cos, sin)[0, 0].numpy()
        theirs, _ = apply_rotary_pos_emb(given[None], given[None], torch.cat((cos, cos), -1), torch.cat((sin, sin), -1))
        for form in ("rotate", "rotate_complex"):
            found = names[form](x, place, 500_000.0)  # type: ignore[operator]
            np.testing.assert_allclose(found, kernel, atol=1e-5)
            np.testing.assert_allclose(found, theirs[0, 0, 0].numpy(), atol=1e-5)


def test_scalings_of_the_page_are_the_engine_s() -> None:
    _, names = run_page(GUIDE / "scaling.md")
    scaled, s = names["scaled"], names["s"]
    assert set(scaled) == {"linear", "ntk", "yarn", "llama3"}  # type: ignore[call-overload]
    for kind, speeds in scaled.items():  # type: ignore[attr-defined]
        fields: dict[str, object] = {"rope_type": kind, "factor": s}
        if kind == "llama3":
            fields |= {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 4096}
        spec = resolve(RopeScaling.from_dict(fields), LLAMA_2, 100_000)
        np.testing.assert_allclose(speeds, spec.inv_freq, rtol=1e-12)


def test_partial_rotation_and_p_rope_are_the_engine_s() -> None:
    _, names = run_page(GUIDE / "without.md")
    partial = RotaryBase(rope_theta=1e4, head_dim=128, rotary_dim=32, trained_len=4096)
    np.testing.assert_allclose(names["partial"], resolve(RopeScaling(), partial, 1).inv_freq)
    gemma = RotaryBase(rope_theta=1e4, head_dim=128, rotary_dim=128, trained_len=4096, rotating_pairs=16)
    spec = resolve(RopeScaling.from_dict({"rope_type": "proportional"}), gemma, 1)
    np.testing.assert_allclose(spec.inv_freq, [*names["p_rope"], *[0.0] * 48])  # type: ignore[misc]


def test_the_walk_is_the_one_that_its_script_draws() -> None:
    spec = importlib.util.spec_from_file_location("make_walk", ROOT / "docs" / "make_walk.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.picture() == (GUIDE / "walk.svg").read_text(encoding="utf-8"), "run docs/make_walk.py"
    # What it shows is what the page's own code prints.
    lengths = re.findall(
        r"^(\d) added ([\d.]+), turned ([\d.]+)$", (GUIDE / "order.md").read_text("utf-8"), re.MULTILINE
    )
    for place, added, turned in lengths:
        assert added == f"{math.hypot(*module.added(int(place))):.3f}"
        assert turned == f"{math.hypot(*module.turned(int(place))):.3f}"
