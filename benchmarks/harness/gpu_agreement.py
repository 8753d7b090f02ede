"""Agreement of a device with a CPU: tiny models of several families, in float32 and bfloat16.

It uses the model makers of the tests, so it runs from a checkout. Cases of one model with the same options share an engine,
because compilation takes longest.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from harness.gpu_figures import reason_of

from windlass.engine.core.engine_core import EngineCore
from windlass.engine.interface.context import ContextRule
from windlass.engine.interface.request import EngineRequest, SamplingParams, ThinkingBudget
from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.server.config.option_names import from_flat

_TESTS = str(Path(__file__).resolve().parents[2] / "tests")
# Nats; the weights are random, and logits of order one. A CPU that computes in bfloat16 is 0.01 to 0.026 off, of DeepSeek's 0.09.
FLOAT32, ROUNDED, ROUNDED_LATENT = 2e-3, 0.05, 0.15
_PROMPT, _DRAWN = 60, 40  # tokens
_SHIFTING = {"shift_context": 80}  # it means nothing to a request that does not ask for shifts
_TRAINED = {"llama": {"max_position_embeddings": 32}}  # so that dynamic scaling begins within the prompt
_DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
# Family, options of the engine, fields of its requests.
Case = tuple[str, dict[str, Any], dict[str, Any]]
CASES: list[Case] = [
    ("llama", _SHIFTING, {}),
    *(
        ("llama", _SHIFTING, {"rope_scaling": RopeScaling.from_dict(scaling), "rope_update": update})
        for scaling, update in (
            ({"rope_type": "linear", "factor": 2.0}, None),
            ({"rope_type": "yarn", "factor": 4.0}, None),
            (_DYNAMIC, "frozen"),
            (_DYNAMIC, "rotate"),
            (_DYNAMIC, "recompute"),
        )
    ),
    ("llama", _SHIFTING, {"context": ContextRule(attention_window=24, attention_sinks=4)}),
    ("llama", _SHIFTING, {"context": ContextRule(overflow="shift")}),
    ("llama", {"quantization": "int8"}, {}),
    ("llama", {"quantization": "int4"}, {}),
    ("llama", {"kv_cache_dtype": "int8"}, {}),
    ("llama", {"deterministic": True}, {}),
    ("llama", {"speculative_ngram": 3, "speculative_ngram_min": 1}, {}),
    ("gemma3", {}, {}),
    ("gpt_oss", {}, {}),
    ("qwen2_moe", {}, {}),
    ("deepseek_v2", {}, {}),
]


@dataclass(frozen=True, slots=True)
class Text:
    """logprobs: of a prompt's tokens but the first, then of the drawn ones. accepted: how many of those had been proposed."""

    logprobs: list[float]
    drawn: list[int]
    accepted: int


def name_of(case: Case) -> str:
    family, options, fields = case
    shown = {k: v for k, v in (options | fields).items() if v is not None and k not in _SHIFTING}
    return " ".join([family, *(f"{k}={_shown(v)}" for k, v in shown.items())])


def chosen(parts: Sequence[str]) -> list[Case]:
    """The cases whose names contain any of these fragments; without fragments all."""
    return [case for case in CASES if not parts or any(part in name_of(case) for part in parts)]


