"""Protocol between the API process and its text workers: pickled frames on socket pairs."""

from __future__ import annotations

import pickle
import socket
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from windlass.server.config.settings import RankSettings
    from windlass.server.text.tokenizer import Tokenizer


COMMAND = struct.Struct("!ci")
ANSWER = struct.Struct("!i")
FORK, REAP = b"F", b"R"
_LENGTH = struct.Struct("!Q")
_RECEIVE_BYTES = 1 << 20  # read from a socket at once
_IDS_PER_BATCH = 100_000  # packed or unpacked while the interpreter lock is held


@dataclass(frozen=True, slots=True)
class WorkerSource:
    """Data that a text worker loads: tokenizer.json as text, named special tokens and the chat template, if there is one.

    tool_template: for chats with functions, if it differs. pair_template: for pairs of texts; None for the chat template, which
    must then support pairs if `requires_pair_template`.
    """

    tokenizer: str
    special_tokens: dict[str, str]
    chat_template: str | None
    tool_template: str | None = None
    pair_template: str | None = None
    requires_pair_template: bool = False

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer, ranking: RankSettings | None = None) -> WorkerSource:
        """The files of this tokenizer, with the template of pairs from the settings."""
        parts = tokenizer.special_tokens, tokenizer.chat_template, tokenizer.tool_template
        pairs = (None, False) if ranking is None else (ranking.template, ranking.needs_template)
        return cls(tokenizer.backend.to_str(), *parts, *pairs)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one phase of a job. seconds: from its start, without waiting for a slot. memory: bytes beyond what the process
    holds."""

    seconds: float
    memory: int


# A job: a method of `TextTasks` with its keyword arguments, and the limits of each of its phases.
Job = tuple[partial[Any], Sequence[Limits]]


@dataclass(frozen=True, slots=True)
class NextPhase:
    """Sent by a worker whose job begins its next phase; no answer is expected. size: characters of its input."""

    size: int


@dataclass(frozen=True, slots=True)
class Result:
    """The end of a job, or of one part of loading. error: "input" with a message for the client, or "memory".

    phase: index of the phase in which a job failed.
    """

    value: Any = None
    error: Literal["", "input", "memory"] = ""
    message: str = ""
    phase: int = 0


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids as bytes, 4 each in native byte order."""
    packed = array("I")
    for start in range(0, len(ids), _IDS_PER_BATCH):
        packed.extend(ids[start : start + _IDS_PER_BATCH])
    return packed.tobytes()


def count_ids(packed: bytes) -> int:
    """Number of ids that `pack_ids` packed."""
    return len(packed) // 4


def slice_ids(packed: bytes, count: int, *, first: bool) -> bytes:
    """The first or the last `count` ids, packed. count: at least 1."""
    return packed[: 4 * count] if first else packed[-4 * count :]


def unpack_ids(packed: bytes) -> list[int]:
    """Inverse of `pack_ids`."""
    ids: list[int] = []
    step = 4 * _IDS_PER_BATCH
    for start in range(0, len(packed), step):
        ids += array("I", packed[start : start + step])
    return ids


def send(sock: socket.socket, message: Any) -> None:
    """Send one frame; blocks. Raises OSError if the peer is gone or the socket's timeout passed."""
    send_encoded(sock, encode(message))


def encode(message: Any) -> bytes:
    """The body of a frame."""
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)


def send_encoded(sock: socket.socket, body: bytes) -> None:
    """Send a frame whose body is already encoded."""
    sock.sendall(_LENGTH.pack(len(body)))
    sock.sendall(body)


def receive(sock: socket.socket) -> Any:
    """The next frame's message; blocks. None if the peer is gone. Raises TimeoutError as the socket does."""
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
