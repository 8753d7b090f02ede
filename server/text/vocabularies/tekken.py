"""Reads tekken.json, the vocabulary of Mistral's models since Nemo (mistral-common, tokens/tokenizers/tekken.py).

Responsible for its ids: special tokens stand first, and the tokens of the file follow as far as the vocabulary goes.
"""

from __future__ import annotations

import base64
import binascii
import json
from typing import Any

from windlass.server.text.vocabularies.ranked_bytes import ranked_parts, refuse
from windlass.server.text.vocabularies.reading import ReadVocabulary, added_token

FILE = "tekken.json"
# What files before version 7 leave out (mistral-common, the same file).
_OLDER_SPECIAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *(
        "[/TOOL_RESULTS]",
        "[TOOL_CALLS]",
        "[IMG]",
        "<pad>",
        "[IMG_BREAK]",
        "[IMG_END]",
        "[PREFIX]",
        "[MIDDLE]",
        "[SUFFIX]",
    ),
    *("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
_NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def read_tekken(data: bytes, source: str) -> ReadVocabulary:
    """The vocabulary in a file's bytes; `source` names the file. Raises LoadError, one line."""
    try:
        content = json.loads(data)
        config = content["config"]
        pattern, count, size = config["pattern"], config["default_num_special_tokens"], config["default_vocab_size"]
        special = _special(content.get("special_tokens"), count)
        tokens = [base64.b64decode(token["token_bytes"], validate=True) for token in content["vocab"][: size - count]]
        ranks = [token["rank"] for token in content["vocab"][: size - count]]
    except (ValueError, KeyError, TypeError, RecursionError, binascii.Error) as error:
        refuse(
            source,
            f"it is not in the form of tekken.json ({type(error).__name__}: {' '.join(str(error).split())[:100]})",
        )
    if ranks != list(range(len(ranks))) or not tokens or not isinstance(pattern, str):
        refuse(source, "the ranks of its tokens are not 0, 1, 2, …")
    parts = ranked_parts(tokens, [pattern], source, first_id=count)
    parts["added_tokens"] = [added_token(index, text, special=True) for index, text in enumerate(special)]
    parts["model"]["vocab"] |= {text: index for index, text in enumerate(special)}
    return ReadVocabulary(
        parts, count + len(tokens), {name: text for name, text in _NAMED.items() if text in special}, add_bos=True
    )


def _special(given: Any, count: int) -> list[str]:
    """Special tokens by id, `count` of them, those without a name filled in as mistral-common does."""
    older = enumerate(_OLDER_SPECIAL)
    named = dict(older if given is None else ((int(token["rank"]), str(token["token_str"])) for token in given))
    if len(named) > count or any(not 0 <= index < count for index in named):
        raise ValueError(f"{len(named)} special tokens, and there is room for {count}")
    return [named.get(index, f"<SPECIAL_{index}>") for index in range(count)]
