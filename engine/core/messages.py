"""Messages between processes: API process and engine, first rank and other ranks.

A frame on the private socket pair is a 4-byte big-endian length and one pickled message. Pickle is safe here only: both ends
are the same program, and no other process can reach the socket. Free of asyncio and torch.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from windlass.engine import errors
from windlass.engine.cache.kv_cache_budget import CachePlan
from windlass.engine.interface.config import EngineConfig
from windlass.engine.interface.introspection import IntrospectionQuery
from windlass.engine.interface.model_info import AdapterInfo, AdapterSource, ModelInfo
from windlass.engine.interface.outputs import EngineStats, RequestOutput, TokenLogprobs
from windlass.engine.interface.request import EngineRequest

Announce = Callable[[float | None], None]  # told how many seconds a step may take; None where nobody can tell

ANNOUNCE_SECONDS = 1.0  # seconds; a step that may take longer is announced

ProgressCallback = Callable[[str, int, int], None]

_LENGTH = struct.Struct("!I")

PROMPT_LOGPROBS_PER_FRAME = (
    512  # prompt tokens whose log-probabilities travel in one frame: some milliseconds of the reader's time
)


# ---- parent to child -------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Load:
    """The first frame: what to load."""

    config: EngineConfig


@dataclass(frozen=True, slots=True)
class Add:
    request: EngineRequest


@dataclass(frozen=True, slots=True)
class Abort:
    """Forget a request. The engine answers `Aborted`; after that no output of this id is under way."""

    request_id: str


@dataclass(frozen=True, slots=True)
class EndSample:
    """Finish one sample of a request; its others go on. Not answered."""

    request_id: str
    index: int


@dataclass(frozen=True, slots=True)
class AskStats:
    """Answered by `Stats` between two steps."""


@dataclass(frozen=True, slots=True)
class InspectRequest:
    """A question of somebody who looks on, answered by `InspectResult` between two steps."""

    inspection_id: int
    question: IntrospectionQuery[Any]


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """Answered by `AdapterLoaded` once it has been read, beside the steps."""

    source: AdapterSource


@dataclass(frozen=True, slots=True)
class DropAdapter:
    """Not answered: no request names it afterwards."""

    adapter_id: int


@dataclass(frozen=True, slots=True)
class Close:
    """End the loop. A closed socket means the same."""


# ---- child to parent -------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Progress:
    stage: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Ready:
    info: ModelInfo


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """Loading ended with this one-line message; the child exits."""

    message: str


@dataclass(frozen=True, slots=True)
class Rejected:
    """`add` refused this request (RequestError, QueueFullError)."""

    request_id: str
    error: errors.EngineError


@dataclass(frozen=True, slots=True)
class Aborted:
    request_id: str


@dataclass(frozen=True, slots=True)
class AdapterLoaded:
    """What became of an adapter: what it is, or why it cannot be used."""

    adapter_id: int
    result: AdapterInfo | errors.EngineError


@dataclass(frozen=True, slots=True)
class InspectResult:
    """The answer of a `InspectRequest`, or why there is none."""

    inspection_id: int
    result: Any


@dataclass(frozen=True, slots=True)
class Stats:
    stats: EngineStats


@dataclass(frozen=True, slots=True)
class StepStarted:
    """A step has begun that may take long. seconds: how long; None where nothing like it has been seen yet."""

    seconds: float | None


@dataclass(frozen=True, slots=True)
class StepDone:
    """Everything one step produced, in one frame; it is also the sign of life that the watchdog waits for.

    seconds: how long the step took. stats: a snapshot, on some steps only.
    """

    outputs: tuple[RequestOutput, ...]
    seconds: float
    stats: EngineStats | None = None


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """A part of a long prompt's log-probabilities; the output that they belong to follows and bears the last part."""

    request_id: str
    entries: tuple[TokenLogprobs | None, ...]


@dataclass(frozen=True, slots=True)
class Crashed:
    """A step raised something unexpected; the child is about to exit."""

    reason: str


Message = (
    Load
    | Add
    | Abort
    | EndSample
    | AskStats
    | InspectRequest
    | LoadAdapter
    | DropAdapter
    | Close
    | Progress
    | Ready
    | LoadFailed
    | Rejected
    | Aborted
    | AdapterLoaded
    | InspectResult
    | Stats
    | StepStarted
    | StepDone
    | PromptLogprobs
    | Crashed
)


def encode(message: Message) -> bytes:
    """Its frame, length included; several where it would take the other side long to read in one go."""
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
    """Frames of all but the last part of its prompt log-probabilities, and the output with that."""
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
    """The fields in the order of RequestOutput's constructor."""
    return (
        output.request_id,
        output.index,
        output.token_ids,
        output.logprobs,
        output.prompt_logprobs,
        output.finish_reason,
        output.stop_token_id,
        output.cached_tokens,
        output.rotary,
        output.context,
        picklable_error(output.error) if output.error is not None else None,
        output.pooled,
        output.scheduled_at,
    )


def picklable_error(error: Exception) -> errors.EngineError:
    """The error itself if it is one of ours, which all survive pickling; else an EngineError that says the same."""
    if type(error).__module__ == errors.__name__ and isinstance(error, errors.EngineError):
        return error
    return errors.EngineError(f"{type(error).__name__}: {error}")


@dataclass(slots=True)
class FrameReader:
    """Cuts a byte stream into messages; what a dead writer left half written stays unread."""

    _buffer: bytearray = field(default_factory=bytearray)

    def feed(self, data: bytes) -> Iterable[Message]:
        """Add received bytes; the messages that are now complete, in order."""
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


@dataclass(frozen=True, slots=True)
class LoadShard:
    """The first message: which part of what to load. Answered by `ShardLoaded` or `ShardFailed`."""

    config: EngineConfig
    rank: int


@dataclass(frozen=True, slots=True)
class ShardLoaded:
    """weight_bytes: of this rank's weights."""

    weight_bytes: int


@dataclass(frozen=True, slots=True)
class ShardFailed:
    """Why it cannot be loaded, one line."""

    message: str


@dataclass(frozen=True, slots=True)
class ProfileMemory:
    """Find out, by the largest step that all ranks compute together, what is left for pages. Answered by `AvailableMemory` or
    `ShardFailed`; sent where each rank has a device with memory of its own."""


@dataclass(frozen=True, slots=True)
class AvailableMemory:
    """Bytes that are left for pages, and what a token takes of them on this rank."""

    num_bytes: int
    bytes_per_kv_token: int


@dataclass(frozen=True, slots=True)
class AllocateCache:
    """How many pages there are, and how many rows of the rotary tables. Answered by `ShardLoaded` or `ShardFailed`.

    After it come the orders of `windlass.engine.execution.model_runner`, which are not answered.
    """

    plan: CachePlan
    rotary_rows: int
