"""Common types of vocabulary readers, and the reader of tokenizer fields of GGUF files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, NoReturn

from windlass.engine.bounded_files import read_bounded
from windlass.engine.errors import LoadError

MAX_BYTES = 2**25  # of a vocabulary file; tekken.json, the largest in use, has 15 million
MAX_TOKENS = 2**20  # four times the largest vocabulary of a model with open weights
MAX_TOKEN_CHARACTERS = 4096  # of one token; runs of 512 spaces are the longest in use
MAX_CHARACTERS = 2**25  # of all tokens; the 262,144 tokens of Gemma have 1.5 million
_PREFIX = "tokenizer.ggml."
_ABSENT_TOKEN = 2**32 - 1  # -1 as an unsigned integer
_SPECIAL = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "eot": "eot_token_id",
    "eom": "eom_token_id",
    "unk": "unknown_token_id",
    "pad": "padding_token_id",
}
_NAMED = {"bos": "bos_token", "eos": "eos_token", "unk": "unk_token", "pad": "pad_token"}


class TokenType(IntEnum):
    """Purpose of a token, numbered like `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_ADDED = (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN)


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """Content of a vocabulary file.

    parts: top-level members of tokenizer.json. size: number of tokens, including added ones.
    named: bos_token, eos_token, … as text. add_bos: whether a text begins with bos_token, unless tokenizer_config.json
    overrides it. notices: lines to show to the user.
    """

    parts: dict[str, Any]
    size: int
    named: dict[str, str] = field(default_factory=dict)
    add_bos: bool = False
    notices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """Checked tokenizer fields of a GGUF file. `tokens`, `types` and `scores` are parallel lists.

    source: the file's name, for messages. kind: `gpt2`, `llama`, …; pre: name of the word rules. ids: token -> id.
    merges: pairs in merge order, None if the file has none. special: ids by the short names "bos", "eos", "eot", ….
    add_bos, add_eos, space_prefix: None if the file does not specify them. model_name: lower case.
    """

    source: str
    kind: str
    pre: str | None
    tokens: list[str]
    types: list[int]
    ids: dict[str, int]
    scores: list[float] | None = None
    merges: list[tuple[str, str]] | None = None
    special: dict[str, int] = field(default_factory=dict)
    add_bos: bool | None = None
    add_eos: bool | None = None
    space_prefix: bool | None = None
    model_name: str = ""

    def refuse(self, reason: str) -> NoReturn:
        """Raise LoadError with a reason."""
        _refuse_gguf(self.source, reason)


def refuse_vocabulary(source: str, reason: str) -> NoReturn:
    """Raise LoadError for a vocabulary file."""
    raise LoadError(f"cannot make a tokenizer from {source}: {reason}")


def _refuse_gguf(source: str, reason: str) -> NoReturn:
    refuse_vocabulary(source, f"{reason}; download the file or convert the model again")


def read_bytes(file: Path) -> bytes:
    """Read a vocabulary file. Raises LoadError if it cannot be read or is larger than `MAX_BYTES`."""
    try:
        return read_bounded(file, MAX_BYTES)
    except OSError as error:
        raise LoadError(f"cannot read {file}: {error.strerror or error}") from None


def added_token(
    index: int, text: str, *, special: bool, normalized: bool = False, rstrip: bool = False
) -> dict[str, Any]:
    """Return an entry of `added_tokens`, which are found in a text before all other tokens."""
    flags = {"single_word": False, "lstrip": False, "rstrip": rstrip, "normalized": normalized, "special": special}
    return {"id": index, "content": text, **flags}


def read_vocabulary(metadata: Mapping[str, Any], source: str) -> GgufVocabulary:
    """Read the vocabulary in the metadata of the file `source`. Raises LoadError, one line.

    metadata: key -> bool, int, float, str or a list of these. Only `tokenizer.*` and `general.name` are read.
    """
    fields = _Fields(metadata, source)
    kind = fields.value("model", str)
    if kind is None:
        fields.refuse("it has no tokenizer (tokenizer.ggml.model is missing)")
    tokens = _tokens(fields)
    name = metadata.get("general.name")
    return GgufVocabulary(
        source=source,
        kind=kind,
        pre=fields.value("pre", str),
        tokens=tokens,
        types=fields.items("token_type", int, length=len(tokens)) or [TokenType.NORMAL] * len(tokens),
        ids=_ids(fields, tokens),
        scores=_scores(fields, len(tokens)),
        merges=_merges(fields),
        special=_special(fields, len(tokens)),
        add_bos=fields.value("add_bos_token", bool),
        add_eos=fields.value("add_eos_token", bool),
        space_prefix=fields.value("add_space_prefix", bool),
        model_name=name.lower() if isinstance(name, str) else "",
    )


@dataclass(frozen=True, slots=True)
class _Fields:
    """Tokenizer fields of a file's metadata, with checked types. Methods raise LoadError."""

    metadata: Mapping[str, Any]
    source: str

    def refuse(self, reason: str) -> NoReturn:
        _refuse_gguf(self.source, reason)

    def value(self, name: str, kind: type) -> Any:
        """Return the value of a field, None if it is absent."""
        value = self.metadata.get(_PREFIX + name)
        if value is not None and type(value) is not kind:
            self.refuse(f"{_PREFIX}{name} should be a {kind.__name__}, not a {type(value).__name__}")
        return value

    def items(self, name: str, *kinds: type, length: int | None = None) -> Any:
        """Return a list of values of these types, None if the field is absent. length: required number of values."""
        values = self.value(name, list)
        if values is None:
            return None
        if wrong := {type(value) for value in values} - set(kinds):
            names = ", ".join(sorted(kind.__name__ for kind in wrong))
            self.refuse(f"{_PREFIX}{name} has values of type {names}, where only {kinds[0].__name__} is permitted")
        if length is not None and len(values) != length:
            self.refuse(f"{_PREFIX}{name} has {len(values)} entries for {length} tokens")
        return values

    def check_unicode(self, texts: Sequence[str], name: str) -> None:
        try:
            "".join(texts).encode("utf-8")
        except UnicodeEncodeError:
            self.refuse(f"{_PREFIX}{name} has text that is not valid UTF-8")


def _tokens(fields: _Fields) -> list[str]:
    tokens: list[str] | None = fields.items("tokens", str)
    if not tokens:
        fields.refuse("its vocabulary is missing (tokenizer.ggml.tokens)")
    if len(tokens) > MAX_TOKENS:
        fields.refuse(f"it has {len(tokens)} tokens; the limit is {MAX_TOKENS}")
    if sum(map(len, tokens)) > MAX_CHARACTERS or max(map(len, tokens)) > MAX_TOKEN_CHARACTERS:
        fields.refuse(
            f"its tokens are too long; the limits are {MAX_TOKEN_CHARACTERS} characters each and {MAX_CHARACTERS} together"
        )
    fields.check_unicode(tokens, "tokens")
    # Empty tokens need distinct names. llama.cpp uses the same ones.
    return [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]


def _ids(fields: _Fields, tokens: list[str]) -> dict[str, int]:
    ids: dict[str, int] = {}
    for index, token in enumerate(tokens):
        if ids.setdefault(token, index) != index:
            fields.refuse(f"tokens {ids[token]} and {index} are the same text, {token[:40]!r}")
    return ids


def _scores(fields: _Fields, count: int) -> list[float] | None:
    scores: list[float] | None = fields.items("scores", float, int, length=count)
    if scores is not None and any(map(math.isnan, scores)):
        fields.refuse("tokenizer.ggml.scores has NaN values")
    return scores


def _merges(fields: _Fields) -> list[tuple[str, str]] | None:
    merges: list[str] | None = fields.items("merges", str)
    if merges is None:
        return None
    if len(merges) > 8 * MAX_TOKENS or sum(map(len, merges)) > 8 * MAX_CHARACTERS:
        fields.refuse(f"it has {len(merges)} merges, more than any model")
    fields.check_unicode(merges, "merges")
    pairs = []
    for merge in merges:
        at = merge.find(" ", 1)  # the first token may be a space, but a longer token never contains one
        if at < 0 or at == len(merge) - 1:
            fields.refuse(f"the merge {merge[:80]!r} is not two tokens separated by a space")
        pairs.append((merge[:at], merge[at + 1 :]))
    return pairs


def _special(fields: _Fields, count: int) -> dict[str, int]:
    found = {}
    for name, key in _SPECIAL.items():
        value = fields.value(key, int)
        if value is None or value == _ABSENT_TOKEN:
            continue
        if not 0 <= value < count:
            fields.refuse(f"{_PREFIX}{key} is {value}, but there are {count} tokens")
        found[name] = value
    return found


def gguf_added_tokens(vocabulary: GgufVocabulary) -> list[dict[str, Any]]:
    """Return the entries of `added_tokens`, ordered by id."""
    # Files do not declare which tokens include the white space after them. llama.cpp decides by the model's name.
    phi3 = "phi-3" in vocabulary.model_name or "phi3" in vocabulary.model_name
    keeps_space = ("<unk>", "<s>", "<|endoftext|>")
    return [
        added_token(index, text, special=kind != TokenType.USER_DEFINED, rstrip=phi3 and text not in keeps_space)
        for index, (text, kind) in enumerate(zip(vocabulary.tokens, _effective_types(vocabulary), strict=True))
        if kind in _ADDED
    ]


def named_tokens(vocabulary: GgufVocabulary) -> dict[str, int]:
    """Return the ids of bos_token, eos_token, unk_token and pad_token.

    Ordinary tokens are omitted: some files have "!" as padding, and a named token is found in a text before all others.
    """
    types = _effective_types(vocabulary)
    return {
        _NAMED[name]: index for name, index in vocabulary.special.items() if name in _NAMED and types[index] in _ADDED
    }


def bos_eos_ids(vocabulary: GgufVocabulary, *, bos: bool) -> tuple[list[int], list[int]]:
    """Return the ids before and after a text. bos: default if the file does not specify it. Raises LoadError."""
    found: list[list[int]] = []
    for name, declared, default in (("bos", vocabulary.add_bos, bos), ("eos", vocabulary.add_eos, False)):
        if declared and name not in vocabulary.special:
            vocabulary.refuse(f"tokenizer.ggml.add_{name}_token is set, but tokenizer.ggml.{name}_token_id is missing")
        wanted = default if declared is None else declared
        found.append([vocabulary.special[name]] if wanted and name in vocabulary.special else [])
    return found[0], found[1]


def _effective_types(vocabulary: GgufVocabulary) -> list[int]:
    """Return the types, where BOS and EOS tokens are control tokens even if an older file has only normal ones."""
    types = list(vocabulary.types)
    for name in ("bos", "eos", "eot", "eom"):
        if (index := vocabulary.special.get(name)) is not None and types[index] not in _ADDED:
            types[index] = TokenType.CONTROL
    return types
