"""Whether a device computes what a CPU does: tiny models of several families, with the same files, in float32 and bfloat16.

Uses the tests' makers of models, so it runs from a checkout.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from windlass.engine.api.context import ContextRule
from windlass.engine.api.request import EngineRequest, SamplingParams
from windlass.engine.core.engine_core import EngineCore
from windlass.engine.rotary.scaling import RopeScaling
from windlass.server.options.engine_names import from_flat

_TESTS = str(Path(__file__).resolve().parents[2] / "tests")
FLOAT32, ROUNDED = 2e-3, 0.15  # nats; the weights are random, and logits of order one
# Family, options of the engine, fields of its requests.
CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", {}, {}),
    ("gemma3", {}, {}),
    ("gpt_oss", {}, {}),
    ("qwen2_moe", {}, {}),
    ("deepseek_v2", {}, {}),
    ("llama", {"quantization": "int8"}, {}),
    ("llama", {"quantization": "int4"}, {}),
    ("llama", {"kv_cache_dtype": "int8"}, {}),
    ("llama", {"deterministic": True}, {}),
    ("llama", {"speculative_ngram": 3, "speculative_ngram_min": 1}, {}),
    *(
        ("llama", {}, {"rope_scaling": RopeScaling.from_dict(scaling), "rope_update": update})
        for scaling, update in (
            ({"rope_type": "linear", "factor": 2.0}, None),
            ({"rope_type": "yarn", "factor": 4.0}, None),
            ({"rope_type": "dynamic", "factor": 2.0}, "frozen"),
            ({"rope_type": "dynamic", "factor": 2.0}, "rotate"),
            ({"rope_type": "dynamic", "factor": 2.0}, "recompute"),
        )
    ),
    ("llama", {}, {"context": ContextRule(attention_window=24, attention_sinks=4)}),
    ("llama", {"shift_context": 80}, {"context": ContextRule(overflow="shift")}),
]


def agreement(device: torch.device, directory: Path, families: list[str] | None = None) -> list[dict[str, Any]]:
    """Of each case the largest difference of a log-probability, and its bound: of a prompt's tokens, in float32 of drawn ones.

    directory: for the models. families: only these.
    """
    if _TESTS not in sys.path:
        sys.path.insert(0, _TESTS)
    from helpers.tiny_models import make_model

    found = []
    for family, options, fields in CASES:
        if families is not None and family not in families:
            continue
        model = directory / family
        if not model.exists():
            make_model(family, model)
        plain = {
            "dtype": "float32",
            "activations": "float32",
            "kv_cache_dtype": "float32",
            "max_model_len": 200,
        } | options
        want = _logprobs(model, {**plain, "device": "cpu"}, fields)
        for dtype in ("float32", "bfloat16"):
            if dtype == "bfloat16" and device.type == "cpu":
                continue
            given = {**plain, "device": str(device), "dtype": dtype}
            if "kv_cache_dtype" not in options:
                given["kv_cache_dtype"] = dtype
            got = _logprobs(model, given, fields)
            drawn = len(want) if dtype == "float32" else 59  # rounded, other tokens may be drawn
            most = max(abs(a - b) for a, b in zip(want[:drawn], got[:drawn], strict=True))
            bound = FLOAT32 if dtype == "float32" else ROUNDED
            name = " ".join(
                [family, dtype, *(f"{k}={_shown(v)}" for k, v in (options | fields).items() if v is not None)]
            )
            found.append({"name": name, "nats": most, "bound": bound, "verdict": "met" if most <= bound else "missed"})
    return found


def _shown(value: Any) -> str:
    if isinstance(value, RopeScaling):
        return value.rope_type
    if isinstance(value, ContextRule):
        return value.overflow if value.attention_window is None else f"window of {value.attention_window}"
    return str(value)


def _logprobs(model: Path, options: dict[str, Any], fields: dict[str, Any]) -> list[float]:
    """Of a prompt of 60 tokens but the first, then of 40 drawn ones, which captured steps compute where there are any."""
    core = EngineCore(from_flat(str(model), {"max_num_seqs": 2, "kv_cache_memory": 8 << 20, **options}))
    core.warm_up()
    prompt = torch.randint(3, 128, (30,), generator=torch.Generator().manual_seed(0)).tolist() * 2
    found: list[float] = []
    for sampling in (
        SamplingParams(max_tokens=0, prompt_logprobs=0),
        SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, logprobs=0),
    ):
        core.add(EngineRequest("x", prompt, sampling, **fields))
        while core.has_work():
            for output in core.step():
                if output.error is not None:
                    raise output.error
                found += [one.logprob for one in output.prompt_logprobs or () if one is not None]
                found += [one.logprob for one in output.logprobs or ()]
    return found
