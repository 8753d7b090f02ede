"""Conversion of vocabulary files (SentencePiece models, tiktoken, tekken, GGUF) to tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import tokenizers
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from tokenizers import processors

from windlass.engine.bounded_files import has_too_many_entries
from windlass.engine.errors import LoadError
from windlass.server.text.token_pieces import byte_level_text
from windlass.server.text.tokenizer_files import add_missing_tokens, one_line, read_json, special_tokens, token_content
from windlass.server.text.vocabularies.vocabulary import (
    MAX_CHARACTERS,
    MAX_TOKEN_CHARACTERS,
    MAX_TOKENS,
    SPACE,
    WORD_RULES,
    GgufVocabulary,
    TokenizerParts,
    TokenType,
    added_token,
    bos_eos_ids,
    byte_level_parts,
    gguf_added_tokens,
    gguf_byte_level_parts,
    merge_list_parts,
    merging_model,
    named_tokens,
    read_bytes,
    read_vocabulary,
    refuse_vocabulary,
    scored_parts,
    sentencepiece_decoder,
    word_rules,
)

# SentencePiece's rules "nmt_nfkc" in addition to NFKC (src/builder.cc): removed, replaced by a space, unchanged.
_REMOVED = r"[\x01-\x08\x0b\x0e-\x1f\x7f\x8f\x9f]"
_SPACES = r"[\t\n\f\r\u061c\u1680\u200b\u200c\u200e\u200f\u2028\u2029\u2581\ufeff\ufffd]"
_SPACE_BEFORE = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "first", "split": False}
_MAX_SPACES = 2**31 - 1  # SentencePiece removes all leading spaces of decoded text if it strips spaces
_TILDE, _TILDE_PLACEHOLDER = "\uff5e", "\ufdd0"  # full-width tilde, and a noncharacter that replaces it during NFKC
_PIECE_TAG = b"\n"  # the byte before each piece, and before the text in it; seldom elsewhere
_Field = descriptor_pb2.FieldDescriptorProto
_FIELD_TYPES = {bytes: _Field.TYPE_BYTES, bool: _Field.TYPE_BOOL, int: _Field.TYPE_INT32, float: _Field.TYPE_FLOAT}
# Fields by message: name -> (number, default). Texts are read as bytes, so that invalid UTF-8 can be detected.
_FIELDS: dict[str, dict[str, tuple[int, Any]]] = {
    "Piece": {"piece": (1, b""), "score": (2, 0.0), "type": (3, 1)},
    "Trainer": {
        "model_type": (3, 1),
        "treat_whitespace_as_suffix": (24, False),
        "byte_fallback": (35, False),
        "unk_id": (40, 0),
        "bos_id": (41, 1),
        "eos_id": (42, 2),
        "pad_id": (43, -1),
    },
    "Normalizer": {
        "name": (1, b""),
        "precompiled_charsmap": (2, b""),
        "add_dummy_prefix": (3, True),
        "remove_extra_whitespaces": (4, True),
        "escape_whitespaces": (5, True),
    },
}


class ModelType(IntEnum):
    """Algorithm that splits a text into pieces, numbered like `TrainerSpec.model_type`."""

    UNIGRAM = 1
    BPE = 2
    WORD = 3
    CHAR = 4


def read_pieces(data: bytes, source: str, config: Mapping[str, Any]) -> TokenizerParts:
    """Read the bytes of the SentencePiece model `source`. Raises LoadError, one line.

    config: of tokenizer_config.json. With `legacy: false`, a space is put before the text only, and not after each special
    token.
    """
    model, pieces = _parse(data, source)
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    scores = [piece.score for piece in model.pieces]
    ids = {name: getattr(trainer, f"{name}_id") for name in ("unk", "bos", "eos", "pad")}
    special = {name: index for name, index in ids.items() if 0 <= index < len(pieces)}
    metadata = {
        "model": "llama",
        "tokens": pieces,
        "scores": scores,
        "token_type": [piece.type for piece in model.pieces],
        **({"unknown_token_id": special["unk"]} if "unk" in special else {}),
    }
    vocabulary = read_vocabulary({f"tokenizer.ggml.{name}": value for name, value in metadata.items()}, source)
    _check(model, vocabulary)
    # SentencePiece finds user-defined symbols in the normalized text.
    added = [token | {"normalized": not token["special"]} for token in gguf_added_tokens(vocabulary)]
    symbols = [token["content"] for token in added if token["normalized"]]
    add_space = normalizer.add_dummy_prefix and config.get("add_prefix_space") is not False
    first_only = add_space and config.get("legacy") is False
    pre_tokenizer = _SPACE_BEFORE if first_only else None
    if trainer.model_type == ModelType.BPE:
        tokenizer_model = scored_parts(vocabulary)["model"] | {"byte_fallback": trainer.byte_fallback}
    else:
        if trainer.byte_fallback:
            # `<0x41>` in a text is not a byte. Split in two, it is not recognized as the piece of that name.
            cut = {"type": "Split", "pattern": {"Regex": r"<(?=0x[0-9A-F]{2}>)"}, "behavior": "MergedWithPrevious"}
            steps = [step for step in (pre_tokenizer, cut | {"invert": False}) if step is not None]
            pre_tokenizer = {"type": "Sequence", "pretokenizers": steps}
        tokenizer_model = {
            "type": "Unigram",
            "unk_id": special["unk"],
            "vocab": [list(pair) for pair in zip(vocabulary.tokens, scores, strict=True)],
            "byte_fallback": trainer.byte_fallback,
        }
    space_before_each = add_space and not first_only
    parts = {
        "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": _normalizers(normalizer, space_before_each, symbols)},
        "pre_tokenizer": pre_tokenizer,
        "decoder": sentencepiece_decoder(_MAX_SPACES if normalizer.remove_extra_whitespaces else int(add_space)),
        "model": tokenizer_model,
    }
    named = {f"{name}_token": pieces[index] for name, index in special.items()}
    return TokenizerParts(parts, len(pieces), named, add_bos=True)


def _parse(data: bytes, source: str) -> tuple[Any, list[str]]:
    """Return the ModelProto and the texts of its pieces. Raises LoadError, one line."""
    if data.count(_PIECE_TAG) > 2 * MAX_TOKENS:
        refuse_vocabulary(source, "its vocabulary is larger than that of any model; fetch the file again")
    try:
        model = _message().FromString(data)
        pieces = [piece.piece.decode("utf-8") for piece in model.pieces]
    except (DecodeError, UnicodeDecodeError):
        model, pieces = None, []
    if model is None or not pieces:
        raise LoadError(
            f"{source} is not a SentencePiece model: fetch the file again, or save the tokenizer as tokenizer.json"
        )
    if not (model.HasField("trainer_spec") and model.HasField("normalizer_spec")):  # they follow the pieces
        raise LoadError(f"{source} is truncated: fetch the file again")
    return model, pieces


@cache
def _message() -> Any:
    """Return a ModelProto class with these fields, in a separate pool because SentencePiece may register its own."""
    file = descriptor_pb2.FileDescriptorProto(name="pieces.proto", package="pieces", syntax="proto2")
    for name, fields in _FIELDS.items():
        message = file.message_type.add(name=name)
        for field_name, (number, default) in fields.items():
            text = str(default).lower() if isinstance(default, bool) else str(default)
            message.field.add(
                name=field_name,
                number=number,
                type=_FIELD_TYPES[type(default)],
                label=_Field.LABEL_OPTIONAL,
                default_value=None if isinstance(default, bytes) else text,
            )
    model = file.message_type.add(name="Model")
    for number, field_name, kind, label in (
        (1, "pieces", "Piece", _Field.LABEL_REPEATED),
        (2, "trainer_spec", "Trainer", _Field.LABEL_OPTIONAL),
        (3, "normalizer_spec", "Normalizer", _Field.LABEL_OPTIONAL),
    ):
        model.field.add(
            name=field_name, number=number, type=_Field.TYPE_MESSAGE, type_name=f".pieces.{kind}", label=label
        )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("pieces.Model"))


def _check(model: Any, vocabulary: GgufVocabulary) -> None:
    trainer = model.trainer_spec
    if trainer.model_type not in (ModelType.BPE, ModelType.UNIGRAM):
        vocabulary.refuse("it is a SentencePiece model of words or characters; BPE and unigram are supported")
    if trainer.treat_whitespace_as_suffix or not model.normalizer_spec.escape_whitespaces:
        vocabulary.refuse("its treatment of spaces is not supported (treat_whitespace_as_suffix, escape_whitespaces)")
    if not 0 <= trainer.unk_id < len(vocabulary.tokens):
        vocabulary.refuse("it has no unknown piece")
    if TokenType.UNUSED in vocabulary.types:
        vocabulary.refuse("some of its pieces are marked as unused")


def _normalizers(normalizer: Any, space_before_each: bool, symbols: list[str]) -> list[dict[str, Any]]:
    """Return the normalizers of tokenizer.json. symbols: user-defined tokens.

    space_before_each: whether a space is put before the text and after each special token.
    """
    steps: list[dict[str, Any]] = []
    charsmap, rules = normalizer.precompiled_charsmap, normalizer.name.decode("utf-8", "replace")
    if charsmap and rules in ("nfkc", "nmt_nfkc"):
        # `Precompiled` would process one grapheme at a time and lose parts of some.
        nmt = [_replace(_REMOVED, ""), _replace(_SPACES, " "), _replace(_TILDE, _TILDE_PLACEHOLDER)]
        steps += (
            [*nmt, {"type": "NFKC"}, _replace(_TILDE_PLACEHOLDER, _TILDE)]
            if rules == "nmt_nfkc"
            else [{"type": "NFKC"}]
        )
    elif charsmap:
        steps.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap).decode("ascii")})
    if normalizer.remove_extra_whitespaces:
        steps += [_replace(" {2,}", " "), _replace(rf"\A +|[ {SPACE}]+\z", "")]
    if space_before_each:
        # Added tokens are normalized too before they are searched for, so a text that is only a symbol must not get a space.
        # SentencePiece inserts one there.
        if symbols:
            alone = "|".join(re.escape(symbol) for symbol in symbols)
            steps.append(_replace(rf"\A(?!(?:{alone})\z)(?=[\s\S])", SPACE))
        else:
            steps.append({"type": "Prepend", "prepend": SPACE})
    return [*steps, {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]


def _replace(pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}


TEKKEN_FILE = "tekken.json"
TIKTOKEN_FILE = "tiktoken.model"
_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} [0-9]+\r?(\n|\Z)")
_TOO_LARGE = "its vocabulary is larger than that of any model"
_NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
# Special tokens of tekken.json before version 7 (mistral-common, tokens/tokenizers/tekken.py).
_LEGACY_SPECIAL_TOKENS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)


@dataclass(frozen=True, slots=True)
class _KnownVocabulary:
    """Properties of a vocabulary that only the model's code specifies.

    word_rules: name in GGUF files. special: texts of the tokens after the last rank. total: number of special tokens
    including reserved ones. normalizes_nfc: a text is normalized to NFC first.
    """

    word_rules: str
    special: tuple[str, ...] = ()
    total: int = 0
    named: Mapping[str, str] = field(default_factory=dict)
    add_bos: bool = False
    normalizes_nfc: bool = False


# QwenLM/Qwen, tokenization_qwen.py.
_QWEN = _KnownVocabulary(
    word_rules="qwen2",
    special=("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{number}|>" for number in range(205))),
    named={"eos_token": "<|endoftext|>"},
    normalizes_nfc=True,
)

# meta-llama/llama-models, models/llama3/tokenizer.py: names since Llama 3.1, which renamed reserved tokens.
_LLAMA3 = _KnownVocabulary(
    word_rules="llama-bpe",
    special=(
        *("<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>"),
        *("<|finetune_right_pad_id|>", "<|step_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>"),
        *("<|eot_id|>", "<|python_tag|>", *(f"<|reserved_special_token_{number}|>" for number in range(2, 247))),
    ),
    named={"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"},
    add_bos=True,
)

# moonshotai/Kimi-K2-Instruct, tokenization_kimi.py: the names are in tokenizer_config.json.
_KIMI = _KnownVocabulary(word_rules="kimi-k2", total=256)


def read_tekken(data: bytes, source: str) -> TokenizerParts:
    """Read the bytes of tekken.json. source: path for messages. Raises LoadError, one line."""
    if has_too_many_entries(data):
        _refuse(source, _TOO_LARGE)
    try:
        content = json.loads(data)
        config = content["config"]
        pattern, count, size = config["pattern"], config["default_num_special_tokens"], config["default_vocab_size"]
        special = _tekken_special_tokens(content.get("special_tokens"), count)
        tokens = [base64.b64decode(token["token_bytes"], validate=True) for token in content["vocab"][: size - count]]
        ranks = [token["rank"] for token in content["vocab"][: size - count]]
    except (ValueError, KeyError, TypeError, RecursionError, binascii.Error) as error:
        _refuse(
            source,
            f"it is not in the format of tekken.json ({type(error).__name__}: {' '.join(str(error).split())[:100]})",
        )
    if ranks != list(range(len(ranks))) or not tokens or not isinstance(pattern, str):
        _refuse(source, "the ranks of its tokens are not 0, 1, 2, …")
    parts = tiktoken_parts(tokens, [pattern], source, first_id=count)
    parts["added_tokens"] = [added_token(index, text, special=True) for index, text in enumerate(special)]
    parts["model"]["vocab"] |= {text: index for index, text in enumerate(special)}
    return TokenizerParts(
        parts, count + len(tokens), {name: text for name, text in _NAMED.items() if text in special}, add_bos=True
    )


def is_tiktoken(data: bytes) -> bool:
    """Return whether the first line has tiktoken's format."""
    return _LINE.match(data) is not None


