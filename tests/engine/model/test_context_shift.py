"""Sequences with dropped tokens, or with a window and sinks: logits compared with keys that are rotated again for every token."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers.raw_key_oracle import RawKeyOracle
from helpers.device import DEVICE, ON_A_CPU
from helpers.engines import Finished, greedy, make_core, run, specs_of
from helpers.tiny_models import make_model

from windlass.engine.core.engine_core import EngineCore
from windlass.engine.errors import RequestError
from windlass.engine.interface.context import ContextReport, ContextRule
from windlass.engine.interface.request import EngineRequest
from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.engine.rotary.rotary_policy import RotaryPlan
from windlass.kernels import KVPages

PROMPT = torch.randint(3, 128, (37,), generator=torch.Generator().manual_seed(5)).tolist()
WINDOW = 64  # slots of a sequence that shifts
LENGTH = 90
FEW_PAGES = {"plain": 160 << 10, "deterministic": 160 << 10, "int8 pages": 52 << 10}  # bytes: 10 blocks

FAMILIES = [
    "llama",
    "mistral",
    "gemma3",
    "smollm3",
    "glm",
    "phi3",
    "hunyuan",
    "ministral3",
    "qwen3",
    "deepseek_v3",
    "minicpm3",
    "gemma4_e2b",
    "gemma4_31b",
    "qwen3_5",
    "lfm2",
    "granite4_h",
    "falcon_h1",
]
# One of the recurrent models is quick enough.
SLOW = ("lfm2", "granite4_h", "falcon_h1")
CASES = [pytest.param(one, marks=pytest.mark.slow) if one in SLOW else one for one in FAMILIES]
SHIFT = ContextRule("shift", keep_tokens=16)
STREAM = ContextRule("shift", attention_window=21, attention_sinks=5)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {name: make_model(name, tmp_path_factory.mktemp(name)) for name in FAMILIES}
    found["short"] = make_model("llama", tmp_path_factory.mktemp("short"), max_position_embeddings=32)
    return found


def core_of(model: Path, **options: Any) -> EngineCore:
    return make_core(model, **{"max_model_len": 128, "shift_context": WINDOW, **options})


def oracle_of(core: EngineCore, model: Path, request: EngineRequest) -> RawKeyOracle:
    return RawKeyOracle(model, specs_of(core, request), [group.name for group in core.info.rotary_groups])


def shifted_logits(
    oracle: RawKeyOracle, tokens: list[int], keep: int, plan: RotaryPlan | None = None
) -> list[torch.Tensor]:
    """Positions for every token: at `WINDOW` tokens the oldest block after the retained ones is dropped, the rest is contiguous.

    plan: with `rotate`, whose keys have the current frequencies.
    """
    held = 0
    for index, token in enumerate(tokens):
        if plan is not None:
            oracle.enter(plan.stage(max(index + 1, len(PROMPT))).specs)
        if held == WINDOW:
            oracle.drop(keep, keep + 16)
            held -= 16
        held += 1
        oracle.step(token, held - 1, range(held), [True] * held)
    return oracle.logits()


def streamed_logits(oracle: RawKeyOracle, tokens: list[int], rule: ContextRule) -> list[torch.Tensor]:
    """Positions for every token: a window, and the sinks directly before it."""
    sinks = rule.attention_sinks
    assert rule.attention_window is not None
    for index, token in enumerate(tokens):
        first = max(0, index - rule.attention_window + 1)  # of the window
        gap = max(0, first - sinks)  # tokens between the sinks and the window
        seen = [j < sinks or j >= first for j in range(index + 1)]
        places = [j + gap if j < sinks else j for j in range(index + 1)]
        oracle.step(token, index, places, seen, index)
    return oracle.logits()


def check(got: Finished, right: list[torch.Tensor]) -> None:
    right = right[len(PROMPT) - 1 : len(PROMPT) - 1 + len(got.logits)]
    difference = (torch.stack(got.logits) - torch.stack(right)).abs().max()
    assert difference / torch.stack(right).abs().max() < 2e-5
    assert got.token_ids == torch.stack(right).argmax(-1).tolist()


SCALINGS = {
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "dynamic frozen": {"rope_type": "dynamic", "factor": 4.0},
    "dynamic rotate": {"rope_type": "dynamic", "factor": 4.0},
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "short_factor": [1.0 + 0.1 * i for i in range(8)],
        "long_factor": [1.5 + 0.5 * i for i in range(8)],
        "original_max_position_embeddings": 40,
    },
}


@pytest.mark.parametrize("name", SCALINGS)
def test_shifted_context_under_every_scaling(name: str, models: dict[str, Path]) -> None:
    core = core_of(models["short"])
    policy = "rotate" if name.endswith("rotate") else None
    scaling = RopeScaling.from_dict(SCALINGS[name])
    request = greedy("a", PROMPT, LENGTH, context=SHIFT, rope_scaling=scaling, rope_update=policy)
    got = run(core, [request])["a", 0]
    plan = core.plan_rotation(request)
    assert plan.longest == WINDOW  # largest visible distance
    oracle = oracle_of(core, models["short"], request)
    if name == "longrope":  # its only change, to the long factors, comes before any drop: everything is computed again
        oracle.enter(plan.stage(WINDOW).specs)
    right = shifted_logits(oracle, PROMPT + got.token_ids, 16, plan if policy == "rotate" else None)
    if name == "longrope":
        right[: 40 - 1] = [torch.full_like(right[0], torch.nan)] * 39
        got.logits, right = got.logits[WINDOW - len(PROMPT) :], right[WINDOW - len(PROMPT) :]
        got.token_ids = got.token_ids[WINDOW - len(PROMPT) :]
    check(got, right)


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("family", CASES)
def test_shifted_context_equals_contiguous_positions(family: str, models: dict[str, Path]) -> None:
    core = core_of(models[family])
    request = greedy("a", PROMPT, LENGTH, context=SHIFT)
    got = run(core, [request])["a", 0]
    assert len(got.token_ids) == LENGTH
    right = shifted_logits(oracle_of(core, models[family], request), PROMPT + got.token_ids, keep=16)
    check(got, right)
    report = got.outputs[-1].context
    assert report is not None and (report.window, report.kept_tokens) == (WINDOW, 16)
    assert (report.dropped_tokens, report.shifts) == (64, 4)


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("family", CASES)
@pytest.mark.parametrize("budget", [16, pytest.param(2048, marks=pytest.mark.slow)])
def test_window_with_sinks_is_equal_for_every_token(family: str, budget: int, models: dict[str, Path]) -> None:
    core = core_of(models[family], max_num_batched_tokens=budget)
    request = greedy("a", PROMPT, LENGTH, context=STREAM)
    got = run(core, [request])["a", 0]
    right = streamed_logits(oracle_of(core, models[family], request), PROMPT + got.token_ids, STREAM)
    check(got, right)


# Windows of layers and of requests: all sinks, some of them, or none are within the layers' window.
WIDER = {"all": (32, 21, 5), "some": (8, 6, 16), "all of one": (8, 4, 2), "just some": (24, 21, 5), "none": (21, 21, 5)}


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("name", WIDER)
@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_layers_with_wider_windows_see_sinks_at_their_positions(family: str, name: str, tmp_path: Path) -> None:
    """For texts of any length, with and without a cached prefix, and after a preemption."""
    own, window, sinks = WIDER[name]
    rule = ContextRule("shift", attention_window=window, attention_sinks=sinks)
    model = make_model(family, tmp_path / "model", sliding_window=own)
    core = core_of(model, max_num_batched_tokens=16)
    request = greedy("a", PROMPT, LENGTH, context=rule)
    got = run(core, [request])["a", 0]
    right = streamed_logits(oracle_of(core, model, request), PROMPT + got.token_ids, rule)
    check(got, right)
    again = run(core, [greedy("b", PROMPT, LENGTH, context=rule)])["b", 0]
    check(again, right)
    assert again.outputs[-1].cached_tokens == 32
    assert core.scheduler.blocks.num_used_blocks == 0


# -- batches, preemption, samples ------------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "int8 pages": {"kv_cache_dtype": "int8"},
    "int8 latent rows": {"kv_cache_dtype": "int8"},
    "bfloat16 pages": {"kv_cache_dtype": "bfloat16"},
    "speculation": {"speculative_ngram": 4, "speculative_ngram_min": 1},
    "deterministic": {"deterministic": True},
    "deterministic int8 pages": {"deterministic": True, "kv_cache_dtype": "int8"},
}

FAMILY_OF = {"int8 latent rows": "deepseek_v3"}
# Rows of 8 bits are for a CPU.
ON_THIS_DEVICE = [pytest.param(one, marks=ON_A_CPU) if one in FAMILY_OF else one for one in OPTIONS]


def crowd(length: int = LENGTH) -> list[EngineRequest]:
    """Requests with and without a context shift in one batch, with a common prefix."""
    rules = {
        "shift": SHIFT,
        "more": ContextRule("shift", keep_tokens=20),
        "none": ContextRule("shift", keep_tokens=0),
        "stream": STREAM,
        "window": ContextRule(attention_window=30),
        "whole": ContextRule(),
    }
    return [greedy(name, PROMPT, length, context=rule, seed=3) for name, rule in rules.items()]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("options", ON_THIS_DEVICE)
def test_batch_of_shifting_and_other_streams(options: str, models: dict[str, Path]) -> None:
    core = core_of(models[FAMILY_OF.get(options, "llama")], **OPTIONS[options])
    alone = {request.request_id: run(core, [request])[request.request_id, 0] for request in crowd()}
    together = run(core, crowd())
    for name, right in alone.items():
        got = together[name, 0]
        assert got.token_ids == right.token_ids, name
        difference = (torch.stack(got.logits) - torch.stack(right.logits)).abs().max()
        assert float(difference) <= (0 if "deterministic" in options else 1e-4), name
    shared = together["shift", 0].outputs[-1].cached_tokens
    assert shared >= 32  # of the common prefix, which requests with windows do not share
    if options == "plain" and DEVICE == "cpu":
        assert core.runner.replay.num_replayed > LENGTH // 2


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("options", FEW_PAGES)
def test_preempted_sequence_resumes_from_its_blocks(options: str, models: dict[str, Path]) -> None:
    right = run(core_of(models["llama"], **OPTIONS[options]), crowd())
    core = core_of(models["llama"], **{"kv_cache_memory": FEW_PAGES[options], **OPTIONS[options]})
    got = run(core, crowd())
    assert core.scheduler.counters.num_preemptions > 0
    for name, index in right:
        assert got[name, index].token_ids == right[name, index].token_ids, name


def test_samples_of_one_prompt_shift_independently(models: dict[str, Path]) -> None:
    core = core_of(models["llama"])
    requests = [greedy("a", PROMPT, LENGTH, context=SHIFT, n=3, temperature=1.0, seed=5)]
    got = run(core, requests)
    singles = [run(core, requests)["a", index] for index in range(3)]
    assert len({tuple(got["a", index].token_ids) for index in range(3)}) == 3
    for index in range(3):
        assert got["a", index].token_ids == singles[index].token_ids
        assert got["a", index].outputs[-1].context == ContextReport(WINDOW, 16, 64, 4)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("shifts", [40, pytest.param(300, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", "float32"), ("llama", "int8"), pytest.param("deepseek_v3", "int8", marks=ON_A_CPU)]
)
def test_written_keys_do_not_change(shifts: int, family: str, dtype: str, models: dict[str, Path]) -> None:
    core = core_of(models[family], kv_cache_dtype=dtype)
    core.add(greedy("a", PROMPT, 16 * shifts + WINDOW, context=SHIFT))
    pages, digests = core.runner.cache.pages(2), dict[int, bytes]()
    blocks_used = set()
    while core.has_work():
        core.step()
        (seq, *_) = core.scheduler.live_sequences() or [None]
        if seq is None:
            break
        full = seq.cache.num_slots // 16
        table = seq.cache.tables[0].blocks
        now = {block: digest_of(pages, block) for block in table[:full]}
        for block, digest in digests.items():
            assert now.get(block, digest) == digest or block not in table[:full]
        digests = now
        blocks_used.add(len(table))
    assert core.scheduler.counters.context_shifts >= shifts
    assert max(blocks_used) == WINDOW // 16


def digest_of(pages: KVPages, block: int) -> bytes:
    planes = (pages.key, pages.value, pages.key_scale, pages.value_scale)
    return hashlib.sha256(b"".join(p[block].cpu().numpy().tobytes() for p in planes if p is not None)).digest()


# -- refusals ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (ContextRule("shift", keep_tokens=-1), "keep_tokens must lie between 0 and 32"),
        (ContextRule("shift", keep_tokens=33), "keep_tokens must lie between 0 and 32"),
        (ContextRule(attention_window=0), "attention_window must be at least 1"),
        (ContextRule(attention_window=90, attention_sinks=20), "they may be at most 96"),
    ],
)
def test_invalid_context_rules_are_refused(rule: ContextRule, says: str, models: dict[str, Path]) -> None:
    core = core_of(models["llama"])
    with pytest.raises(RequestError, match=says):
        core.add(greedy("a", PROMPT, context=rule))
    with pytest.raises(RequestError, match="the context holds 64"):
        core.add(greedy("a", PROMPT + PROMPT, context=SHIFT))
    assert len(run(core, [greedy("a", PROMPT)])["a", 0].token_ids) == 8
