"""RoPE parameters of a GGUF model, in the form of config.json's `rope_parameters`.

Reads the `rope.*` keys and the tensors of per-frequency factors. The result is interpreted by `engine.rotary`.
"""

from __future__ import annotations

import math
from typing import Any

from windlass.engine.errors import LoadError
from windlass.engine.model.config_json.rotary_layout import rotary_share
from windlass.engine.model.gguf.architecture import ArchitectureKeys, Factors
from windlass.engine.rotary import frequencies
from windlass.engine.rotary.scaling_fields import format_value

FACTORS, LONG_FACTORS, SHORT_FACTORS = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
FACTOR_TENSORS = (FACTORS, LONG_FACTORS, SHORT_FACTORS)
_THETA = 10_000.0

# Parameters of every Llama 3: only `factor` differs. Frequencies depend only on the quotients of these three.
_LOW, _HIGH, _ORIGINAL = 1.0, 4.0, 8192
_MIN_STILL = 1e20  # factors from this on stop the rotation of a pair at every position; files have 1e30
_ROUNDING = 1e-6  # relative: numbers computed in float32 by another formula differ by a few ulps


def read_rope(keys: ArchitectureKeys, factors: Factors, rotary_dim: int, trained_len: int) -> dict[str, Any]:
    """Rope parameters of full-attention layers. factors: contents of those FACTOR_TENSORS that the file has.

    Raises LoadError for unsupported keys.
    """
    for name, values in factors.items():
        if len(values) != rotary_dim // 2 or not all(0 < value < math.inf for value in values):
            raise LoadError(f"tensor {name} must hold {rotary_dim // 2} positive numbers, one for each rotated pair")
    theta = keys.number("rope.freq_base") or _THETA
    scaling = _by_factors(keys, factors, theta, rotary_dim, trained_len) if factors else _by_keys(keys, trained_len)
    return {"rope_theta": theta, **scaling}


def read_proportional_rope(keys: ArchitectureKeys, factors: Factors, head_dim: int) -> dict[str, Any]:
    """Rope parameters of layers that rotate only the first pairs, whose factors are 1; the other pairs have a huge factor.

    Raises LoadError for other factors, and for a scaling in addition.
    """
    if factors.keys() != {FACTORS}:
        wrong = next(iter(factors.keys() - {FACTORS}), None)
        what = f"{FACTORS} is missing, which gives" if wrong is None else f"{wrong} is not the one that gives"
        raise LoadError(f"tensor {what} the rotated pairs: get another conversion of the model")
    values, pairs = factors[FACTORS], head_dim // 2
    rotated = next((i for i, value in enumerate(values) if value != 1), len(values))
    if len(values) != pairs or not rotated or not all(_MIN_STILL <= value < math.inf for value in values[rotated:]):
        raise LoadError(
            f"tensor {FACTORS} must hold {pairs} numbers, one for each pair of a head: 1 for rotated pairs, which come first, "
            f"and {_MIN_STILL:g} or more for the others"
        )
    scales = ("rope.scaling.factor", "rope.scale_linear", "rope.scaling.attn_factor")
    plain = keys.text("rope.scaling.type") in (None, "none", "linear")
    if not plain or any((keys.number(key) or 1.0) != 1.0 for key in scales):
        raise LoadError(f"sets {keys.key('rope.scaling')}.*, and there is {FACTORS} as well: get another conversion")
    return {
        "rope_type": "proportional",
        "rope_theta": keys.required_number("rope.freq_base"),
        "partial_rotary_factor": rotary_share(2 * rotated, head_dim),
    }


