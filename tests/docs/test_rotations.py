"""What pages show as a change of the rotation is one, on the model that they ask: smollm2, trained for 8,192 tokens."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from helpers.doc_examples import ROOT

from windlass.engine.model.families.spec_reader import read_rotary_groups
from windlass.engine.rotary.rope_scaling import RopeScaling, apply_scaling
from windlass.engine.rotary.rotary_policy import make_plan
from windlass.server.serving.request_rotation import report_at

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "num_attention_heads": 9,
    "rope_theta": 1e5,
    "max_position_embeddings": 8192,
}
LONGEST = 40 + 1024  # tokens of a short prompt and of the answer of a chat that does not say
README = (ROOT / "README.md").read_text(encoding="utf-8")


def fingerprint(scaling: Any, length: int = LONGEST) -> str:
    groups = apply_scaling(read_rotary_groups(CONFIG), None if scaling is None else RopeScaling.from_dict(scaling))
    return report_at(make_plan(groups, length, None), length, 0).fingerprint


def requests(page: str) -> list[Any]:
    """The scalings that requests of a page bring: in bodies, in Python, and in a chat."""
    found = [json.loads(text) for text in re.findall(r"rope_scaling\"?: (\{[^{}]*\})", page)]
    return found + [{"rope_type": kind, "factor": float(by)} for kind, by in re.findall(r"/rope (\w+) (\d+)", page)]


@pytest.mark.parametrize(("name", "least"), [("README.md", 4), ("docs/openai.md", 2), ("docs/chat.md", 1)])
def test_a_request_that_shows_a_scaling_runs_under_another_rotation(name: str, least: int) -> None:
    found = [one for one in requests((ROOT / name).read_text(encoding="utf-8")) if one["factor"] > 0]
    assert len(found) >= least
    for scaling in found:
        assert fingerprint(scaling) != fingerprint(None), scaling


def test_the_readme_shows_two_rotations_as_they_are() -> None:
    part = README.partition("## A first request")[2].partition("\n## ")[0]
    plain, scaled = (
        json.loads(block.replace("\n ", " "))["rotary"] for block in re.findall(r"```json\n(.*?)```", part, re.DOTALL)
    )
    asked = requests(README)[0]
    assert plain["fingerprint"] == fingerprint(None) != scaled["fingerprint"] == fingerprint(asked)
    assert {"rope_type": scaled["rope_type"], **scaled["parameters"]} == {"rope_theta": 1e5, **asked}


def test_what_a_scaling_would_do_is_asked_for_a_length_at_which_it_does_something() -> None:
    page = (ROOT / "docs" / "rotary.md").read_text(encoding="utf-8")
    (body,) = re.findall(r"/v1/rotary/inspect .*\n +-d '(.*)'", page)
    asked = json.loads(body)
    assert fingerprint(asked["rope_scaling"], asked["length"]) != fingerprint(None)
