"""Compilation of all Triton programs that a script launches, for absent GPUs and without execution.

Run as a script with a compute capability, for example 90, and 1, or n to compile the first and then each nth variant of a
program only. Prints one line per variant: bytes of shared memory, registers per thread and spilled bytes. Results of operations
are meaningless.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from helpers.attention_case import AttentionCase
from helpers.block_weights import random_blocks
from helpers.ranges import Part, RangeCase
from helpers.recurrences import Convolution, DeltaRule, StateSpace, state_rows
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from windlass.kernels import (
    FORMS,
    AttentionCall,
    Filters,
    KVPages,
    LogitsChanges,
    LowRankTarget,
    Penalties,
    Routed,
    Routing,
    SamplingTensors,
    page_tensor_shapes,
)
from windlass.kernels.triton import launch

_TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float64: "*fp64",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.int8: "*i8",
    torch.uint8: "*u8",
}
_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
_SHARED = {86: 99 << 10, 90: 227 << 10}  # bytes of shared memory per program
_seen: set[str] = set()
_variants: Counter[str] = Counter()


def _type_of(operand: Any) -> str:
    if operand is None:
        return "constexpr"
    if isinstance(operand, TensorDescriptor):
        return f"tensordesc<{_TYPES[operand.base.dtype].lstrip('*')}{list(operand.block_shape)}>"
    if isinstance(operand, Tensor):
        return _TYPES[operand.dtype]
    if isinstance(operand, float):
        return "fp32"
    return "i32" if -(2**31) <= operand < 2**31 else "i64"


def _taken(made: Any) -> tuple[int, int]:
    """Return registers and spilled bytes per thread."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(made.asm["cubin"])
        tool = triton.knobs.nvidia.cuobjdump.path
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    assert found is not None, said
    return int(found[1]), int(found[2])


def _compile(capability: int, every: int) -> Callable[..., None]:
    def compile_instead(kernel: Any, grid: tuple[int, ...], on: Tensor, *operands: Any, **sizes: Any) -> None:
        options = {name: sizes.pop(name) for name in _OPTIONS if name in sizes}
        params = kernel.params[: len(operands)]
        names = [param.name for param in params]
        signature = {name: _type_of(operand) for name, operand in zip(names, operands, strict=True)}
        constants = {name: None for name, kind in signature.items() if kind == "constexpr"} | sizes
        attributes: dict[tuple[int], list[list[object]]] = {}
        for place, (param, operand) in enumerate(zip(params, operands, strict=True)):  # as in a launch
            if param.do_not_specialize:
                continue
            if isinstance(operand, Tensor) or (isinstance(operand, int) and operand % 16 == 0):
                attributes[(place,)] = [["tt.divisibility", 16]]
            if isinstance(operand, int) and operand == 1:
                constants[names[place]], signature[names[place]] = 1, "constexpr"
        signature |= dict.fromkeys(sizes, "constexpr")
        key = repr((kernel.__name__, signature, constants, options, capability))
        if key in _seen:
            return
        _seen.add(key)
        _variants[kernel.__name__] += 1
        if (_variants[kernel.__name__] - 1) % every:
            return
        source = ASTSource(kernel, signature, constants, attributes)
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        if options.get("enable_fp_fusion") is False:  # numbers that affect sampling are rounded as on other devices
            assert re.search(r"fma\.|\.ftz|div\.(full|approx)", made.asm["ptx"]) is None, kernel.__name__
        registers, spilled = _taken(made)
        shared, warps = made.metadata.shared, made.metadata.num_warps
        types = ",".join(kind.lstrip("*") for kind in dict.fromkeys(signature.values()) if kind.startswith("*"))
        dim = sizes["PAGES"].dim if "PAGES" in sizes else sizes.get("DIM")
        tile = ",".join(str(size) for size in (dim, sizes.get("BLOCK_M"), sizes.get("BLOCK_N")) if size is not None)
        print(
            f"sm_{capability} {kernel.__name__} shared {shared} registers {registers} spilled {spilled} warps {warps} "
            f"({types}; {tile})",
            flush=True,
        )

    return compile_instead


