"""Call recording: compiled calls of a decode step, recorded once and repeated on the same memory.

Recording avoids Python's cost around small kernels (dispatch, checks, allocation). A step is repeatable if all its calls
depend on memory only and torch computes nothing. Temporary tensors are allocated first-fit in an arena, and freed when the
tensor and its views are gone.
"""

from __future__ import annotations

import bisect
import ctypes
import math
import struct
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from windlass.kernels.cpu.elementwise_bindings import CompiledBufferFiller
from windlass.kernels.cpu.library import RECORDED_CALL, SIGNATURES, Function, Library, struct_values
from windlass.kernels.step_recording import MultiStepInputs, Recording

_ALIGNMENT = 64  # of torch's own allocator too: a cache line


class Arena:
    """`capacity` bytes of memory; unused pages cost nothing. Tensors in it keep it alive."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.memory = torch.empty(capacity, dtype=torch.uint8, device="cpu").numpy().data


class ArenaAllocator:
    """Allocates tensors in an arena; live ones never overlap. peak: the largest end, in bytes, of a tensor so far.

    Another allocator on the same arena uses the same memory.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._taken: list[tuple[int, int]] = []  # begin and end in bytes, in order
        self.peak = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """An uninitialised contiguous tensor of at least one element, or None if the arena is full."""
        size = math.prod(shape) * dtype.itemsize
        begin = self._take(-(-size // _ALIGNMENT) * _ALIGNMENT)
        if begin is None:
            return None
        # A storage made from a buffer keeps the exporter of the buffer (this view) alive.
        view = self._arena.memory[begin : begin + size]
        weakref.finalize(view, self._give_back, begin)
        return torch.frombuffer(view, dtype=dtype).view(shape)

    def _take(self, size: int) -> int | None:
        begin = 0
        for taken, end in self._taken:
            if taken - begin >= size:
                break
            begin = end
        if begin + size > self._arena.capacity:
            return None
        bisect.insort(self._taken, (begin, begin + size))
        self.peak = max(self.peak, begin + size)
        return begin

    def _give_back(self, begin: int) -> None:
        del self._taken[bisect.bisect_left(self._taken, (begin, 0))]


_EMPTY = "aten::empty.memory_format"

# Torch operations that return a view of the same memory.
_HARMLESS = frozenset(
    {
        "aten::alias",
        "aten::detach",
        "aten::expand",
        "aten::select.int",
        "aten::slice.Tensor",
        "aten::split_with_sizes",
        "aten::unbind.int",
        "aten::view",
    }
)

_OFTEN_HARMLESS = frozenset({"aten::to.dtype", "aten::reshape", "aten::contiguous"})


@dataclass(slots=True)
class CompiledRecording:
    """See `Recording`: the calls in order, and the memory that they use. library: of the called functions."""

    library: Library
    arena: Arena
    calls: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    num_bytes: int = 0  # of the arena, from its start
    obstacle: str | None = None
    _packed: tuple[ctypes.Array[ctypes.c_char], ctypes.Array[ctypes.c_char]] | None = None  # calls, their arguments

    def repeat(self) -> bool:
        return not self.library.repeat_calls(*self._addressed())

    def _addressed(self) -> tuple[int, int]:
        """The address of the calls in the format of recorded_calls.h, and their number."""
        if self._packed is None:
            if self.obstacle is not None:
                raise ValueError(f"a recording cannot be repeated: {self.obstacle}")
            self._packed = self._pack()
        return ctypes.addressof(self._packed[0]), len(self.calls)

    def run_decode_steps(
        self, ahead: MultiStepInputs, passes: int, maxima: tuple[Tensor, Tensor], stop_ids: Sequence[Sequence[int]]
    ) -> NDArray[np.int64] | None:
        if not isinstance(ahead.fill, CompiledBufferFiller):
            return None
        rows = ahead.fill.arguments(ahead.tables, ahead.blocks, passes)
        stops = np.array([token for of_row in stop_ids for token in of_row], dtype=np.int64)
        ends = np.cumsum([len(of_row) for of_row in stop_ids], dtype=np.int64)
        drawn, made = np.empty((passes, len(stop_ids)), dtype=np.int64), ctypes.c_int64()
        self.library.run_decode_steps(
            *(*self._addressed(), passes, *rows),
            *(maxima[0].data_ptr(), maxima[1].data_ptr(), stops.ctypes.data, ends.ctypes.data),
            *(drawn.ctypes.data, ctypes.addressof(made)),
        )
        return drawn[: made.value]

    def same_calls(self, other: Recording) -> bool:
        if not isinstance(other, CompiledRecording):
            return False
        return [self._values(*call) for call in self.calls] == [other._values(*call) for call in other.calls]

    def _pack(self) -> tuple[ctypes.Array[ctypes.c_char], ctypes.Array[ctypes.c_char]]:
        """The calls and their arguments in the format of recorded_calls.h."""
        packed, offsets = bytearray(), []
        for name, arguments in self.calls:
            offsets.append(len(packed))
            kinds = "".join("d" if letter == "f" else "q" for letter in SIGNATURES[name])
            packed += struct.pack("=" + kinds, *map(_as_number, arguments))
        data = ctypes.create_string_buffer(bytes(packed), len(packed))
        calls = b"".join(
            RECORDED_CALL.pack(self.library.recorded[name], ctypes.addressof(data) + offset)
            for (name, _), offset in zip(self.calls, offsets, strict=True)
        )
        return ctypes.create_string_buffer(calls, len(calls)), data

    def _values(self, name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        found: list[Any] = [self.library.isa, name]
        for argument, letter in zip(arguments, SIGNATURES[name], strict=True):
            if isinstance(argument, ctypes.Structure):
                found.append(struct_values(argument))
            else:
                found.append(argument if letter != "P" else argument is None)
        return tuple(found)


def _as_number(argument: Any) -> float:
    """An argument as a number. The address of a struct is valid as long as the recording holds the struct."""
    return ctypes.addressof(argument) if isinstance(argument, ctypes.Structure) else argument or 0


@contextmanager
def record(library: Library, arena: Arena) -> Iterator[tuple[CompiledRecording, Library]]:
    """Record calls of the returned library, which calls the functions of `library`; see `Recorder`.

    All tensors made meanwhile are allocated in the arena.
    """
    recording = CompiledRecording(library, arena)
    tensors = ArenaAllocator(arena)
    try:
        with _RecordingMode(recording, tensors):
            yield recording, _recording_library(library, recording)
    finally:
        recording.num_bytes = tensors.peak


def _recording_library(library: Library, recording: CompiledRecording) -> Library:
    functions = {name: call for name, call in library.functions.items() if call is not None}
    return library.with_functions({name: _recorded(name, call, recording) for name, call in functions.items()})


def _recorded(name: str, function: Function, recording: CompiledRecording) -> Function:
    def call(*arguments: Any) -> int:
        if name not in recording.library.recorded:
            recording.obstacle = f"{name} cannot be repeated"
        recording.calls.append((name, arguments))
        return function(*arguments)

    return call


class _RecordingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Allocates tensors in the arena, and reports torch operations that compute."""

    def __init__(self, recording: CompiledRecording, tensors: ArenaAllocator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording, self._tensors = recording, tensors

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: skipping torch's compiler would import it first, a second or more in the middle of a stream."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, name = func(*args, **(kwargs or {})), func.name()
        if name == _EMPTY:
            return self._in_arena(result)
        # These return their operand's own memory if there is nothing to do.
        same = name in _OFTEN_HARMLESS and result.data_ptr() == args[0].data_ptr()
        if name not in _HARMLESS and not same:
            self._recording.obstacle = f"{name} computes outside the compiled kernels"
        return result

    def _in_arena(self, made: Tensor) -> Tensor:
        """A tensor in the arena in place of a new, uninitialised one; the given one if the arena cannot hold it."""
        if not made.numel():
            return made  # no call reads or writes there
        placed = None
        if made.layout == torch.strided and made.is_cpu and made.is_contiguous():
            placed = self._tensors.empty(made.shape, made.dtype)
        if placed is None:
            size = f"{made.numel() * made.itemsize} bytes on {made.device}"
            self._recording.obstacle = f"an arena of {self._recording.arena.capacity} bytes has no place for {size}"
            return made
        return placed