def read_tiktoken(data: bytes, file: Path, config: Mapping[str, Any], model_type: str) -> TokenizerParts:
    """Read the bytes of a tiktoken file.

    config: of tokenizer_config.json. model_type: of config.json. Raises LoadError, one line, if these and the file's name
    do not identify a known vocabulary, or if the file is damaged.
    """
    kind = _known_vocabulary(file, str(config.get("tokenizer_class") or ""), model_type)
    if data.count(b"\n") > MAX_TOKENS:
        _refuse(str(file), _TOO_LARGE)
    tokens = _tokens(data, str(file))
    parts = tiktoken_parts(tokens, WORD_RULES[kind.word_rules].splits, str(file))
    if kind.normalizes_nfc:
        parts["normalizer"] = {"type": "NFC"}
    special = _tiktoken_special_tokens(len(tokens), config.get("added_tokens_decoder") or {}, kind)
    parts["added_tokens"] = [added_token(index, text, special=flag) for index, (text, flag) in special.items()]
    return TokenizerParts(parts, len(tokens) + len(special), dict(kind.named), add_bos=kind.add_bos)


def _tekken_special_tokens(entries: Any, count: int) -> list[str]:
    """Return `count` special tokens by id. Unnamed ones get the names of mistral-common."""
    legacy = enumerate(_LEGACY_SPECIAL_TOKENS)
    named = dict(legacy if entries is None else ((int(token["rank"]), str(token["token_str"])) for token in entries))
    if len(named) > count or any(not 0 <= index < count for index in named):
        raise ValueError(f"{len(named)} special tokens, where {count} are permitted")
    return [named.get(index, f"<SPECIAL_{index}>") for index in range(count)]


