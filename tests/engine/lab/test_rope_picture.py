"""`windlass rope picture`: values against formulas, all kinds of pictures, the gallery and errors."""

from __future__ import annotations

import importlib.util
import math
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from helpers.marks import slow_but
from helpers.rotary_formulas import by_formula

from windlass.engine.rotary import curves
from windlass.engine.rotary.rope_scaling import RopeScaling, RotaryBase
from windlass.lab import encoding_formulas
from windlass.lab.gallery import KINDS, choose_heads, draw_attention, draw_scalings, read_learned, read_pattern
from windlass.lab.gallery_subject import LLAMA_2, make_subject
from windlass.lab.plotting import save_figure
from windlass.server.cli import main as cli
from windlass.server.cli import rope
from windlass.server.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[3]
W = np.array([1.0, 0.3, 0.01])
RNG = np.random.default_rng(1)


def brute_score(q: np.ndarray, k: np.ndarray, m: int, n: int) -> float:
    """The score with a rotation matrix for each pair."""
    total = 0.0
    for j, w in enumerate(W):
        matrices = [np.array([[math.cos(p * w), -math.sin(p * w)], [math.sin(p * w), math.cos(p * w)]]) for p in (m, n)]
        total += (matrices[0] @ q[[j, j + 3]]) @ (matrices[1] @ k[[j, j + 3]])
    return total


def test_scores_equal_rotation_matrices() -> None:
    q, k = RNG.standard_normal((2, 6))
    for m, n in ((0, 0), (7, 2), (1005, 1000), (40, 3)):
        wanted = brute_score(q, k, m, n)
        assert encoding_formulas.rotated(q, m, W) @ encoding_formulas.rotated(k, n, W) == pytest.approx(
            wanted, abs=1e-9
        )
        assert encoding_formulas.scores(q, k, np.array([float(m - n)]), W)[0] == pytest.approx(wanted, abs=1e-9)
    ones = np.ones(6)
    assert curves.mean_cosine(np.array([9.0]), W)[0] == pytest.approx(brute_score(ones, ones, 12, 3) / 6)


def test_decay_bound() -> None:
    """RoFormer: |sum h_j e^(i r w_j)| <= max |h_(j+1) - h_j| sum |S_j|, with h = 0 after the last."""
    distances = np.arange(0.0, 300.0)
    bound = curves.decay_bound(distances, W)
    assert bound[0] == pytest.approx(2)  # (1 + 2 + 3) / 3
    by_hand = [sum(abs(sum(np.exp(1j * r * w) for w in W[:count])) for count in (1, 2, 3)) / 3 for r in (5.0, 130.0)]
    assert bound[[5, 130]] == pytest.approx(by_hand)
    for _ in range(5):
        q, k = RNG.standard_normal((2, 6))
        h = (q[:3] + 1j * q[3:]) * (k[:3] - 1j * k[3:])
        steps = np.abs(np.diff(np.append(h, 0)))
        assert (np.abs(encoding_formulas.scores(q, k, distances, W)) <= steps.max() * bound * 3 + 1e-9).all()


def test_other_encodings_equal_their_papers() -> None:
    table = encoding_formulas.sinusoids(np.arange(5.0), 8)
    assert table[3] == pytest.approx([f(3 / 10000 ** (i / 8)) for i in (0, 2, 4, 6) for f in (math.sin, math.cos)])
    assert encoding_formulas.alibi_slopes(8) == pytest.approx([1 / 2**h for h in range(1, 9)])
    # transformers' T5, decoders: 32 buckets, 128 tokens.
    import torch
    from transformers.models.t5.modeling_t5 import T5Attention

    wanted = T5Attention._relative_position_bucket(
        -torch.arange(300), bidirectional=False, num_buckets=32, max_distance=128
    )
    assert encoding_formulas.t5_buckets(np.arange(300.0)).tolist() == wanted.tolist()
    matrix = encoding_formulas.relative(3, np.array([5.0, 6.0, 7.0]))
    assert matrix[2].tolist() == [7, 6, 5] and math.isnan(matrix[0, 1])