def agreement(device: torch.device, directory: Path, parts: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """The largest difference of a log-probability between device and CPU for each case, and its bound.

    In float32 a device draws tokens itself. In bfloat16 it is forced to the tokens of the CPU, since rounding may change
    them. `apart`: the effect of the case's options on the CPU's own log-probabilities of the same text. A case without
    effect counts as missed: a request option with an effect within the bound, rounded weights or caches with one within the
    bound of float32, and speculation without an accepted proposal. A failed case is not measured, with the reason as its
    note. directory: for the models.
    """
    if _TESTS not in sys.path:
        sys.path.insert(0, _TESTS)
    from helpers.tiny_models import make_model

    wanted = chosen(parts)
    for family in dict.fromkeys(family for family, _, _ in wanted):
        model = directory / family
        if not model.exists():
            make_model(family, model, **_TRAINED.get(family, {}))
        plain = _Engines(model, {})
        mine = [case for case in wanted if case[0] == family]
        for options in {str(options): options for _, options, _ in mine}.values():
            engines = _Engines(model, options)
            for case in mine:
                if case[1] == options:
                    for dtype in ("float32",) if device.type == "cpu" else ("float32", "bfloat16"):
                        yield _compared(case, engines, plain, str(device), dtype)


def _compared(case: Case, engines: _Engines, plain: _Engines, device: str, dtype: str) -> dict[str, Any]:
    family, options, fields = case
    bound = FLOAT32 if dtype == "float32" else ROUNDED_LATENT if family == "deepseek_v2" else ROUNDED
    row = {"name": name_of((f"{family} {dtype}", options, fields)), "nats": None, "bound": bound, "apart": None}
    try:
        want = engines.text("cpu", "float32", fields)
        without = plain.text("cpu", "float32", {}, want.drawn)
        got = engines.text(device, dtype, fields, None if dtype == "float32" else want.drawn)
    except Exception as error:  # the other cases continue
        return row | {"verdict": "not measured", "note": reason_of(error)}
    nats, apart = _furthest(want, got), _furthest(want, without)
    if "speculative_ngram" in options:
        effective = min(want.accepted, got.accepted) > 0
    elif any(value is not None for value in fields.values()):
        effective = apart > bound
    else:
        effective = apart > FLOAT32 or not {"quantization", "kv_cache_dtype"} & options.keys()
    note = "" if effective else "the case has no effect"
    return row | {
        "nats": nats,
        "apart": apart,
        "verdict": "met" if effective and nats <= bound else "missed",
        "note": note,
    }


def _furthest(one: Text, other: Text) -> float:
    return max(abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True))


def _shown(value: Any) -> str:
    if isinstance(value, RopeScaling):
        return value.rope_type
    if isinstance(value, ContextRule):
        return value.overflow if value.attention_window is None else f"window of {value.attention_window}"
    return str(value)


class _Engines:
    """Engines of a model with the same options, one per device and dtype, created on first use and after a failure."""

    def __init__(self, model: Path, options: dict[str, Any]) -> None:
        self._model, self._options, self._made = model, options, dict[tuple[str, str], EngineCore]()

    def text(self, device: str, dtype: str, fields: dict[str, Any], forced: Sequence[int] | None = None) -> Text:
        """Log-probabilities of a prompt that repeats itself and of the tokens after it, which captured steps compute.

        forced: the tokens to draw. Raises the error of the request.
        """
        core = self._made.pop((device, dtype), None) or self._make(device, dtype)
        found, drawn = list[float](), list[int]()
        before = core.scheduler.counters.spec_decode_num_accepted_tokens
        # The end sequence of a thinking budget of 0 tokens is drawn immediately.
        thinking = None if forced is None else ThinkingBudget(0, tuple(forced))
        sampling = SamplingParams(
            max_tokens=_DRAWN, temperature=0.0, ignore_eos=True, logprobs=0, prompt_logprobs=0, thinking=thinking
        )
        prompt = torch.randint(3, 128, (_PROMPT // 2,), generator=torch.Generator().manual_seed(0)).tolist() * 2
        core.add(EngineRequest("x", prompt, sampling, **fields))
        while core.has_work():
            for output in core.step():
                if output.error is not None:
                    raise output.error
                found += [one.logprob for one in output.prompt_logprobs or () if one is not None]
                found += [one.logprob for one in output.logprobs or ()]
                drawn += output.token_ids
        self._made[device, dtype] = core
        return Text(found, drawn, core.scheduler.counters.spec_decode_num_accepted_tokens - before)

    def _make(self, device: str, dtype: str) -> EngineCore:
        given = {
            "dtype": dtype,
            "activations": "float32",
            "kv_cache_dtype": dtype,
            "device": device,
            "max_model_len": 200,
        }
        # Each prompt is computed in one step, so fewer shapes are compiled.
        given |= {"max_num_seqs": 2, "kv_cache_memory": 8 << 20, "prefix_caching": False}
        core = EngineCore(from_flat(str(self._model), given | self._options))
        core.warm_up()
        return core
