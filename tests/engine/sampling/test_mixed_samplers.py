"""DRY, XTC, grammars and plain requests in one engine do not affect each other, also with preemption and speculation."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from helpers.engines import greedy, make_core, run
from llguidance import LLMatcher
from tokenizers import Tokenizer

import windlass
from windlass.engine.core.engine_core import EngineCore
from windlass.engine.interface.request import DryParams, EngineRequest

DEMO = Path(windlass.__file__).parent / "models" / "demo"
TOKENIZER = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
WORDS = LLMatcher.grammar_from_regex("(red|green|blue)( and (red|green|blue)){12}")
DRY: dict[str, Any] = {"repeats": DryParams(multiplier=2.0, base=1.75, allowed_length=1)}
XTC: dict[str, Any] = {"temperature": 1.0, "xtc_probability": 0.6, "xtc_threshold": 0.05}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "drawn": {"temperature": 1.0, "seed": 1},
    "dry": DRY,
    "dry drawn": {**DRY, "temperature": 0.8, "seed": 2},
    "xtc": {**XTC, "seed": 3},
    "both": {**XTC, **DRY, "seed": 4, "repetition_penalty": 1.1},
    "grammar": {"grammar": WORDS},
    "grammar dry": {**DRY, "grammar": WORDS},
    "grammar xtc": {**XTC, "grammar": WORDS, "seed": 5},
    "grammar both": {**XTC, **DRY, "grammar": WORDS, "seed": 6, "n": 2},
}


def requests(*names: str) -> list[EngineRequest]:
    prompt = TOKENIZER.encode("The colours of the flags are red and green and blue and red and green").ids
    return [
        greedy(name, prompt, **{"max_tokens": 60, "ignore_eos": "grammar" not in name, **KINDS[name]})
        for name in names or KINDS
    ]


def tokens(core: EngineCore, *names: str) -> dict[tuple[str, int], list[int]]:
    return {key: sample.token_ids for key, sample in run(core, requests(*names)).items()}


@cache
def alone() -> dict[tuple[str, int], list[int]]:
    """Run each request in an engine without others."""
    core = make_core(DEMO, deterministic=True)
    return {key: ids for name in KINDS for key, ids in tokens(core, name).items()}


@pytest.mark.slow
def test_kinds_differ_and_grammars_match() -> None:
    found = alone()
    assert len({tuple(ids) for ids in found.values()}) == len(found) == len(KINDS) + 1
    said = [TOKENIZER.decode(ids) for (name, _), ids in found.items() if "grammar" in name]
    assert len(said) == 5 and all(re.fullmatch(r"\w+( and \w+){12}", text.strip()) for text in said)


@pytest.mark.slow
def test_requests_draw_the_same_together_and_alone() -> None:
    assert tokens(make_core(DEMO, deterministic=True)) == alone()
    assert tokens(make_core(DEMO, deterministic=True, max_num_seqs=3), *reversed(KINDS)) == alone()


def test_speculation_does_not_change_tokens() -> None:
    core = make_core(DEMO, deterministic=True, speculative_ngram=4)
    assert tokens(core) == alone()
    assert core.stats().spec_decode_num_accepted_tokens > 10


@pytest.mark.parametrize("blocks", [16, 24])
def test_preemption_does_not_change_tokens(blocks: int) -> None:
    info = make_core(DEMO, deterministic=True).info
    memory = blocks * info.kv_bytes_per_token * info.block_size
    core = make_core(DEMO, deterministic=True, kv_cache_memory=memory, max_model_len=200)
    assert tokens(core) == alone()
    assert core.stats().num_preemptions > 0