def tiktoken_parts(tokens: Sequence[bytes], splits: Sequence[str], source: str, *, first_id: int = 0) -> dict[str, Any]:
    """Return the parts of tokenizer.json without added tokens. Raises LoadError.

    tokens: by rank, including all single bytes. splits: see `WordRules`. first_id: id of the token with rank 0.
    """
    ranks = {token: rank for rank, token in enumerate(tokens)}
    if (
        len(tokens) > MAX_TOKENS
        or sum(map(len, tokens)) > MAX_CHARACTERS
        or max(map(len, tokens)) > MAX_TOKEN_CHARACTERS
    ):
        _refuse(source, _TOO_LARGE)
    if len(ranks) != len(tokens) or b"" in ranks:
        _refuse(source, "two of its tokens are equal, or one is empty")
    if any(bytes([byte]) not in ranks for byte in range(256)):
        _refuse(source, "not every byte is a token")
    texts = [byte_level_text(token) for token in tokens]
    ids = {text: first_id + rank for rank, text in enumerate(texts)}
    return byte_level_parts(splits, merging_model(ids, _merges(ranks), whole_words=True))


def _merges(ranks: dict[bytes, int]) -> list[tuple[str, str]]:
    """Return the pairs of tokens that form a token, ordered by its rank, which is tiktoken's merge order.

    Here each pair has its own rank: of the pairs that form the same token, the one with the longer left token is first.
    """
    texts = {token: byte_level_text(token) for token in ranks}
    return [
        (texts[token[:cut]], texts[token[cut:]])
        for token in ranks
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in ranks and token[cut:] in ranks
    ]


