"""Request bodies: from bytes to a validated model."""

from __future__ import annotations

import asyncio
import codecs
import logging
import math
import re
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from windlass.engine.errors import did_you_mean
from windlass.server.app.state import state_of
from windlass.server.errors import ApiError, bad_request
from windlass.server.observability.logging import RateLimitedLogger, response_headers
from windlass.server.schemas.base import IGNORED_HEADER, MAX_NAME, MAX_REPORTED, FieldReport, StrictModel

M = TypeVar("M", bound=StrictModel)

LARGE_BODY = 256 * 1024  # bytes from which a body is parsed in a thread
MAX_STRUCTURE = 200_000  # strings, objects and arrays in a body: far above real ones, and parsed quickly

MAX_VALUES = (
    2_200_000  # values in all, such as token ids: more would hold the interpreter lock for too long when parsed
)

_CHARSETS = frozenset({"", "utf-8", "utf8", "us-ascii"})  # the last is part of the others

# Text outside strings up to the next structural character or string, and a part of a string's content. Both have a limited
# length, since a match holds the interpreter lock.
_OUTSIDE = re.compile(rb'[^"\[{,]{0,65536}+(["\[{,]?)')

_INSIDE = re.compile(rb'(?:[^"\\]{1,16384}+|\\.){0,64}+("?)', re.DOTALL)
_SUBJECT = re.compile(r"[A-Z]\w+ (?=should )")  # pydantic's "Input should …", "List should …"
_VERBS = ("should ", "holds ", "contains ", "goes ")
_UNPRINTABLE = re.compile(r"[^!-+\--~]")  # in a list of names in a header

_unknown_fields_log = RateLimitedLogger(logging.getLogger("windlass.server"), logging.WARNING)


async def read_body(request: Request, model: type[M]) -> M:
    """Read, parse and validate a JSON body; raises ApiError. Ignored fields are named in the header of the response."""
    _check_headers(request)
    settings = state_of(request).settings
    raw = await _read(request, settings.body_stall_seconds)
    report = FieldReport(settings.unknown_fields)
    if len(raw) < LARGE_BODY:
        body = parse_body(raw, model, report)
    else:
        body = await asyncio.to_thread(parse_body, raw, model, report)
    report_ignored(request, *report.ignored)
    if report.unknown and settings.unknown_fields == "warn":
        path = request.scope["path"]
        _unknown_fields_log.log(
            f"ignored unknown fields of a request to {path}: {', '.join(map(repr, report.unknown))}"
        )
    return body


def report_ignored(request: Request, *names: str) -> None:
    """Name fields without effect in the header of the response; no effect after its start."""
    headers = response_headers(request.scope)
    reported = [*headers.get(IGNORED_HEADER, "").split(", "), *(_UNPRINTABLE.sub("?", name) for name in names)]
    if found := list(dict.fromkeys(filter(None, reported))):
        headers[IGNORED_HEADER] = ", ".join(found[:MAX_REPORTED])


