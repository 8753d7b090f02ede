"""Reads a file that `windlass serve --record` wrote. Knows its form; sends nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, ValidationError

from windlass.clients.terminal.errors import CommandError
from windlass.clients.terminal.lines import say
from windlass.engine.interface.model_info import PoolingKind
from windlass.server.routes.recorded import FORM, OK

Model = TypeVar("Model", bound=BaseModel)
TokenIds = list[Annotated[int, Field(ge=0, lt=2**31)]]


class RecordHead(BaseModel):
    """What a server says of itself before its first request."""

    windlass_record: int
    model: str = ""
    fingerprint: str = ""
    deterministic: bool = False
    text: bool = False


class RecordedAnswer(BaseModel):
    """digest: of its tokens, or of a text's rows, where text was recorded."""

    choice: int
    tokens: Annotated[int, Field(ge=0)] = 0
    digest: str | None = None


class RecordedRows(BaseModel):
    """How rows were made of a request's texts: see `PoolingRule`."""

    kind: PoolingKind
    dimensions: int | None = None
    normalize: bool = False


class RecordedLine(BaseModel):
    """A request as it was recorded. `line` is its number in the file, `of` the head above it."""

    at: float
    request_id: str
    route: str
    model: str = ""
    stream: bool = False
    prompt_tokens: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1, max_length=4096)]
    fields: dict[str, Any]
    outcome: str
    seconds: float = 0.0
    answers: list[RecordedAnswer] = []
    prompt_token_ids: list[TokenIds] | None = None
    texts: dict[str, Any] = {}
    exact: bool = False
    body: dict[str, Any] | None = None
    chat: bool = False
    pooling: RecordedRows | None = None  # of one that generated nothing
    line: int = 0
    of: RecordHead = RecordHead(windlass_record=FORM)

    @property
    def ended_well(self) -> bool:
        return self.outcome == OK

    @property
    def tokens(self) -> int:
        """Of its longest answer."""
        return max((answer.tokens for answer in self.answers), default=0)


@dataclass(frozen=True, slots=True)
class RecordedWorkload:
    """The requests of a file, by their time of arrival. head: of the last server that wrote to it."""

    head: RecordHead
    requests: list[RecordedLine]


def read_recording(path: Path) -> RecordedWorkload:
    """Raises CommandError, which names the file and the line at fault. A last line that was cut off is left out and said."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    head: RecordHead | None = None
    requests = []
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if number == len(lines):
            say(f"notice: the last line of {path} is cut off and left out")
            continue
        found = _read(line, path, number)
        if "windlass_record" in found:
            head = _checked(RecordHead, found, path, number)
            if head.windlass_record != FORM:
                raise CommandError(f"{path}, line {number}: its form is {head.windlass_record}, this reads {FORM}")
        elif head is None:
            raise CommandError(f"{path} was not written by `windlass serve --record`: it does not begin as such a file")
        else:
            request = _checked(RecordedLine, found, path, number)
            request.line, request.of = number, head
            requests.append(request)
    if head is None or not requests:
        raise CommandError(f"{path} holds no requests")
    return RecordedWorkload(head, sorted(requests, key=lambda request: request.at))


def _read(line: str, path: Path, number: int) -> Mapping[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CommandError(f"{path}, line {number} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise CommandError(f"{path}, line {number} is no object")
    return found


def _checked(kind: type[Model], found: Mapping[str, Any], path: Path, number: int) -> Model:
    try:
        return kind.model_validate(found)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise CommandError(f"{path}, line {number}: {where}: {first['msg']}") from None