def _known_vocabulary(file: Path, tokenizer_class: str, model_type: str) -> _KnownVocabulary:
    if tokenizer_class == "QWenTokenizer" or file.name == "qwen.tiktoken":
        return _QWEN
    if tokenizer_class == "TikTokenTokenizer" and model_type in ("kimi_k2", "deepseek_v3"):
        return _KIMI
    if file.name == "tokenizer.model" and model_type in ("llama", "mllama", "llama4"):
        return _LLAMA3
    raise LoadError(
        f"{file} does not name its word rules, and only those of Qwen (qwen.tiktoken), Llama 3 and Kimi K2 are known: save "
        "the tokenizer as tokenizer.json"
    )


def _tokens(data: bytes, source: str) -> list[bytes]:
    """Return the tokens by rank."""
    found: dict[int, bytes] = {}
    for line in data.splitlines():
        if not line:
            continue
        try:
            token, rank = line.split()
            found[int(rank)] = base64.b64decode(token, validate=True)
        except (ValueError, binascii.Error):
            _refuse(source, f"a line is not a token in base64 and its rank ({line[:40]!r})")
    if sorted(found) != list(range(len(found))) or not found:
        _refuse(source, "the ranks of its tokens are not 0, 1, 2, …")
    return [found[rank] for rank in range(len(found))]


