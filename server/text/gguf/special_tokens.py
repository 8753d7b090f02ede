"""Which tokens of a GGUF vocabulary are no ordinary text: control tokens, and those that a user added.

Responsible for the rules that llama.cpp keeps in its code because the files do not hold them (src/llama-vocab.cpp).
Knows nothing of tokenizer.json.
"""

from __future__ import annotations

from dataclasses import dataclass

from windlass.server.text.gguf.fields import GgufVocabulary, TokenType

_NAMED = {"bos": "bos_token", "eos": "eos_token", "unk": "unk_token", "pad": "pad_token"}
_ADDED = (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN)


@dataclass(frozen=True, slots=True)
class FoundToken:
    """A token that is found in a text before anything else.

    special: left out of decoded text. strips_right: white space behind it belongs to it.
    """

    id: int
    text: str
    special: bool
    strips_right: bool = False


def found_tokens(vocabulary: GgufVocabulary) -> list[FoundToken]:
    """In the order of their ids."""
    # Files do not say which tokens swallow the white space behind them; llama.cpp goes by the model's name.
    phi3 = "phi-3" in vocabulary.model_name or "phi3" in vocabulary.model_name
    keeps_space = ("<unk>", "<s>", "<|endoftext|>")
    return [
        FoundToken(index, text, kind != TokenType.USER_DEFINED, phi3 and text not in keeps_space)
        for index, (text, kind) in enumerate(zip(vocabulary.tokens, _types(vocabulary), strict=True))
        if kind in _ADDED
    ]


def named_tokens(vocabulary: GgufVocabulary) -> dict[str, int]:
    """Ids of bos_token, eos_token, unk_token and pad_token, as far as there are any.

    Unknown and padding tokens only where they are no ordinary text: some files name "!" as padding, and a named token is
    found in a text before anything else.
    """
    types = _types(vocabulary)
    return {
        _NAMED[name]: index for name, index in vocabulary.special.items() if name in _NAMED and types[index] in _ADDED
    }


def start_and_end(vocabulary: GgufVocabulary, *, bos: bool) -> tuple[list[int], list[int]]:
    """Ids put before and behind a text; `bos`: whether there is one where the file does not tell. Raises LoadError."""
    found: list[list[int]] = []
    for name, told, default in (("bos", vocabulary.add_bos, bos), ("eos", vocabulary.add_eos, False)):
        if told and name not in vocabulary.special:
            vocabulary.refuse(f"every text gets a {name} token, and tokenizer.ggml.{name}_token_id is missing")
        wanted = default if told is None else told
        found.append([vocabulary.special[name]] if wanted and name in vocabulary.special else [])
    return found[0], found[1]


def _types(vocabulary: GgufVocabulary) -> list[int]:
    """The file's types; what begins or ends a text is a control token, also in older files that have all tokens as normal."""
    types = list(vocabulary.types)
    for name in ("bos", "eos", "eot", "eom"):
        if (index := vocabulary.special.get(name)) is not None and types[index] not in _ADDED:
            types[index] = TokenType.CONTROL
    return types