def _by_keys(keys: ArchitectureKeys, trained_len: int) -> dict[str, Any]:
    kind = keys.text("rope.scaling.type") or "linear"
    factor = keys.number("rope.scaling.factor") or keys.number("rope.scale_linear") or 1.0
    if kind == "longrope":
        raise LoadError(
            f"{keys.key('rope.scaling.type')} is longrope and {LONG_FACTORS} is missing: get another conversion"
        )
    if kind not in ("none", "linear", "yarn"):
        raise LoadError(
            f"{keys.key('rope.scaling.type')} {format_value(kind)} is not known: supported are none, linear, yarn and longrope"
        )
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return {"rope_type": "default"}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    found: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": keys.size("rope.scaling.original_context_length", trained_len),
        "beta_fast": keys.number("rope.scaling.yarn_beta_fast"),
        "beta_slow": keys.number("rope.scaling.yarn_beta_slow"),
        "attention_factor": keys.number("rope.scaling.yarn_attn_factor"),
    }
    all_dimensions = keys.number("rope.scaling.yarn_log_multiplier")
    if all_dimensions is not None:
        found |= {"mscale": 1.0, "mscale_all_dim": all_dimensions}
    temperature = keys.number("attention.temperature_scale")
    if temperature is not None:
        found["llama_4_scaling_beta"] = temperature
    given = keys.number("rope.scaling.attn_factor")  # on top of YaRN's own
    if given is not None and given != 1.0:
        own = found["attention_factor"] or frequencies.yarn_attention_factor(
            factor, found.get("mscale"), all_dimensions
        )
        found["attention_factor"] = own * given
    return {key: value for key, value in found.items() if value is not None}


def _by_factors(
    keys: ArchitectureKeys, factors: Factors, theta: float, rotary_dim: int, trained_len: int
) -> dict[str, Any]:
    if FACTORS in factors:
        _refuse_scaling(keys, FACTORS)
        return _as_llama3(factors[FACTORS], theta, rotary_dim) or _as_divisors(factors[FACTORS], trained_len)
    if len(factors) != 2:
        raise LoadError(
            f"{LONG_FACTORS} and {SHORT_FACTORS} belong together, and one is missing: get another conversion"
        )
    _refuse_scaling(keys, LONG_FACTORS)
    found: dict[str, Any] = {
        "rope_type": "longrope",
        "long_factor": list(factors[LONG_FACTORS]),
        "short_factor": list(factors[SHORT_FACTORS]),
    }
    original = keys.size("rope.scaling.original_context_length", trained_len)
    found["original_max_position_embeddings"] = original
    given = keys.number("rope.scaling.attn_factor") or 1.0
    own = frequencies.longrope_attention_factor(trained_len / original, original)
    if not math.isclose(given, own, rel_tol=_ROUNDING):
        found["attention_factor"] = given
    return found


def _refuse_scaling(keys: ArchitectureKeys, tensor: str) -> None:
    """Raise LoadError for factors together with a scaling by keys: no specification defines which applies first."""
    kind = keys.text("rope.scaling.type")
    if kind in ("linear", "yarn") and (keys.number("rope.scaling.factor") or 1.0) != 1.0:
        raise LoadError(
            f"{keys.key('rope.scaling.type')} is {kind} and there is {tensor} as well: get another conversion"
        )


def _as_llama3(factors: tuple[float, ...], theta: float, rotary_dim: int) -> dict[str, Any] | None:
    """Llama 3's scaling if these are its factors, up to the rounding of the file; else None."""
    factor = max(factors)
    unscaled = frequencies.default(theta, rotary_dim)
    scaled = frequencies.llama3(unscaled, factor, _LOW, _HIGH, _ORIGINAL)
    if not all(math.isclose(w / s, f, rel_tol=_ROUNDING) for w, s, f in zip(unscaled, scaled, factors, strict=True)):
        return None
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LOW,
        "high_freq_factor": _HIGH,
        "original_max_position_embeddings": _ORIGINAL,
    }


def _as_divisors(factors: tuple[float, ...], trained_len: int) -> dict[str, Any]:
    """Frequencies divided by these numbers at every length: longrope with two equal lists and without scaled scores."""
    divisors = list(factors)
    return {
        "rope_type": "longrope",
        "long_factor": divisors,
        "short_factor": divisors,
        "original_max_position_embeddings": trained_len,
        "attention_factor": 1.0,
    }
