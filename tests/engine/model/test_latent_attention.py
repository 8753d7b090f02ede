"""Latent attention: contents of the cache, cache operations, and both forms compared with a float64 formula."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers.raw_key_oracle import RawKeyOracle
from helpers.configs import engine_config
from helpers.cpu_kernels import MATRIX_FORMS, choose, kernels
from helpers.device import DEVICE, ON_A_CPU
from helpers.engines import Finished, greedy, make_core, run, specs_of
from helpers.tiny_models import Reference, make_model
from torch import Tensor

from windlass.engine.core.engine_core import EngineCore
from windlass.engine.errors import LoadError, RequestError
from windlass.engine.interface.context import ContextRule
from windlass.engine.interface.request import EngineRequest
from windlass.engine.model.families.spec_reader import read_spec
from windlass.engine.model.loading.preflight import DeviceCapabilities, prepare_model
from windlass.engine.model.mixers import latent_attention
from windlass.engine.model.mixers.latent_attention import (
    LatentAttentionForms,
    LatentQueries,
    LatentSpec,
    QueryRotations,
)
from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.kernels import AttentionCall, Backend, KeyRanges, KVPages
from windlass.kernels.attention_call import LatentExpansion
from windlass.kernels.backend import BackendOptions
from windlass.kernels.cpu import attention_bindings, library
from windlass.kernels.cpu.cpu_backend import CompiledBackend
from windlass.kernels.torch import reference
from windlass.kernels.torch.torch_backend import RowIndependentBackend, TorchBackend

PROMPT = torch.randint(3, 128, (40,), generator=torch.Generator().manual_seed(0)).tolist()
LAYERS, WIDTH = 4, 24 + 8  # latent and rotated dims of the tiny models


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make_model(name, tmp_path_factory.mktemp(name)) for name in ("deepseek_v3", "minicpm3")}


def error(core: EngineCore, model: Path, request: EngineRequest, got: Finished) -> float:
    prompt = request.prompt_token_ids
    right = Reference(model, specs_of(core, request), ["full_attention"]).logits([*prompt, *got.token_ids])
    right = right[len(prompt) - 1 : -1]
    return float((torch.stack(got.logits) - right).abs().max() / right.abs().max())


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_token_size_is_the_latent_vector_and_one_rotated_part(dtype: str, size: int, models: dict[str, Path]) -> None:
    core = make_core(models["deepseek_v3"], kv_cache_dtype=dtype)
    assert core.info.kv_bytes_per_token == LAYERS * WIDTH * size
    pages = core.runner.cache.pages(0)
    assert pages.key.shape[2:] == (1, WIDTH) and pages.value.numel() == 0
    run(core, [greedy("a", PROMPT)])


@ON_A_CPU
def test_int8_token_size_has_a_scale_for_every_32_numbers(models: dict[str, Path]) -> None:
    core = make_core(models["deepseek_v3"], kv_cache_dtype="int8", kv_cache_memory=1 << 20)
    assert core.info.kv_cache_dtype == "int8" and core.info.kv_bytes_per_token == LAYERS * (WIDTH + 4)
    pages = [core.runner.cache.pages(layer) for layer in range(LAYERS)]
    tensors = [t for p in pages for t in (p.key, p.value, p.key_scale, p.value_scale) if t is not None]
    assert sum(t.nbytes for t in tensors) == core.info.kv_cache_bytes <= 1 << 20


def test_int8_cache_is_refused_on_a_gpu(models: dict[str, Path]) -> None:
    config = engine_config(models["deepseek_v3"], kv_cache_dtype="int8", kv_cache_memory=8 << 20)
    prepare_model(config, DeviceCapabilities("cpu", True))
    with pytest.raises(LoadError, match=r"`cache\.dtype=int8` with latent attention is for the CPU"):
        prepare_model(config, DeviceCapabilities("cuda:0", True))


WIDE: dict[str, Any] = {"qk_rope_head_dim": 32, "kv_lora_rank": 80}  # rotated dims fill a group, as in real models


def through_codes(x: Tensor) -> Tensor:
    """Round x [..., D] to codes with a scale for each group of 32 numbers, and back."""
    found = []
    for group in x.double().split(32, dim=-1):
        step = group.abs().amax(dim=-1, keepdim=True) / 127
        found.append((group / step).round() * step)
    return torch.cat(found, dim=-1).to(x.dtype)


def error_with_rounded_rows(
    monkeypatch: pytest.MonkeyPatch, model: Path, core: EngineCore, request: EngineRequest, got: Finished
) -> float:
    """Return logits of transformers with latent vectors and shared rotated keys rounded to codes before attention."""
    reference = Reference(model, specs_of(core, request), ["full_attention"])
    attention = [layer.self_attn for layer in reference.model.model.layers]
    module = sys.modules[type(attention[0]).__module__]
    original = module.apply_rotary_pos_emb_interleave  # type: ignore[attr-defined]

    def rotate(*given: Any) -> tuple[Tensor, Tensor]:
        q, k = original(*given)
        return q, through_codes(k)

    monkeypatch.setattr(module, "apply_rotary_pos_emb_interleave", rotate)
    for one in attention:
        one.kv_a_layernorm.register_forward_hook(lambda _, __, latent: through_codes(latent))
    prompt = request.prompt_token_ids
    right = reference.logits([*prompt, *got.token_ids])[len(prompt) - 1 : -1]
    monkeypatch.undo()
    return float((torch.stack(got.logits) - right).norm() / right.norm())


@pytest.mark.quick_cases(3)
@ON_A_CPU
@pytest.mark.parametrize(
    "options", [{}, {"max_num_batched_tokens": 7}, {"deterministic": True}], ids=["", "chunks", "det"]
)
@pytest.mark.parametrize("compiled", [True, False])
def test_int8_cache_equals_rounded_transformers(
    compiled: bool, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        choose(monkeypatch, "turned off by this test")
    model, request = make_model("deepseek_v3", tmp_path, **WIDE), greedy("a", PROMPT, 12)
    core = make_core(model, kv_cache_dtype="int8", **options)
    got = run(core, [request])["a", 0]
    wide = run(make_core(model, **options), [request])["a", 0]
    assert error(core, model, request, wide) < 1e-5
    lost = error(core, model, request, got)
    left = error_with_rounded_rows(monkeypatch, model, core, request, got)
    assert lost > 1e-3 and left < 0.05 * lost, (lost, left)


@pytest.mark.quick_cases(1)
@ON_A_CPU
@pytest.mark.parametrize("model", ["deepseek_v3", "minicpm3"])
def test_int8_rows_in_batches_chunks_preempted_and_cached(model: str, models: dict[str, Path]) -> None:
    """Equal bits under `deterministic`, in which no other rounding changes a code."""
    options: dict[str, Any] = {"kv_cache_dtype": "int8", "deterministic": True, "max_model_len": 96}
    requests = [greedy(f"r{i}", PROMPT[i:] + PROMPT[: 3 * i], 30) for i in range(6)]
    alone = {one.request_id: run(make_core(models[model], **options), [one])[one.request_id, 0] for one in requests}
    room = 14 * 16 * make_core(models[model], **options).info.kv_bytes_per_token
    tight, cut, cached = (
        make_core(models[model], **options, **more)
        for more in ({"kv_cache_memory": room}, {"max_num_batched_tokens": 7}, {})
    )
    run(cached, requests)
    found = {"tight": run(tight, requests), "cut": run(cut, requests), "cached": run(cached, requests)}
    assert tight.stats().num_preemptions > 0
    assert found["cached"]["r0", 0].outputs[-1].cached_tokens >= 32
    for way, together in found.items():
        for name, right in alone.items():
            assert together[name, 0].token_ids == right.token_ids, (way, name)
            assert torch.equal(torch.stack(together[name, 0].logits), torch.stack(right.logits)), (way, name)


@ON_A_CPU
def test_int8_rows_in_recorded_steps(models: dict[str, Path]) -> None:
    if library.unavailable_reason() is not None:
        pytest.skip("no compiled kernels")
    core = make_core(models["minicpm3"], kv_cache_dtype="int8")
    run(core, [greedy("a", PROMPT, 30), greedy("b", PROMPT[:9], 30)])
    assert core.runner.replay.obstacle is None and core.runner.replay.num_replayed > 20


@ON_A_CPU
def test_rotated_int8_rows_are_rounded_once(tmp_path: Path) -> None:
    """Only the rotated groups change, and after four rotations they are as near as after the first rounding."""
    model = make_model(
        "deepseek_v3", tmp_path, max_position_embeddings=32, rope_parameters={"rope_type": "default"}, **WIDE
    )
    core = make_core(model, max_model_len=256, kv_cache_dtype="int8", deterministic=True)
    dynamic = RopeScaling.from_dict({"rope_type": "dynamic", "factor": 2.0})
    core.add(greedy("a", range(3, 51), 120, rope_scaling=dynamic, rope_update="rotate"))
    sequence = core.scheduler.live_sequences()[0]
    while core.has_work() and sequence.cache.num_rerotations < 4:
        core.step()
    core.step()
    pages = core.runner.cache.pages(0)
    rows = pages.keys_of(torch.arange(pages.key.shape[0]), 112).double()
    original = rows[torch.tensor(sequence.cache.originals[0].blocks[:3])].flatten(0, 2)
    turned = rows[torch.tensor(sequence.cache.block_tables[0][:3])].flatten(0, 2)
    old, new = sequence.cache.originals[0].origins[0][1][0], sequence.stage.specs[0]
    step = torch.tensor(new.inv_freq, dtype=torch.float64) - torch.tensor(old.inv_freq, dtype=torch.float64)
    angle = torch.arange(48).double()[:, None] * step
    first, second = original[:, :16], original[:, 16:32]
    right = torch.cat((first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), 1)
    assert ((turned[:, :32] - right).abs() <= right.abs().amax(1, keepdim=True) * 0.501 / 127).all()
    assert torch.equal(turned[:, 32:], original[:, 32:]) and not torch.equal(turned[:, :32], original[:, :32])


SCALINGS: dict[str, dict[str, Any] | None] = {
    "own": None,
    "none": {"rope_type": "default"},
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32},
    "whole scores": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "only whole scores": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "mscale_all_dim": 0.5,
    },
    "linear": {"rope_type": "linear", "factor": 4.0},
}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 16}], ids=["", "chunks"])
def test_mixed_scalings_equal_transformers(options: dict[str, Any], models: dict[str, Path], tmp_path: Path) -> None:
    """transformers has each scaling in its config.json, including mscale_all_dim on entire scores."""
    model, core = models["deepseek_v3"], make_core(models["deepseek_v3"], **options)
    requests = [
        greedy(name, PROMPT, 9, rope_scaling=None if given is None else RopeScaling.from_dict(given))
        for name, given in SCALINGS.items()
    ]
    together = run(core, requests)
    config = json.loads((model / "config.json").read_text())
    for request in requests:
        name, given = request.request_id, SCALINGS[request.request_id]
        other = shutil.copytree(model, tmp_path / name)
        if given is not None:
            parameters = {"rope_theta": config["rope_parameters"]["rope_theta"], **given}
            (other / "config.json").write_text(json.dumps({**config, "rope_parameters": parameters}))
        assert error(core, other, request, together[name, 0]) < 1e-5, name
    # A missing factor on entire scores fails here.
    assert error(core, models["deepseek_v3"], requests[3], together["none", 0]) > 1e-3
    factor = specs_of(core, requests[3])[0].score_scale
    assert factor == pytest.approx((0.1 * torch.tensor(8.0).log().item() + 1) ** 2)
    assert len({specs_of(core, request)[0].fingerprint for request in requests}) == len(requests)


def test_factor_on_scores_is_bounded(models: dict[str, Path]) -> None:
    scaling = RopeScaling.from_dict({"rope_type": "yarn", "factor": 8.0, "mscale": 1.0, "mscale_all_dim": 1e9})
    with pytest.raises(RequestError, match="rope_scaling"):
        make_core(models["deepseek_v3"]).add(greedy("a", PROMPT, rope_scaling=scaling))


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("model", ["deepseek_v3", "minicpm3"])
@pytest.mark.parametrize("options", [{}, {"deterministic": True}], ids=["", "deterministic"])
def test_preempted_batch_equals_single_requests(model: str, options: dict[str, Any], models: dict[str, Path]) -> None:
    requests = [greedy(f"r{i}", PROMPT[i:] + PROMPT[: 3 * i], 30) for i in range(6)]
    alone = {one.request_id: run(make_core(models[model], **options), [one])[one.request_id, 0] for one in requests}
    room = 14 * 16 * LAYERS * WIDTH * 4  # 14 blocks
    core = make_core(models[model], kv_cache_memory=room, max_model_len=96, **options)
    together = run(core, requests)
    assert core.stats().num_preemptions > 0
    for name, right in alone.items():
        got = together[name, 0]
        assert got.token_ids == right.token_ids
        difference = float((torch.stack(got.logits) - torch.stack(right.logits)).abs().max())
        assert difference <= (0 if options else 1e-4), name


@ON_A_CPU
@pytest.mark.skipif(library.unavailable_reason() is not None, reason="no compiled kernels")
@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "bfloat16"}], ids=["float32", "bfloat16 pages"])
def test_recorded_decode_steps_give_the_same_bits(options: dict[str, Any], models: dict[str, Path]) -> None:
    core = make_core(models["minicpm3"], **options)
    requests = [greedy("a", PROMPT, 30), greedy("b", PROMPT[:9], 30)]
    got = run(core, requests)
    assert core.runner.replay.obstacle is None and core.runner.replay.num_replayed > 20
    if not options:
        assert all(error(core, models["minicpm3"], one, got[one.request_id, 0]) < 1e-5 for one in requests)


def test_proposals_do_not_change_answers(models: dict[str, Path]) -> None:
    request = greedy("a", PROMPT[:8] * 4, 40)
    right = run(make_core(models["deepseek_v3"]), [request])["a", 0]
    core = make_core(models["deepseek_v3"], speculative_ngram=4, speculative_ngram_min=1)
    assert run(core, [request])["a", 0].token_ids == right.token_ids
    assert core.stats().spec_decode_num_draft_tokens > 0


def test_cached_keys_are_rotated_again_as_a_text_grows(tmp_path: Path) -> None:
    """With `rotate`, only the rotated part of a cached row changes. The rest is copied to the new block."""
    model = make_model("deepseek_v3", tmp_path, max_position_embeddings=32, rope_parameters={"rope_type": "default"})
    core, prompt = make_core(model, max_model_len=128), PROMPT[:20]
    scaling = RopeScaling.from_dict({"rope_type": "dynamic", "factor": 4.0})
    request = greedy("a", prompt, 40, rope_scaling=scaling, rope_update="rotate")
    got = run(core, [request])["a", 0]
    report = got.outputs[-1].rotary
    assert report is not None and report.moves > 0
    oracle, plan = RawKeyOracle(model, specs_of(core, request), ["full_attention"]), core.plan_rotation(request)
    for index, token in enumerate([*prompt, *got.token_ids]):
        oracle.enter(plan.stage(max(index + 1, len(prompt))).specs)
        oracle.step(token, index, range(index + 1), [True] * (index + 1))
    expected = torch.stack(oracle.logits()[len(prompt) - 1 : -1])
    assert (torch.stack(got.logits) - expected).abs().max() / expected.abs().max() < 2e-5


BASE: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 2,
}


def test_omitted_keys_have_the_defaults_of_the_class() -> None:
    mixer = read_spec(BASE).layers[0].mixer
    assert isinstance(mixer, LatentSpec)
    assert (mixer.latent_dim, mixer.rotary_dim, mixer.plain_dim, mixer.value_dim) == (512, 64, 128, 128)
    assert mixer.query_rank == 1536 and mixer.interleaved and mixer.scale == 192**-0.5
    without = read_spec({**BASE, "q_lora_rank": None, "model_type": "kimi_k2"}).layers[0].mixer
    assert isinstance(without, LatentSpec) and without.query_rank is None


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"num_key_value_heads": 2}, "num_key_value_heads differs"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1"),
        ({"kv_lora_rank": 0}, "kv_lora_rank must be a positive integer"),
        ({"q_lora_rank": "8"}, "q_lora_rank must be a positive integer"),
        ({"qk_rope_head_dim": 7}, "7 rotated dimensions"),
        ({"first_k_dense_replace": 1, "n_group": 3}, "do not make 3 groups"),
        (
            {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "topk_method": "noaux_tc"},
            "topk_method must be greedy or group_limited_greedy",
        ),
        ({"rope_interleave": 1}, "rope_interleave must be true or false"),
    ],
)
def test_unsupported_options_are_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(LoadError, match=says):
        read_spec({**BASE, **given})


# -- forms -------------------------------------------------------------------------------------------------------------

SPEC = LatentSpec(num_heads=5, latent_dim=24, rotary_dim=8, plain_dim=12, value_dim=10, scale=20**-0.5)
WIDE_HEADS = LatentSpec(num_heads=3, latent_dim=512, rotary_dim=64, plain_dim=128, value_dim=128, scale=192**-0.5)
BLOCKS, SIZE = 64, 16
FORMS_PROMPT = torch.randint(3, 128, (90,), generator=torch.Generator().manual_seed(0)).tolist()
COMPILED = pytest.param(
    CompiledBackend,
    marks=pytest.mark.skipif(library.unavailable_reason() is not None, reason="no compiled kernels"),
)
Choice = Callable[[float | None], None]


@pytest.fixture
def at_cost(monkeypatch: pytest.MonkeyPatch) -> Choice:
    """Set the cost of the expanded form: 0 selects it for every prompt, None for none."""

    def choose(cost: float | None) -> None:
        way = None if cost is None else LatentExpansion(cost, cost)
        for backend in (CompiledBackend, TorchBackend):
            monkeypatch.setattr(backend, "latent_expansion", lambda self, pages: way)
        monkeypatch.setattr(latent_attention, "_MIN_EXPANDED_TOKENS", 2)

    return choose


@pytest.fixture
def expansions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of rows of every later expansion."""
    found: list[int] = []
    original = latent_attention.expand_latents

    def noted(rows: torch.Tensor, *rest: Any) -> KVPages:
        found.append(rows.shape[0] * rows.shape[1])
        return original(rows, *rest)

    monkeypatch.setattr(latent_attention, "expand_latents", noted)
    return found


