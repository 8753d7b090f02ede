"""Prefix keys depend on everything that cached keys depend on, and on nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from helpers.scripted_engine import model_info

from windlass.engine.client.prefix_router import MAX_KEY_BLOCKS, PrefixKeys
from windlass.engine.interface.config import RotaryConfig
from windlass.engine.interface.context import ContextRule
from windlass.engine.interface.request import EngineRequest, SamplingParams
from windlass.engine.rotary.rope_scaling import RopeScaling

PROMPT = list(range(100))


def keys(**fields: object) -> PrefixKeys:
    return PrefixKeys(model_info(**fields), RotaryConfig())


def request(prompt: list[Any] = PROMPT, **fields: Any) -> EngineRequest:
    return EngineRequest("r", prompt, SamplingParams(max_tokens=fields.pop("max_tokens", 16)), **fields)


def scaling(**fields: object) -> RopeScaling:
    return RopeScaling.from_dict(dict(fields), param="rope_scaling")


YARN = scaling(rope_type="yarn", factor=4.0)


def test_equal_prefixes_have_equal_keys() -> None:
    ours = keys()
    assert ours.block_tokens == 32
    found, longer = ours.of(request()), ours.of(request([*PROMPT, *range(60)]))
    assert (len(found), len(longer)) == (3, 5)
    assert longer[:3] == found and len({*longer}) == 5
    changed = ours.of(request([*PROMPT[:40], 0, *PROMPT[41:]]))
    assert changed[0] == found[0] and not {*changed[1:]} & {*found}
    assert ours.of(request(caller="somebody", priority=3, max_tokens=50)) == found


@pytest.mark.parametrize(
    "fields",
    [
        {"cache_salt": "s"},
        {"cache_salt": ""},
        {"adapter": 1},
        {"adapter": 2},
        {"rope_scaling": YARN},
        {"rope_scaling": scaling(rope_type="yarn", factor=8.0)},
        {"rope_scaling": scaling(rope_type="dynamic", factor=2.0), "max_tokens": 150},
        {"context": ContextRule(attention_window=32)},
        {"context": ContextRule(attention_window=32, attention_sinks=4)},
    ],
)
def test_keys_depend_on_everything_that_cached_keys_depend_on(fields: dict[str, Any]) -> None:
    ours = keys()
    assert not {*ours.of(request(**fields))} & {*ours.of(request())}
    assert ours.of(request(**fields)) == ours.of(request(**fields))


def test_scalings_with_equal_frequencies_have_equal_keys() -> None:
    ours = keys()
    assert ours.of(request(rope_scaling=scaling(rope_type="default"))) == ours.of(request())
    dynamic = scaling(rope_type="dynamic", factor=2.0)
    short, long = (ours.of(request(rope_scaling=dynamic, max_tokens=count)) for count in (16, 150))
    assert short == ours.of(request()) != long  # without effect within the trained length


def test_any_prompt_has_keys() -> None:
    ours = keys(max_model_len=1 << 20)
    assert ours.of(request([])) == ours.of(request(PROMPT[:31])) == []
    assert len(ours.of(request([7] * (33 * MAX_KEY_BLOCKS)))) == MAX_KEY_BLOCKS
    assert ours.of(request(["a"] * 64)) == ours.of(request([2**70] * 64)) == []
    refused = request(rope_scaling=RopeScaling("nothing"))
    assert len(ours.of(refused)) == 3


def test_blocks_are_those_of_the_engine() -> None:
    assert keys(block_size=48).block_tokens == 48 and keys(block_size=16).block_tokens == 32
    other = PrefixKeys(replace(model_info(), fingerprint="other weights"), RotaryConfig())
    assert not {*other.of(request())} & {*keys().of(request())}
