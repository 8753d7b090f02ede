"""Records the compiled calls of a piece of work, to repeat them later on the same memory.

Around a small kernel Python spends several times what the kernel takes: choosing it, checking operands, allocating its
result. Where the same tensors come back step after step, all of that gives the same answers, and only the calls remain.
What makes a repetition right is checked while recording: nothing but calls that depend on memory alone, and no torch
operation that computes. The tensors that were made meanwhile are kept, since later calls read and write them.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from windlass.kernels.cpu.library import SIGNATURES, Function, Library, load, recording_thread

# Functions whose arguments follow from shapes and addresses, never from what the tensors hold; in the order of repeat.h.
_REPEATABLE = (
    "linear",
    "linear_packed",
    "rms_norm",
    "gated_activation",
    "soft_cap",
    "rotate_and_append",
    "rotate_and_append_int8",
    "paged_attention_decode",
    "embed_rows",
)
# Torch operations that only allocate, or name the same memory again.
_HARMLESS = frozenset(
    {
        "aten::alias",
        "aten::detach",
        "aten::empty.memory_format",
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
class Recording:
    """The calls in order, and the tensors they need. obstacle: why they cannot be repeated, None if they can."""

    library: Library
    calls: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    obstacle: str | None = None
    _packed: tuple[ctypes.Array[ctypes.c_char], ctypes.Array[ctypes.c_char]] | None = None  # calls, their arguments

    def repeat(self) -> bool:
        """Make the calls again; False as soon as one reports an error. Raises ValueError where there is an obstacle."""
        if self._packed is None:
            if self.obstacle is not None:
                raise ValueError(f"a recording cannot be repeated: {self.obstacle}")
            self._packed = self._pack()
        return not self.library.repeat_calls(ctypes.addressof(self._packed[0]), len(self.calls))

    def same_values(self, other: Recording) -> bool:
        """Whether the other recording made the same calls, addresses aside."""
        return [self._values(*call) for call in self.calls] == [other._values(*call) for call in other.calls]

    def _pack(self) -> tuple[ctypes.Array[ctypes.c_char], ctypes.Array[ctypes.c_char]]:
        """The calls as repeat.h reads them."""
        packed, offsets = bytearray(), []
        for name, arguments in self.calls:
            offsets.append(len(packed))
            kinds = ("d" if kind is ctypes.c_float else "q" for kind in SIGNATURES[name])
            packed += struct.pack("=" + "".join(kinds), *(a or 0 for a in arguments))
        data = ctypes.create_string_buffer(bytes(packed), len(packed))
        calls = b"".join(
            struct.pack("=qqq", _REPEATABLE.index(name), self.library.addresses[name], ctypes.addressof(data) + offset)
            for (name, _), offset in zip(self.calls, offsets, strict=True)
        )
        return ctypes.create_string_buffer(calls, len(calls)), data

    def _values(self, name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        kinds = zip(arguments, SIGNATURES[name], strict=True)
        return (self.library.isa, name, *(a if kind is not ctypes.c_void_p else a is None for a, kind in kinds))


@contextmanager
def record() -> Iterator[Recording]:
    """Record what this thread calls, which runs as ever. Raises KernelsUnavailableError."""
    recording = Recording(load())
    recording_thread.library = _recorder(recording.library, recording)
    try:
        with _Watch(recording):
            yield recording
    finally:
        recording_thread.library = None


def _recorder(library: Library, recording: Recording) -> Library:
    functions = {f.name: getattr(library, f.name) for f in fields(library) if f.name in SIGNATURES}
    return replace(library, **{name: _recorded(name, call, recording) for name, call in functions.items()})  # type: ignore[arg-type]


def _recorded(name: str, function: Function, recording: Recording) -> Function:
    def call(*arguments: Any) -> int:
        if name not in _REPEATABLE:
            recording.obstacle = f"{name} cannot be repeated"
        recording.calls.append((name, arguments))
        return function(*arguments)

    return call


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the tensors that are made, and notes operations that are more than bookkeeping."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # These return their operand's own memory where there is nothing to do.
        same = func.name() in _OFTEN_HARMLESS and result.data_ptr() == args[0].data_ptr()
        if func.name() not in _HARMLESS and not same:
            self._recording.obstacle = f"{func.name()} computes outside the compiled kernels"
        self._recording.tensors += [result] if isinstance(result, Tensor) else list(result)
        return result
