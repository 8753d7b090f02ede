"""The two forms of latent attention compared with a float64 formula: prompts, chunks, mixed batches and moved keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.cpu_kernels import MATRIX_FORMS, choose, kernels
from helpers.device import DEVICE, ON_A_CPU
from helpers.engines import greedy, make_core, run, specs_of
from helpers.tiny_models import Reference, make_model

from windlass.engine.interface.context import ContextRule
from windlass.engine.interface.request import EngineRequest
from windlass.engine.model.mixers import latent_attention
from windlass.engine.model.mixers.latent_attention import (
    LatentAttentionForms,
    LatentQueries,
    LatentSpec,
    QueryRotations,
)
from windlass.kernels import AttentionCall, Backend, KeyRanges, KVPages
from windlass.kernels.attention_call import LatentExpansion
from windlass.kernels.backend import BackendOptions
from windlass.kernels.cpu import attention_bindings, library
from windlass.kernels.cpu.cpu_backend import CompiledBackend
from windlass.kernels.torch import reference
from windlass.kernels.torch.torch_backend import RowIndependentBackend, TorchBackend

SPEC = LatentSpec(num_heads=5, latent_dim=24, rotary_dim=8, plain_dim=12, value_dim=10, scale=20**-0.5)
WIDE = LatentSpec(num_heads=3, latent_dim=512, rotary_dim=64, plain_dim=128, value_dim=128, scale=192**-0.5)
BLOCKS, SIZE = 64, 16
PROMPT = torch.randint(3, 128, (90,), generator=torch.Generator().manual_seed(0)).tolist()
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


@pytest.mark.parametrize("backend", [TorchBackend, COMPILED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("spec", [SPEC, WIDE], ids=["narrow", "deepseek"])
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
    up, pages = operands(WIDE)
    call = call_of(WIDE, [length], [news])
    q = torch.randn(news, WIDE.num_heads, WIDE.rotary_dim + WIDE.plain_dim)
    LatentAttentionForms(WIDE, up, bound(TorchBackend)).attend(LatentQueries(q), pages, call)
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
        up, pages = operands(WIDE, dtype)
        ways = [backend.latent_expansion(pages) for backend in (plain, narrow, strict)]
        made = torch.float32 if dtype == torch.float32 else torch.bfloat16
        assert [None if way is None else way.dtype for way in ways] == [torch.float32, made, None]
        call = call_of(WIDE, [300, 130], [200, 130])
        q = torch.randn(330, WIDE.num_heads, WIDE.rotary_dim + WIDE.plain_dim)
        got = LatentAttentionForms(WIDE, up, narrow).attend(LatentQueries(q), pages, call).double()
        right = expected(WIDE, up, pages, call, q)
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
    _, pages = operands(WIDE, torch.float16)
    call = AttentionCall(
        torch.zeros(1, -(-length // SIZE), dtype=torch.int32),
        *(torch.tensor([0, news]), torch.tensor([length]), torch.ones(news), WIDE.scale),
    )
    found = LatentAttentionForms(WIDE, torch.empty(3, 256, 512), own)._expanded_sequences(pages, call)
    assert bool(found) is expands


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make_model(name, tmp_path_factory.mktemp(name)) for name in ("deepseek_v3", "minicpm3")}


@pytest.mark.parametrize("model", ["deepseek_v3", "minicpm3"])
@pytest.mark.parametrize("piece", [2048, 37, 7, 1], ids=["whole", "odd pieces", "small pieces", "token by token"])
def test_prompt_in_any_chunks_equals_transformers(
    model: str, piece: int, models: dict[str, Path], at_cost: Choice, expansions: list[int]
) -> None:
    at_cost(0.0)
    core = make_core(models[model], max_num_batched_tokens=piece, max_num_seqs=1)
    request = greedy("a", PROMPT, 6)
    got = run(core, [request])["a", 0]
    right = Reference(models[model], specs_of(core, request), ["full_attention"]).logits([*PROMPT, *got.token_ids])
    right = right[len(PROMPT) - 1 : -1]
    assert (torch.stack(got.logits) - right).abs().max() / right.abs().max() < 1e-5
    assert bool(expansions) is (piece > 1 and DEVICE == "cpu")  # a GPU's host does not know how long sequences are


@ON_A_CPU
def test_cached_prefix_is_expanded(models: dict[str, Path], at_cost: Choice, expansions: list[int]) -> None:
    at_cost(0.0)
    core = make_core(models["deepseek_v3"])
    run(core, [greedy("first", PROMPT[:64], 1)])
    expansions.clear()
    request = greedy("a", [*PROMPT[:64], *PROMPT[:20]], 6)
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
    return greedy("a", PROMPT[:8] * 5, 60, context=ContextRule(overflow="shift", keep_tokens=16))
