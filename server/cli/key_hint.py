"""What a command says of an answer that refuses its key."""

from __future__ import annotations

from windlass.clients import APIError


def with_key_hint(error: APIError) -> str:
    """The message of an error, on one line, with the option that a refused key asks for."""
    hint = ": give one with --api-key" if error.status == 401 else ""
    return " ".join(error.message.split()) + hint
