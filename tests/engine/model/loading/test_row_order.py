"""Interleaved checkpoints: rows of the rotary slice are permuted at load, so that caches hold half-split pairs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.rotary_formulas import rotate_pairs
from safetensors.torch import save_file

from windlass import kernels
from windlass.engine.cache.kv_cache import KVCache
from windlass.engine.cache.kv_cache_spec import KVGroupSpec
from windlass.engine.model.decoder import Decoder
from windlass.engine.model.feed_forward.mlp import GatedMLPSpec
from windlass.engine.model.forward_batch import ForwardBatch
from windlass.engine.model.loading.weights import head_order, load_weights, row_order
from windlass.engine.model.mixers.attention import AttentionNames, AttentionSpec
from windlass.engine.model.model_spec import LayerSpec, ModelSpec
from windlass.engine.model.weight_spec import InterleavedParts, RotaryRows, StoredTensor
from windlass.engine.rotary.rope_scaling import RopeScaling, RotaryBase, RotaryGroup
from windlass.kernels.torch.reference import rotate_half_split

HEADS, KV_HEADS, DIM, HIDDEN = 4, 2, 12, 24


@pytest.mark.parametrize("rotary_dim", [2, 8, 12])
def test_permuted_rows_rotate_with_the_same_bits(rotary_dim: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, DIM, generator=generator)
    angle = torch.randn(5, rotary_dim // 2, generator=generator)
    cos, sin = angle.cos(), angle.sin()
    order = head_order(RotaryRows(1, DIM, rotary_dim, "interleaved"))
    interleaved = x.clone()
    even, odd = x[..., 0:rotary_dim:2], x[..., 1:rotary_dim:2]
    interleaved[..., 0:rotary_dim:2] = even * cos[:, None] - odd * sin[:, None]
    interleaved[..., 1:rotary_dim:2] = odd * cos[:, None] + even * sin[:, None]
    assert torch.equal(rotate_half_split(x[..., order], cos, sin), interleaved[..., order])
    assert sorted(order.tolist()) == list(range(DIM))
    assert order[rotary_dim:].tolist() == list(range(rotary_dim, DIM))


@pytest.mark.parametrize("rotary_dim", [2, 8, 12])
def test_swapped_pairs_rotate_the_other_way_with_the_same_bits(rotary_dim: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, DIM, generator=generator)
    angle = torch.randn(5, rotary_dim // 2, generator=generator)
    order = head_order(RotaryRows(1, DIM, rotary_dim, "swapped"))
    turned = rotate_half_split(x[..., order], angle.cos(), angle.sin())
    assert torch.equal(turned, rotate_half_split(x, angle.cos(), -angle.sin())[..., order])


@pytest.mark.parametrize(
    ("fused", "names"),
    [
        (InterleavedParts(2, (1, 1, 1)), "q0 k0 v0 q1 k1 v1"),
        (InterleavedParts(2, (2, 1, 1)), "q0 q1 k0 v0 q2 q3 k1 v1"),
        (InterleavedParts(2, (2, 2, 2), (0, 2, 1)), "q0 q1 v0 v1 k0 k1 q2 q3 v2 v3 k2 k3"),
    ],
)
def test_fused_heads_are_split(fused: InterleavedParts, names: str) -> None:
    stored = names.split()
    order = row_order(StoredTensor("qkv", len(stored), interleaved_parts=fused))
    assert order is not None and [stored[row] for row in order] == sorted(stored, key=lambda name: "qkv".index(name[0]))


@pytest.mark.parametrize(
    ("turns", "names", "wanted"),
    [
        (InterleavedParts(2, (1, 1)), "q0 g0 q1 g1", "q0 q1 g0 g1"),
        (InterleavedParts(2, (2, 1, 3)), "a0 a1 b0 c0 c1 c2 a2 a3 b1 c3 c4 c5", "a0 a1 a2 a3 b0 b1 c0 c1 c2 c3 c4 c5"),
        (InterleavedParts(1, (3, 2)), "a0 a1 a2 b0 b1", "a0 a1 a2 b0 b1"),
    ],
)
def test_alternating_parts_are_split(turns: InterleavedParts, names: str, wanted: str) -> None:
    stored = names.split()
    order = row_order(StoredTensor("parts", len(stored), interleaved_parts=turns))
    assert order is not None and [stored[row] for row in order] == wanted.split()


def test_interleaved_pairs_in_alternating_parts() -> None:
    """In files with interleaved pairs, rows of the first part are ordered for each head."""
    pairs = RotaryRows(2, 4, 4, "interleaved")
    order = row_order(StoredTensor("q", 16, pairs, interleaved_parts=InterleavedParts(2, (4, 4))))
    assert order is not None and order.tolist() == [0, 2, 1, 3, 8, 10, 9, 11, 4, 5, 6, 7, 12, 13, 14, 15]


def test_order_is_per_head() -> None:
    assert head_order(RotaryRows(2, 6, 4, "interleaved")).tolist() == [0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11]


def layer(group: int | None, fused: bool) -> LayerSpec:
    attention = AttentionSpec(
        HEADS,
        KV_HEADS,
        DIM,
        DIM**-0.5,
        group,
        qkv_bias=True,
        qk_norm="before",
        interleaved_dims=0 if group is None else 8,
        names=AttentionNames(qkv="self_attn.qkv_proj") if fused else AttentionNames(),
    )
    return LayerSpec(attention, GatedMLPSpec(intermediate_size=8))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("position", [5, 1_000_000])
def test_cached_keys_equal_interleaved_rotation(fused: bool, position: int, tmp_path: Path) -> None:
    """Projection, bias and per-head norm in the checkpoint's order, in float64, compared with the cache."""
    base = RotaryBase(1e4, DIM, 8, 64)
    spec = ModelSpec(
        architecture="made up",
        vocab_size=16,
        hidden_size=HIDDEN,
        layers=(layer(0, fused), layer(None, fused)),
        rotary_groups=(RotaryGroup("full_attention", base, RopeScaling()),),
        kv_groups=(KVGroupSpec((0, 1), KV_HEADS, DIM, None),),
        trained_len=64,
        norm_eps=1e-6,
    )
    decoder = Decoder(spec, kernels.select_backend("cpu"))
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    tensors = {name: random(16, HIDDEN) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    tensors["model.norm.weight"] = random(HIDDEN)
    for i in (0, 1):
        prefix = f"model.layers.{i}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = random(HIDDEN)
        tensors[f"{prefix}self_attn.o_proj.weight"] = random(HIDDEN, HEADS * DIM)
        tensors[f"{prefix}mlp.down_proj.weight"] = torch.zeros(HIDDEN, 8)
        for name in ("gate", "up"):
            tensors[f"{prefix}mlp.{name}_proj.weight"] = random(8, HIDDEN)
        for name, count in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = random(count * DIM, HIDDEN)
            tensors[f"{prefix}self_attn.{name}_proj.bias"] = random(count * DIM)
            if name != "v":
                tensors[f"{prefix}self_attn.{name}_norm.weight"] = random(DIM)
    stored = dict(tensors)
    if fused:
        for i in (0, 1):
            for kind in ("weight", "bias"):
                names = [f"model.layers.{i}.self_attn.{part}_proj.{kind}" for part in "qkv"]
                stored[f"model.layers.{i}.self_attn.qkv_proj.{kind}"] = torch.cat([stored.pop(name) for name in names])
    save_file(stored, tmp_path / "model.safetensors")
    load_weights(decoder, tmp_path)

    w = 1e4 ** (-np.arange(0, 8, 2) / 8)
    angles = w * position
    rotation = [torch.tensor(f(angles), dtype=torch.float32)[None, None] for f in (np.cos, np.sin)]
    cache = KVCache(spec.kv_groups, [1], 16, torch.float32, decoder.backend)
    one = torch.tensor([1])
    batch = ForwardBatch(
        input_ids=torch.tensor([7]),
        positions=torch.tensor([position]),
        rotary_ids=torch.tensor([0]),
        slots=torch.zeros(1, 1, dtype=torch.int64),
        block_tables=torch.zeros(1, 1, 1, dtype=torch.int32),
        query_start=torch.tensor([0, 1]),
        seq_lens=one,
        context_positions=torch.tensor([position]),
        cos=rotation[0],
        sin=rotation[1],
        q_scale=torch.ones(1, 1),
        score_scale=torch.ones(1),
    )
    decoder.forward(batch, cache)

    x = tensors["model.embed_tokens.weight"][7].double().numpy()
    for i in (0, 1):
        t = {name.removeprefix(f"model.layers.{i}."): v.double().numpy() for name, v in tensors.items()}
        normed = x / np.sqrt((x**2).mean() + 1e-6) * t["input_layernorm.weight"]
        k, v = (
            (t[f"self_attn.{part}_proj.weight"] @ normed + t[f"self_attn.{part}_proj.bias"]).reshape(KV_HEADS, DIM)
            for part in "kv"
        )
        k = k / np.sqrt((k**2).mean(-1, keepdims=True) + 1e-6) * t["self_attn.k_norm.weight"]
        if i == 0:
            k = rotate_pairs(k, angles, interleaved=True)[:, head_order(RotaryRows(1, DIM, 8, "interleaved")).numpy()]
        pages = cache.pages(i)
        np.testing.assert_allclose(pages.key[0, 0].numpy(), k, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(pages.value[0, 0].numpy(), v, rtol=1e-5, atol=1e-5)
        # One token attends to itself alone: each query head gets the value of its key head.
        x = x + t["self_attn.o_proj.weight"] @ np.repeat(v, HEADS // KV_HEADS, axis=0).ravel()


def test_layer_without_rotation_uses_the_same_call() -> None:
    """Cosines of width 0: the key is cached unchanged, and scores are unrotated."""
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(3, heads, 8, generator=generator) for heads in (2, 1, 1))
    pages = kernels.KVPages(torch.zeros(1, 16, 1, 8), torch.zeros(1, 16, 1, 8))
    before = q.clone()
    empty = torch.ones(3, 4)[:, :0]
    kernels.select_backend("cpu").rotate_and_append(
        q, k, v, empty, empty, torch.full((3,), 2.0), pages, torch.tensor([0, 1, 2])
    )
    assert torch.equal(q, before)
    assert torch.equal(pages.key[0, :3], k)
    assert torch.equal(pages.value[0, :3], v)
