"""The requests of lm-eval and guidellm, compared with transformers.

The tools themselves are no dependency of the tests. Their payloads are repeated here, as of lm-eval 0.4.13
(`models/openai_completions.py`) and guidellm 0.8.1 (`backends/openai`).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import yaml
from helpers.live_server import parse_events
from helpers.real_server import RealServer
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parents[2]
TASKS = ROOT / "benchmarks" / "lm_eval"
DEMO = ROOT / "models" / "demo"


def documents(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (TASKS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEMO)


@pytest.fixture(scope="module")
def reference() -> Any:
    return AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()


Pair = tuple[list[int], list[int]]  # a context and its continuation


def loglikelihoods(server: RealServer, pairs: list[Pair]) -> list[tuple[float, bool]]:
    """The log-likelihood of each continuation and whether it is the greedy one, as lm-eval requests and parses them."""
    prompts = [context + continuation for context, continuation in pairs]
    answer = server.complete(prompts, model="demo", max_tokens=1, logprobs=1, seed=1234, echo=True)
    found = []
    for choice, (context, continuation) in zip(answer["choices"], pairs, strict=True):
        values = choice["logprobs"]["token_logprobs"][len(context) : -1]
        tops = choice["logprobs"]["top_logprobs"][len(context) : -1]
        assert len(values) == len(continuation)
        found.append((sum(values), all(value == max(top.values()) for value, top in zip(values, tops, strict=True))))
    return found


@torch.no_grad()
def expected_loglikelihood(reference: Any, pair: Pair) -> float:
    context, continuation = pair
    logits = reference(torch.tensor([context + continuation])).logits[0, len(context) - 1 : -1]
    return float(logits.log_softmax(-1).gather(1, torch.tensor(continuation)[:, None]).sum())


def test_loglikelihoods_of_endings(demo_server: RealServer, tokenizer: Any, reference: Any) -> None:
    for document in documents("endings"):
        context = tokenizer.encode(document["beginning"])
        texts = [tokenizer.encode(f"{document['beginning']} {ending}") for ending in document["endings"]]
        assert all(ids[: len(context)] == context for ids in texts)
        pairs = [(context, ids[len(context) :]) for ids in texts]
        for pair, (found, _) in zip(pairs, loglikelihoods(demo_server, pairs), strict=True):
            assert found == pytest.approx(expected_loglikelihood(reference, pair), abs=1e-3 * len(pair[1]))


def test_loglikelihoods_of_entire_texts(demo_server: RealServer, tokenizer: Any, reference: Any) -> None:
    texts = [tokenizer.encode(document["text"]) for document in documents("heldout")]
    # With add_bos_token lm-eval puts that token before a text that already has it.
    pairs = [pair for ids in texts for pair in ((ids[:1], ids[1:]), (ids[:1], ids))]
    for pair, (found, _) in zip(pairs, loglikelihoods(demo_server, pairs), strict=True):
        assert found == pytest.approx(expected_loglikelihood(reference, pair), abs=1e-3 * len(pair[1]))


def test_greedy_continuations_are_recognized(demo_server: RealServer, tokenizer: Any) -> None:
    context = tokenizer.encode("In the beginning God created the heaven and the")
    greedy = demo_server.complete(context, max_tokens=3, return_token_ids=True)["choices"][0]
    other = [greedy["token_ids"][0], 100]
    (_, is_greedy), (_, is_not) = loglikelihoods(demo_server, [(context, greedy["token_ids"]), (context, other)])
    assert is_greedy and not is_not


def test_texts_are_generated_until_a_stop_string(demo_server: RealServer, tokenizer: Any, reference: Any) -> None:
    for document in documents("recite"):
        ids = tokenizer.encode(document["beginning"])
        stop = [".", "\n", "<|end|>"]
        answer = demo_server.complete([ids], model="demo", max_tokens=16, stop=stop, seed=1234)
        (choice,) = answer["choices"]
        generated = reference.generate(
            torch.tensor([ids]), max_new_tokens=16, do_sample=False, temperature=None, max_length=None, pad_token_id=0
        )
        text = tokenizer.decode(generated[0, len(ids) :], skip_special_tokens=False)
        assert choice["text"] == re.split(r"\.|\n|<\|end\|>", text)[0], document


def test_tasks_and_their_documents_are_consistent() -> None:
    excerpt = json.loads((DEMO / "heldout_excerpt.json").read_text(encoding="utf-8"))
    for document in documents("endings"):
        assert len(set(document["endings"])) == 4
        sentence = f"{document['beginning']} {document['endings'][document['answer']]}"
        assert sentence in excerpt["bible" if document["source"] == "ruth" else "sqlite"]
    for task in TASKS.glob("*.yaml"):
        settings = yaml.safe_load(task.read_text(encoding="utf-8"))
        assert settings["task"] == task.stem
        assert (ROOT / settings["dataset_kwargs"]["data_files"]["test"]).is_file()


@pytest.mark.parametrize("chat", [False, True])
def test_guidellm_gets_exact_token_counts_and_a_running_usage(demo_server: RealServer, chat: bool) -> None:
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
    assert counts == sorted(counts) and counts[-1] == 24
    assert len({chunk["usage"]["prompt_tokens"] for chunk in chunks}) == 1
    assert demo_server.get("/v1/models")["data"][0]["id"] == "demo"
