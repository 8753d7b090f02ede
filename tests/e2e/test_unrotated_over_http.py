"""Models without rotation through real servers: what they say of themselves, and what they refuse with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import tokenizers
from helpers.marks import slow_but
from helpers.real_server import RealServer, serve
from helpers.refused import inside, program, reason
from helpers.tiny_unrotated import logits_of, make_unrotated
from tokenizers import models, pre_tokenizers

PROMPT = "a b c d e f g h"


def make(directory: Path, family: str) -> Path:
    words = {chr(ord("a") + i): i for i in range(26)}
    made = tokenizers.Tokenizer(models.WordLevel(words, unk_token="a"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    make_unrotated(family, directory)
    made.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="module", params=slow_but(["gpt2", "bloom", "falcon_rw"], "gpt2"))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[RealServer]:
    with serve("--max-model-len", "256", model=model) as server:
        yield server


def test_answers_and_refusals(server: RealServer, model: Path) -> None:
    def ask(**body: object) -> httpx.Response:
        wanted = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "return_token_ids": True, **body}
        return httpx.post(f"{server.url}/v1/completions", json=wanted, timeout=60)

    learned = model.name.startswith("gpt2")
    text = ask()
    assert text.status_code == 200, text.text
    ids = list(range(8))
    for token in text.json()["choices"][0]["token_ids"]:
        assert int(logits_of(model, ids)[-1].argmax()) == token
        ids.append(token)
    for scaling in ({"rope_type": "yarn", "factor": 2}, "auto"):
        refused = ask(rope_scaling=scaling)
        assert refused.status_code == 400 and refused.json()["error"]["param"].startswith("rope_scaling"), refused.text
    for field, value in (("context_overflow", "shift"), ("cache_reuse", 32)):
        answer = ask(**{field: value})
        assert answer.status_code == (400 if learned else 200), answer.text
        if learned:
            assert "learned" in answer.json()["error"]["message"] and answer.json()["error"]["param"] == field
    card = httpx.get(f"{server.url}/v1/models").json()["data"][0]
    assert card["rotary"] is None and card["rotary_auto"] is None and "generate" in card["tasks"]
    assert httpx.get(f"{server.url}/v1/rotary").json()["error"]["code"] == "no_rotation"
    assert "rotary    none: " in server.log.read_text()


@pytest.mark.parametrize(
    ("family", "option", "says"),
    [
        ("gpt2", ("--context-overflow", "shift"), "are learned"),
        ("gpt2", ("--max-model-len", "300"), "a table of 256"),
        ("gpt2", ("--rope-scaling", '{"rope_type": "yarn", "factor": 2}'), "does not rotate"),
        ("bloom", ("--rope-scaling", "auto"), "no rotation that could be scaled"),
        ("bloom", ("--attention-window", "64,16"), "lose by the distance"),
    ],
)
def test_starts_that_are_refused(family: str, option: tuple[str, ...], says: str, tmp_path: Path) -> None:
    start = program if option[-1] == "auto" else inside
    assert says in reason(start("serve", make(tmp_path, family), "--port", "0", *option))
