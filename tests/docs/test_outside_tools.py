"""What lm-eval and guidellm ask of the server, request by request, and the numbers of docs/outside-tools.md.

The tools themselves are no dependency of the tests: their payloads and their arithmetic are repeated here, as of
lm-eval 0.4.13 (`models/openai_completions.py`, `api/metrics.py`) and guidellm 0.8.1 (`backends/openai`).
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.live_server import parse_events
from helpers.real_server import RealServer
from transformers import AutoTokenizer

ROOT = Path(__file__).parents[2]
TASKS = ROOT / "benchmarks" / "lm_eval"
DEMO = ROOT / "models" / "demo"
PAGE = (ROOT / "docs" / "outside-tools.md").read_text(encoding="utf-8")


def documents(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (TASKS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEMO)


def on_the_page(task: str, metric: str) -> float:
    (value,) = re.findall(rf"^\| `{task}` \| {metric} \| ([0-9.]+) \|", PAGE, re.MULTILINE)
    return float(value)


def ask(server: RealServer, **body: Any) -> dict[str, Any]:
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    return response.json()


def loglikelihoods(server: RealServer, pairs: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
    """Of each continuation after its context, and whether it is the greedy one, as lm-eval asks and reads it."""
    prompts = [context + continuation for context, continuation in pairs]
    answer = ask(server, model="demo", prompt=prompts, temperature=0, max_tokens=1, logprobs=1, seed=1234, echo=True)
    found = []
    for choice, (context, continuation) in zip(answer["choices"], pairs, strict=True):
        values = choice["logprobs"]["token_logprobs"][len(context) : -1]
        tops = choice["logprobs"]["top_logprobs"][len(context) : -1]
        assert len(values) == len(continuation)
        found.append((sum(values), all(value == max(top.values()) for value, top in zip(values, tops, strict=True))))
    return found


def test_endings_are_scored_as_the_page_says(demo_server: RealServer, tokenizer: Any) -> None:
    right, right_by_length = [], []
    for document in documents("endings"):
        whole = [tokenizer.encode(f"{document['beginning']} {ending}") for ending in document["endings"]]
        context = tokenizer.encode(document["beginning"])
        assert all(ids[: len(context)] == context for ids in whole)
        scores = [score for score, _ in loglikelihoods(demo_server, [(context, ids[len(context) :]) for ids in whole])]
        by_length = [score / len(ending) for score, ending in zip(scores, document["endings"], strict=True)]
        right.append(scores.index(max(scores)) == document["answer"])
        right_by_length.append(by_length.index(max(by_length)) == document["answer"])
    assert round(sum(right) / len(right), 4) == on_the_page("demo_endings", "acc")
    assert round(sum(right_by_length) / len(right), 4) == on_the_page("demo_endings", "acc_norm")


def test_greedy_continuations_are_told_apart(demo_server: RealServer, tokenizer: Any) -> None:
    context = tokenizer.encode("In the beginning God created the heaven and the")
    greedy = ask(demo_server, prompt=context, max_tokens=3, temperature=0, return_token_ids=True)["choices"][0]
    other = [greedy["token_ids"][0], 100]
    (_, is_greedy), (_, is_not) = loglikelihoods(demo_server, [(context, greedy["token_ids"]), (context, other)])
    assert is_greedy and not is_not


def test_verses_are_recited_as_the_page_says(demo_server: RealServer, tokenizer: Any) -> None:
    matches = []
    for document in documents("recite"):
        answer = ask(
            demo_server,
            prompt=[tokenizer.encode(document["beginning"])],
            model="demo",
            max_tokens=16,
            temperature=0,
            stop=[".", "\n", "<|end|>"],
            seed=1234,
        )
        word = re.match(r"\s*(\w+)", answer["choices"][0]["text"])
        matches.append(word is not None and word[1].lower() == document["word"].lower())
    assert round(sum(matches) / len(matches), 4) == on_the_page("demo_recite", "exact_match")


def test_perplexities_are_those_of_the_page(demo_server: RealServer, tokenizer: Any) -> None:
    texts = [document["text"] for document in documents("heldout")]
    ids = [tokenizer.encode(text) for text in texts]  # the first is the beginning-of-sequence token
    size = sum(len(text.encode()) for text in texts)
    words = sum(len(re.split(r"\s+", text)) for text in texts)
    once = sum(score for score, _ in loglikelihoods(demo_server, [(part[:1], part[1:]) for part in ids]))
    (shown,) = re.findall(r"Without it the byte perplexity is ([0-9.]+)\.\)", " ".join(PAGE.split()))
    assert math.exp(-once / size) == pytest.approx(float(shown), abs=2e-4)
    # With add_bos_token lm-eval puts that token before a text that already has it, and scores the second.
    total = sum(score for score, _ in loglikelihoods(demo_server, [(part[:1], part) for part in ids]))
    assert math.exp(-total / size) == pytest.approx(on_the_page("demo_heldout", "byte_perplexity"), abs=2e-4)
    assert -total / size / math.log(2) == pytest.approx(on_the_page("demo_heldout", "bits_per_byte"), abs=2e-4)
    assert math.exp(-total / words) == pytest.approx(on_the_page("demo_heldout", "word_perplexity"), rel=1e-5)


def test_documents_fit_their_tasks() -> None:
    endings, heldout = documents("endings"), documents("heldout")
    assert f"{len(endings)} sentences" in PAGE and f"{len(documents('recite'))} verses" in PAGE and len(heldout) == 4
    excerpt = json.loads((DEMO / "heldout_excerpt.json").read_text(encoding="utf-8"))
    for document in endings:
        assert len(set(document["endings"])) == 4
        own = f"{document['beginning']} {document['endings'][document['answer']]}"
        assert own in excerpt["bible" if document["source"] == "ruth" else "sqlite"]
    for task in TASKS.glob("*.yaml"):
        text = task.read_text(encoding="utf-8")
        assert f"task: {task.stem}\n" in text and task.stem in PAGE
        (data,) = re.findall(r"^    test: (\S+)$", text, re.MULTILINE)
        assert (ROOT / data).is_file()


@pytest.mark.parametrize("chat", [False, True])
def test_guidellm_gets_the_counts_it_relies_on(demo_server: RealServer, chat: bool) -> None:
    """Exactly as many tokens as asked for, and a running usage in every chunk."""
    content = [{"type": "text", "text": "1 0 m0 Finish medical want almost away until."}]
    prompt = (
        {"messages": [{"role": "user", "content": content}], "max_completion_tokens": 24}
        if chat
        else {"prompt": content[0]["text"], "max_tokens": 24}
    )
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"model": "demo", "stream": True, "stream_options": options, "ignore_eos": True, **prompt}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    with httpx.stream("POST", demo_server.url + path, json=body, timeout=60) as response:
        *chunks, done = parse_events(response.read().decode())
    assert done == "[DONE]" and not chunks[-1]["choices"]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert (
        counts == sorted(counts)
        and counts[-1] == 24
        and len({chunk["usage"]["prompt_tokens"] for chunk in chunks}) == 1
    )
    assert httpx.get(f"{demo_server.url}/v1/models").json()["data"][0]["id"] == "demo"