def _tiktoken_special_tokens(
    first: int, declared: Mapping[str, Any], kind: _KnownVocabulary
) -> dict[int, tuple[str, bool]]:
    """Return text and `special` flag of the tokens after the last rank, by id without gaps."""
    found = {first + offset: (text, True) for offset, text in enumerate(kind.special)}
    for name, token in declared.items():
        if int(name) >= first:
            found[int(name)] = (token["content"], bool(token.get("special", False)))
    end = max(found, default=first - 1) + 1
    if end - first > 2**16:
        raise ValueError(f"token {end - 1} of added_tokens_decoder is far beyond the vocabulary's {first} tokens")
    for index in range(first, max(end, first + kind.total)):
        found.setdefault(index, (f"<|reserved_token_{index}|>", True))
    return dict(sorted(found.items()))


def _refuse(source: str, reason: str) -> NoReturn:
    refuse_vocabulary(source, f"{reason}; fetch the file again")


_CONFIG = "tokenizer_config.json"
_TEMPLATE = "tokenizer.chat_template"
# Default token ids of GGUF files with the vocabulary `llama` (llama.cpp, src/llama-vocab.cpp).
_SENTENCE_PIECE_IDS = {"unk": 0, "bos": 1, "eos": 2}
# Tokenizer classes outside transformers whose code does nothing that this conversion does not do.
_KNOWN_TOKENIZER_CLASSES = frozenset(
    {
        *("BaichuanTokenizer", "InternLMTokenizer", "InternLM2Tokenizer", "InternLM3Tokenizer", "OrionTokenizer"),
        *("QWenTokenizer", "TikTokenTokenizer", "XverseTokenizer", "YiTokenizer"),
    }
)


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """tokenizer, config: text of tokenizer.json and tokenizer_config.json. notices: lines to show to the user."""

    tokenizer: str
    config: str
    notices: tuple[str, ...] = ()


