"""Rotary fields of config.json: corner cases."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from windlass.engine.errors import LoadError
from windlass.engine.model.families.spec_reader import read_rotary_groups
from windlass.engine.rotary.rope_scaling import RopeScaling, resolve

GPT_OSS = {
    "rope_type": "yarn",
    "rope_theta": 150_000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


@pytest.mark.parametrize("nested", [False, True])
def test_yarn_uses_truncate(nested: bool) -> None:
    """gpt-oss does not round the ends of the ramp. transformers ignores the field if groups are named."""
    types = ["full_attention", "sliding_attention"]
    config: dict[str, Any] = {"model_type": "qwen3", "head_dim": 64, "num_hidden_layers": 2, "layer_types": types}
    config |= {"use_sliding_window": True, "max_position_embeddings": 131_072}
    config["rope_parameters"] = dict.fromkeys(types, GPT_OSS) if nested else GPT_OSS
    (group,) = read_rotary_groups(json.loads(json.dumps(config)))
    spec = resolve(group.scaling, group.base, 1)
    j = np.arange(32)
    w = 150_000.0 ** (-2 * j / 64)
    low, high = (64 * np.log(4096 / (2 * np.pi * turns)) / (2 * np.log(150_000)) for turns in (32, 1))
    ramp = np.clip((j - low) / (high - low), 0, 1)
    np.testing.assert_allclose(spec.inv_freq, w * (1 - ramp) + w / 32 * ramp, rtol=1e-12)
    assert spec.rotary_scale == pytest.approx(1.3466, abs=1e-4)
    rounded = resolve(RopeScaling.from_dict({**GPT_OSS, "truncate": True}), group.base, 1)
    assert max(abs(a / b - 1) for a, b in zip(spec.inv_freq, rounded.inv_freq, strict=True)) > 0.05


def test_too_wide_head_is_refused() -> None:
    config: dict[str, Any] = {"model_type": "qwen3", "head_dim": 10**9, "num_hidden_layers": 2}
    config |= {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 64}
    with pytest.raises(LoadError, match=r"head_dim must be a positive integer up to 65536, got 1000000000"):
        read_rotary_groups(config)
