"""Independent implementation of rotary scaling in numpy from the papers' definitions, and rotation in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from windlass.engine.rotary.rope_scaling import RotaryBase


def by_formula(obj: dict[str, Any], length: int, base: RotaryBase) -> tuple[np.ndarray, float]:
    """Return inverse frequencies and attention factor of a flat object, for a base without zeros and learned frequencies."""
    d, big_m = base.rotary_dim, base.trained_len
    b = obj.get("rope_theta", base.rope_theta)
    original = obj.get("original_max_position_embeddings", big_m)
    f = obj.get("factor", big_m / original)
    j = np.arange(d // 2, dtype=np.float64)
    w = np.exp(-(2 * j / d) * np.log(b))
    wavelengths = 2 * np.pi / w
    kind = obj.get("rope_type", obj.get("type"))
    if kind in ("dual_chunk", "log_n"):
        kind = "yarn" if "factor" in obj else "default"
    if kind in ("self_extend", "rerope"):
        kind = "default"
    if kind in ("default", "mrope"):
        return w, 1.0
    if kind in ("linear", "proportional"):
        return w / f, 1.0
    if kind in ("ntk", "dynamic"):
        if kind == "dynamic" and "alpha" in obj:
            f = obj["alpha"]
        elif kind == "dynamic":
            n = big_m
            grid = 0
            while n < length:
                grid += 1
                n = big_m * 2 ** (grid / 4)
            f = f * n / big_m - (f - 1)
        # Base that slows the slowest pair by exactly f: w_j * f^(-2j/(d-2)).
        return w * np.exp(-(2 * j / (d - 2)) * np.log(f)), 1.0
    if kind == "llama3":
        low, high = original / obj["low_freq_factor"], original / obj["high_freq_factor"]
        with np.errstate(divide="ignore", invalid="ignore"):
            blend = (original / wavelengths - obj["low_freq_factor"]) / (
                obj["high_freq_factor"] - obj["low_freq_factor"]
            )
        middle = (1 - blend) * w / f + blend * w
        return np.where(wavelengths < high, w, np.where(wavelengths > low, w / f, middle)), 1.0
    if kind == "yarn":
        turns = original / wavelengths  # decreasing in j; it reaches a beta linearly in log space
        pair = np.interp
        log_turns = np.log(turns)
        slope = log_turns[1] - log_turns[0]
        low = (np.log(obj.get("beta_fast", 32)) - log_turns[0]) / slope
        high = (np.log(obj.get("beta_slow", 1)) - log_turns[0]) / slope
        if obj.get("truncate", True):
            low, high = np.floor(low), np.ceil(high)
        low, high = max(low, 0), min(high, d - 1)
        ramp = pair(j, [low, high], [0.0, 1.0]) if high > low else (j > low).astype(float)
        attention = obj.get("attention_factor")
        if attention is None:
            attention = 0.1 * math.log(f) + 1
            if obj.get("mscale") and obj.get("mscale_all_dim"):
                attention = (0.1 * obj["mscale"] * math.log(f) + 1) / (0.1 * obj["mscale_all_dim"] * math.log(f) + 1)
        return w * (1 - ramp) + w / f * ramp, attention
    assert kind in ("longrope", "su")
    side = "short" if length <= original else "long"
    attention = obj.get(f"{side}_mscale") or obj.get("attention_factor")
    if attention is None:
        attention = math.sqrt(1 + math.log(f) / math.log(original)) if f > 1 else 1.0
    return w / np.array(obj[f"{side}_factor"]), attention


def rotate_pairs(x: np.ndarray, angles: np.ndarray, *, interleaved: bool) -> np.ndarray:
    """Rotate vectors [..., D] by angles [d/2] as complex numbers in float64; further dims are unchanged."""
    half = len(angles)
    x = x.astype(np.float64)
    real, imaginary = (
        (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
        if interleaved
        else (
            slice(0, half),
            slice(half, 2 * half),
        )
    )
    turned = (x[..., real] + 1j * x[..., imaginary]) * np.exp(1j * angles)
    out = x.copy()
    out[..., real], out[..., imaginary] = turned.real, turned.imag
    return out