def everything(capability: int) -> None:
    """Launch every program with the dtypes and shapes of models."""
    launch.SMALL = launch.Device(132, _SHARED[capability], (capability // 10, capability % 10))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        _attention_of_all_kinds(dtype)
        for dim in (64, 128, 512) if dtype == torch.bfloat16 else (128,):
            for kind in (dtype, torch.int8, torch.float8_e4m3fn):
                _rotation(dtype, kind, dim)
        _by_element(dtype)
        _states(dtype)
        _products(dtype)
        _low_rank(dtype)
        if capability == 90 and dtype != torch.float32:
            _prompts(dtype)
    _latent(torch.bfloat16)
    _routes()
    _draws()


def _attend(dtype: torch.dtype, kind: torch.dtype, **options: Any) -> None:
    from windlass.kernels.triton.paged_attention import paged_attention

    cap, sinks = options.pop("soft_cap", None), options.pop("sinks", False)
    case = AttentionCase([(17, 4), (3, 1)], page_type=kind, **options)
    call = case.call(soft_cap=cap, sink_logits=torch.ones(case.q.shape[1]) if sinks else None)
    for deterministic in (False, True):
        paged_attention(case.q.to(dtype), case.all_pages, call, deterministic=deterministic)


def _attention_of_all_kinds(dtype: torch.dtype) -> None:
    """Launch attention for each head size, each number of queries per key, and each kind of mask."""
    from windlass.kernels.triton.paged_attention import paged_attention

    shapes = [
        (64, 1),
        (64, 9),
        (80, 1),
        (96, 3),
        (128, 4),
        (128, 16),
        (192, 1),
        (256, 2),
        (256, 8),
        (512, 8),
        (512, 16),
    ]
    for dim, group in shapes if dtype == torch.bfloat16 else [(64, 8), (128, 4), (256, 2)]:
        _attend(dtype, dtype, dim=dim, heads=group * 2, kv_heads=2)
    for dim in (128, 256, 512):
        for kind in (torch.int8, torch.float8_e4m3fn):
            _attend(dtype, kind, dim=dim, heads=8, kv_heads=2)
    if dtype == torch.float16:
        return
    _attend(dtype, dtype, dim=128, window=70, sinks=True, soft_cap=2.0)
    _attend(dtype, dtype, dim=256, window=70, soft_cap=2.0)
    _attend(dtype, dtype, dim=128, chunk=9)
    _attend(dtype, dtype, dim=64, causal=False, heads=4, kv_heads=4)
    part = [Part(10), Part(33, shift=3)]
    for dim, kind in ((64, dtype), (128, torch.int8), (512, dtype)):
        ranges = RangeCase([(30, 3), (5, 1)], [part, [Part(6)]], dim=dim, value_dim=dim, page_type=kind)
        for slopes in (None, torch.ones(4)):
            ranges.slopes = slopes
            q, pages, call = ranges.operands()
            for deterministic in (False, True):
                paged_attention(q.to(dtype), pages, call, deterministic=deterministic)


def _prompts(dtype: torch.dtype) -> None:
    """Launch attention over keys in order."""
    from windlass.kernels.triton import prefill_attention

    for dim, kind, options in (
        (64, dtype, {}),
        (128, dtype, {}),
        (128, torch.int8, {"window": 70}),
        (128, torch.float8_e4m3fn, {"chunk": 9}),
        (96, dtype, {"causal": False}),
    ):
        case = AttentionCase([(17, 140)], dim=dim, heads=8, kv_heads=2, page_type=kind, **options)
        q = case.q.to(dtype)
        prefill_attention.prefill_attention(q, case.all_pages, case.call(), torch.empty_like(q))


def _pages(kind: torch.dtype, heads: int, dim: int, value_dim: int) -> KVPages:
    return KVPages(
        *[torch.zeros(shape, dtype=t) for shape, t in page_tensor_shapes(3, 16, heads, dim, value_dim, kind)]
    )


def _rotation(dtype: torch.dtype, kind: torch.dtype, dim: int) -> None:
    from windlass.kernels.triton import rotary_embedding

    pages, q, k = _pages(kind, 2, dim, dim), torch.ones(4, 4, dim).to(dtype), torch.ones(4, 2, dim).to(dtype)
    slots = torch.arange(4)
    for half in (dim // 2, 16, 0):
        angles = torch.ones(4, half)
        rotary_embedding.rotate_and_append(q, k, k, angles, angles, torch.ones(4), pages, slots)
        rotary_embedding.rerotate_cached_keys(pages, slots, slots, angles, angles)
        rotary_embedding.rotate_queries(q, slots, angles, angles)


def _by_element(dtype: torch.dtype) -> None:
    from windlass.kernels.triton import elementwise, norms

    for width in (128, 4096, 16384):
        x, weight = torch.ones(20, width).to(dtype), torch.ones(width)
        norms.rms_norm(x, weight, 1e-5)
        norms.add_rms_norm(x, x, weight, 1e-5)
        norms.layer_norm(x, weight, weight, 1e-5)
    for name in ("silu", "gelu_tanh", "gelu", "relu2"):
        elementwise.activation(x, name, gated=True)
        elementwise.activation(x, name)
    elementwise.clamped_glu(x, 1.7, 7.0)
    elementwise.gate_by_sigmoid(x, x)
    elementwise.gate_by_sigmoid(x, x[:, :1])
    elementwise.soft_cap(x.float(), 30.0)
    elementwise.sum_of_experts(x, torch.ones(10, 2))


def _states(dtype: torch.dtype) -> None:
    """Launch the shapes of Qwen 3.5, a smaller one, LFM2, and Mamba 2 in Granite 4 and Nemotron H."""
    from windlass.kernels.triton import recurrent_layers

    some = state_rows([1, 0], [1, 9], [False, True])
    for key_heads, heads, dim, kept in ((16, 32, 128, None), (16, 32, 128, torch.full((10,), -1)), (2, 2, 64, None)):
        rows = some._replace(snapshots=kept)
        own = DeltaRule.random(rows, key_heads, heads, dim, dim, dtype)
        recurrent_layers.gated_delta_rule(*own.operands(rows))
        recurrent_layers.short_convolution(
            *Convolution.random(rows, 2 * dim * (key_heads + heads // 2), 4, dtype).operands(rows)
        )
    recurrent_layers.short_convolution(*Convolution.random(rows, 2048, 3, dtype).plain.operands(rows))  # LFM2's
    for key_heads, heads, value_dim, kept in (
        (1, 48, 64, None),
        (8, 128, 80, torch.full((10,), -1)),
        (8, 128, 80, None),
    ):
        rows = some._replace(snapshots=kept)
        space = StateSpace.random(rows, key_heads, heads, 128, value_dim, dtype)
        recurrent_layers.state_space(*space.operands(rows))


def _products(dtype: torch.dtype) -> None:
    from windlass.kernels.triton import gemv, matmul

    if dtype != torch.float32:
        y = torch.ones(1, 4096).to(dtype)
        gemv.linear_single_row(y, torch.ones(128, 4096).to(dtype), torch.ones(128).to(dtype))
        gemv.linear_single_row(y, torch.ones(128, 4096).to(dtype), None, "silu")
    chosen = torch.zeros(300, 2).long()
    for rows in (4, 300):
        y = torch.ones(rows, 256).to(dtype)
        matmul.linear(y, torch.ones(128, 256).to(dtype), torch.ones(128).to(dtype), fixed=rows == 4)
        for form in FORMS.values():
            own = random_blocks(128, 256, form)
            matmul.linear(y, own, torch.ones(128).to(dtype))
            matmul.embed(own, torch.arange(4), dtype, 2.0)
            matmul.linear_of_experts(y, matmul.PointerTableExperts([own, own]), chosen[:rows])
        plain = [torch.ones(128, 256).to(dtype)] * 2
        experts = matmul.PointerTableExperts(plain, [torch.ones(128)] * 2)
        matmul.linear_of_experts(y, experts, chosen[:rows])
        if dtype != torch.float32 and rows == 300:
            _many_rows(y, experts, chosen)
        if rows == 300:
            with patch.object(matmul, "_MOST_BEHIND", 1):  # as with more tiles of rows
                matmul.linear(y, torch.ones(128, 256).to(dtype), torch.ones(128).to(dtype))
                matmul.linear(y, random_blocks(128, 256, FORMS["q4_k"]), None)
                matmul.linear_of_experts(y, experts, chosen)
        matmul.by_head(y[:, :128].view(rows, 1, 128).expand(rows, 3, 128), torch.ones(3, 128, 512).to(dtype))


def _many_rows(x: Tensor, experts: Any, chosen: Tensor) -> None:
    """Launch products of experts in large tiles and in tiles of fewer rows."""
    from windlass.kernels.triton import grouped_gemm, matmul

    down = matmul.PointerTableExperts([torch.ones(256, 64).to(x.dtype)] * 2)
    plain = matmul.PointerTableExperts(experts.weights)
    for rows in (100, 300):
        some, own = x[:rows], chosen[:rows]
        grouped_gemm.linear_of_experts(some, experts, own, launch.SMALL)
        for kind in ("silu", "gelu"):
            routed = Routed(own, torch.ones(rows, 2))
            grouped_gemm.feed_forward_of_experts(some, plain, down, routed, kind, launch.SMALL)


def _low_rank(dtype: torch.dtype) -> None:
    """Launch LoRA for one matrix, a fused one with wide changes, and one with odd sizes, stored in two dtypes."""
    from windlass.kernels.triton import low_rank

    for kept in dict.fromkeys((dtype, torch.bfloat16)):
        for parts, inner, rank in (((4096,), 14336, 64), ((4096, 1024, 1024), 4096, 192), ((100,), 60, 8)):
            matrix = LowRankTarget(parts, inner, rank, kept)
            table = low_rank.DeviceLowRankTable(8, matrix, torch.device("cpu"))
            for rows, fixed in ((4, False), (300, False), (4, True)):
                x, out = torch.ones(rows, inner).to(dtype), torch.ones(rows, matrix.columns).to(dtype)
                low_rank.add_low_rank(out, x, table, torch.zeros(rows).long(), fixed=fixed, device=launch.SMALL)


def _routes() -> None:
    """Launch routing for few experts, many experts, and groups of experts."""
    from windlass.kernels.triton import moe_routing

    for experts, rule in (
        (8, Routing(2)),
        (128, Routing(8)),
        (256, Routing(8, "sigmoid", groups=8, top_groups=4, least_sum=1e-20, scale=2.5)),
        (512, Routing(10, normalized=False)),
        (1024, Routing(4, "sigmoid", groups=2, group_score="largest")),
    ):
        for bias in (None, torch.ones(experts)):
            moe_routing.route(torch.ones(3, experts), rule, bias)
        moe_routing.route(torch.ones(3, experts), rule, None, torch.ones(experts))


def _latent(dtype: torch.dtype) -> None:
    """DeepSeek's shape: one cached row of 576 for 128 heads."""
    from windlass.kernels.triton import rotary_embedding
    from windlass.kernels.triton.paged_attention import paged_attention

    for kind in (dtype, torch.float8_e4m3fn):
        case = AttentionCase([(17, 4), (3, 1)], dim=576, heads=128, kv_heads=1, page_type=dtype)
        call = AttentionCall(case.table, case.start, case.lengths, case.temperature, case.scale)
        pages = _pages(kind, 1, 576, 0)
        for deterministic in (False, True):
            paged_attention(case.q.to(dtype), pages.with_keys_as_values, call, deterministic=deterministic)
        q, k, angles = torch.ones(4, 128, 192).to(dtype), torch.ones(4, 1, 576).to(dtype), torch.ones(4, 32)
        rotary_embedding.rotate_and_append(q, k, k[:, :, :0], angles, angles, torch.ones(4), pages, torch.arange(4))


def _draws() -> None:
    from windlass.kernels.triton import triton_sampler

    logits = torch.randn(2, 128_256)
    triton_sampler.row_maxima(logits)
    triton_sampler.log_sums(logits)
    token_sampler = triton_sampler.TritonSampler()
    one, some, numbers = token_sampler.new(Filters(top_k=5, top_p=0.9), Penalties(1.1)), torch.arange(3), torch.ones(3)
    one.change(LogitsChanges(some, some, some, numbers, some, numbers, some, numbers))
    try:
        token_sampler.sample(logits, [one])
    except ValueError as error:  # status of a launch that never happened
        assert "SamplingStatus" in str(error)
    shares = torch.ones(2, dtype=torch.float64)
    triton_sampler.sample_rows(
        logits,
        triton_sampler.row_maxima(logits),
        SamplingTensors(shares.float(), *[some[:2].int()] * 2, shares, shares),
    )


if __name__ == "__main__":
    torch.manual_seed(0)
    wanted = int(sys.argv[1])
    launch.launch = _compile(wanted, int(sys.argv[2]))
    for name in [
        name for name in sys.modules if name.startswith("windlass.kernels.triton.") and name != launch.__name__
    ]:
        del sys.modules[name]
    everything(wanted)
