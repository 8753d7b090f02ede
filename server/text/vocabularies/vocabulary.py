"""Vocabularies: common types of their readers, the tokenizer fields of GGUF files, and the parts of tokenizer.json for BPE.

BPE is byte-level or SentencePiece's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path
from typing import Any, NoReturn

from windlass.engine.bounded_files import read_bounded
from windlass.engine.errors import LoadError, did_you_mean

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


SPACE = "▁"
DEFAULT = "default"  # name of the word rules of files that name none
_MAX_MERGED_CHARACTERS = 256  # characters of a token, which is split at each position to find its merges


@dataclass(frozen=True, slots=True)
class WordRules:
    """Rules that split a text into words before merging.

    splits: regular expressions, applied in order; each splits the pieces of the previous one into matches and the rest.
    whole_words: a word that is a token is not split. add_bos: default if the file does not specify it.
    """

    splits: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False


def _alternatives(*alternatives: str) -> str:
    return "|".join(alternatives)


_ANY_CASE = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LOWER_CASE = r"'s|'t|'re|'ve|'m|'ll|'d"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SYMBOLS_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_CJK = r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_GPT2 = _alternatives(_LOWER_CASE, r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
_LLAMA3 = _alternatives(_ANY_CASE, _WORD, r"\p{N}{1,3}", _SYMBOLS, _SPACES)
_QWEN2 = _alternatives(_ANY_CASE, _WORD, r"\p{N}", _SYMBOLS, _SPACES)
_QWEN35 = _alternatives(
    _ANY_CASE, r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r"\p{N}", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", _SPACES
)


def _cased(upper: str, lower: str, suffix: str) -> str:
    """Return the pattern of a word as runs of upper case and lower case, where one of the two may be empty."""
    start = r"[^\r\n\p{L}\p{N}]?"
    return f"{start}{upper}*{lower}+{suffix}|{start}{upper}+{lower}*{suffix}"


_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_GPT4O = _alternatives(_cased(_UPPER, _LOWER, _ANY_CASE + "?"), r"\p{N}{1,3}", _SYMBOLS_SLASH, _SPACES)
_TEKKEN = _alternatives(_cased(_UPPER, _LOWER, ""), r"\p{N}", _SYMBOLS_SLASH, _SPACES)
_KIMI = _alternatives(
    r"\p{Han}+",
    _cased(_UPPER[:-1] + r"&&[^\p{Han}]]", _LOWER[:-1] + r"&&[^\p{Han}]]", _ANY_CASE + "?"),
    r"\p{N}{1,3}",
    _SYMBOLS,
    _SPACES,
)

# A word with leading ASCII punctuation, or a word of letters and marks.
_DEEPSEEK_WORD = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
_DEEPSEEK3 = _alternatives(_DEEPSEEK_WORD, r" ?[\p{P}\p{S}]+[\r\n]*", _SPACES)
_SPARK = _alternatives(_DEEPSEEK_WORD, r" ?[\p{P}\p{S}]+", r"[\r\n]", r"\s+(?!\S)|\s+")
_DEEPSEEK_CJK = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_LETTERS = (
    r"\s?[A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    r"\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556"
    r"\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15"
    r"\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe"
    r"\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113"
    r"\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184"
    r"\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e"
    r"\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943]+"
)

_BLOOM = r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_YOUTU_CJK = (
    r"[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    r"|[\u3105-\u312f]+|" + _CJK
)

_AFMOE_ASIAN = (
    r"[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff"
    r"\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)

# Groups of three digits from the end of a number.
_THREES_FROM_THE_END = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
_FALLING_SPACES = "|".join(
    rf"\s{{{width}}}(?!\S)" for width in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2")
)

_WORDS = WordRules((_GPT2,))
_SINGLE_DIGITS = WordRules((r"\p{N}", _GPT2))
_LLAMA3_RULES = WordRules((_LLAMA3,), whole_words=True, add_bos=True)
_QWEN2_RULES = WordRules((_QWEN2,))
_GPT4O_RULES = WordRules((_GPT4O,))
_DEEPSEEK3_RULES = WordRules((r"\p{N}{1,3}", _CJK, _DEEPSEEK3))
_BAILING = WordRules(
    (
        _alternatives(
            r"'(?i:[sdmt]|ll|ve|re)",
            r"[^\r\n\p{L}\p{N}]?+\p{L}+",
            r"\p{N}",
            r" ?[^\s\p{L}\p{N}]++[\r\n]*",
            r"\s*[\r\n]|\s+(?!\S)|\s+",
        ),
    )
)

_RULES_BY_NAMES: tuple[tuple[str, WordRules], ...] = (
    (DEFAULT, WordRules((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))),
    ("llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano", _LLAMA3_RULES),
    ("dbrx smaug-bpe chatglm-bpe", WordRules((_LLAMA3,))),
    ("glm4 glm5", WordRules((_LLAMA3,), whole_words=True)),
    (
        "jais-2",
        WordRules((_alternatives(_ANY_CASE, _WORD, r"\p{N}{1,3}", _SYMBOLS, r"\s*[\r\n]+", _FALLING_SPACES, r"\s"),)),
    ),
    ("minicpm5", WordRules((r"\p{N}{1,3}", _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}+")), whole_words=True)),
    ("qwen2 deepseek-r1-qwen kormo f2llmv2 openpangu megrez stablelm2 hunyuan solar-open grok-2", _QWEN2_RULES),
    ("qwen35", WordRules((_QWEN35,))),
    ("ufakzeka", WordRules((_alternatives(_WORD, r"\p{N}", _SYMBOLS, _SPACES),))),
    ("laguna", WordRules((r"[^\n]+|[\n]+", _QWEN2))),
    (
        "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe gigachat a.x-4.0 mellum "
        "modern-bert exaone4 mpt olmo jais trillion granite-docling",
        _WORDS,
    ),
    ("smollm starcoder refact command-r cohere2_moe codeshell exaone minerva-7b mellum2", _SINGLE_DIGITS),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", _GPT4O_RULES),
    ("granite-embed-multi-97m", replace(_GPT4O_RULES, whole_words=True)),
    ("tekken", WordRules((_TEKKEN,), whole_words=True, add_bos=True)),
    ("tiny_aya cohere2moe", WordRules((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O))),
    ("kimi-k2", WordRules((_KIMI,))),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", _DEEPSEEK3_RULES),
    ("spark2_5", WordRules((r"\p{N}{1,3}", _CJK, _SPARK, r"\p{N}"))),
    (
        "deepseek-llm",
        WordRules(
            (
                r"[\r\n]",
                _DEEPSEEK_LETTERS,
                r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
                r"\s+$",
                _DEEPSEEK_CJK,
                r"\p{N}+",
            )
        ),
    ),
    ("deepseek-coder", WordRules((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}"))),
    (
        "youtu",
        WordRules(
            (_YOUTU_CJK, _alternatives(_cased(_UPPER, _LOWER, _ANY_CASE + "?"), r"\p{N}", _SYMBOLS_SLASH, _SPACES)),
            whole_words=True,
        ),
    ),
    ("afmoe", WordRules((_THREES_FROM_THE_END, _AFMOE_ASIAN, _DEEPSEEK3))),
    ("falcon", WordRules((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"))),
    ("poro-chat bloom gpt3-finnish", WordRules((_BLOOM,))),
    ("viking", WordRules((_BLOOM, r"\p{N}"))),
    ("superbpe", WordRules((r"\p{N}+", r"(?=(\d{3})+(?!\d))"))),
    ("bailingmoe bailingmoe2 llada-moe", _BAILING),
    ("seed-coder", WordRules((_alternatives(_ANY_CASE, _WORD, r"\p{N}{1}", r" ?[^\s\p{L}\p{N}\r\n]+", _SPACES),))),
    (
        "exaone-moe",
        WordRules(
            (
                _alternatives(
                    _ANY_CASE,
                    r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+",
                    r"\p{N}",
                    r" ?[^\s\p{L}\p{N}]+[\r\n/]?",
                    r"\s*[\r\n]|\s+(?!\S)|\s+",
                ),
            )
        ),
    ),
    (
        "chameleon",
        WordRules(
            (
                r"<sentinel:[0-9]+>",
                r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
                r"([\t\n]|    |  )",
                r"\p{N}",
                r"[\p{P}!-/:-@\[-`{-~]",
                _GPT2,
            ),
            add_bos=True,
        ),
    ),
)

WORD_RULES: dict[str, WordRules] = {name: rules for names, rules in _RULES_BY_NAMES for name in names.split()}


def word_rules(vocabulary: GgufVocabulary) -> WordRules:
    """Return the file's rules, those of "default" if it names none. Raises LoadError for an unknown name."""
    kind = vocabulary.pre or DEFAULT
    if kind not in WORD_RULES:
        vocabulary.refuse(
            f"its word rules are unknown: tokenizer.ggml.pre is {kind[:80]!r}{did_you_mean(kind, WORD_RULES)}; "
            f"known are {', '.join(sorted(WORD_RULES))}"
        )
    return WORD_RULES[kind]