def gguf_tokenizer_files(metadata: Mapping[str, Any], source: str) -> TokenizerFiles:
    """Convert the tokenizer in the metadata of the GGUF file `source`.

    metadata: key -> bool, int, float, str or a list of these. Raises LoadError, one line, for invalid, too large and
    unsupported vocabularies.
    """
    vocabulary = read_vocabulary(metadata, source)
    notices: list[str] = []
    bos = False
    if vocabulary.kind == "gpt2":
        parts = gguf_byte_level_parts(vocabulary)
        bos = word_rules(vocabulary).add_bos
        if not vocabulary.pre:
            notices.append(
                f"{source} does not name its word rules (tokenizer.ggml.pre), so its tokens may differ from those of the "
                "model's training: convert the model again"
            )
    elif vocabulary.kind == "llama":
        ids = {name: index for name, index in _SENTENCE_PIECE_IDS.items() if index < len(vocabulary.tokens)}
        vocabulary = replace(vocabulary, special=ids | vocabulary.special)
        parts = scored_parts(vocabulary)
        bos = True
    elif vocabulary.kind == "gemma4":
        vocabulary = replace(vocabulary, add_bos=True)  # files have false by mistake; llama.cpp corrects it too
        parts = merge_list_parts(vocabulary)
    else:
        vocabulary.refuse(
            f"tokenizer.ggml.model is {vocabulary.kind[:80]!r}; gpt2, llama and gemma4 are the supported kinds"
        )
    before, after = ([(vocabulary.tokens[index], index) for index in ids] for ids in bos_eos_ids(vocabulary, bos=bos))
    parts = {
        "added_tokens": gguf_added_tokens(vocabulary),
        "post_processor": _post_processor(before, after) if before or after else None,
        **parts,
    }
    _, text = _load(parts, len(vocabulary.tokens), vocabulary.refuse)
    return TokenizerFiles(text, _config(vocabulary, metadata), tuple(notices))


def tokenizer_files(file: Path) -> TokenizerFiles:
    """Convert a vocabulary file, with the configuration files in its directory. Raises LoadError, one line.

    file: tokenizer.model (SentencePiece or tiktoken), tekken.json, tiktoken.model or a name that ends with .tiktoken.
    """
    directory = file.parent
    config = read_json(directory / _CONFIG)
    _check_code(file, config)

    def refuse(reason: str) -> NoReturn:
        refuse_vocabulary(str(file), f"{reason}; fetch the file again")

    def added_at_end(name: str, default: bool) -> list[tuple[str, int]]:
        wanted = config.get(f"add_{name}")
        if name not in named or not (default if wanted is None else wanted):
            return []
        text = token_content(named[name])
        index = backend.token_to_id(text)
        return [] if index is None else [(text, index)]

    try:
        vocabulary = _read(file, config)
        backend, _ = _load({"post_processor": None, **vocabulary.parts}, vocabulary.size, refuse)
        named, extra = special_tokens(directory, config)
        for name, token in vocabulary.named.items():
            if name not in config:  # null there means that the model has none
                named.setdefault(name, token)
        add_missing_tokens(backend, directory, config, named, extra)
        before = added_at_end("bos_token", vocabulary.add_bos)
        after = added_at_end("eos_token", False)
        if before or after:
            processor = processors.TemplateProcessing()
            processor.__setstate__(json.dumps(_post_processor(before, after)).encode())
            backend.post_processor = processor
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise LoadError(
            f"cannot understand {_CONFIG} in {directory} ({one_line(error)}): fetch the file again"
        ) from error
    texts = {name: token for name, token in vocabulary.named.items() if name not in config}
    return TokenizerFiles(backend.to_str(), json.dumps(config | texts, indent=2), vocabulary.notices)


