"""Operands of recurrent layers, and their outputs by the formulas in float64, element by element."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from windlass.kernels import StateRows


def state_rows(blocks: Sequence[int], tokens: Sequence[int], begins: Sequence[bool]) -> StateRows:
    """Sequences with these numbers of tokens in a step. Those that do not begin had five tokens before."""
    starts = [0]
    for count in tokens:
        starts.append(starts[-1] + count)
    lengths = [count if fresh else count + 5 for count, fresh in zip(tokens, begins, strict=True)]
    return StateRows(*(torch.tensor(numbers, dtype=torch.int64) for numbers in (blocks, starts, lengths)))


def some_rows() -> StateRows:
    """Return sequences that begin and continue: one longer than a kernel's chunk, single tokens, and an empty one.
    Blocks 1 and 4 of 6 are unused."""
    return state_rows([3, 0, 5, 2, 0], [1, 70, 3, 2, 0], [False, True, False, True, True])


def beginning(rows: StateRows) -> list[int]:
    """Return the blocks of sequences that begin."""
    starts, found = rows.starts.tolist(), []
    for s, block in enumerate(rows.blocks.tolist()):
        if rows.lengths[s] == starts[s + 1] - starts[s] > 0:
            found.append(block)
    return found


def some_of(rows: StateRows, first: int, end: int) -> StateRows:
    """Return the same sequences in a step with only their tokens first .. end."""
    starts = rows.starts.clamp(first, end)
    behind = rows.starts[1:] - starts[1:]
    return StateRows(rows.blocks, starts - first, rows.lengths - behind)


@dataclass(frozen=True)
class Convolution:
    """Operands of `short_convolution`, as columns of a wider tensor. Windows of sequences that begin are NaN."""

    x: Tensor
    weight: Tensor
    window: Tensor
    activation: Literal["silu"] | None = "silu"
    bias: Tensor | None = None

    @classmethod
    def random(cls, rows: StateRows, channels: int, width: int, dtype: torch.dtype = torch.float32) -> Convolution:
        x = torch.randn(int(rows.starts[-1]), channels + 5).to(dtype)[:, 2 : channels + 2]
        window = torch.randn(6, width - 1, channels)
        window[beginning(rows)] = torch.nan
        return cls(x, torch.randn(channels, width), window)

    @property
    def plain(self) -> Convolution:
        """Return the case without activation and with a bias."""
        return replace(self, activation=None, bias=torch.randn(len(self.weight)))

    def copy(self) -> Convolution:
        return replace(self, window=self.window.clone())

    def part(self, first: int, end: int) -> Convolution:
        return replace(self, x=self.x[first:end])

    def operands(
        self, rows: StateRows
    ) -> tuple[Tensor, Tensor, Tensor, StateRows, Literal["silu"] | None, Tensor | None]:
        return self.x, self.weight, self.window, rows, self.activation, self.bias

    @property
    def state(self) -> Tensor:
        return self.window

    def expected(self, rows: StateRows) -> tuple[Tensor, Tensor]:
        """Return the output and the window after it, float64."""
        width, window = self.weight.shape[1], self.window.double()
        out = torch.full(self.x.shape, torch.nan, dtype=torch.float64)
        starts = rows.starts.tolist()
        for s, block in enumerate(rows.blocks.tolist()):
            if starts[s] == starts[s + 1]:
                continue
            past = list(torch.zeros_like(window[block]) if block in beginning(rows) else window[block])
            for t in range(starts[s], starts[s + 1]):
                past.append(self.x[t].double())
                total = torch.stack(past[-width:]).mul(self.weight.double().T).sum(0)
                if self.bias is not None:
                    total += self.bias.double()
                out[t] = total if self.activation is None else total / (1 + torch.exp(-total))
            window[block] = torch.stack(past[1 - width :])
        return out, window


@dataclass(frozen=True)
class DeltaRule:
    """Operands of `gated_delta_rule`, as columns of a wider tensor. States of sequences that begin are NaN."""

    qkv: Tensor
    decay: Tensor
    strength: Tensor
    rate: Tensor
    bias: Tensor
    memory: Tensor

    @classmethod
    def random(
        cls,
        rows: StateRows,
        key_heads: int,
        heads: int,
        key_dim: int,
        value_dim: int,
        dtype: torch.dtype = torch.float32,
    ) -> DeltaRule:
        tokens, columns = int(rows.starts[-1]), 2 * key_heads * key_dim + heads * value_dim
        qkv = torch.randn(tokens, columns + 3).to(dtype)[:, 3:]
        decay, strength = torch.randn(tokens, 2 * heads + 1).to(dtype)[:, :-1].chunk(2, dim=1)
        memory = torch.randn(6, heads, key_dim, value_dim)
        memory[beginning(rows)] = torch.nan
        return cls(qkv, decay, strength, torch.rand(heads) * 2, torch.randn(heads), memory)

    def tiled_heads(self) -> tuple[DeltaRule, list[int]]:
        """Return the case with value heads that alternate between key heads, and their order."""
        _, heads, key_dim, value_dim = self.memory.shape
        keys = self.qkv.shape[1] - heads * value_dim
        key_heads = keys // (2 * key_dim)
        order = [k * (heads // key_heads) + turn for turn in range(heads // key_heads) for k in range(key_heads)]
        values = self.qkv[:, keys:].unflatten(1, (heads, value_dim))[:, order].flatten(1)
        gates = {name: getattr(self, name)[..., order] for name in ("decay", "strength", "rate", "bias")}
        return replace(
            self, qkv=torch.cat((self.qkv[:, :keys], values), dim=1), memory=self.memory[:, order], **gates
        ), order

    def copy(self) -> DeltaRule:
        return replace(self, memory=self.memory.clone())

    def part(self, first: int, end: int) -> DeltaRule:
        pick = slice(first, end)
        return replace(self, qkv=self.qkv[pick], decay=self.decay[pick], strength=self.strength[pick])

    def operands(self, rows: StateRows) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, StateRows]:
        return self.qkv, self.decay, self.strength, self.rate, self.bias, self.memory, rows

    @property
    def state(self) -> Tensor:
        return self.memory

    def expected(self, rows: StateRows) -> tuple[Tensor, Tensor]:
        """Return the output and the state after it, float64."""
        memory = self.memory.double()
        _, heads, key_dim, value_dim = memory.shape
        key_heads = (self.qkv.shape[1] - heads * value_dim) // (2 * key_dim)
        out = torch.full((len(self.qkv), heads, value_dim), torch.nan, dtype=torch.float64)
        starts = rows.starts.tolist()
        for s, block in enumerate(rows.blocks.tolist()):
            if starts[s] == starts[s + 1]:
                continue
            if block in beginning(rows):
                memory[block] = 0
            for t in range(starts[s], starts[s + 1]):
                for head in range(heads):
                    own = head * key_heads // heads
                    q = self._vector(t, own * key_dim, key_dim)
                    k = self._vector(t, (key_heads + own) * key_dim, key_dim)
                    v = self._vector(t, 2 * key_heads * key_dim + head * value_dim, value_dim)
                    q, k = (one / torch.sqrt(one @ one + 1e-6) for one in (q, k))
                    share = 1 / (1 + math.exp(-float(self.strength[t, head])))
                    m = memory[block, head] * math.exp(-float(self.rate[head]) * self._softplus(t, head))
                    m += torch.outer(k, share * (v - m.T @ k))
                    out[t, head] = m.T @ (q / math.sqrt(key_dim))
                    memory[block, head] = m
        return out.flatten(1), memory

    def _vector(self, t: int, first: int, size: int) -> Tensor:
        return self.qkv[t, first : first + size].double()

    def _softplus(self, t: int, head: int) -> float:
        return softplus(float(self.decay[t, head]) + float(self.bias[head]))


@dataclass(frozen=True)
class StateSpace:
    """Operands of `state_space`, as columns of a wider tensor, with keys and queries of about length 1. States of sequences
    that begin are NaN. limits: of step sizes; some random values exceed each."""

    mixed: Tensor
    step: Tensor
    rate: Tensor
    bias: Tensor
    skip: Tensor
    memory: Tensor
    limits: tuple[float, float] = (0.3, 1.2)

    @classmethod
    def random(
        cls,
        rows: StateRows,
        key_heads: int,
        heads: int,
        key_dim: int,
        value_dim: int,
        dtype: torch.dtype = torch.float32,
    ) -> StateSpace:
        tokens, columns = int(rows.starts[-1]), heads * value_dim + 2 * key_heads * key_dim
        mixed = torch.randn(tokens, columns + 5)
        mixed[:, 5 + heads * value_dim :] *= key_dim**-0.5
        step = torch.randn(tokens, heads + 3).to(dtype)[:, 2:-1]
        memory = torch.randn(6, heads, key_dim, value_dim)
        memory[beginning(rows)] = torch.nan
        gates = torch.rand(heads) * 2, torch.randn(heads), torch.randn(heads)
        return cls(mixed.to(dtype)[:, 5:], step, *gates, memory)

    def copy(self) -> StateSpace:
        return replace(self, memory=self.memory.clone())

    def part(self, first: int, end: int) -> StateSpace:
        return replace(self, mixed=self.mixed[first:end], step=self.step[first:end])

    def operands(self, rows: StateRows) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, StateRows]:
        return self.mixed, self.step, self.rate, self.bias, self.skip, self.memory, rows

    @property
    def state(self) -> Tensor:
        return self.memory

    def expected(self, rows: StateRows) -> tuple[Tensor, Tensor]:
        """Return the output and the state after it, float64."""
        memory = self.memory.double()
        _, heads, key_dim, value_dim = memory.shape
        key_heads = (self.mixed.shape[1] - heads * value_dim) // (2 * key_dim)
        out = torch.full((len(self.mixed), heads, value_dim), torch.nan, dtype=torch.float64)
        starts = rows.starts.tolist()
        for s, block in enumerate(rows.blocks.tolist()):
            if starts[s] == starts[s + 1]:
                continue
            if block in beginning(rows):
                memory[block] = 0
            for t in range(starts[s], starts[s + 1]):
                for head in range(heads):
                    own = head * key_heads // heads
                    v = self._vector(t, head * value_dim, value_dim)
                    k = self._vector(t, heads * value_dim + own * key_dim, key_dim)
                    q = self._vector(t, heads * value_dim + (key_heads + own) * key_dim, key_dim)
                    d = softplus(float(self.step[t, head]) + float(self.bias[head]))
                    d = min(max(d, self.limits[0]), self.limits[1])
                    m = memory[block, head] * math.exp(-float(self.rate[head]) * d) + torch.outer(k, d * v)
                    out[t, head] = m.T @ q + float(self.skip[head]) * v
                    memory[block, head] = m
        return out.flatten(1), memory

    def _vector(self, t: int, first: int, size: int) -> Tensor:
        return self.mixed[t, first : first + size].double()


Operands = Convolution | DeltaRule | StateSpace


def apply(functions: Any, own: Operands, rows: StateRows, **options: Any) -> Tensor:
    """Call the operation of these operands. functions: has the three operations as attributes, as backends do."""
    if isinstance(own, Convolution):
        return functions.short_convolution(*own.operands(rows), **options)
    if isinstance(own, StateSpace):
        return functions.state_space(*own.operands(rows), limits=own.limits, **options)
    return functions.gated_delta_rule(*own.operands(rows), **options)


def softplus(x: float) -> float:
    return x if x > 500 else math.log1p(math.exp(x))
