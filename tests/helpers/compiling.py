"""Compiles every Triton program that a script launches, for GPUs that are not here, and runs none of them.

Run as a script with capabilities, 80 and 90 for instance: prints a line for each program and the shared memory and the
registers it takes. Results of operations mean nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import triton
from helpers.block_weights import random_blocks
from helpers.prefill_case import PrefillCase
from helpers.ranges import Part, RangeCase
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from windlass.kernels import FORMS, AttentionCall, Filters, KVPages, LogitsChanges, Penalties, plane_shapes
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
_seen: set[str] = set()


def _type_of(operand: Any) -> str:
    if operand is None:
        return "constexpr"
    if isinstance(operand, Tensor):
        return _TYPES[operand.dtype]
    if isinstance(operand, float):
        return "fp32"
    return "i32" if -(2**31) <= operand < 2**31 else "i64"


def _compile(capability: int) -> Callable[..., None]:
    def compile_instead(kernel: Any, grid: tuple[int, ...], on: Tensor, *operands: Any, **sizes: Any) -> None:
        options = {name: sizes.pop(name) for name in _OPTIONS if name in sizes}
        names = kernel.arg_names[: len(operands)]
        signature = {name: _type_of(operand) for name, operand in zip(names, operands, strict=True)}
        constants = {name: None for name, kind in signature.items() if kind == "constexpr"} | sizes
        attributes: dict[tuple[int], list[list[object]]] = {}
        for place, operand in enumerate(operands):  # as a launch would find them
            if isinstance(operand, Tensor) or (isinstance(operand, int) and operand % 16 == 0):
                attributes[(place,)] = [["tt.divisibility", 16]]
            if isinstance(operand, int) and operand == 1:
                constants[names[place]], signature[names[place]] = 1, "constexpr"
        signature |= dict.fromkeys(sizes, "constexpr")
        key = repr((kernel.__name__, signature, constants, options, capability))
        if key in _seen:
            return
        _seen.add(key)
        source = ASTSource(kernel, signature, constants, attributes)
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        print(flush=True, end="")
        print(
            f"sm_{capability} {kernel.__name__}: {made.metadata.shared} bytes shared, {len(made.asm['cubin'])} of code"
        )

    return compile_instead


def everything() -> None:
    """Every program, in the types that a model brings."""
    from windlass.kernels.triton import attention, drawing, norms, pointwise, products, rotary

    for dtype, kind in ((torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.int8)):
        dim = 128
        for options in ({"window": 70, "heads": 8, "kv_heads": 2}, {"causal": kind == torch.int8, "chunk": 9}):
            case = PrefillCase([(17, 4), (3, 1)], dim=dim, page_type=kind, **options)
            call = AttentionCall(
                case.table, case.start, case.lengths, case.temperature, case.scale, window=case.window,
                causal=case.causal, chunk=case.chunk, soft_cap=2.0, sink_logits=torch.ones(case.q.shape[1]),
            )  # fmt: skip
            for deterministic in (False, True):
                attention.paged_attention(case.q.to(dtype), case.all_pages, call, deterministic=deterministic)
        part = [Part(10), Part(33, shift=3)]
        ranges = RangeCase([(30, 3), (5, 1)], [part, [Part(6)]], dim=dim, value_dim=dim, page_type=kind)
        ranges.slopes = torch.ones(4)
        q, pages, call = ranges.operands()
        for deterministic in (False, True):
            attention.paged_attention(q.to(dtype), pages, call, deterministic=deterministic)

        planes = [torch.zeros(shape, dtype=t) for shape, t in plane_shapes(3, 16, 2, dim, dim, kind)]
        pages, q, k = KVPages(*planes), torch.ones(4, 4, dim).to(dtype), torch.ones(4, 2, dim).to(dtype)
        slots = torch.arange(4)
        for half in (dim // 2, 16, 0):
            angles = torch.ones(4, half)
            rotary.rotate_and_append(q, k, k, angles, angles, torch.ones(4), pages, slots)
            rotary.rerotate_cached_keys(pages, slots, slots, angles, angles)
            rotary.turn_queries(q, slots, angles, angles)

        x, weight = torch.ones(20, 4096).to(dtype), torch.ones(4096)
        norms.rms_norm(x, weight, 1e-5)
        norms.add_rms_norm(x, x, weight, 1e-5)
        norms.layer_norm(x, weight, weight, 1e-5)
        for name in ("silu", "gelu_tanh", "gelu", "relu2"):
            pointwise.activation(x, name, gated=True)
            pointwise.activation(x, name)
        pointwise.clamped_glu(x, 1.7, 7.0)
        pointwise.gate_by_sigmoid(x, x)
        pointwise.gate_by_sigmoid(x, x[:, :1])
        pointwise.soft_cap(x.float(), 30.0)
        pointwise.sum_of_experts(x, torch.ones(10, 2))

        chosen = torch.zeros(300, 2).long()
        for rows in (4, 300):
            y = torch.ones(rows, 256).to(dtype)
            products.linear(y, torch.ones(128, 256).to(dtype), torch.ones(128).to(dtype), fixed=rows == 4)
            for form in FORMS.values():
                own = random_blocks(128, 256, form)
                products.linear(y, own, torch.ones(128).to(dtype))
                products.embed(own, torch.arange(4), dtype, 2.0)
                products.linear_of_experts(y, products.AddressedExperts([own, own]), chosen[:rows])
            plain = [torch.ones(128, 256).to(dtype)] * 2
            experts = products.AddressedExperts(plain, [torch.ones(128)] * 2)
            products.linear_of_experts(y, experts, chosen[:rows])
        products.by_head(torch.ones(4, 3, 128).to(dtype), torch.ones(3, 128, 512).to(dtype))

    logits = torch.randn(2, 128_256)
    drawing.row_maxima(logits)
    drawer = drawing.TritonDrawer()
    one, some, numbers = drawer.new(Filters(top_k=5, top_p=0.9), Penalties(1.1)), torch.arange(3), torch.ones(3)
    one.change(LogitsChanges(some, some, some, numbers, some, numbers, some, numbers))
    try:
        drawer.draw(logits, [one])
    except ValueError as error:  # what was never drawn is no status
        assert "DrawStatus" in str(error)


if __name__ == "__main__":
    torch.manual_seed(0)
    for wanted in sys.argv[1:]:
        launch.launch = _compile(int(wanted))
        for name in [
            name for name in sys.modules if name.startswith("windlass.kernels.triton.") and name != launch.__name__
        ]:
            del sys.modules[name]
        everything()
