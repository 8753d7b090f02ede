"""API keys and the file that lists them (`--api-key-file`): plain keys, or names, keys and limits of callers."""

from __future__ import annotations

import hashlib
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from windlass.engine.errors import LoadError

MAX_KEYS = 1000
MAX_FILE_BYTES = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_EXPECTED_FORM = 'write a table such as [alice] with key = "…" for each caller'

# The first line of a TOML file of keys: a table, or a name with a value.
_TOML_LINE = re.compile(r"""\[|\S+\s*=\s*[{"']""")

_TOML_LOCATION = re.compile(r"\(at (line \d+, column \d+|end of document)\)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """One caller. digest: SHA-256 of the key, in hexadecimal. name: empty for a plain key.

    A limit of None is unlimited. Rates are counted over a minute; unused capacity does not accumulate beyond a minute.
    """

    digest: str
    name: str = ""
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    concurrency: int | None = None
    share: float = 1.0
    priority: int | None = None
    admin: bool = True

    @classmethod
    def plain(cls, key: str) -> ApiKey:
        """A key without a name and without limits, with all permissions."""
        return cls(digest=hashlib.sha256(key.encode()).hexdigest())


class _KeyTable(BaseModel):
    """A table of the TOML file."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    key: str | None = Field(None, min_length=1, max_length=4096)
    key_sha256: str | None = Field(None, pattern="^[0-9a-fA-F]{64}$")
    requests_per_minute: float | None = Field(None, gt=0)
    tokens_per_minute: float | None = Field(None, gt=0)
    concurrency: int | None = Field(None, ge=1)
    share: float = Field(1.0, ge=0.001, le=1000)
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    admin: bool = False


def read_key_file(path: Path) -> tuple[ApiKey, ...] | tuple[str, ...]:
    """The named keys of a TOML file, or the plain keys of a file with one per line, where # starts a comment.

    Raises LoadError, which names the place at fault and never a key.
    """
    where = f"--api-key-file {path}"
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise LoadError(f"cannot read {where}: {error.strerror or error}") from error
    if len(data) > MAX_FILE_BYTES:
        raise LoadError(f"{where} is larger than {MAX_FILE_BYTES} bytes")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise LoadError(f"{where} is not UTF-8 text") from None
    lines = [line.strip() for line in text.splitlines()]
    plain = tuple(dict.fromkeys(line for line in lines if line and not line.startswith("#")))
    if not plain:  # an empty file must not open the server to every client
        raise LoadError(f"{where} has no key: write one per line, or {_EXPECTED_FORM}")
    return _read_tables(where, text) if _TOML_LINE.match(plain[0]) else plain


def _read_tables(where: str, text: str) -> tuple[ApiKey, ...]:
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:  # only the place is shown: the rest of the message may quote a key
        place = _TOML_LOCATION.search(str(error))
        at = f" ({place[1]})" if place else ""
        raise LoadError(f"{where} is not valid TOML{at}: {_EXPECTED_FORM}") from None
    if len(tables) > MAX_KEYS:
        raise LoadError(f"{where} names {len(tables)} callers: at most {MAX_KEYS} are supported")
    keys = tuple(_read_entry(where, name, table) for name, table in tables.items())
    seen: dict[str, str] = {}
    for key in keys:
        if key.digest in seen:
            raise LoadError(f"{where}: {key.name} and {seen[key.digest]} have the same key")
        seen[key.digest] = key.name
    return keys


def _read_entry(where: str, name: str, table: object) -> ApiKey:
    if not _NAME.fullmatch(name):
        raise LoadError(f"{where}: {name[:64]!r} is not a name: use up to 64 letters, digits and . _ @ -")
    try:
        entry = TypeAdapter(_KeyTable).validate_python(table)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        field = ".".join(map(str, (name, *first["loc"])))
        raise LoadError(f"{where}: {field}: {first['msg'][:1].lower()}{first['msg'][1:]}") from None
    if (entry.key is None) == (entry.key_sha256 is None):
        raise LoadError(f"{where}: {name} needs one of key and key_sha256")
    digest = entry.key_sha256 or hashlib.sha256((entry.key or "").encode()).hexdigest()
    limits = entry.model_dump(exclude={"key", "key_sha256"})
    return ApiKey(digest=digest.lower(), name=name, **limits)
