"""Lists whose objects say by their `type` what they are: items, parts, blocks and tools. One of an unknown kind is refused by it.

Knows how such lists are told apart; knows none of their kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Discriminator, field_validator
from pydantic_core import PydanticCustomError

from windlass.server.protocol.base import MAX_NAME, OrString

OTHER = "[other]"  # tags stand in brackets: those are left out of the names of fields that errors tell


def by_type(known: Collection[str], default: Callable[[dict[str, Any]], str] | None = None) -> Discriminator:
    """Tells objects apart by `type`: each has the tag "[type]", or OTHER. default: the type of one that has none."""

    def tag(value: Any) -> str:
        kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        if kind is None and default is not None and isinstance(value, dict):
            kind = default(value)
        return f"[{kind}]" if isinstance(kind, str) and kind in known else OTHER

    return Discriminator(tag)


class OtherKind(BaseModel):
    """An object of any other kind, which never validates. what: "items"; instead: the kinds that there are."""

    model_config = ConfigDict(hide_input_in_errors=True)

    what: ClassVar[str]
    instead: ClassVar[str]

    type: Any

    @field_validator("type")
    @classmethod
    def _refuse(cls, kind: Any) -> Any:
        shown = repr(kind[:MAX_NAME]) if isinstance(kind, str) else "this"
        raise PydanticCustomError(
            "unsupported_field",
            "{shown} is not among the {what} that are supported: {instead}",
            {"shown": shown, "what": cls.what, "instead": cls.instead},
        )


def texts(kind: str) -> OrString:
    """A list of parts, of which a string is the one of this kind."""
    return OrString(lambda value: [{"type": kind, "text": value}] if isinstance(value, str) else value)