def bound(backend: type[Backend]) -> Backend:
    return backend(BackendOptions(torch.device("cpu")))  # type: ignore[call-arg]


def operands(spec: LatentSpec, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, KVPages]:
    """Matrices of the heads, and cache blocks of latent rows."""
    up = torch.randn(spec.num_heads, spec.plain_dim + spec.value_dim, spec.latent_dim) / spec.latent_dim**0.5
    rows = torch.randn(BLOCKS, SIZE, 1, spec.cached_dim)
    if dtype == torch.int8:
        codes, scales = reference.quantize_rows(rows)
        return up, KVPages(codes, codes[..., :0].contiguous(), scales, scales[..., :0].contiguous())
    return up, KVPages(rows.to(dtype), torch.empty(BLOCKS, SIZE, 1, 0, dtype=dtype))


def call_of(spec: LatentSpec, lengths: list[int], news: list[int], **options: Any) -> AttentionCall:
    """Sequences with blocks in arbitrary order."""
    columns = -(-max(lengths) // SIZE)
    tables = torch.randperm(BLOCKS)[: columns * len(lengths) % (BLOCKS + 1)].int()
    tables = tables.repeat(len(lengths))[: columns * len(lengths)].view(len(lengths), columns).contiguous()
    start = torch.tensor([0, *news]).cumsum(0)
    return AttentionCall(tables, start, torch.tensor(lengths), torch.rand(sum(news)) + 0.5, spec.scale, **options)


def expected(
    spec: LatentSpec, up: torch.Tensor, pages: KVPages, call: AttentionCall, versions: torch.Tensor
) -> torch.Tensor:
    """Attention in float64, one query at a time. versions: [N, H, R + N], all rows that the call's ranges name."""
    found = []
    starts, wide = call.query_start.tolist(), up.double()
    for b, length in enumerate(call.seq_lens.tolist()):
        rows = pages.key[call.block_tables[b].clamp(min=0).long()].flatten(0, 2).double()[:length]  # [S, R + C]
        if pages.key_scale is not None:
            scales = pages.key_scale[call.block_tables[b].clamp(min=0).long()].flatten(0, 2).double()[:length]
            rows *= scales[:, torch.arange(rows.shape[1]) // 32]
        made = torch.einsum("sc,hnc->shn", rows[:, spec.rotary_dim :], wide)
        shared = rows[:, None, : spec.rotary_dim].expand(-1, spec.num_heads, -1)
        keys, values = torch.cat((shared, made[..., : spec.plain_dim]), dim=-1), made[..., spec.plain_dim :]
        count = starts[b + 1] - starts[b]
        for i in range(count):
            index, token = length - count + i, starts[b] + i
            place = torch.arange(length)
            seen, row_of = place <= index, torch.full((length,), token)
            if call.window is not None:
                seen &= index - place < call.window
            if (ranges := call.ranges) is not None:
                begin = 0
                for end, row, reach in zip(
                    *(ranges.ends[b].tolist(), ranges.rows[b].tolist(), ranges.reaches[b].tolist()), strict=True
                ):
                    inside = (place >= begin) & (place < end)
                    row_of[inside] = row + i
                    seen &= ~inside | ((row >= 0) & (index - place < reach))
                    begin = max(begin, end)
            q = versions[row_of.clamp(min=0)].double()  # [S, H, R + N]
            scores = (q * keys).sum(-1) * spec.scale * call.score_scale[token].double()
            weights = scores.masked_fill(~seen[:, None], float("-inf")).softmax(0)
            found.append((weights[..., None] * values).sum(0).flatten())
    return torch.stack(found)


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("backend", [TorchBackend, COMPILED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("spec", [SPEC, WIDE_HEADS], ids=["narrow", "deepseek"])
@pytest.mark.parametrize("cost", [0.0, None], ids=["expanded", "absorbed"])
def test_prompts_chunks_and_single_tokens_equal_the_formula(
    backend: type[Backend],
    dtype: torch.dtype,
    spec: LatentSpec,
    cost: float | None,
    at_cost: Choice,
    expansions: list[int],
) -> None:
    at_cost(cost)
    up, pages = operands(spec, dtype)
    call = call_of(spec, [70, 41, 300, 2, 129], [70, 1, 37, 2, 128])
    q = torch.randn(call.num_tokens, spec.num_heads, spec.rotary_dim + spec.plain_dim)
    got = LatentAttentionForms(spec, up, bound(backend)).attend(LatentQueries(q), pages, call)
    assert (got - expected(spec, up, pages, call, q)).abs().max() < 1e-5
    assert expansions == ([80, 304, 16, 144] if cost is not None else [])


@pytest.mark.parametrize("backend", [TorchBackend, COMPILED])
@pytest.mark.parametrize("cost", [0.0, None], ids=["expanded", "absorbed"])
def test_windows_equal_the_formula(
    backend: type[Backend], cost: float | None, at_cost: Choice, expansions: list[int]
) -> None:
    """Keys before all windows are neither expanded nor read: the table has no blocks there."""
    at_cost(cost)
    up, pages = operands(SPEC)
    call = call_of(SPEC, [300, 100], [20, 20], window=33)
    call.block_tables[0, :15] = call.block_tables[1, :3] = -1
    q = torch.randn(40, SPEC.num_heads, SPEC.rotary_dim + SPEC.plain_dim)
    got = LatentAttentionForms(SPEC, up, bound(backend)).attend(LatentQueries(q), pages, call)
    assert (got - expected(SPEC, up, pages, call, q)).abs().max() < 1e-5
    assert expansions == ([64, 64] if cost is not None else [])


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("backend", [TorchBackend, COMPILED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("cost", [0.0, 1.0, None], ids=["expanded", "mixed", "absorbed"])
def test_moved_keys_use_their_rotated_queries(
    backend: type[Backend], dtype: torch.dtype, cost: float | None, at_cost: Choice, expansions: list[int]
) -> None:
    """Sequences with a rotated first part, with a hole, with neither, and one that decodes, in one call."""
    at_cost(cost)
    up, pages = operands(SPEC, dtype)
    news, lengths = [1, 40, 33, 50], [200, 70, 90, 50]
    total = sum(news)
    sources = torch.cat(
        (torch.arange(0, 41), torch.arange(41, 74))
    )  # those of the first three sequences, in another order
    sources = torch.cat((sources[41:], sources[:41]))
    angle = torch.rand(total - 50, SPEC.rotary_dim // 2)
    start = torch.tensor([0, *news]).cumsum(0)
    far = 10**6
    call = replace(
        call_of(SPEC, lengths, news),
        ranges=KeyRanges(
            ends=torch.tensor([[32, 200, 200], [20, 70, 70], [16, 48, 90], [50, 50, 50]]),
            rows=torch.tensor([[total + 33, 0, 0], [total + 34, 1, 1], [total, -1, 41], [74, 74, 74]]),
            reaches=torch.tensor([[far, far, far], [far, 64, 64], [far, far, far], [far, far, far]]),
        ),
    )
    call.block_tables[2, 1:3] = -1
    q = torch.randn(total, SPEC.num_heads, SPEC.rotary_dim + SPEC.plain_dim)
    own, rotations = bound(backend), QueryRotations(sources, angle.cos(), angle.sin())
    versions = own.rotate_queries(q, *rotations)
    got = LatentAttentionForms(SPEC, up, own).attend(LatentQueries(q, rotations), pages, call)
    assert start.tolist() == call.query_start.tolist()
    assert (got - expected(SPEC, up, pages, call, versions)).abs().max() < 1e-5
    # The two blocks of the third sequence's hole are unchanged.
    assert expansions == {0.0: [80, 64, 64], 1.0: [80, 64, 64], None: []}[cost]


def test_heads_are_expanded_in_groups(at_cost: Choice, expansions: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    at_cost(0.0)
    monkeypatch.setattr(latent_attention, "_MAX_EXPANDED_BYTES", 2 * 4 * 64 * 30)
    up, pages = operands(SPEC)
    call = call_of(SPEC, [60], [60])
    q = torch.randn(60, SPEC.num_heads, SPEC.rotary_dim + SPEC.plain_dim)
    got = LatentAttentionForms(SPEC, up, bound(TorchBackend)).attend(LatentQueries(q), pages, call)
    assert (got - expected(SPEC, up, pages, call, q)).abs().max() < 1e-5
    assert expansions == [64, 64, 64]


@pytest.mark.parametrize(
    ("length", "news", "expands"),
    [(512, 512, True), (64, 64, True), (16, 16, False), (900, 64, False), (900, 400, True), (900, 1, False)],
)
def test_form_with_fewer_multiplications_is_used(length: int, news: int, expands: bool, expansions: list[int]) -> None:
    up, pages = operands(WIDE_HEADS)
    call = call_of(WIDE_HEADS, [length], [news])
    q = torch.randn(news, WIDE_HEADS.num_heads, WIDE_HEADS.rotary_dim + WIDE_HEADS.plain_dim)
    LatentAttentionForms(WIDE_HEADS, up, bound(TorchBackend)).attend(LatentQueries(q), pages, call)
    assert bool(expansions) is expands


def test_large_expansions_are_avoided(at_cost: Choice, expansions: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    at_cost(0.0)
    monkeypatch.setattr(latent_attention, "_MAX_EXPANDED_ROWS", 60)
    up, pages = operands(SPEC)
    call = call_of(SPEC, [61, 60], [20, 20])
    q = torch.randn(40, SPEC.num_heads, SPEC.rotary_dim + SPEC.plain_dim)
    got = LatentAttentionForms(SPEC, up, bound(TorchBackend)).attend(LatentQueries(q), pages, call)
    assert (got - expected(SPEC, up, pages, call, q)).abs().max() < 1e-5
    assert expansions == [64]


def test_row_independent_backend_never_expands(expansions: list[int]) -> None:
    up, pages = operands(SPEC)
    call = call_of(SPEC, [40], [40])
    q = torch.randn(40, SPEC.num_heads, SPEC.rotary_dim + SPEC.plain_dim)
    own = RowIndependentBackend(BackendOptions(torch.device("cpu"), deterministic=True))
    LatentAttentionForms(SPEC, up, own).attend(LatentQueries(q), pages, call)
    assert not expansions


@pytest.mark.parametrize("name", MATRIX_FORMS)
def test_matrix_unit_receives_16_bit_keys_and_values(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If prompts may be rounded and the cache is not float32."""
    form = kernels(name)
    choose(monkeypatch, form)
    device = torch.device("cpu")
    plain, narrow, strict = (
        CompiledBackend(BackendOptions(device, **options))
        for options in ({}, {"bf16_prefill": True}, {"bf16_prefill": True, "deterministic": True})
    )
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int8):
        up, pages = operands(WIDE_HEADS, dtype)
        ways = [backend.latent_expansion(pages) for backend in (plain, narrow, strict)]
        made = torch.float32 if dtype == torch.float32 else torch.bfloat16
        assert [None if way is None else way.dtype for way in ways] == [torch.float32, made, None]
        call = call_of(WIDE_HEADS, [300, 130], [200, 130])
        q = torch.randn(330, WIDE_HEADS.num_heads, WIDE_HEADS.rotary_dim + WIDE_HEADS.plain_dim)
        got = LatentAttentionForms(WIDE_HEADS, up, narrow).attend(LatentQueries(q), pages, call).double()
        right = expected(WIDE_HEADS, up, pages, call, q)
        lost = float((got - right).norm() / right.norm())
        assert lost < 1e-5 if dtype == torch.float32 else 1e-4 < lost < 6e-3, dtype


@pytest.mark.parametrize(
    ("length", "news", "expands"),
    [
        (512, 512, True),
        (64, 64, True),
        (700, 64, True),
        (4096, 64, False),
        (2048, 128, True),
        (4096, 200, True),
        (900, 1, False),
    ],
)
def test_faster_form_is_used(length: int, news: int, expands: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With measured costs, a query costs more than a cached row."""
    monkeypatch.setattr(
        TorchBackend,
        "latent_expansion",
        lambda self, pages: attention_bindings.latent_expansion_cost(pages, narrow=True),
    )
    own = bound(TorchBackend)
    _, pages = operands(WIDE_HEADS, torch.float16)
    call = AttentionCall(
        torch.zeros(1, -(-length // SIZE), dtype=torch.int32),
        *(torch.tensor([0, news]), torch.tensor([length]), torch.ones(news), WIDE_HEADS.scale),
    )
    found = LatentAttentionForms(WIDE_HEADS, torch.empty(3, 256, 512), own)._expanded_sequences(pages, call)
    assert bool(found) is expands


@pytest.mark.parametrize("model", ["deepseek_v3", "minicpm3"])
@pytest.mark.parametrize("piece", [2048, 37, 7, 1], ids=["whole", "odd pieces", "small pieces", "token by token"])
def test_prompt_in_any_chunks_equals_transformers(
    model: str, piece: int, models: dict[str, Path], at_cost: Choice, expansions: list[int]
) -> None:
    at_cost(0.0)
    core = make_core(models[model], max_num_batched_tokens=piece, max_num_seqs=1)
    request = greedy("a", FORMS_PROMPT, 6)
    got = run(core, [request])["a", 0]
    right = Reference(models[model], specs_of(core, request), ["full_attention"]).logits(
        [*FORMS_PROMPT, *got.token_ids]
    )
    right = right[len(FORMS_PROMPT) - 1 : -1]
    assert (torch.stack(got.logits) - right).abs().max() / right.abs().max() < 1e-5
    assert bool(expansions) is (piece > 1 and DEVICE == "cpu")  # a GPU's host does not know how long sequences are


@ON_A_CPU
def test_cached_prefix_is_expanded(models: dict[str, Path], at_cost: Choice, expansions: list[int]) -> None:
    at_cost(0.0)
    core = make_core(models["deepseek_v3"])
    run(core, [greedy("first", FORMS_PROMPT[:64], 1)])
    expansions.clear()
    request = greedy("a", [*FORMS_PROMPT[:64], *FORMS_PROMPT[:20]], 6)
    got = run(core, [request])["a", 0]
    prompt = request.prompt_token_ids
    right = Reference(models["deepseek_v3"], specs_of(core, request), ["full_attention"]).logits(
        [*prompt, *got.token_ids]
    )
    right = right[len(prompt) - 1 : -1]
    assert core.stats().prefix_cache_hits > 0 and set(expansions) == {96}  # 84 keys in whole blocks, 20 of them new
    assert (torch.stack(got.logits) - right).abs().max() / right.abs().max() < 1e-5


@ON_A_CPU
def test_expanded_form_after_a_context_shift(tmp_path: Path, at_cost: Choice, expansions: list[int]) -> None:
    """Keys at other positions are expanded unchanged, queries are rotated; proposed tokens are short prompts there."""
    at_cost(0.0)
    model = make_model("deepseek_v3", tmp_path)
    right = run(make_core(model, max_model_len=64), [shifting()])["a", 0]
    expansions.clear()
    core = make_core(model, max_model_len=64, speculative_ngram=4, speculative_ngram_min=1)
    got = run(core, [shifting()], every_logit=False)["a", 0]
    assert core.stats().spec_decode_num_draft_tokens > 0 and expansions
    assert core.stats().dropped_tokens >= 32
    assert got.token_ids == right.token_ids


def shifting() -> EngineRequest:
    return greedy("a", FORMS_PROMPT[:8] * 5, 60, context=ContextRule(overflow="shift", keep_tokens=16))