def test_errors_of_angles_by_dtype() -> None:
    q, k = RNG.standard_normal((2, 128))
    frequencies = np.array(10000.0 ** (-np.arange(64) / 64))
    places = np.unique(np.geomspace(1, 1e5, 200).round())
    errors = encoding_formulas.invariance_errors(q, k, 5, places, frequencies)
    assert errors["float64"].max() < 1e-12
    assert errors["float32"][-50:].max() > 100 * errors["float32"][:20].max()
    assert 1e-5 < errors["bfloat16"].max() < 1e-2


@pytest.mark.parametrize("at", range(1, 6))
def test_default_scalings_equal_the_formulas(at: int) -> None:
    subject = make_subject(None, None, [], None, "Llama 2")
    assert (subject.base, subject.length, len(subject.compared)) == (LLAMA_2, 100_000, 6)
    label, scaling = subject.compared[at]
    found = subject.frequencies(scaling)
    if scaling.rope_type == "longrope":
        own = by_formula({"rope_type": "default"}, 1, LLAMA_2)[0]
        wanted = own / np.linspace(1, 100_000 / 4096, 64)
    else:
        wanted = by_formula(scaling.to_dict(), 100_000, LLAMA_2)[0]
    assert found == pytest.approx(wanted, rel=1e-9), label


