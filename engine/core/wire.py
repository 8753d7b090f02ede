"""What the two processes of a server say to each other, and how it is framed on their private socket pair.

A frame is a 4-byte big-endian length and one pickled message. Pickle is safe here alone: both ends are the same
program, and nobody else can reach the socket. Knows nothing of asyncio, processes or torch.
"""

from __future__ import annotations

import pickle
import struct
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from windlass.engine import errors
from windlass.engine.api.adapters import AdapterInfo, AdapterSource
from windlass.engine.api.config import EngineConfig
from windlass.engine.api.looks import IntrospectionQuery
from windlass.engine.api.request import (
    MAX_TIMING_SAMPLES,
    EngineRequest,
    EngineStats,
    ModelInfo,
    RequestOutput,
    TokenLogprobs,
)

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


@dataclass(slots=True)
class StatsAccumulator:
    """Joins snapshots so that every sample of `*_seconds` is handed out exactly once.

    The engine drains its samples into each snapshot it takes, whether it was asked for or pushed along with a step. Where
    nobody takes them, the last MAX_TIMING_SAMPLES of each kind wait and older ones are dropped; all counters and gauges stay right.
    """

    _latest: EngineStats | None = None
    _queue: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_TIMING_SAMPLES))
    _prefill: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_TIMING_SAMPLES))
    _decode: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_TIMING_SAMPLES))
    _inference: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_TIMING_SAMPLES))

    def add(self, stats: EngineStats) -> None:
        self._latest = stats
        self._queue += stats.queue_seconds
        self._prefill += stats.prefill_seconds
        self._decode += stats.decode_seconds
        self._inference += stats.inference_seconds

    def take(self) -> EngineStats:
        """The latest gauges and counters (zeros before the first) with all samples since the last call."""
        stats = replace(
            self._latest or EngineStats(),
            queue_seconds=tuple(self._queue),
            prefill_seconds=tuple(self._prefill),
            decode_seconds=tuple(self._decode),
            inference_seconds=tuple(self._inference),
        )
        for samples in (self._queue, self._prefill, self._decode, self._inference):
            samples.clear()
        return stats

    def forget_engine(self) -> None:
        """The engine died: its gauges and counters are void. Samples already received still count."""
        self._latest = None
