"""Rotation of a draft model, compared with the scaling resolved for the draft model itself."""

from __future__ import annotations

from typing import Any

import pytest

from windlass.engine.rotary.rope_scaling import DraftRotaryMapper, RopeScaling, RotaryBase, RotaryGroup, resolve

KINDS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "ntk", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "yarn", "factor": 8.0, "truncate": False},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 2048,
    },
]
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 8.0}


def group(dim: int, scaling: dict[str, Any] | None = None, **base: Any) -> RotaryGroup:
    given: dict[str, Any] = {"rope_theta": 1e5, "head_dim": dim, "rotary_dim": dim, "trained_len": 2048, **base}
    return RotaryGroup(
        "full_attention", RotaryBase(**given), RopeScaling.from_dict(scaling or {"rope_type": "default"})
    )


@pytest.mark.parametrize("scaling", [*KINDS, YARN], ids=lambda kind: kind["rope_type"])
@pytest.mark.parametrize("dims", [(128, 128), (128, 64), (64, 128)])
def test_frequencies_are_interpolated_for_heads_of_another_size(scaling: dict[str, Any], dims: tuple[int, int]) -> None:
    source, target = group(dims[0]), group(dims[1])
    wanted = RopeScaling.from_dict(scaling)
    (found,) = DraftRotaryMapper([source], [target])([resolve(wanted, source.base, 6000)])
    right = resolve(wanted, target.base, 6000)
    assert found.rotary_scale == right.rotary_scale
    # The ratio is interpolated linearly. YaRN rounds the ends of its ramp to pairs, which differ.
    tolerance = 1e-12 if dims[0] == dims[1] else 0.4 if scaling is YARN else 0.08
    assert found.inv_freq == pytest.approx(right.inv_freq, rel=tolerance)
    assert max(abs(a / b - 1) for a, b in zip(right.inv_freq, target.base.unscaled(), strict=True)) > 0.5


def test_the_own_scaling_of_a_model_is_that_of_its_draft_model() -> None:
    source, target = group(64, KINDS[3]), group(32, KINDS[0], rope_theta=1e4)
    transfer = DraftRotaryMapper([source], [target])
    assert transfer([resolve(source.scaling, source.base, 2048)]) == (resolve(target.scaling, target.base, 2048),)
    plain = RopeScaling.from_dict({"rope_type": "default"})
    (found,) = transfer([resolve(plain, source.base, 2048)])
    assert found.inv_freq == pytest.approx(target.base.unscaled(), rel=1e-12)


def test_learned_frequencies_are_unchanged() -> None:
    learned = RotaryGroup("full_attention", group(4, inv_freq=(1.0, 0.1)).base, RopeScaling("learned"))
    plain, scaled = group(4), resolve(RopeScaling.from_dict(KINDS[0]), group(4).base, 2048)
    assert DraftRotaryMapper([plain], [learned])([scaled]) == (resolve(learned.scaling, learned.base, 2048),)
    assert DraftRotaryMapper([learned], [plain])([scaled]) == (resolve(plain.scaling, plain.base, 2048),)


def test_distances_are_transferred_if_the_draft_model_supports_them() -> None:
    chunks = RopeScaling.from_dict({"rope_type": "dual_chunk", "chunk_size": 1024})
    source, target = group(64), group(32, KINDS[0])
    spec = resolve(chunks, source.base, 2048)
    (found,) = DraftRotaryMapper([source], [target])([spec])
    own = resolve(target.scaling, target.base, 2048)
    assert found.distances == spec.distances and found.inv_freq == own.inv_freq
    for shorter in (
        group(32, KINDS[0], trained_len=1023),
        group(32, KINDS[0], fixed_distances_reason="whose are its own"),
    ):
        assert DraftRotaryMapper([source], [shorter])([spec]) == (resolve(shorter.scaling, shorter.base, 2048),)
