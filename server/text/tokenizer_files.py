"""Files of a tokenizer: which one has the vocabulary, and the special tokens declared in the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.engine.bounded_files import read_json_text
from windlass.engine.errors import LoadError, reason_of

if TYPE_CHECKING:
    import tokenizers

TOKENIZER = "tokenizer.json"
_CONVERTIBLE_FILES = ("tekken.json", "tokenizer.model", "tiktoken.model", "*.tiktoken")  # in order of precedence
_UNSUPPORTED_FILES = ("vocab.json", "spiece.model", "sentencepiece.bpe.model", "vocab.txt")
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def find_tokenizer(directory: Path) -> Path:
    """Return the path of tokenizer.json, or of a file that can be converted to it. Raises LoadError, one line."""
    file = directory / TOKENIZER
    if file.is_file():
        return file
    if not directory.is_dir():
        raise LoadError(f"{directory} is not a directory: specify the directory that contains tokenizer.json")
    for pattern in _CONVERTIBLE_FILES:
        found = sorted(file for file in directory.glob(pattern) if file.is_file())
        if len(found) > 1:
            raise LoadError(
                f"no tokenizer.json in {directory}, but several files that can be converted to it "
                f"({', '.join(file.name for file in found)}): remove all but one"
            )
        if found:
            return found[0]
    unread = [name for name in _UNSUPPORTED_FILES if (directory / name).is_file()]
    if unread:
        raise LoadError(
            f"no tokenizer.json in {directory}, only {unread[0]}: convert it with transformers, "
            f"AutoTokenizer.from_pretrained(directory).save_pretrained(directory)"
        )
    raise LoadError(f"no tokenizer.json in {directory}: copy it from the model's repository")


def one_line(error: BaseException) -> str:
    """Return an error's message in one line of at most 200 characters, without the path of a file."""
    return " ".join(reason_of(error).split())[:200]


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file, empty if the file does not exist. Raises LoadError, one line."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(read_json_text(file))
    except (OSError, ValueError, RecursionError) as error:
        raise LoadError(f"cannot read {file} ({one_line(error)}): fetch the file again or remove it") from error
    if not isinstance(value, dict):
        raise LoadError(f"{file} must contain a JSON object: fetch the file again or remove it")
    return value


def token_content(token: str | tokenizers.AddedToken) -> str:
    """Return the text of a token."""
    return token if isinstance(token, str) else token.content


def _added_token(value: Any, *, special: bool | None = None) -> str | tokenizers.AddedToken:
    """Convert a special token of a configuration: a string, or an object with content and flags."""
    if isinstance(value, str):
        return value
    from tokenizers import AddedToken  # imported here: `find_tokenizer` does not need the library

    flags = {key: value[key] for key in ("lstrip", "rstrip", "single_word", "normalized", "special") if key in value}
    if special is not None:
        flags["special"] = special
    return AddedToken(value["content"], **flags)


def special_tokens(
    directory: Path, config: dict[str, Any]
) -> tuple[dict[str, str | tokenizers.AddedToken], list[str | tokenizers.AddedToken]]:
    """Return named and unnamed special tokens. special_tokens_map.json is read only for configurations in the old format."""
    source = {
        key: _added_token(value)
        for key, value in config.items()
        if key.endswith("_token")
        and isinstance(value, (str, dict))
        and (key in _NAMED_TOKENS or isinstance(value, str) or "content" in value)
    }
    unnamed = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    if "added_tokens_decoder" not in config:
        for key, value in read_json(directory / "special_tokens_map.json").items():
            if key in ("additional_special_tokens", "extra_special_tokens"):
                unnamed = unnamed or value
            elif isinstance(value, (str, dict)):
                source[key] = _added_token(value, special=True)
    if isinstance(unnamed, dict):
        source.update({key: _added_token(value) for key, value in unnamed.items()})
        unnamed = []
    return source, [_added_token(value) for value in unnamed]


def add_missing_tokens(
    backend: tokenizers.Tokenizer,
    directory: Path,
    config: dict[str, Any],
    named: dict[str, str | tokenizers.AddedToken],
    unnamed: list[str | tokenizers.AddedToken],
) -> None:
    """Add the tokens that other files declare and tokenizer.json lacks, in the order of their ids."""
    from tokenizers import AddedToken

    present = {repr(token) for token in backend.get_added_tokens_decoder().values()}
    declared: dict[int, AddedToken] = {}
    for index, value in (config.get("added_tokens_decoder") or {}).items():
        token = _added_token(value)
        declared[int(index)] = token if not isinstance(token, str) else AddedToken(token)
    if "added_tokens_decoder" not in config:
        specials = {token_content(token) for token in [*named.values(), *unnamed]}
        for text, index in read_json(directory / "added_tokens.json").items():
            special = text in specials
            declared[int(index)] = AddedToken(text, normalized=not special, special=special)
    missing = [token for _, token in sorted(declared.items()) if repr(token) not in present]
    known = {token.content for token in backend.get_added_tokens_decoder().values()} | {t.content for t in missing}
    for token in [*named.values(), *unnamed]:
        text = token_content(token)
        if text not in known:
            known.add(text)
            missing.append(AddedToken(text, special=True) if isinstance(token, str) else token)
    if missing:
        names = {token_content(token) for token in named.values()}
        for token in missing:
            token.special = token.special or token.content in names
        backend.add_tokens(missing)
