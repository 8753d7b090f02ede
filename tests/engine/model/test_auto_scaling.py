"""`auto` scaling: logits equal transformers with the scaling for the length, in any batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.adapters import merged, save_adapter
from helpers.engines import Finished, greedy, make_core, run
from helpers.tiny_models import Reference, make_model

from windlass.engine.core.engine_core import EngineCore
from windlass.engine.errors import LoadError, RequestError
from windlass.engine.interface.context import ContextRule, NonPrefixReuseParams
from windlass.engine.interface.model_info import AdapterSource
from windlass.engine.interface.outputs import RequestOutput
from windlass.engine.interface.request import EngineRequest
from windlass.engine.rotary.auto_scaling import AUTO, ScalingThreshold
from windlass.engine.rotary.rope_scaling import RopeScaling, RotaryBase, resolve

M = 128
YARN = {factor: RopeScaling.from_dict({"rope_type": "yarn", "factor": factor}) for factor in (2.0, 4.0)}
TEXT = torch.randint(3, 128, (600,), generator=torch.Generator().manual_seed(5)).tolist()
TOKENS = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=M)


def core_of(model: Path, **options: Any) -> EngineCore:
    return make_core(model, **{"max_model_len": 512, **options})


def auto(name: str, length: int, **fields: Any) -> EngineRequest:
    """Return a request with a total of `length` tokens."""
    return greedy(name, TEXT[: length - TOKENS], TOKENS, rope_scaling=AUTO, **fields)


def transformers_logits(model: Path, folder: Path, length: int, got: Finished) -> torch.Tensor:
    """Return logits of the text in one pass, with `rope_parameters` in config.json for this length."""
    factor = next(f for f in (1.0, 2.0, 4.0) if length <= f * M)
    scaling = RopeScaling() if factor == 1.0 else YARN[factor]
    folder.mkdir(exist_ok=True)
    config = json.loads((model / "config.json").read_text())
    config["rope_parameters"] = {"rope_theta": 10000.0, **scaling.to_dict()}
    (folder / "config.json").write_text(json.dumps(config))
    if not (folder / "model.safetensors").exists():
        (folder / "model.safetensors").symlink_to(model / "model.safetensors")
    spec = resolve(scaling, RotaryBase(10000.0, 16, 16, M), length)
    reference = Reference(folder, (spec,), ["full_attention"])
    own = reference.model.model.rotary_emb
    assert torch.allclose(torch.tensor(spec.inv_freq, dtype=torch.float32), own.inv_freq, rtol=1e-6, atol=0)
    assert spec.rotary_scale == pytest.approx(own.attention_scaling)
    return reference.logits(TEXT[: length - TOKENS] + got.token_ids)[length - TOKENS - 1 : length - 1]


LENGTHS = {100: 1.0, M: 1.0, M + 1: 2.0, 2 * M: 2.0, 2 * M + 1: 4.0, 512: 4.0}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    "options", [{}, {"deterministic": True}, {"max_num_batched_tokens": 7}, {"speculative_ngram": 4}]
)
def test_batch_of_lengths_equals_transformers(model: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    core = core_of(model, **options)
    results = run(core, [auto(f"r{length}", length, cache_salt=str(length)) for length in LENGTHS])
    for length, factor in LENGTHS.items():
        got = results[f"r{length}", 0]
        report = got.outputs[-1].rotary
        assert report is not None and report.policy == "frozen"
        assert report.parameters.get("factor", 1.0) == factor
        assert report.auto == {"length": length, "up_to": int(factor * M)}
        right = transformers_logits(model, tmp_path / str(factor), length, got)
        assert float((torch.stack(got.logits) - right).abs().max() / right.abs().max()) < 1e-5


def test_trained_length_has_the_bits_and_the_cache_of_no_scaling(model: Path) -> None:
    plain = run(core_of(model), [greedy("a", TEXT[:100], TOKENS)])["a", 0]
    core = core_of(model, rope_scaling=AUTO)
    got = run(core, [greedy("a", TEXT[:100], TOKENS)])["a", 0]
    assert all(torch.equal(a, b) for a, b in zip(got.logits, plain.logits, strict=True))
    assert got.outputs[-1].rotary is not None and plain.outputs[-1].rotary is not None
    assert got.outputs[-1].rotary.fingerprint == plain.outputs[-1].rotary.fingerprint
    default = greedy("b", TEXT[:100], TOKENS, rope_scaling=RopeScaling())
    assert run(core, [default])["b", 0].outputs[-1].cached_tokens == 96


def test_crossing_a_threshold_uses_the_cache_of_the_next_scaling(model: Path) -> None:
    """A chat that grows beyond a threshold reuses no blocks cached below it, and all blocks cached above it."""
    core = core_of(model)
    for name, length, cached in (
        ("below", 110, 0),
        ("grown", 126, 96),
        ("crossed", 140, 0),
        ("on", 160, 128),
        ("back", 120, 112),
    ):
        first = run(core, [auto(name, length)])[name, 0].outputs[0]
        assert first.cached_tokens == cached, name
    # A request with the same explicit scaling shares the cached blocks: only frequencies matter.
    spelt = greedy("spelt", TEXT[:170], TOKENS, rope_scaling=YARN[2.0])
    assert run(core, [spelt])["spelt", 0].outputs[0].cached_tokens == 144
    # Under the next scaling almost everything is cached, but a request gets the smallest sufficient one.
    run(core, [auto("higher", 300)])
    least = run(core, [auto("least", 250)])["least", 0].outputs[-1]
    assert least.rotary is not None and least.rotary.parameters["factor"] == 2.0


@pytest.mark.parametrize("policy", ["recompute", "rotate"])
def test_choice_follows_the_context_on_request(model: Path, policy: Any) -> None:
    core = core_of(model)
    prompt = TEXT[:100]
    sent = greedy("a", prompt, 180, rope_scaling=AUTO, rope_update=policy)
    result = run(core, [sent])["a", 0]
    report = result.outputs[-1].rotary
    assert report is not None and report.policy == policy and report.moves == (2 if policy == "rotate" else 0)
    assert report.auto == {"length": None, "up_to": 512}
    if policy == "recompute":
        plan = core.plan_rotation(sent)
        for length in (100, 128, 129, 200, 256, 257, 279):
            right = Reference(model, plan.stage(length).specs, ["full_attention"])
            right_row = right.logits((prompt + result.token_ids)[:length])[-1]
            logits = result.logits[length - 100]
            assert float((logits - right_row).abs().max() / right_row.abs().max()) < 1e-5
        assert core.stats().recomputed_tokens["rope_update"] >= 128 + 256 - 2


def preempt_once(core: EngineCore) -> None:
    """Preempt a sequence that has sampled some tokens."""
    step = core.step

    def step_and_preempt() -> list[RequestOutput]:
        for sequence in core.scheduler.live_sequences():
            if sequence.num_output_tokens == 3 and core.stats().num_preemptions == 0:
                core.scheduler._queues.preempt(sequence)
        return step()

    core.step = step_and_preempt  # type: ignore[method-assign]


def test_other_features_do_not_change_the_choice(model: Path) -> None:
    """Samples, an int8 cache, windows, passages and preemption equal those under the scaling for the length."""
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "samples": ({}, {"n": 3}),
        "int8": ({"kv_cache_dtype": "int8"}, {}),
        "preempted": ({"deterministic": True}, {"n": 2}),
        "passages": ({}, {"reuse": NonPrefixReuseParams(32)}),
        "logprobs": ({}, {"prompt_logprobs": 0}),
        "draft": ({"speculative_model": str(model), "speculative_tokens": 3, "speculative_adaptive": False}, {}),
    }
    for name, (options, fields) in cases.items():
        core = core_of(model, **options)
        if name == "preempted":
            preempt_once(core)
        chosen = run(core, [auto("a", 200, **fields), auto("b", 201, **fields)])
        assert (core.stats().num_preemptions > 0) == (name == "preempted")
        assert name != "draft" or core.stats().spec_decode_num_accepted_tokens > 0
        core = core_of(model, **options)
        named = [
            greedy(n, TEXT[: length - TOKENS], TOKENS, rope_scaling=YARN[2.0], **fields)
            for n, length in (("a", 200), ("b", 201))
        ]
        for key, right in run(core, named).items():
            assert chosen[key].token_ids == right.token_ids, name
            assert all(torch.equal(a, b) for a, b in zip(chosen[key].logits, right.logits, strict=True)), name
            assert chosen[key].outputs[-1].cached_tokens == right.outputs[-1].cached_tokens


def test_requests_with_adapters_are_scaled_by_their_length(model: Path, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", model)
    core = core_of(model, lora=(AdapterSource(1, "a", str(adapter)),))
    results = run(core, [auto(f"{i} {length}", length, adapter=i) for i in (None, 1) for length in (120, 200, 400)])
    whole = {None: model, 1: merged(model, adapter, tmp_path / "merged")}
    for name, got in ((name, got) for (name, _), got in results.items()):
        number, length = name.split()
        weights = whole[None if number == "None" else 1]
        right = transformers_logits(weights, tmp_path / f"{name}", int(length), got)
        assert float((torch.stack(got.logits) - right).abs().max() / right.abs().max()) < 1e-5, name


def test_unlimited_context_uses_the_scaling_of_its_window(model: Path) -> None:
    """With a window, the largest visible distance decides, so that the choice never changes."""
    core = core_of(model, max_model_len=512, shift_context=192)
    shift = ContextRule(overflow="shift", keep_tokens=16)
    got = run(core, [greedy("a", TEXT[:60], 300, rope_scaling=AUTO, context=shift)])["a", 0].outputs[-1].rotary
    assert got is not None and got.parameters["factor"] == 2.0 and got.auto == {"length": 192, "up_to": 256}
    window = ContextRule(attention_window=64, attention_sinks=16)
    got = run(core, [greedy("b", TEXT[:300], 60, rope_scaling=AUTO, context=window)])["b", 0].outputs[-1].rotary
    assert got is not None and got.rope_type == "default" and got.auto == {"length": 80, "up_to": 128}
    # Tokens, not blocks: the trained length needs no scaling.
    window = ContextRule(attention_window=127, attention_sinks=1)
    got = run(core, [greedy("c", TEXT[:300], 60, rope_scaling=AUTO, context=window)])["c", 0].outputs[-1].rotary
    assert got is not None and got.rope_type == "default" and got.auto == {"length": 128, "up_to": 128}


def test_thresholds_of_the_server_and_their_end(model: Path) -> None:
    linear = RopeScaling.from_dict({"rope_type": "linear", "factor": 2.0})
    core = core_of(model, rope_ladder=(ScalingThreshold(100), ScalingThreshold(300, linear, "two")), rope_scaling=AUTO)
    result = run(core, [greedy("a", TEXT[:101], TOKENS)])["a", 0].outputs[-1].rotary
    assert result is not None and result.rope_type == "linear"
    assert result.auto == {"length": 107, "up_to": 300, "profile": "two"}
    with pytest.raises(RequestError, match="have 301 tokens, the last threshold of this server is 300"):
        core.add(greedy("b", TEXT[:295], TOKENS))
    with pytest.raises(LoadError, match=r"^`rotary\.ladder`: step 2 scales by 1, the one before it by 2"):
        core_of(model, rope_ladder=(ScalingThreshold(100, linear), ScalingThreshold(300)))
