"""Embeddings of the bundled model through a real server and its engine process, beside those of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import tokenizers
import torch
import transformers
from helpers.marks import slow_but
from helpers.real_server import RealServer, serve

DEMO = Path(__file__).parents[2] / "models" / "demo"
TEXTS = ["Once upon a time", "The sea is wide and the king is old. " * 12, "a"]


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    with serve("--max-num-batched-tokens", "64", model=DEMO) as server:
        yield server


def embed(server: RealServer, **body: object) -> torch.Tensor:
    answer = httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return torch.tensor([item["embedding"] for item in answer.json()["data"]])


@pytest.fixture(scope="module")
def states() -> list[torch.Tensor]:
    """[T, hidden] of each text."""
    tokenizer = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    with torch.no_grad():
        ids = [torch.tensor([tokenizer.encode(text).ids]) for text in TEXTS]
        return [model.model(one, use_cache=False).last_hidden_state[0] for one in ids]


@pytest.mark.parametrize("pooling", slow_but(["last", "mean", "first"], "mean"))
def test_vectors_are_those_of_transformers(server: RealServer, states: list[torch.Tensor], pooling: str) -> None:
    made = {"last": [s[-1] for s in states], "mean": [s.mean(0) for s in states], "first": [s[0] for s in states]}
    wanted = torch.nn.functional.normalize(torch.stack(made[pooling]))
    found = embed(server, input=TEXTS, pooling=pooling)
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(embed(server, input=TEXTS[1], pooling=pooling)[0], found[1], atol=2e-4, rtol=2e-4)


def test_embeddings_and_answers_share_the_engine(server: RealServer) -> None:
    body = {"prompt": TEXTS[0], "max_tokens": 24, "temperature": 0}

    def complete() -> str:
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        return answer.json()["choices"][0]["text"]

    alone = complete()
    many = [f"{text} {n}" for n in range(20) for text in TEXTS]
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(complete) for _ in range(2)]
        vectors = pool.submit(embed, server, input=many, pooling="mean")
        assert [answer.result() for answer in answers] == [alone] * 2
    assert vectors.result().shape[0] == len(many)
    torch.testing.assert_close(vectors.result().norm(dim=1), torch.ones(len(many)))
    assert server.metric("windlass_num_requests_running") == 0
