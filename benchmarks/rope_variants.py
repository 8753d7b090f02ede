"""What rope_formulations.py times: the rotary embedding in real and complex form under JAX, torch and Windlass.

The forms are written once and run under every framework. Responsible for calls that take x and give its rotation; knows
nothing of checking or timing them.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from windlass import kernels
from windlass.engine.rotary.rope_scaling import RopeScaling, RotaryBase, resolve
from windlass.engine.rotary.rotary_tables import RotaryTables
from windlass.kernels import cpu

BASE = 10000.0
FLOAT32_ANGLES = 2e-3  # a float32 angle near 4095 rad is off by up to about 5e-4
EXACT_ANGLES = 2e-6
HEAD_DIM, BLOCK = 128, 16

Array = Any  # a torch or a JAX array
Formulation = Callable[[ModuleType, Array], Array]


# -- the formulations: xp is torch or jax.numpy, x is [T, D] ------------------------------------------------------------


def _angles(xp: ModuleType, length: int, width: int) -> Array:
    """position * theta, float32 [T, D/2] (RoFormer, 2104.09864)."""
    theta = BASE ** (-xp.arange(0, width, 2, dtype=xp.float32) / width)
    return xp.outer(xp.arange(length, dtype=xp.float32), theta)


def real_tables(xp: ModuleType, length: int, width: int) -> tuple[Array, Array]:
    """Cosines and sines of the angles written twice side by side, [T, D] each."""
    angles = _angles(xp, length, width)
    twice = xp.concatenate((angles, angles), -1)
    return xp.cos(twice), xp.sin(twice)


def complex_table(xp: ModuleType, length: int, width: int) -> Array:
    """cos + i sin of the angles, complex64 [T, D/2]."""
    angles = _angles(xp, length, width)
    return xp.cos(angles) + xp.sin(angles) * 1j


def negate_second_half(xp: ModuleType, x: Array) -> Array:
    """The published h: (x1, x2) to (x1, -x2). With it, x * cos + h(x) * sin scales each element by itself."""
    half = x.shape[-1] // 2
    return xp.concatenate((x[..., :half], -x[..., half:]), -1)


def rotate_half(xp: ModuleType, x: Array) -> Array:
    """What it takes: (x1, x2) to (-x2, x1)."""
    half = x.shape[-1] // 2
    return xp.concatenate((-x[..., half:], x[..., :half]), -1)


def real(xp: ModuleType, x: Array, h: Formulation) -> Array:
    cos, sin = real_tables(xp, *x.shape)
    return x * cos + h(xp, x) * sin


def complex_tiled(xp: ModuleType, x: Array, h: Formulation) -> Array:
    """The published complex form: only the table is complex."""
    table = complex_table(xp, *x.shape)
    return x * xp.tile(xp.real(table), (1, 2)) + h(xp, x) * xp.tile(xp.imag(table), (1, 2))


def apply_real(xp: ModuleType, x: Array, cos: Array, sin: Array) -> Array:
    """Corrected, with tables made beforehand."""
    return x * cos + rotate_half(xp, x) * sin


def apply_complex(xp: ModuleType, x: Array, table: Array) -> Array:
    """A complex product of x1 + i x2 and a table made beforehand."""
    half = x.shape[-1] // 2
    turned = (x[..., :half] + 1j * x[..., half:]) * table
    return xp.concatenate((xp.real(turned), xp.imag(turned)), -1)


# -- what is timed ------------------------------------------------------------------------------------------------------


def _nothing() -> None:
    """Frameworks that return a new array have no output to poison."""


@dataclass(slots=True)
class Variant:
    """One thing to time.

    call: takes x [T, D] of its framework; its result may be unfinished. read: its result as a torch tensor [T, D].
    tables: "in the call", "beforehand" or "none". expects: "rotation", "as written" or "copy". tolerance: largest
    deviation allowed from float64. in_place: the call overwrites its input. poison: fills the call's output with NaN.
    heads: x holds this many heads, each rotated by itself. checks: what `verify` measured. milliseconds: one per round.
    """

    name: str
    framework: str
    tables: str
    call: Callable[[Array], Array]
    expects: str = "rotation"
    tolerance: float = FLOAT32_ANGLES
    jax: bool = False
    in_place: bool = False
    heads: int = 1
    poison: Callable[[], None] = _nothing
    read: Callable[[Array], Tensor] = torch.clone
    checks: dict[str, float] = field(default_factory=dict)
    milliseconds: list[float] = field(default_factory=list)

    def finish(self, result: Array) -> Array:
        return result.block_until_ready() if self.jax else result

    def own_input(self, x: Tensor) -> Array:
        """x for this variant to use up."""
        if self.jax:
            return _to_jax(x)
        return x.clone() if self.in_place else x

    def run(self, x: Tensor) -> Tensor:
        self.poison()
        return self.read(self.finish(self.call(self.own_input(x))))


def _to_jax(x: Tensor) -> Array:
    jnp = importlib.import_module("jax.numpy")
    return jnp.array(x.numpy(), copy=True).block_until_ready()


def _from_jax(x: Array) -> Tensor:
    return torch.from_numpy(importlib.import_module("numpy").array(x))


def copy_variants(shape: tuple[int, int]) -> list[Variant]:
    """The bound: x read once and written once."""
    target = torch.empty(shape)

    def poison() -> None:
        target.fill_(math.nan)

    return [
        Variant("copy into existing memory", "torch", "none", target.copy_, "copy", 0.0, poison=poison),
        Variant("copy into new memory", "torch", "none", torch.clone, "copy", 0.0),
    ]


def framework_variants(
    framework: str,
    xp: ModuleType,
    compiler: Callable[[Callable[..., Array]], Callable[..., Array]],
    shape: tuple[int, int],
) -> list[Variant]:
    """Every formulation under torch or jax.numpy. compiler: what a function goes through first, or the identity."""
    if xp is torch:
        make = functools.partial(Variant, framework=framework)
    else:
        make = functools.partial(Variant, framework=framework, jax=True, read=_from_jax)
    variants = []
    for label, form in (("real", real), ("complex", complex_tiled)):
        for suffix, h in (("as written", negate_second_half), ("corrected", rotate_half)):
            call = compiler(functools.partial(form, xp, h=h))
            expects = "as written" if h is negate_second_half else "rotation"
            variants.append(make(f"{label}, {suffix}", tables="in the call", call=call, expects=expects))
    # Tables are arguments, so that no compiler can fold them into its code.
    cos, sin = real_tables(xp, *shape)
    table = complex_table(xp, *shape)
    with_real, with_complex = (compiler(functools.partial(form, xp)) for form in (apply_real, apply_complex))
    return [
        *variants,
        make("real, corrected", tables="beforehand", call=lambda x: with_real(x, cos, sin)),
        make("complex product", tables="beforehand", call=lambda x: with_complex(x, table)),
    ]


def equinox_variants(equinox: ModuleType, width: int) -> list[Variant]:
    """The module Equinox ships. It makes its tables on the first call and keeps them, so under jit they are constants."""
    module = equinox.nn.RotaryPositionalEmbedding(embedding_size=width, theta=BASE)
    make = functools.partial(Variant, "RotaryPositionalEmbedding", tables="beforehand", jax=True, read=_from_jax)
    return [make(framework="Equinox", call=module), make(framework="Equinox jit", call=equinox.filter_jit(module))]


class WindlassKernel:
    """Windlass's one kernel on x alone: as queries, rotated in place, or as keys, rotated into shuffled cache blocks.

    heads: of x [T, heads * D]. One head of 1024 is the shape of the comparison, heads of 128 that of a model, whose
    tables are as much narrower.
    """

    def __init__(self, shape: tuple[int, int], heads: int) -> None:
        self.length, self.heads, dim = shape[0], heads, shape[1] // heads
        base = RotaryBase(rope_theta=BASE, head_dim=dim, rotary_dim=dim, trained_len=self.length)
        self.backend = kernels.select_backend("cpu")
        self.rotary = RotaryTables(1, [base], self.backend)
        row = self.rotary.acquire([resolve(RopeScaling(), base, self.length)])
        self.rotary_ids = torch.full((self.length,), row, dtype=torch.int64)
        self.positions = torch.arange(self.length)
        self.made = self.make_tables()
        self.q_scale = torch.ones(self.length)
        blocks = torch.randperm(-(-self.length // BLOCK))
        self.slots = (blocks[:, None] * BLOCK + torch.arange(BLOCK)).flatten()[: self.length].contiguous()
        self.pages = kernels.KVPages(
            torch.empty(len(blocks), BLOCK, heads, dim), torch.empty(len(blocks), BLOCK, heads, 0)
        )
        self.no_pages = kernels.KVPages(torch.empty(1, BLOCK, 0, dim), torch.empty(1, BLOCK, 0, 0))
        self.no_slots = torch.full((self.length,), -1)
        self.no_heads, self.no_values = torch.empty(self.length, 0, dim), torch.empty(self.length, heads, 0)

    def make_tables(self) -> tuple[Tensor, Tensor]:
        rotation = self.rotary.cos_sin(self.rotary_ids, self.positions)
        return rotation.cos[0], rotation.sin[0]

    def queries(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        q, none = x.view(self.length, self.heads, -1), self.no_heads
        self.backend.rotate_and_append(q, none, none[:, :, :0], *tables, self.q_scale, self.no_pages, self.no_slots)
        return x

    def keys(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        k = x.view(self.length, self.heads, -1)
        self.backend.rotate_and_append(self.no_heads, k, self.no_values, *tables, self.q_scale, self.pages, self.slots)
        return self.pages.key

    def read_keys(self, pages: Tensor) -> Tensor:
        return pages.view(-1, pages.shape[2] * pages.shape[3])[self.slots]

    def poison(self) -> None:
        self.pages.key.fill_(math.nan)

    def variants(self) -> list[Variant]:
        suffix = f", {self.heads} heads" if self.heads > 1 else ""
        make = functools.partial(Variant, framework="Windlass", tolerance=EXACT_ANGLES, heads=self.heads)
        queries = functools.partial(make, f"in place{suffix}", in_place=True)
        keys = functools.partial(make, f"into the cache{suffix}", poison=self.poison, read=self.read_keys)
        variants = [
            keys(tables="in the call", call=lambda x: self.keys(x, self.make_tables())),
            keys(tables="beforehand", call=lambda x: self.keys(x, self.made)),
        ]
        if cpu.unavailable_reason() is None:  # the plain torch form wants keys beside the queries
            variants += [
                queries(tables="in the call", call=lambda x: self.queries(x, self.make_tables())),
                queries(tables="beforehand", call=lambda x: self.queries(x, self.made)),
            ]
        return variants


def torch_variants(shape: tuple[int, int]) -> list[Variant]:
    """What runs without a compiler and without JAX."""
    heads = [1, *([shape[1] // HEAD_DIM] if shape[1] > HEAD_DIM else [])]
    ours = [variant for count in heads for variant in WindlassKernel(shape, count).variants()]
    return [*copy_variants(shape), *framework_variants("torch eager", torch, lambda f: f, shape), *ours]


def compiled_variants(shape: tuple[int, int]) -> tuple[list[Variant], list[str]]:
    """Those of torch.compile, or why there are none: it looks for a C++ compiler at the first call."""
    compiler = functools.partial(torch.compile, fullgraph=True, dynamic=False)
    variants = framework_variants("torch.compile", torch, compiler, shape)
    try:
        variants[0].run(torch.rand(shape))
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        return [], [f"torch.compile ({reason}): it needs a C++ compiler"]
    return variants, []


def all_variants(shape: tuple[int, int]) -> tuple[list[Variant], list[str]]:
    """Everything this environment can run, and what it lacks."""
    compiled, missing = compiled_variants(shape)
    variants = [*torch_variants(shape), *compiled]
    if (reason := cpu.unavailable_reason()) is not None:
        missing.append(
            f"Windlass's compiled kernels ({reason}): its figures are of plain torch, those in place are absent"
        )
    try:
        jax = importlib.import_module("jax")
        jax.config.update("jax_platforms", "cpu")
        jnp = importlib.import_module("jax.numpy")
        variants += framework_variants("JAX eager", jnp, lambda f: f, shape)
        variants += framework_variants("JAX jit", jnp, jax.jit, shape)
    except ImportError as error:
        return variants, [*missing, f"jax, and with it equinox ({error}): pip install 'jax[cpu]' equinox"]
    try:
        variants += equinox_variants(importlib.import_module("equinox"), shape[1])
    except ImportError as error:
        missing.append(f"equinox ({error}): pip install equinox")
    return variants, missing
