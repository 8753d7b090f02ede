"""Special and added tokens as the files beside a vocabulary declare them: tokenizer_config.json and older ones.

Responsible for the same tokens, in the same order, as transformers finds. Knows no vocabulary's own form.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers

from windlass.engine.errors import LoadError

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def one_line(error: BaseException) -> str:
    """What an error says, short enough for a message."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def read_json(file: Path) -> dict[str, Any]:
    """The object in a file; an empty one where there is no such file. Raises LoadError, one line."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise LoadError(f"cannot read {file} ({one_line(error)}): fetch the file again or remove it") from error
    if not isinstance(value, dict):
        raise LoadError(f"{file} must hold a JSON object: fetch the file again or remove it")
    return value


def content_of(token: str | tokenizers.AddedToken) -> str:
    """The token as text."""
    return token if isinstance(token, str) else token.content


def _added_token(value: Any, *, special: bool | None = None) -> str | tokenizers.AddedToken:
    """A special token as configs write it: a string, or an object with content and flags."""
    if isinstance(value, str):
        return value
    flags = {key: value[key] for key in ("lstrip", "rstrip", "single_word", "normalized", "special") if key in value}
    if special is not None:
        flags["special"] = special
    return tokenizers.AddedToken(value["content"], **flags)


def special_tokens(
    directory: Path, config: dict[str, Any]
) -> tuple[dict[str, str | tokenizers.AddedToken], list[str | tokenizers.AddedToken]]:
    """Named and nameless special tokens. special_tokens_map.json counts only beside configs of the old form."""
    source = {
        key: _added_token(value)
        for key, value in config.items()
        if key.endswith("_token")
        and isinstance(value, (str, dict))
        and (key in _NAMED_TOKENS or isinstance(value, str) or "content" in value)
    }
    nameless = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    if "added_tokens_decoder" not in config:
        for key, value in read_json(directory / "special_tokens_map.json").items():
            if key in ("additional_special_tokens", "extra_special_tokens"):
                nameless = nameless or value
            elif isinstance(value, (str, dict)):
                source[key] = _added_token(value, special=True)
    if isinstance(nameless, dict):
        source.update({key: _added_token(value) for key, value in nameless.items()})
        nameless = []
    return source, [_added_token(value) for value in nameless]


def add_missing_tokens(
    backend: tokenizers.Tokenizer,
    directory: Path,
    config: dict[str, Any],
    named: dict[str, str | tokenizers.AddedToken],
    nameless: list[str | tokenizers.AddedToken],
) -> None:
    """Add what the files beside tokenizer.json declare and it lacks, in the order of their ids."""
    present = {repr(token) for token in backend.get_added_tokens_decoder().values()}
    declared: dict[int, tokenizers.AddedToken] = {}
    for index, value in (config.get("added_tokens_decoder") or {}).items():
        token = _added_token(value)
        declared[int(index)] = token if not isinstance(token, str) else tokenizers.AddedToken(token)
    if "added_tokens_decoder" not in config:
        specials = {content_of(token) for token in [*named.values(), *nameless]}
        for text, index in read_json(directory / "added_tokens.json").items():
            special = text in specials
            declared[int(index)] = tokenizers.AddedToken(text, normalized=not special, special=special)
    missing = [token for _, token in sorted(declared.items()) if repr(token) not in present]
    known = {token.content for token in backend.get_added_tokens_decoder().values()} | {t.content for t in missing}
    for token in [*named.values(), *nameless]:
        text = content_of(token)
        if text not in known:
            known.add(text)
            missing.append(tokenizers.AddedToken(text, special=True) if isinstance(token, str) else token)
    if missing:
        names = {content_of(token) for token in named.values()}
        for token in missing:
            token.special = token.special or token.content in names
        backend.add_tokens(missing)
