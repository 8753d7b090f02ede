"""Messages between the API process and its text workers: pickled frames on socket pairs."""

from __future__ import annotations

import pickle
import socket
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from windlass.server.config.settings import RankSettings
    from windlass.server.text.tokenizer import Tokenizer


COMMAND = struct.Struct("!ci")

ANSWER = struct.Struct("!i")

FORK, REAP = b"F", b"R"

R = TypeVar("R")

_LENGTH = struct.Struct("!Q")

_RECEIVE_BYTES = 1 << 20  # bytes taken from a socket at once

_IDS_PER_BATCH = 100_000  # packed or unpacked in one go, which holds the interpreter lock


@dataclass(frozen=True, slots=True)
class WorkerSource:
    """What a text process loads: tokenizer.json as text, named special tokens, and the chat template, if there is one.

    tool_template: of chats with functions, where that is another one. pair_template: of pairs of texts, None: the chat template,
    where it takes them, as it has to if `requires_pair_template`.
    """

    tokenizer: str
    special_tokens: dict[str, str]
    chat_template: str | None
    tool_template: str | None = None
    pair_template: str | None = None
    requires_pair_template: bool = False

    @classmethod
    def of(cls, tokenizer: Tokenizer, ranking: RankSettings | None = None) -> WorkerSource:
        """What this tokenizer was loaded from, and how pairs are put to the model."""
        parts = tokenizer.special_tokens, tokenizer.chat_template, tokenizer.tool_template
        pairs = (None, False) if ranking is None else (ranking.template, ranking.needs_template)
        return cls(tokenizer.backend.to_str(), *parts, *pairs)


@dataclass(frozen=True, slots=True)
class TaskCall(Generic[R]):
    """A method of `TextTasks` by name with its arguments, which comes to an R. `tasks.call` makes it."""

    task: str
    args: tuple[Any, ...]
    keywords: dict[str, Any]

    def of(self, tasks: object) -> R:
        """Make it."""
        found: R = getattr(tasks, self.task)(*self.args, **self.keywords)
        return found


@dataclass(frozen=True, slots=True)
class Job:
    """memory: bytes that the call may take beyond what the process has."""

    call: TaskCall[Any]
    memory: int


@dataclass(frozen=True, slots=True)
class Done:
    """A job's result; as an answer to a `WorkerSource`: that much of it is loaded."""

    value: Any = None


@dataclass(frozen=True, slots=True)
class Refused:
    """The input is at fault; the message is fit for the caller."""

    message: str


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """The job needed more memory than it may have."""


Result = Done | Refused | OutOfMemory


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids as bytes, 4 each in this machine's order."""
    packed = array("I")
    for start in range(0, len(ids), _IDS_PER_BATCH):
        packed.extend(ids[start : start + _IDS_PER_BATCH])
    return packed.tobytes()


def count_ids(packed: bytes) -> int:
    """How many `pack_ids` packed."""
    return len(packed) // 4


def slice_ids(packed: bytes, count: int, *, first: bool) -> bytes:
    """The first or the last `count` of them, packed."""
    return packed[: 4 * count] if first else packed[-4 * count :]


def unpack_ids(packed: bytes) -> list[int]:
    """What `pack_ids` packed."""
    ids: list[int] = []
    step = 4 * _IDS_PER_BATCH
    for start in range(0, len(packed), step):
        ids += array("I", packed[start : start + step])
    return ids


def send(sock: socket.socket, message: Any) -> None:
    """Send one frame; blocks. Raises OSError when the other end is gone or a timeout of the socket passed."""
    send_encoded(sock, encode(message))


def encode(message: Any) -> bytes:
    """The body of a frame."""
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)


def send_encoded(sock: socket.socket, body: bytes) -> None:
    """Send a frame whose body is encoded already."""
    sock.sendall(_LENGTH.pack(len(body)))
    sock.sendall(body)


def receive(sock: socket.socket) -> Any:
    """The next frame's message; blocks. None when the other end is gone. Raises TimeoutError as the socket does."""
    head = _receive_exactly(sock, _LENGTH.size)
    if head is None:
        return None
    body = _receive_exactly(sock, _LENGTH.unpack(head)[0])
    return None if body is None else pickle.loads(body)


def _receive_exactly(sock: socket.socket, count: int) -> bytearray | None:
    data = bytearray(count)
    with memoryview(data) as view:
        taken = 0
        while taken < count:
            try:
                got = sock.recv_into(view[taken : taken + _RECEIVE_BYTES])
            except ConnectionError:
                got = 0
            if not got:
                return None
            taken += got
    return data
