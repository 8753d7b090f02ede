"""The JSON of vectors, written row by row. Knows numbers; knows nothing of the engine's requests."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence

from windlass.engine.interface.outputs import PooledRows

_NUMBER_BYTES = 16  # "-0.000123456789,"


def vector_bytes(values: int, *, base64: bool) -> int:
    """How large a vector of so many values may become in JSON."""
    return 2 + (-(-4 * values // 3) + 4 if base64 else _NUMBER_BYTES * values)


def vector_json(values: Sequence[float]) -> bytes:
    """A list of float32 numbers with the nine digits that tell each from all others."""
    return b"[" + ",".join([format(value, ".9g") for value in values]).encode() + b"]"


def base64_json(rows: PooledRows) -> bytes:
    """The bytes of the rows as a JSON string."""
    return b'"' + b64encode(rows.values) + b'"'
