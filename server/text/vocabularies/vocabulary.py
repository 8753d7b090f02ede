"""Vocabularies as their readers return them, and the tokenizer fields of GGUF files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, NoReturn

from windlass.engine.errors import LoadError

MAX_BYTES = 2**27  # of a vocabulary's file; tekken.json, the largest in use, has 15 million


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """A vocabulary as read.

    parts: of tokenizer.json by name. size: tokens, added ones among them. named: bos_token, eos_token, … as text. add_bos:
    whether a text begins with bos_token where tokenizer_config.json does not tell. notices: what the user should know, by line.
    """

    parts: dict[str, Any]
    size: int
    named: dict[str, str] = field(default_factory=dict)
    add_bos: bool = False
    notices: tuple[str, ...] = ()


def read_bytes(file: Path) -> bytes:
    """The file's bytes. Raises LoadError where it cannot be read or is larger than any vocabulary."""
    try:
        if file.stat().st_size > MAX_BYTES:
            raise LoadError(f"{file} is larger than any vocabulary ({file.stat().st_size} bytes): fetch the file again")
        return file.read_bytes()
    except OSError as error:
        raise LoadError(f"cannot read {file}: {error.strerror or error}") from None


def added_token(index: int, text: str, *, special: bool, normalized: bool = False) -> dict[str, Any]:
    """An entry of `added_tokens`: found in a text before anything else."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": normalized, "special": special}
    return {"id": index, "content": text, **flags}


MAX_TOKENS = 2**21  # eight times the largest vocabulary of a model with open weights

MAX_TOKEN_CHARACTERS = 4096  # of one token; runs of spaces of 512 are the longest in use

MAX_CHARACTERS = 2**25  # of all tokens; 262,144 tokens of Gemma have 1.5 million

_PREFIX = "tokenizer.ggml."

_ABSENT_TOKEN = 2**32 - 1  # -1 as it is sometimes written: there is none

_SPECIAL = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "eot": "eot_token_id",
    "eom": "eom_token_id",
    "unk": "unknown_token_id",
    "pad": "padding_token_id",
}


class TokenType(IntEnum):
    """What a token is for, as `tokenizer.ggml.token_type` numbers it."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """The checked fields. Lists are parallel: token i has tokens[i], types[i] and, where there are any, scores[i].

    source: the file's name, for messages. kind: `gpt2`, `llama`, …; pre: how a text is cut into words before merging.
    ids: token -> id. merges: pairs, the earliest merged first; None where the file has none. special: ids by the
    short names "bos", "eos", "eot", …, as far as the file tells. add_bos, add_eos, space_prefix: None where it does not
    tell. model_name: lower case.
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

    def refuse(self, what: str) -> NoReturn:
        """Raise the LoadError that says what is wrong with the vocabulary."""
        raise _error(self.source, what)


def read_vocabulary(metadata: Mapping[str, Any], source: str) -> GgufVocabulary:
    """The vocabulary in a file's metadata; `source` names the file. Raises LoadError, one line.

    metadata: key -> bool, int, float, str or a list of these, of which only `tokenizer.*` and `general.name` are read.
    """
    kind = _value(metadata, "model", str, source)
    if kind is None:
        raise _error(source, "it has no tokenizer (tokenizer.ggml.model is missing)")
    tokens = _tokens(metadata, source)
    name = metadata.get("general.name")
    return GgufVocabulary(
        source=source,
        kind=kind,
        pre=_value(metadata, "pre", str, source),
        tokens=tokens,
        types=_file_types(metadata, len(tokens), source),
        ids=_ids(tokens, source),
        scores=_scores(metadata, len(tokens), source),
        merges=_merges(metadata, source),
        special=_special(metadata, len(tokens), source),
        add_bos=_value(metadata, "add_bos_token", bool, source),
        add_eos=_value(metadata, "add_eos_token", bool, source),
        space_prefix=_value(metadata, "add_space_prefix", bool, source),
        model_name=name.lower() if isinstance(name, str) else "",
    )


def _error(source: str, what: str) -> LoadError:
    return LoadError(f"cannot make a tokenizer from {source}: {what}; get the file again, or convert the model again")


def _value(metadata: Mapping[str, Any], name: str, kind: type, source: str) -> Any:
    """The value under a key, None where there is none."""
    value = metadata.get(_PREFIX + name)
    if value is None or type(value) is kind:
        return value
    raise _error(source, f"{_PREFIX}{name} should be a {kind.__name__}, not a {type(value).__name__}")


def _list(metadata: Mapping[str, Any], name: str, kinds: tuple[type, ...], source: str) -> list[Any] | None:
    values: list[Any] | None = _value(metadata, name, list, source)
    if values is not None and (wrong := {type(value) for value in values} - set(kinds)):
        names = ", ".join(sorted(kind.__name__ for kind in wrong))
        raise _error(source, f"{_PREFIX}{name} holds values of type {names}, where only {kinds[0].__name__} may stand")
    return values


def _tokens(metadata: Mapping[str, Any], source: str) -> list[str]:
    tokens = _list(metadata, "tokens", (str,), source)
    if not tokens:
        raise _error(source, "its vocabulary is missing (tokenizer.ggml.tokens)")
    if len(tokens) > MAX_TOKENS:
        raise _error(source, f"it has {len(tokens)} tokens, and at most {MAX_TOKENS} are read")
    if sum(map(len, tokens)) > MAX_CHARACTERS or max(map(len, tokens)) > MAX_TOKEN_CHARACTERS:
        raise _error(
            source,
            f"its tokens are longer than any model's: {MAX_TOKEN_CHARACTERS} characters each and {MAX_CHARACTERS} "
            "together are read",
        )
    _check_unicode(tokens, "tokens", source)
    # An empty token cannot stand in a dictionary beside others: llama.cpp gives it this name too.
    return [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]