def gguf_byte_level_parts(vocabulary: GgufVocabulary) -> dict[str, Any]:
    """Return the parts of tokenizer.json for a byte-level vocabulary. Raises LoadError."""
    rules = word_rules(vocabulary)
    model = merging_model(vocabulary.ids, file_merges(vocabulary), whole_words=rules.whole_words)
    return byte_level_parts(rules.splits, model)


def byte_level_parts(splits: Sequence[str], model: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of tokenizer.json for words cut by `splits` and merged by `model`."""
    steps: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False} for split in splits
    ]
    steps.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False})
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": model,
    }


def scored_parts(vocabulary: GgufVocabulary) -> dict[str, Any]:
    """Return the parts of tokenizer.json for a vocabulary whose scores give the merge order. Raises LoadError."""
    prefix = vocabulary.space_prefix is not False
    return _sentencepiece_parts(vocabulary, merges_from_scores(vocabulary), space_before=prefix)


def merge_list_parts(vocabulary: GgufVocabulary) -> dict[str, Any]:
    """Return the parts of tokenizer.json for a SentencePiece vocabulary with merges (Gemma 4). Raises LoadError."""
    return _sentencepiece_parts(vocabulary, file_merges(vocabulary), space_before=bool(vocabulary.space_prefix))


def _sentencepiece_parts(
    vocabulary: GgufVocabulary, merges: list[tuple[str, str]], *, space_before: bool
) -> dict[str, Any]:
    escape: dict[str, Any] = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    if space_before:
        escape = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}, escape]}
    unknown = vocabulary.special.get("unk")
    return {
        "normalizer": escape,
        "pre_tokenizer": None,
        "decoder": sentencepiece_decoder(int(space_before)),
        "model": merging_model(
            vocabulary.ids, merges, unknown=None if unknown is None else vocabulary.tokens[unknown], byte_tokens=True
        ),
    }


def sentencepiece_decoder(leading_spaces: int) -> dict[str, Any]:
    """Return the decoder of tokenizer.json. leading_spaces: maximum number removed from the start of a text."""
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if leading_spaces:
        steps.append({"type": "Strip", "content": " ", "start": leading_spaces, "stop": 0})
    return {"type": "Sequence", "decoders": steps}


def file_merges(vocabulary: GgufVocabulary) -> list[tuple[str, str]]:
    """Return the file's merges. Raises LoadError if there are none, or one is not made of tokens."""
    if vocabulary.merges is None:
        vocabulary.refuse("its merges are missing (tokenizer.ggml.merges)")
    ids = vocabulary.ids
    for first, second in vocabulary.merges:
        if first not in ids or second not in ids or first + second not in ids:
            vocabulary.refuse(f"the merge of {first[:40]!r} and {second[:40]!r} does not join two tokens to a third")
    return vocabulary.merges


def merges_from_scores(vocabulary: GgufVocabulary) -> list[tuple[str, str]]:
    """Return the pairs of tokens that form a token, ordered by the score of that token.

    SentencePiece merges the neighbours whose token has the best score, and the leftmost of equal ones. Here each pair has
    its own rank: of the pairs that form the same token, the one with the longer left token is first, as in transformers.
    """
    scores, ids = vocabulary.scores, vocabulary.ids
    if scores is None:
        vocabulary.refuse("the scores of its tokens are missing (tokenizer.ggml.scores)")
    pairs: list[tuple[float, int, str, str]] = []
    for token, score in zip(vocabulary.tokens, scores, strict=True):
        if len(token) > _MAX_MERGED_CHARACTERS:
            vocabulary.refuse(f"a token has {len(token)} characters; the limit is {_MAX_MERGED_CHARACTERS}")
        for cut in range(1, len(token)):
            if (left := token[:cut]) in ids and (right := token[cut:]) in ids:
                pairs.append((-score, -cut, left, right))
    pairs.sort(key=lambda pair: pair[:2])
    return [(left, right) for _, _, left, right in pairs]


def merging_model(
    ids: dict[str, int],
    merges: list[tuple[str, str]],
    *,
    unknown: str | None = None,
    whole_words: bool = False,
    byte_tokens: bool = False,
) -> dict[str, Any]:
    """Return the BPE model of tokenizer.json.

    unknown: the unknown token. whole_words: a word that is a token is not split. byte_tokens: characters without a token
    become byte tokens such as `<0xE2>`.
    """
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": byte_tokens,
        "byte_fallback": byte_tokens,
        "ignore_merges": whole_words,
        "vocab": ids,
        "merges": merges,
    }
