"""Reads what a connection sends as events of HTTP/1.1, a few in one turn of the event loop. Knows h11 only.

A chunk of a body takes as long to read with one byte as with thousands, and 256 KiB that came at once may hold 40,000 of them.
Read in one turn they would hold up every stream of the server, before any key is looked at.
"""

from __future__ import annotations

from typing import Any

import h11

PIECES_PER_TURN = 32  # of bodies: a millisecond, as much as a request takes anyway
# A body of more chunks than these is refused where they have fewer bytes on average. Who writes JSON as it is made sends pieces
# of a few bytes, but not thousands of them without a text between.
MANY_CHUNKS, TINY_CHUNK = 4096, 64
# The same of the rest of a body whose request is answered. A client may see its answer only once it has sent all of it.
UNWANTED_CHUNKS = 64


class PacedConnection(h11.Connection):
    """A server's end. `begin_turn` lets it give events again after it said NEED_DATA because it `has_paused`.

    too_fine: its body was refused for its tiny chunks. unwanted: so is what comes of it after the answer.
    """

    def __init__(self, max_incomplete_event_size: int) -> None:
        super().__init__(h11.SERVER, max_incomplete_event_size)
        self.too_fine = self.unwanted = False
        self._left = PIECES_PER_TURN
        self._begin_body()

    @property
    def has_paused(self) -> bool:
        """Whether there may be more events in what came, for a later turn."""
        return self._left == 0

    def begin_turn(self) -> None:
        self._left = PIECES_PER_TURN

    def next_event(self) -> Any:
        """As h11 has it. Raises RemoteProtocolError where the chunks are too fine."""
        if self._left == 0 or self.unwanted:
            return h11.NEED_DATA
        event = super().next_event()
        if isinstance(event, h11.Data):
            self._count(event)
        elif isinstance(event, h11.EndOfMessage):
            self._begin_body()
        return event

    def _begin_body(self) -> None:
        self._chunks = self._bytes = self._unwanted_chunks = self._unwanted_bytes = 0

    def _count(self, piece: h11.Data) -> None:
        self._left -= 1
        self._chunks += piece.chunk_start
        self._bytes += len(piece.data)
        if self.our_state is h11.DONE:
            self._unwanted_chunks += piece.chunk_start
            self._unwanted_bytes += len(piece.data)
            many = piece.chunk_end and self._unwanted_chunks > UNWANTED_CHUNKS
            self.unwanted = many and self._unwanted_bytes < TINY_CHUNK * self._unwanted_chunks
        if piece.chunk_end and self._chunks > MANY_CHUNKS and self._bytes < TINY_CHUNK * self._chunks:
            self.too_fine = True
            raise h11.RemoteProtocolError("a body of tiny chunks")
