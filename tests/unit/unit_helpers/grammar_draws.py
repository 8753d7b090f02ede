"""Random documents under a grammar, sampled over the demo model's vocabulary."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from windlass.server.text.grammars import GrammarCompiler
from windlass.server.text.tokenizer import Tokenizer

DEMO = Path(__file__).parents[3] / "models" / "demo"
EOS = 2


@cache
def demo_tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(DEMO)


@cache
def demo_compiler() -> GrammarCompiler:
    return GrammarCompiler(demo_tokenizer())


@cache
def _vocabulary() -> LLTokenizer:
    return LLTokenizer(str(DEMO / "tokenizer.json"), n_vocab=demo_tokenizer().vocab_size, eos_token=[EOS])


def takes(schema: Any, value: Any, kind: str = "json_schema") -> bool:
    """Return whether the grammar of a JSON schema accepts a document."""
    matcher = LLMatcher(_vocabulary(), demo_compiler().compile(kind, json.dumps(schema)), log_level=0)
    return _all_of(matcher, json.dumps(value))


def accepts(kind: str, value: str, text: str) -> bool:
    """Return whether the grammar of a pattern or another constraint accepts a text."""
    return takes_text(demo_compiler().compile(kind, value), text)


def takes_text(grammar: str, text: str) -> bool:
    """Return whether a compiled grammar accepts a text."""
    return _all_of(LLMatcher(_vocabulary(), grammar, log_level=0), text)


def _all_of(matcher: LLMatcher, text: str) -> bool:
    ids = demo_tokenizer().encode(text, add_special_tokens=False)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def drawn(grammar: str, seed: int, most: int = 300) -> str | None:
    """Sample a text token by token; return None if it does not end within `most` tokens.

    The end and closing punctuation are preferred, so that texts end.
    """
    source, matcher = random.Random(seed), LLMatcher(_vocabulary(), grammar, log_level=0)
    tokenizer, output = demo_tokenizer(), list[int]()
    words = np.zeros(-(-tokenizer.vocab_size // 32), np.int32)
    while len(output) < most:
        matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        assert not matcher.is_error(), matcher.get_error()
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
        assert allowed, "the grammar leaves no token"
        if EOS in allowed and (len(allowed) == 1 or source.random() < 0.5):
            return b"".join(map(tokenizer.token_bytes, output)).decode()
        closing = [token for token in allowed if tokenizer.token_bytes(token) in (b'"', b"}", b"]", b",", b":")]
        token = source.choice(closing if closing and source.random() < 0.5 else [one for one in allowed if one != EOS])
        assert matcher.consume_token(token), matcher.get_error()
        output.append(token)
    return None
