"""Loads a model's tokenizer and turns text into token ids and back.

Responsible for reading tokenizer.json and the files around it as transformers does, without transformers, and for
telling what bytes a single token stands for. Knows nothing of HTTP, chats or streaming.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from windlass.engine.errors import LoadError, RequestError
from windlass.server.text.token_pieces import PieceDecoder
from windlass.server.text.tokenizer_file import find_tokenizer

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MAX_ID = 2**32 - 1


class Tokenizer:
    """A loaded tokenizer. Every method may be called from any thread.

    vocab_size: one more than the largest id. special_tokens: named tokens (bos_token, eos_token, …) as text.
    chat_template: the default template's source; tool_template: that of chats with functions, where they have one of their own;
    chat_templates: all of them by name ("default", "tool_use", …).
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        backend.no_truncation()  # a prompt that is too long is refused by length, never cut behind the caller's back
        backend.no_padding()
        self._backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.chat_templates = dict(chat_templates or {})
        self.chat_template = self.chat_templates.get("default")
        self.tool_template = self.chat_templates.get("tool_use")
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(index for index, token in added.items() if token.special)
        ids = backend.get_vocab(with_added_tokens=True).values()
        self.vocab_size = max(ids, default=-1) + 1
        self.bos_token_id = self._named_id("bos_token")
        self.eos_token_id = self._named_id("eos_token")
        self.pieces = PieceDecoder.for_tokenizer(backend)
        self._bytes: dict[int, bytes] = {}

    def template_for(self, tools: bool) -> str | None:
        """The source of the template for a chat. tools: whether functions are on offer."""
        return self.tool_template if tools and self.tool_template is not None else self.chat_template

    @classmethod
    def from_directory(cls, path: str | Path) -> Tokenizer:
        """Load from a model directory; raises LoadError (one line) when that cannot be done."""
        directory = Path(path)
        file = find_tokenizer(directory)
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic inside the Rust library is not an Exception
            raise LoadError(
                f"cannot read {file} ({_one_line(error)}): fetch the file again or re-save the tokenizer"
            ) from error
        config = _read_json(directory / "tokenizer_config.json")
        try:
            named, extra = _special_tokens(directory, config)
            _add_missing_tokens(backend, directory, config, named, extra)
            templates = _chat_templates(directory, config)
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            raise LoadError(
                f"cannot understand tokenizer_config.json in {directory} ({_one_line(error)}): fetch the file again"
            ) from error
        return cls(backend, {name: _content(token) for name, token in named.items()}, templates)

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The `tokenizers` object itself, for libraries that need it. Do not change it."""
        return self._backend

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of the text; raises RequestError when it holds lone surrogates."""
        return list(self._encoding(text, add_special_tokens).ids)

    def encode_with_offsets(
        self, text: str, *, add_special_tokens: bool = True
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids and, parallel to them, the half-open range of characters of each; (0, 0) for added specials."""
        encoding = self._encoding(text, add_special_tokens)
        return list(encoding.ids), list(encoding.offsets)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the ids: unknown ids give nothing, broken UTF-8 U+FFFD. Raises RequestError for negative ids."""
        for token_id in token_ids:
            if not 0 <= token_id <= _MAX_ID:
                raise RequestError(f"{token_id} is not a token id: ids run from 0 to {self.vocab_size - 1}")
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds mid-text, as UTF-8 (possibly part of a character); empty for unknown ids."""
        known = self._bytes.get(token_id)
        if known is None:
            token = self._token(token_id)
            known = b"" if token is None else self._piece(token_id, token)
            if token is not None:  # callers may ask for any integer: remember only what the vocabulary bounds
                self._bytes[token_id] = known
        return known

    def token_text(self, token_id: int) -> str:
        """The same as text; a token that is not valid UTF-8 by itself is shown as OpenAI does, `bytes:\\xe2\\x82`."""
        data = self.token_bytes(token_id)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    @cached_property
    def max_token_chars(self) -> int:
        """No text of more than n * max_token_chars characters has n tokens or fewer.

        Exact for byte-level vocabularies. Where a normaliser, an unknown token or a whitespace-eating special token may
        swallow characters, a generous guess takes its place. Computed on first use: it visits the whole vocabulary.
        """
        starts = 1
        for token_id in self._backend.get_vocab(with_added_tokens=True).values():
            data = self.token_bytes(token_id)
            starts = max(starts, sum(byte & 0xC0 != 0x80 for byte in data))  # characters that begin in this token
        return starts * 4 if self._shrink == "composition" else starts if self._shrink == "none" else max(starts, 4096)

    @property
    def _shrink(self) -> str:
        """How tokenizing may lose characters: "none", "composition" (up to 4 become 1) or "unbounded"."""
        added = self._backend.get_added_tokens_decoder().values()
        normalizers = _kinds(self._backend.normalizer)
        if (
            self.pieces is None
            or not self.pieces.covers_every_byte(self._backend)
            or any(token.lstrip or token.rstrip for token in added)
            or normalizers - {"NFC", "NFKC", "NFD", "NFKD", "Prepend", "Replace", "ByteLevel", "Lowercase"}
            or _kinds(self._backend.pre_tokenizer) - {"ByteLevel", "Metaspace", "Split", "Digits"}
        ):
            return "unbounded"
        return "composition" if normalizers & {"NFC", "NFKC"} else "none"

    def _encoding(self, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError("the text is not valid Unicode: it holds a lone surrogate") from error

    def _token(self, token_id: int) -> str | None:
        return self._backend.id_to_token(token_id) if 0 <= token_id <= _MAX_ID else None

    def _piece(self, token_id: int, token: str) -> bytes:
        if self.pieces is not None:
            return self.pieces.bytes_of(token)
        # A decoder without a rule per token: what the token adds behind a copy of itself is what it adds mid-text.
        once = self._backend.decode([token_id], skip_special_tokens=False)
        twice = self._backend.decode([token_id, token_id], skip_special_tokens=False)
        return (twice[len(once) :] if twice.startswith(once) else once).encode("utf-8", "replace")

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise LoadError(f"cannot read {file} ({_one_line(error)}): fetch the file again or remove it") from error
    if not isinstance(value, dict):
        raise LoadError(f"{file} must hold a JSON object: fetch the file again or remove it")
    return value


def _kinds(component: Any) -> set[str]:
    """Type names of a normaliser or pre-tokenizer and of all inside it; "Shrinking" for rules that drop characters."""
    if component is None:
        return set()

    def walk(node: dict[str, Any]) -> set[str]:
        if node["type"] == "Sequence":
            children = node.get("normalizers") or node.get("pretokenizers") or ()
            return {kind for child in children for kind in walk(child)}
        if node["type"] == "Replace":
            pattern = node["pattern"]
            shorter = "String" not in pattern or len(node["content"]) < len(pattern["String"])
            return {"Shrinking" if shorter else "Replace"}
        return {"Shrinking"} if node.get("behavior") == "Removed" else {node["type"]}

    return walk(json.loads(component.__getstate__()))


def _content(token: str | tokenizers.AddedToken) -> str:
    return token if isinstance(token, str) else token.content


def _added_token(value: Any, *, special: bool | None = None) -> str | tokenizers.AddedToken:
    """A special token as configs write it: a string, or an object with content and flags."""
    if isinstance(value, str):
        return value
    flags = {key: value[key] for key in ("lstrip", "rstrip", "single_word", "normalized", "special") if key in value}
    if special is not None:
        flags["special"] = special
    return tokenizers.AddedToken(value["content"], **flags)


def _special_tokens(
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
        for key, value in _read_json(directory / "special_tokens_map.json").items():
            if key in ("additional_special_tokens", "extra_special_tokens"):
                nameless = nameless or value
            elif isinstance(value, (str, dict)):
                source[key] = _added_token(value, special=True)
    if isinstance(nameless, dict):
        source.update({key: _added_token(value) for key, value in nameless.items()})
        nameless = []
    return source, [_added_token(value) for value in nameless]


def _add_missing_tokens(
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
        specials = {_content(token) for token in [*named.values(), *nameless]}
        for text, index in _read_json(directory / "added_tokens.json").items():
            special = text in specials
            declared[int(index)] = tokenizers.AddedToken(text, normalized=not special, special=special)
    missing = [token for _, token in sorted(declared.items()) if repr(token) not in present]
    known = {token.content for token in backend.get_added_tokens_decoder().values()} | {t.content for t in missing}
    for token in [*named.values(), *nameless]:
        text = _content(token)
        if text not in known:
            known.add(text)
            missing.append(tokenizers.AddedToken(text, special=True) if isinstance(token, str) else token)
    if missing:
        names = {_content(token) for token in named.values()}
        for token in missing:
            token.special = token.special or token.content in names
        backend.add_tokens(missing)


def _chat_templates(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    """Templates by name; files win over tokenizer_config.json, which wins over the older chat_template.json."""
    templates: dict[str, str] = {}
    for value in (_read_json(directory / "chat_template.json").get("chat_template"), config.get("chat_template")):
        if isinstance(value, str):
            templates = {"default": value}
        elif isinstance(value, list):
            templates = {entry["name"]: entry["template"] for entry in value}
        elif isinstance(value, dict):
            templates = {str(name): str(text) for name, text in value.items()}
    files = {"default": directory / "chat_template.jinja"}
    files.update({file.stem: file for file in sorted((directory / "additional_chat_templates").glob("*.jinja"))})
    try:
        on_disk = {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()}
    except (OSError, ValueError) as error:
        raise LoadError(
            f"cannot read a chat template in {directory} ({_one_line(error)}): fetch the file again"
        ) from error
    return on_disk or templates