@pytest.mark.slow
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "kind", slow_but([name for name in KINDS if name != "attention"], "angles", "cos-sin", "decay")
)
def test_every_kind_as_png_and_svg(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["rope", "picture", kind, "--theta", "5000", "--dim", "16", "--trained-len", "64"]
    png, svg = tmp_path / "a.png", tmp_path / "a.SVG"
    assert cli.run([*common, "--out", str(png)]) == 0, capsys.readouterr().err
    assert (
        cli.run([*common, "--length", "900", "--scaling", '{"rope_type": "yarn", "factor": 3}', "--out", str(svg)]) == 0
    )
    data = png.read_bytes()
    width, height = struct.unpack(">II", data[16:24])
    assert data.startswith(b"\x89PNG") and 900 <= width <= 1200 and 300 <= height <= 600
    text = svg.read_text(encoding="utf-8")
    assert "<svg" in text and ("16 dimensions" in text or "θ 5,000" in text)
    assert ("yarn 3" in text) == (kind in ("scalings", "extrapolation"))


def test_options_list_all_kinds() -> None:
    assert list(KINDS) == list(rope.PICTURE_KINDS)


def test_attention_of_a_real_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a.svg"
    arguments = [
        "rope",
        "picture",
        "attention",
        "--model",
        "demo",
        "--layer",
        "1",
        "--head",
        "2",
        "--text",
        "And he said",
    ]
    assert cli.run([*arguments, "--out", str(out)]) == 0, capsys.readouterr().err
    text = out.read_text(encoding="utf-8")
    assert "Layer 1 of demo" in text and "head 2" in text and "said" in text
    tokens, weights = read_pattern(ROOT / "models" / "demo", "And he said unto them", 0, None, Tokenizer.from_directory)
    assert weights.shape[1:] == (len(tokens), len(tokens))
    assert weights.sum(axis=2) == pytest.approx(np.ones(weights.shape[:2]), abs=1e-5)
    near, far = choose_heads(np.stack([np.tril(np.ones((4, 4))), np.eye(4), np.eye(4)]), 2)
    assert (near, far) == (1, 0)


def test_dollar_signs_are_literal(tmp_path: Path) -> None:
    out = tmp_path / "a.svg"
    save_figure(draw_attention("a $$b$$", 0, ["$x$", "\\$$y"], np.tril(np.full((1, 2, 2), 0.5)), [0]), out)
    text = out.read_text(encoding="utf-8")
    assert ">$x$<" in text and ">\\$$y<" in text and "Layer 0 of a $$b$$" in text


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("factor", [1e90, 1e200, 1e308])
def test_nearly_constant_pairs_are_omitted(factor: float) -> None:
    """Warnings fail the test."""
    base = RotaryBase(rope_theta=1e4, head_dim=8, rotary_dim=8, trained_len=512)
    subject = make_subject(None, base, [RopeScaling.from_dict({"rope_type": "linear", "factor": factor})], 4096, "toy")
    figure = draw_scalings(subject)
    figure.draw_without_rendering()
    drawn = [line.get_ydata() for line in figure.axes[0].lines if len(line.get_xdata()) != 2]
    assert all(np.isfinite(heights).all() for heights in drawn)
    assert max(len(label.get_text()) for label in figure.axes[0].get_yticklabels()) < 20


def test_default_length_is_limited() -> None:
    for trained in (416_667, 20_000_000):
        base = RotaryBase(rope_theta=1e6, head_dim=8, rotary_dim=8, trained_len=trained)
        assert make_subject(None, base, [], None, "long").length == 10_000_000


@pytest.mark.slow
def test_learned_table_is_read_from_a_checkpoint(tmp_path: Path, error_of: Callable[..., str]) -> None:
    table = RNG.standard_normal((64, 12)).astype(np.float32)
    safetensors.numpy.save_file({"transformer.wpe.weight": table}, tmp_path / "model.safetensors")
    assert read_learned(tmp_path) == pytest.approx(table)
    out = tmp_path / "a.svg"
    assert cli.run(["rope", "picture", "encodings", "--learned", str(tmp_path), "--out", str(out)]) == 0
    assert "learned (random here)" not in out.read_text(encoding="utf-8")
    safetensors.numpy.save_file({"other": table}, tmp_path / "model.safetensors")
    assert "no table" in error_of("picture", "encodings", "--learned", str(tmp_path), "--out", str(out))


@pytest.mark.slow
def test_errors_are_one_line(tmp_path: Path, error_of: Callable[..., str]) -> None:
    out = str(tmp_path / "a.png")
    assert "did you mean 'scalings'" in error_of("picture", "scaling", "--out", out)
    assert ".png or .svg" in error_of("picture", "decay", "--out", str(tmp_path / "a.jpg"))
    assert "--out" in error_of("picture", "decay", "--out", str(tmp_path / "none" / "a.png"))
    for dim in ("7", "2", "1000000"):
        assert "--dim must be even and between 4 and 4,096" in error_of("picture", "decay", "--dim", dim, "--out", out)
    for theta in ("1", "inf", "nan"):
        assert "--theta must be a number above 1" in error_of("picture", "decay", "--theta", theta, "--out", out)
    assert "omit one of them" in error_of("picture", "decay", "--dim", "8", "--model", "demo", "--out", out)
    assert "--length" in error_of("picture", "decay", "--length", "1", "--out", out)
    assert "rope_type" in error_of("picture", "decay", "--scaling", '{"rope_type": "yarm"}', "--out", out)
    assert "layers 0 to" in error_of("picture", "attention", "--model", "demo", "--layer", "77", "--out", out)
    assert "--head" in error_of("picture", "attention", "--model", "demo", "--head", "77", "--out", out)
    assert not Path(out).exists()


def test_rotation_of_a_model() -> None:
    subject = make_subject(
        ROOT / "models" / "demo", None, [RopeScaling.from_dict({"rope_type": "linear", "factor": 2})], None, "demo"
    )
    assert subject.base.trained_len == 512 and subject.length == 24 * 512
    plain = make_subject(ROOT / "models" / "demo", None, [], None, "demo")
    assert subject.frequencies() == pytest.approx(plain.frequencies() / 2)
    assert isinstance(subject.base, RotaryBase)


def test_gallery_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("make_gallery", ROOT / "tools" / "docs" / "make_gallery.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    page = module.PAGE.read_text(encoding="utf-8")
    assert sorted(module.kinds_of(page)) == sorted(module.SHOWN)
    assert all(f"picture {name}`" in page or f"* `{name}`: " in page for name in KINDS)
    assert page == module.updated(page), "run tools/docs/make_gallery.py"
    assert all(
        f"](pictures/{name}.png)" in page and (module.PICTURES / f"{name}.png").exists() for name in module.SHOWN
    )
