"""Messages between processes: API process and engine, first rank and other ranks.

A frame on the private socket pair is a 4-byte big-endian length and one pickled message. Pickle is safe here only: both ends
are the same program, and no other process can reach the socket. Free of asyncio and torch.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from windlass.engine import errors
from windlass.engine.interface.config import EngineConfig
from windlass.engine.interface.introspection import IntrospectionQuery
from windlass.engine.interface.model_info import AdapterInfo, AdapterSource, ModelInfo
from windlass.engine.interface.outputs import EngineStats, RequestOutput, TokenLogprobs
from windlass.engine.interface.request import EngineRequest

if TYPE_CHECKING:
    from windlass.engine.cache.kv_cache_budget import CachePlan

Announce = Callable[[float | None], None]  # called with the expected seconds of a step; None: unknown
ProgressCallback = Callable[[str, int, int], None]  # called with (stage, done, total)

ANNOUNCE_SECONDS = 1.0  # a step that may take longer is announced
PROMPT_LOGPROBS_PER_FRAME = 512  # prompt tokens: some milliseconds of the reader's time

_LENGTH = struct.Struct("!I")


class Message:
    """Base of the messages between parent and child."""

    __slots__ = ()


# -- parent to child ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Load(Message):
    """The first message: the configuration to load."""

    config: EngineConfig


@dataclass(frozen=True, slots=True)
class Add(Message):
    request: EngineRequest


@dataclass(frozen=True, slots=True)
class Abort(Message):
    """Drop a request. The engine answers `Aborted`, and sends no output of this id after that."""

    request_id: str


@dataclass(frozen=True, slots=True)
class EndSample(Message):
    """Finish one sample of a request; its other samples continue. Not answered."""

    request_id: str
    index: int


@dataclass(frozen=True, slots=True)
class AskStats(Message):
    """Answered by `Stats` between two steps."""


@dataclass(frozen=True, slots=True)
class InspectRequest(Message):
    """An introspection query, answered by `InspectResult` between two steps."""

    inspection_id: int
    query: IntrospectionQuery[Any]


@dataclass(frozen=True, slots=True)
class LoadAdapter(Message):
    """Answered by `AdapterLoaded` once the adapter has been read in the background."""

    source: AdapterSource


@dataclass(frozen=True, slots=True)
class DropAdapter(Message):
    """Not answered: no request uses the adapter afterwards."""

    adapter_id: int


@dataclass(frozen=True, slots=True)
class Close(Message):
    """End the loop. A closed socket means the same."""


# -- child to parent ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Progress(Message):
    stage: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Ready(Message):
    info: ModelInfo


@dataclass(frozen=True, slots=True)
class LoadFailed(Message):
    """Loading the model, or a rank's shard, failed with this one-line message; the process exits."""

    message: str


@dataclass(frozen=True, slots=True)
class Rejected(Message):
    """`add` refused this request (RequestError, QueueFullError)."""

    request_id: str
    error: errors.EngineError


@dataclass(frozen=True, slots=True)
class Aborted(Message):
    request_id: str


@dataclass(frozen=True, slots=True)
class AdapterLoaded(Message):
    """A loaded adapter, or why it cannot be used."""

    adapter_id: int
    result: AdapterInfo | errors.EngineError


@dataclass(frozen=True, slots=True)
class InspectResult(Message):
    """The answer to an `InspectRequest`, or an EngineError."""

    inspection_id: int
    result: Any


@dataclass(frozen=True, slots=True)
class Stats(Message):
    stats: EngineStats


@dataclass(frozen=True, slots=True)
class StepStarted(Message):
    """A step that may take long has started. seconds: its expected duration; None if unknown."""

    seconds: float | None


@dataclass(frozen=True, slots=True)
class StepDone(Message):
    """All outputs of one step. The watchdog waits for it.

    seconds: duration of the step. stats: a snapshot, on some steps only.
    """

    outputs: tuple[RequestOutput, ...]
    seconds: float
    stats: EngineStats | None = None


@dataclass(frozen=True, slots=True)
class PromptLogprobs(Message):
    """A part of a long prompt's log-probabilities; the output that they belong to follows with the last part."""

    request_id: str
    entries: tuple[TokenLogprobs | None, ...]


