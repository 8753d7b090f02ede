"""Parts of tokenizer.json for BPE vocabularies: byte-level and SentencePiece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from windlass.engine.errors import did_you_mean
from windlass.server.text.vocabularies.vocabulary import GgufVocabulary

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
    (
        DEFAULT,
        WordRules((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    ),
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
            vocabulary.ids,
            merges,
            unknown=None if unknown is None else vocabulary.tokens[unknown],
            byte_tokens=True,
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
