"""Simulated device with graphs: executes submitted work when it is waited for, or when a test permits it.

Graphs consist of torch operations with their operands, as CUDA captures kernels: a replay uses the same memory and the same
Python numbers. Data that is read or written too early becomes a wrong token.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from helpers.played_copies import PlayedCopies
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from windlass.kernels import AdapterSlots, AttentionCall, DeviceEvent, Graphs, KVPages, LowRankTable, SamplingTensors
from windlass.kernels.backend import BackendOptions
from windlass.kernels.token_sampling import Filters
from windlass.kernels.torch import row_independent, torch_sampler
from windlass.kernels.torch.torch_backend import RowIndependentBackend

# Operations that read device memory on the host, or create a host tensor.
_WAITS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::lift_fresh", "aten::equal")
_recorders: list[_Recorder] = []
_inside: list[bool] = []  # running programs


def is_wait(name: str, args: Any) -> bool:
    """Return whether a torch operation synchronizes host and device."""
    masks = [x for x in tree_flatten(args[1:2])[0] if isinstance(x, Tensor) and x.dtype == torch.bool]
    return name.startswith(_WAITS) or (name.startswith("aten::index") and bool(masks))


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Callable[[], None]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.name()
        if is_wait(name, args):
            raise RuntimeError(f"operation not permitted when stream is capturing: {name}")
        before = [x.untyped_storage().data_ptr() for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        result = func(*args, **kwargs)
        made = [x for x in tree_flatten(result)[0] if isinstance(x, Tensor)]
        fresh = [x.untyped_storage().data_ptr() not in before for x in made]
        if "empty" in name or (not any(fresh) and func.is_view):
            return result

        def again() -> None:
            found = [x for x in tree_flatten(func(*args, **kwargs))[0] if isinstance(x, Tensor)]
            for target, source, is_fresh in zip(made, found, fresh, strict=True):
                if is_fresh:
                    target.copy_(source)

        def again_alone() -> None:
            result.copy_(func(*args, **kwargs))

        if not any(fresh):
            self.calls.append(lambda: func(*args, **kwargs))
        else:  # most create one tensor and are repeated very often
            self.calls.append(again_alone if isinstance(result, Tensor) else again)
        return result


@contextlib.contextmanager
def reads_refused() -> Iterator[None]:
    """Refuse reads of tensors on the host that are not torch operations."""

    def refusing(name: str) -> Callable[..., Any]:
        read = getattr(Tensor, name)

        def refused(self: Tensor, *given: Any, **named: Any) -> Any:
            if _inside:
                return read(self, *given, **named)
            raise RuntimeError(f"operation not permitted when stream is capturing: Tensor.{name}")

        return refused

    with contextlib.ExitStack() as stack:
        for name in ("tolist", "numpy", "__array__"):
            stack.enter_context(mock.patch.object(Tensor, name, refusing(name)))
        yield


@contextlib.contextmanager
def inside_a_program() -> Iterator[None]:
    """Execute the block as the device."""
    _inside.append(True)
    try:
        with torch.utils._python_dispatch._disable_current_modes():
            yield
    finally:
        _inside.pop()


def opaque(work: Callable[..., None], *operands: Any) -> None:
    """Run a program, which is captured as one call with these operands."""
    if not _recorders:
        work(*operands)
        return
    with inside_a_program():
        work(*operands)
    _recorders[-1].calls.append(lambda: work(*operands))


class PlayedEvent(DeviceEvent):
    def __init__(self, graphs: PlayedGraphs, place: int) -> None:
        self._graphs, self._place = graphs, place

    def wait(self) -> None:
        self._graphs.waits.append(self._place)
        self._graphs.do_until(self._place)

    def make_stream_wait(self) -> None:
        self.wait()


class PlayedGraphs(Graphs):
    """done: number of executed calls. waits: positions for which the host waited."""

    def __init__(self) -> None:
        self._asked: deque[Callable[[], None]] = deque()
        self.asked = self.done = self.replays = 0
        self.waits: list[int] = []
        self.fails: Callable[[], None] | None = None  # called before each capture

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        self.do_until(self.asked)
        if self.fails is not None:
            self.fails()
        work()
        recorder = _Recorder()
        _recorders.append(recorder)
        try:
            with recorder, reads_refused():
                work()
        finally:
            _recorders.pop()

        def again() -> None:
            self.replays += 1
            for call in recorder.calls:
                call()

        return again

    def submit(self, work: Callable[[], None]) -> None:
        self._asked.append(work)
        self.asked += 1

    def do_until(self, place: int) -> None:
        while self.done < place:
            with torch.inference_mode():
                self._asked.popleft()()
            self.done += 1

    def sample_rows(
        self, logits: Tensor, maxima: tuple[Tensor, Tensor], draws: SamplingTensors
    ) -> tuple[Tensor, Tensor]:
        tokens, statuses = torch.empty((2, len(logits)), dtype=torch.int64)
        opaque(_draw, logits, maxima[1], *draws, tokens, statuses)
        return tokens, statuses

    def join(self) -> None:
        self.do_until(self.asked)

    def record_event(self) -> DeviceEvent:
        return PlayedEvent(self, self.asked)

    def host_memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype)


class PlayedBackend(RowIndependentBackend):
    """Torch backend on the simulated device, for comparison of bits."""

    def __init__(self, options: BackendOptions, refusal: str | None = None) -> None:
        super().__init__(options, refusal)
        self.played = PlayedGraphs()  # the last ones created
        self.copies = PlayedCopies()

    def make_graph_runner(self) -> Graphs | None:
        self.played = PlayedGraphs()
        return self.played

    def make_copies(self) -> PlayedCopies:
        return self.copies

    @property
    def reads_host_memory(self) -> bool:
        return False

    def rotate_and_append(self, q: Tensor, *operands: Any) -> None:
        opaque(super().rotate_and_append, q, *operands)

    def rotate_queries(self, q: Tensor, rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        out = q.new_empty(len(q) + len(rows), *q.shape[1:])
        opaque(lambda *operands: out.copy_(super(PlayedBackend, self).rotate_queries(*operands)), q, rows, cos, sin)
        return out

    def paged_attention(self, q: Tensor, pages: KVPages, call: AttentionCall) -> Tensor:
        if not call.is_decode:
            return super().paged_attention(q, pages, call)
        out = q.new_empty(call.num_tokens, q.shape[1], pages.value_dim)
        opaque(_attend, q, pages, call, out)
        return out

    def short_convolution(self, x: Tensor, *operands: Any) -> Tensor:
        out = torch.empty_like(x)
        opaque(lambda *given: out.copy_(super(PlayedBackend, self).short_convolution(*given)), x, *operands)
        return out

    def gated_delta_rule(self, qkv: Tensor, *operands: Any, **options: Any) -> Tensor:
        return self._read(super().gated_delta_rule, qkv, *operands, **options)

    def state_space(self, mixed: Tensor, *operands: Any, **options: Any) -> Tensor:
        return self._read(super().state_space, mixed, *operands, **options)

    def _read(self, operation: Callable[..., Tensor], columns: Tensor, *operands: Any, **options: Any) -> Tensor:
        """Return what queries read of a memory, the second to last operand."""
        out = columns.new_empty(len(columns), operands[-2].shape[1] * operands[-2].shape[3])
        opaque(lambda *given: out.copy_(operation(*given, **options)), columns, *operands)
        return out

    def add_low_rank(self, out: Tensor, x: Tensor, table: LowRankTable, rows: AdapterSlots) -> None:
        def add(out: Tensor, x: Tensor, slots: Tensor) -> None:
            super(PlayedBackend, self).add_low_rank(out, x, table, AdapterSlots(slots))

        opaque(add, out, x, rows.on(self.device))

    def row_maxima(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        if not _recorders:
            return super().row_maxima(logits)
        ids, values = torch.empty(len(logits), dtype=torch.int64), torch.empty(len(logits))
        opaque(_maxima, logits, ids, values)
        return ids, values


def _attend(q: Tensor, pages: KVPages, call: AttentionCall, out: Tensor) -> None:
    out.zero_()
    rows = (call.seq_lens > 0).nonzero().squeeze(1)  # padding rows see nothing
    if not len(rows):
        return
    own = call.select_sequences(rows)[1]
    out[rows] = row_independent.paged_attention(call.queries(q, rows), pages, own)


def _maxima(logits: Tensor, ids: Tensor, values: Tensor) -> None:
    found, largest = torch_sampler.row_maxima(logits)
    ids.copy_(torch.tensor(found))
    values.copy_(torch.tensor(largest, dtype=torch.float32))


def _draw(
    logits: Tensor,
    maxima: Tensor,
    temperature: Tensor,
    magnitude: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    uniform: Tensor,
    tokens: Tensor,
    statuses: Tensor,
) -> None:
    for row in range(len(logits)):
        own = logits[row : row + 1]
        if not bool(own.max().isfinite()):
            tokens[row], statuses[row] = -1, 1
        elif float(temperature[row]) <= 0:
            tokens[row], statuses[row] = int(own.argmax()), 0
        else:
            floor = magnitude[row].view(torch.float32)
            min_p = 0.0 if int(magnitude[row]) == 0x7F7FFFFF else float(torch.exp(-floor.double()))
            filters = Filters(float(temperature[row]), min_p, int(top_k[row]), float(top_p[row]))
            tokens[row], statuses[row] = torch_sampler.sample(own.clone(), [filters], [float(uniform[row])])[0], 0
