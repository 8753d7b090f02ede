"""Errors about fields of a chat, in the names of the API that the request used."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from windlass.engine.errors import RequestError
from windlass.server.errors import ApiError
from windlass.server.schemas.chat import ChatRequest

_MESSAGE = re.compile(r"messages\[(\d+)\](?:\.(\w+))?.*")


class FieldNames:
    """names: by the chat's name of a field, what it is called here. places: by message, where it came from.

    parts: by the chat's name of a field of a message, what it is called there; "" for the place itself.
    """

    def __init__(
        self, names: Mapping[str, str], message_paths: Sequence[str], message_fields: Mapping[str, str]
    ) -> None:
        self._names = names
        self._message_paths = message_paths
        self._message_fields = message_fields

    @contextmanager
    def renamed_errors(self) -> Iterator[None]:
        """Errors raised inside name the fields as this API does."""
        try:
            yield
        except ApiError as error:
            if error.param is not None or error.status == 400:
                error.message, error.param = self._rename(error.message, error.param)
            raise
        except RequestError as error:
            error.message, error.param = self._rename(error.message, error.param)
            raise

    def _rename(self, message: str, param: str | None) -> tuple[str, str | None]:
        found = None if param is None else _MESSAGE.fullmatch(param)
        if found is not None and param is not None:
            place = self._message_paths[min(int(found[1]), len(self._message_paths) - 1)]
            part = self._message_fields.get(found[2] or "", "")
            here = f"{place}.{part}" if part else place
            message, param = message.replace(param, here), here
        elif param is not None:
            param = self._names.get(param, param)
        for theirs, ours in self._names.items():
            message = re.sub(rf"(?<![\w.]){theirs}(?![\w])", ours, message)
        return message, param


@dataclass(frozen=True, slots=True)
class ChatTranslation:
    """A chat in place of another body, and how errors about it are told."""

    body: ChatRequest
    names: FieldNames
