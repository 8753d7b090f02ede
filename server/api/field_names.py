"""Requests translated from other APIs, whose errors use the field names of the API that the client used."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from windlass.engine.errors import RequestError
from windlass.server.errors import ApiError

_MESSAGE = re.compile(r"messages\[(\d+)\](?:\.(\w+))?.*")


class FieldNames:
    """Names of fields in the original API.

    names: by the name in the translated request. message_paths: path in the original body, by message of the chat.
    message_fields: by the name of a field of a chat message; "" means the path itself.
    """

    def __init__(
        self, names: Mapping[str, str], message_paths: Sequence[str], message_fields: Mapping[str, str]
    ) -> None:
        self._names = names
        self._message_paths = message_paths
        self._message_fields = message_fields

    @contextmanager
    def renamed_errors(self) -> Iterator[None]:
        """Rename the fields in errors that are raised inside."""
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