def _check_unicode(texts: list[str], name: str, source: str) -> None:
    try:
        "".join(texts).encode("utf-8")
    except UnicodeEncodeError:
        raise _error(source, f"{_PREFIX}{name} holds text that is not valid UTF-8") from None


def _ids(tokens: list[str], source: str) -> dict[str, int]:
    ids: dict[str, int] = {}
    for index, token in enumerate(tokens):
        if ids.setdefault(token, index) != index:
            raise _error(source, f"tokens {ids[token]} and {index} are the same text, {token[:40]!r}")
    return ids


def _file_types(metadata: Mapping[str, Any], count: int, source: str) -> list[int]:
    types = _list(metadata, "token_type", (int,), source)
    if types is None:
        return [TokenType.NORMAL] * count
    if len(types) != count:
        raise _error(source, f"tokenizer.ggml.token_type has {len(types)} entries for {count} tokens")
    return types


def _scores(metadata: Mapping[str, Any], count: int, source: str) -> list[float] | None:
    scores = _list(metadata, "scores", (float, int), source)
    if scores is not None and len(scores) != count:
        raise _error(source, f"tokenizer.ggml.scores has {len(scores)} entries for {count} tokens")
    if scores is not None and any(map(math.isnan, scores)):
        raise _error(source, "tokenizer.ggml.scores holds values that are no numbers")
    return scores


def _merges(metadata: Mapping[str, Any], source: str) -> list[tuple[str, str]] | None:
    merges = _list(metadata, "merges", (str,), source)
    if merges is None:
        return None
    if len(merges) > 8 * MAX_TOKENS or sum(map(len, merges)) > 8 * MAX_CHARACTERS:
        raise _error(source, f"it has {len(merges)} merges, more than any model's")
    _check_unicode(merges, "merges", source)
    pairs = []
    for merge in merges:
        at = merge.find(" ", 1)  # a space may be the first half, never a part of it
        if at < 0 or at == len(merge) - 1:
            raise _error(source, f"the merge {merge[:80]!r} is not two tokens with a space between them")
        pairs.append((merge[:at], merge[at + 1 :]))
    return pairs


def _special(metadata: Mapping[str, Any], count: int, source: str) -> dict[str, int]:
    found = {}
    for name, key in _SPECIAL.items():
        value = _value(metadata, key, int, source)
        if value is None or value == _ABSENT_TOKEN:
            continue
        if not 0 <= value < count:
            raise _error(source, f"{_PREFIX}{key} is {value}, and there are {count} tokens")
        found[name] = value
    return found


_NAMED = {"bos": "bos_token", "eos": "eos_token", "unk": "unk_token", "pad": "pad_token"}

_ADDED = (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN)


@dataclass(frozen=True, slots=True)
class GgufAddedToken:
    """A token that is found in a text before anything else.

    special: left out of decoded text. strips_right: white space behind it belongs to it.
    """

    id: int
    text: str
    special: bool
    strips_right: bool = False


def gguf_added_tokens(vocabulary: GgufVocabulary) -> list[GgufAddedToken]:
    """In the order of their ids."""
    # Files do not say which tokens swallow the white space behind them; llama.cpp goes by the model's name.
    phi3 = "phi-3" in vocabulary.model_name or "phi3" in vocabulary.model_name
    keeps_space = ("<unk>", "<s>", "<|endoftext|>")
    return [
        GgufAddedToken(index, text, kind != TokenType.USER_DEFINED, phi3 and text not in keeps_space)
        for index, (text, kind) in enumerate(zip(vocabulary.tokens, _effective_types(vocabulary), strict=True))
        if kind in _ADDED
    ]


def named_tokens(vocabulary: GgufVocabulary) -> dict[str, int]:
    """Ids of bos_token, eos_token, unk_token and pad_token, as far as there are any.

    Unknown and padding tokens only where they are no ordinary text: some files name "!" as padding, and a named token is
    found in a text before anything else.
    """
    types = _effective_types(vocabulary)
    return {
        _NAMED[name]: index for name, index in vocabulary.special.items() if name in _NAMED and types[index] in _ADDED
    }


def bos_eos_ids(vocabulary: GgufVocabulary, *, bos: bool) -> tuple[list[int], list[int]]:
    """Ids put before and behind a text; `bos`: whether there is one where the file does not tell. Raises LoadError."""
    found: list[list[int]] = []
    for name, declared, default in (("bos", vocabulary.add_bos, bos), ("eos", vocabulary.add_eos, False)):
        if declared and name not in vocabulary.special:
            vocabulary.refuse(f"every text gets a {name} token, and tokenizer.ggml.{name}_token_id is missing")
        wanted = default if declared is None else declared
        found.append([vocabulary.special[name]] if wanted and name in vocabulary.special else [])
    return found[0], found[1]


def _effective_types(vocabulary: GgufVocabulary) -> list[int]:
    """The file's types; what begins or ends a text is a control token, also in older files that have all tokens as normal."""
    types = list(vocabulary.types)
    for name in ("bos", "eos", "eot", "eom"):
        if (index := vocabulary.special.get(name)) is not None and types[index] not in _ADDED:
            types[index] = TokenType.CONTROL
    return types