def parse_body(raw: bytes | bytearray, model: type[M], report: FieldReport | None = None) -> M:
    """Parse JSON bytes into `model`. Raises ApiError 400 that names the field at fault, if any. report: see `StrictModel`."""
    raw = raw.removeprefix(codecs.BOM_UTF8)
    if len(raw) >= LARGE_BODY:
        _refuse_structure(raw)
    try:
        # Unlike json.loads, this parser limits nesting and the digits of integers, and refuses NaN and lone surrogates.
        data = from_json(raw, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        where = _find_non_finite(raw)
        if where is not None:
            raise bad_request(
                f"{where} must be a finite number: JSON has no NaN and no Infinity", where, "invalid_value"
            ) from None
        raise bad_request(f"the body is not valid JSON: {str(error)[:200]}", code="invalid_json") from None
    if not isinstance(data, dict):
        raise bad_request("the body must be a JSON object", code="invalid_json")
    if b"\\u0000" in raw:
        _refuse_null_characters(data)
    try:
        return model.model_validate(data, context=report)
    except ValidationError as error:
        raise validation_error(error) from None


def _check_headers(request: Request) -> None:
    content_type = request.headers.get("content-type")
    if content_type is not None:
        media_type, *parameters = (part.strip().lower() for part in content_type.split(";"))
        if media_type != "application/json" and not (
            media_type.startswith("application/") and media_type.endswith("+json")
        ):
            raise bad_request(
                f"send the body as application/json, not {media_type[:100]!r}", "content-type", "unsupported_media_type"
            )
        pairs = (parameter.partition("=") for parameter in parameters)
        if not _CHARSETS.issuperset(value.strip(' "') for name, _, value in pairs if name.strip() == "charset"):
            raise bad_request("send the body in UTF-8", "content-type", "unsupported_media_type")
    elif _is_browser_request(request):
        raise bad_request(
            "a page in a browser must send content-type: application/json with the body, since any page may send one without it",
            "content-type",
            "unsupported_media_type",
        )
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise bad_request("send the body without content-encoding", "content-encoding", "unsupported_media_type")


def _is_browser_request(request: Request) -> bool:
    """Whether the headers show that a page in a browser sends the request.

    For a page of another origin, a browser asks the server first (CORS) if the body has the JSON type, but not if it has none:
    without this check, any page could use a server that requires no keys. A key proves nothing: a proxy may have added it.
    """
    return "origin" in request.headers or request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin")


async def _read(request: Request, stall_seconds: float) -> bytearray:
    body = bytearray()
    stream = request.stream()
    try:
        while True:
            async with asyncio.timeout(stall_seconds):
                body += await anext(stream)
    except StopAsyncIteration:
        return body
    except TimeoutError:
        raise ApiError(
            408,
            f"no more of the body arrived within {stall_seconds:g} s",
            code="body_timeout",
            headers={"connection": "close"},
        ) from None
    except ClientDisconnect:
        # No client is left to read the response; 400 keeps it out of the server's error counts.
        raise bad_request("the client disconnected while sending the body", code="client_disconnected") from None


def _refuse_structure(raw: bytes | bytearray) -> None:
    """Refuse millions of tiny values before they are created, which would take seconds and gigabytes.

    Brackets and commas inside strings do not count, so a suspicious body is scanned precisely.
    """
    structure = raw.count(b"[") + raw.count(b"{") + raw.count(b'"') // 2
    if structure <= MAX_STRUCTURE and raw.count(b",") <= MAX_VALUES:
        return
    structure = commas = position = 0
    inside = False
    while position < len(raw):
        match = (_INSIDE if inside else _OUTSIDE).match(raw, position)
        assert match is not None  # both can match the empty string
        found = match[1]
        if found == b'"':
            inside = not inside
            structure += inside
        elif found == b",":
            commas += 1
        elif found:
            structure += 1
        if structure > MAX_STRUCTURE or commas > MAX_VALUES:
            raise bad_request(
                f"the body has more than {MAX_STRUCTURE} strings, objects and arrays, keys among them, or more than "
                f"{MAX_VALUES} values: send less at once, token ids as text",
                code="invalid_json",
            )
        position = max(match.end(), position + 1)


def _find_non_finite(raw: bytes | bytearray) -> str | None:
    """The path of the first NaN or Infinity, which Python's json module writes, in otherwise valid JSON."""
    if b"NaN" not in raw and b"Infinity" not in raw:
        return None
    try:
        data = from_json(raw, allow_inf_nan=True, cache_strings="keys")
    except ValueError:
        return None
    stack: list[tuple[str, Any]] = [("", data)]
    while stack:
        path, item = stack.pop()
        for key, part in item.items() if isinstance(item, dict) else enumerate(item) if isinstance(item, list) else ():
            if not isinstance(part, dict | list | float):
                continue
            where = f"{path}[{key}]" if isinstance(key, int) else f"{path}.{key[:MAX_NAME]}" if path else key[:MAX_NAME]
            if isinstance(part, dict | list):
                stack.append((where[:200], part))
            elif not math.isfinite(part):
                return where[:200]
    return None


def _refuse_null_characters(data: dict[str, Any]) -> None:
    for name, top in data.items():
        stack: list[Any] = [name, top]
        while stack:
            item = stack.pop()
            if isinstance(item, str):
                if "\0" in item:
                    raise bad_request(
                        "strings must not contain the null character (U+0000)", name.replace("\0", ""), "null_character"
                    )
            elif isinstance(item, dict):
                stack.extend(item)
                stack.extend(item.values())
            elif isinstance(item, list) and not set(map(type, item)).isdisjoint((str, dict, list)):
                stack.extend(item)


def validation_error(error: ValidationError) -> ApiError:
    """The first error, with `param` as the client would write it: `messages[0].content`, `stop`."""
    first = error.errors(include_url=False)[0]
    location = [part for part in first["loc"] if not (isinstance(part, str) and "[" in part)]
    context = first.get("ctx") or {}
    kind = first["type"]
    if kind == "unknown_field":
        location.append(str(context["name"]))
    missing = kind == "missing" or (first["input"] is None and isinstance(location[-1] if location else None, str))
    place = _field_path(location)
    while kind != "model_type" and len(location) > 1 and isinstance(location[-1], int):
        location.pop()  # an item of a flat list: `param` is the list
    path = _field_path(location)
    message = str(first["msg"])
    if kind == "unknown_field":
        return bad_request(f"unknown field {path!r}: {context['hint']}", path, "unknown_field")
    if missing:
        return bad_request(f"the field {path!r} is missing", path, "missing_field")
    code = kind if kind == "unsupported_field" else "invalid_value"
    if kind == "literal_error":
        message += did_you_mean(first["input"], re.findall(r"'([^']*)'", context["expected"]))
    elif kind == "model_type":
        message = "should be an object"
    return bad_request(_error_message(location, place, message), path or None, code, context.get("details"))


def _field_path(location: list[int | str]) -> str:
    """A location as the client would write it: `messages[0].content`."""
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    return path[:200]


def _error_message(location: list[int | str], path: str, message: str) -> str:
    """The error of the field at `path` as one sentence that begins with its name."""
    if not path:
        return message
    if len(location) == 1 and message.startswith(path):  # it already begins with the name
        return message
    message = _SUBJECT.sub("", message)
    return f"{path} {message}" if message.startswith(_VERBS) else f"{path}: {message}"