def _load(parts: Mapping[str, Any], size: int, refuse: Callable[[str], NoReturn]) -> tuple[tokenizers.Tokenizer, str]:
    """Load a generated tokenizer; return it and the text of its tokenizer.json.

    Calls `refuse` if the library rejects the parts, or if the tokenizer does not have `size` tokens.
    """
    text = json.dumps({"version": "1.0", "truncation": None, "padding": None, **parts}, ensure_ascii=False)
    try:
        backend = tokenizers.Tokenizer.from_str(text)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic inside the Rust library is not an Exception
        refuse(f"its vocabulary is inconsistent ({one_line(error)})")
    if backend.get_vocab_size(with_added_tokens=True) != size:
        refuse("its vocabulary is inconsistent")
    return backend, text


def _post_processor(before: Sequence[tuple[str, int]], after: Sequence[tuple[str, int]]) -> dict[str, Any]:
    """Return the post-processor that puts tokens (text and id) before and after a text."""

    def sequence(name: str, type_id: int) -> list[dict[str, Any]]:
        special = [
            [{"SpecialToken": {"id": text, "type_id": type_id}} for text, _ in tokens] for tokens in (before, after)
        ]
        return [*special[0], {"Sequence": {"id": name, "type_id": type_id}}, *special[1]]

    return {
        "type": "TemplateProcessing",
        "single": sequence("A", 0),
        "pair": sequence("A", 0) + sequence("B", 1),
        "special_tokens": {text: {"id": text, "ids": [index], "tokens": [text]} for text, index in (*before, *after)},
    }


def _config(vocabulary: GgufVocabulary, metadata: Mapping[str, Any]) -> str:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{name: vocabulary.tokens[index] for name, index in named_tokens(vocabulary).items()},
    }
    templates = {
        "default" if key == _TEMPLATE else key[len(_TEMPLATE) + 1 :]: key for key in metadata if _is_template_key(key)
    }
    for key in templates.values():
        if not isinstance(metadata[key], str):
            vocabulary.refuse(f"{key} should be a str, not a {type(metadata[key]).__name__}")
    if set(templates) == {"default"}:
        config["chat_template"] = metadata[_TEMPLATE]
    elif templates:
        config["chat_template"] = [{"name": name, "template": metadata[key]} for name, key in templates.items()]
    return json.dumps(config, indent=2)


def _is_template_key(key: object) -> bool:
    return isinstance(key, str) and (key == _TEMPLATE or key.startswith(_TEMPLATE + "."))


def _check_code(file: Path, config: dict[str, Any]) -> None:
    """Refuse a tokenizer that requires unknown Python code of the model."""
    name = str(config.get("tokenizer_class") or "")
    code = config.get("auto_map")
    if isinstance(code, dict) and "AutoTokenizer" in code and name not in _KNOWN_TOKENIZER_CLASSES:
        raise LoadError(
            f"the tokenizer of {file.parent} requires the model's own code ({name or 'AutoTokenizer'}), which is not executed: "
            "save it as tokenizer.json, or fetch a version of the model that has one"
        )


def _read(file: Path, config: dict[str, Any]) -> TokenizerParts:
    data = read_bytes(file)
    if file.name == TEKKEN_FILE:
        return read_tekken(data, str(file))
    if file.suffix == ".tiktoken" or file.name == TIKTOKEN_FILE or is_tiktoken(data):
        model_type = read_json(file.parent / "config.json").get("model_type")
        return read_tiktoken(data, file, config, str(model_type))
    try:
        from windlass.server.text.vocabularies.conversion import read_pieces
    except ModuleNotFoundError as error:
        raise LoadError(f"{file} requires {error.name}, which is not installed: run pip install protobuf") from None
    return read_pieces(data, str(file), config)