@dataclass(frozen=True, slots=True)
class Crashed(Message):
    """A step raised an unexpected error; the child is about to exit."""

    reason: str


# -- frames ------------------------------------------------------------------------------------------------------------
_values_of_output = attrgetter(*(f.name for f in fields(RequestOutput)))


def encode(message: Message) -> bytes:
    """The frame of a message, length included; several frames if the reader would be busy with one for too long."""
    if type(message) is not StepDone:
        return _frame(message)
    # By far the most frequent: plain tuples pickle several times faster than dataclasses.
    before, outputs = b"", []
    for output in message.outputs:
        if output.prompt_logprobs is not None and len(output.prompt_logprobs) > PROMPT_LOGPROBS_PER_FRAME:
            parts, output = _split_prompt_logprobs(output)
            before += parts
        outputs.append(output_fields(output))
    return before + _frame((outputs, message.seconds, message.stats))


def _frame(content: Any) -> bytes:
    body = pickle.dumps(content, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


def _split_prompt_logprobs(output: RequestOutput) -> tuple[bytes, RequestOutput]:
    """Frames of all but the last part of the prompt log-probabilities, and the output with only that part."""
    entries = output.prompt_logprobs or ()
    starts = range(0, len(entries), PROMPT_LOGPROBS_PER_FRAME)
    parts = [
        _frame(PromptLogprobs(output.request_id, entries[start : start + PROMPT_LOGPROBS_PER_FRAME]))
        for start in starts[:-1]
    ]
    return b"".join(parts), replace(output, prompt_logprobs=entries[starts[-1] :])


def decode(body: bytes | bytearray | memoryview) -> Message:
    """The message in one frame's body."""
    content = pickle.loads(body)
    if type(content) is tuple:
        outputs, seconds, stats = content
        return StepDone(tuple(RequestOutput(*fields) for fields in outputs), seconds, stats)
    return content  # type: ignore[no-any-return]


def output_fields(output: RequestOutput) -> tuple[Any, ...]:
    """The fields in the order of RequestOutput's constructor, picklable."""
    if output.error is not None:
        output = replace(output, error=picklable_error(output.error))
    values: tuple[Any, ...] = _values_of_output(output)
    return values


def picklable_error(error: Exception) -> errors.EngineError:
    """The error itself if it is one of the engine's, which all survive pickling; else an EngineError with its text."""
    if type(error).__module__ == errors.__name__ and isinstance(error, errors.EngineError):
        return error
    return errors.EngineError(f"{type(error).__name__}: {error}")


@dataclass(slots=True)
class FrameReader:
    """Splits a byte stream into messages; a frame that a dead writer left incomplete is not read."""

    _buffer: bytearray = field(default_factory=bytearray)

    def feed(self, data: bytes) -> Iterable[Message]:
        """Add received bytes and return the messages that are now complete, in order."""
        self._buffer += data
        messages: list[Message] = []
        start = 0
        with memoryview(self._buffer) as view:
            while len(view) - start >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(view, start)
                end = start + _LENGTH.size + length
                if len(view) < end:
                    break
                with view[start + _LENGTH.size : end] as body:
                    messages.append(decode(body))
                start = end
        if start:
            del self._buffer[:start]
        return messages


# -- first rank to and from the other ranks ----------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class LoadShard:
    """The first message: load this rank's shard. Answered by `ShardLoaded` or `LoadFailed`."""

    config: EngineConfig
    rank: int


@dataclass(frozen=True, slots=True)
class ShardLoaded:
    """weight_bytes: of this rank's weights."""

    weight_bytes: int


@dataclass(frozen=True, slots=True)
class ProfileMemory:
    """Run the largest step, which all ranks compute together, and report the available KV memory. Answered by `AvailableMemory`
    or `LoadFailed`; sent if each rank has a device with its own memory."""


@dataclass(frozen=True, slots=True)
class AvailableMemory:
    """Available KV memory of this rank, and KV bytes per token on it."""

    num_bytes: int
    bytes_per_kv_token: int


@dataclass(frozen=True, slots=True)
class AllocateCache:
    """Allocate the KV cache and the rotary tables. Answered by `ShardLoaded` or `LoadFailed`.

    The commands of `windlass.engine.execution.model_runner` follow, which are not answered.
    """

    plan: CachePlan
    rotary_rows: int
