"""Files of a tokenizer: vocabulary and special tokens, chat templates and their capabilities, and prompts of rerankers.

It finds the file that has the vocabulary, and reads the special tokens declared in the others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

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


RESERVED = ("messages", "tools", "add_generation_prompt")  # variables of templates that come from fields of a request


CallIds = Literal["any", "short", "named"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateCapabilities:
    """Capabilities of a template, found by rendering short conversations (`chat_template`). By default it has all.

    tools: it shows functions to the model. described_tools: each of which must have a description.
    calls: it shows calls and their results.
    text_arguments: it reads arguments of calls as JSON text instead of objects.
    null_content: it shows null content of a message with calls in a form of its own.
    empty_content, text_with_calls: it shows calls if the content is empty, and if it is a text, with that.
    text_before_calls: it shows a text as a turn of its own before a turn with calls.
    thinking_with_text: it shows that text even if the message has thinking.
    call_ids: "short" if it accepts only ids of nine characters, "named" if it shows the name of a function only in the id of a
    call, as `functions.name:0`.
    named_results: results must name their function.
    parallel_calls, open_calls: a message may have several calls, and a call may have no result.
    orphan_results, user_after_result: a result may have no call, and a user's message may follow a result.
    system: it shows a system message. several_systems: it shows several at the front. late_systems: it shows later ones.
    developer: it has this role. repeated_users, repeated_assistants: a turn may follow another one of its role.
    known_roles: roles that it compares with the role of a message.
    """

    tools: bool = True
    described_tools: bool = False
    calls: bool = True
    text_arguments: bool = False
    null_content: bool = False
    empty_content: bool = True
    text_with_calls: bool = True
    text_before_calls: bool = True
    thinking_with_text: bool = True
    call_ids: CallIds = "any"
    named_results: bool = False
    parallel_calls: bool = True
    open_calls: bool = True
    orphan_results: bool = True
    user_after_result: bool = True
    system: bool = True
    several_systems: bool = True
    late_systems: bool = True
    developer: bool = False
    repeated_users: bool = True
    repeated_assistants: bool = True
    known_roles: frozenset[str] = frozenset()

    @property
    def gathers_texts(self) -> bool:
        """Whether texts that accompany calls are shown only as the one turn without calls between two turns of the user."""
        shows_text = self.text_with_calls or self.repeated_assistants
        return self.calls and self.text_before_calls and not shows_text

    @property
    def single_call(self) -> bool:
        """Whether a message has at most one call."""
        return self.calls and not self.parallel_calls


def chat_templates(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    """Templates by name. Files override tokenizer_config.json, which overrides the older chat_template.json."""
    templates: dict[str, str] = {}
    for value in (read_json(directory / "chat_template.json").get("chat_template"), config.get("chat_template")):
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
            f"cannot read a chat template in {directory} ({one_line(error)}): fetch the file again"
        ) from error
    return on_disk or templates


PairField = Literal["query", "document", "instruction"]

# As published with Qwen3-Reranker. The instruction is an optional first message.
QWEN3_RERANKER_TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: '
    "{{ messages[0].content if messages | length > 2 else "
    "'Given a web search query, retrieve relevant passages that answer the query' }}\n"
    "<Query>: {{ messages[-2].content }}\n<Document>: {{ messages[-1].content }}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n\n"  # Jinja removes the last newline
)


def names_pair_roles(source: str) -> bool:
    """Whether a template names both roles, which templates of chats do not."""
    return all(re.search(rf"['\"]{role}['\"]", source) for role in ("query", "document"))


@dataclass(frozen=True, slots=True)
class PairPrompt:
    """A prompt with gaps. texts: around the gaps, one more than gaps. trimmed: per gap, whether its value is stripped."""

    texts: tuple[str, ...]
    pair_fields: tuple[PairField, ...]
    trimmed: tuple[bool, ...]

    @property
    def length(self) -> int:
        """Characters around the gaps."""
        return sum(map(len, self.texts))

    def fill(self, values: Mapping[PairField, str]) -> tuple[str, int, str]:
        """(text, offset of the document's first occurrence in it, the document as inserted)."""
        parts, size = [self.texts[0]], len(self.texts[0])
        begin, document = size, ""
        for pair_field, trimmed, text in zip(self.pair_fields, self.trimmed, self.texts[1:], strict=True):
            value = values[pair_field].strip() if trimmed else values[pair_field]
            if pair_field == "document" and not document:
                begin, document = size, value
            parts += (value, text)
            size += len(value) + len(text)
        return "".join(parts), begin, document


@dataclass(frozen=True, slots=True)
class PairTemplate:
    """The prompts of a reranker. instructed: with an instruction from the request, None if it has no gap for one."""

    plain: PairPrompt
    instructed: PairPrompt | None
