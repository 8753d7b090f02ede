"""A model with a classification head through a real server: its classes and rankings beside transformers, and its refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
import torch
import transformers
from helpers.real_server import RealServer, serve

DEMO = Path(__file__).parents[2] / "models" / "demo"
TEXTS = ["Once upon a time", "The sea is wide and the king is old. " * 12, "a"]


def make(directory: Path, labels: list[str], *, pooling: str | None = None) -> Path:
    """The bundled model with a random head of these classes, and perhaps the files of sentence-transformers."""
    named: dict[str, Any] = {
        "id2label": dict(enumerate(labels)),
        "label2id": {name: i for i, name in enumerate(labels)},
    }
    model = transformers.AutoModelForSequenceClassification.from_pretrained(DEMO, num_labels=len(labels), **named)
    torch.manual_seed(3)
    with torch.no_grad():
        model.score.weight.normal_(0.0, 0.1)
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, directory)
    if pooling is not None:
        kinds = ("Transformer", "Pooling")
        modules = [{"path": kind, "type": f"sentence_transformers.models.{kind}"} for kind in kinds]
        (directory / "modules.json").write_text(json.dumps(modules))
        (directory / "Pooling").mkdir()
        (directory / "Pooling" / "config.json").write_text(json.dumps({pooling: True}))
    return directory


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("judge"), ["fits"], pooling="pooling_mode_mean_tokens")


@pytest.fixture(scope="module")
def server(judge: Path) -> Iterator[RealServer]:
    with serve("--max-num-batched-tokens", "64", "--served-model-name", "judge", model=judge) as server:
        yield server


def post(server: RealServer, path: str, **body: object) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def ids_of(text: str) -> list[int]:
    return tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json")).encode(text).ids


def logits(directory: Path, prompts: list[list[int]]) -> torch.Tensor:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        return torch.cat([model(torch.tensor([ids])).logits for ids in prompts])


def test_pairs_are_ranked_by_the_head(server: RealServer, judge: Path) -> None:
    answer = post(server, "/v1/rerank", query=TEXTS[0], documents=TEXTS)
    wanted = torch.sigmoid(logits(judge, [ids_of(TEXTS[0]) + ids_of(text) for text in TEXTS]))[:, 0]
    assert [result["index"] for result in answer["results"]] == wanted.argsort(descending=True).tolist()
    found = torch.tensor([result["relevance_score"] for result in answer["results"]])
    torch.testing.assert_close(found, wanted.sort(descending=True).values, atol=1e-4, rtol=1e-4)


def test_its_files_say_how_vectors_are_made(server: RealServer, judge: Path) -> None:
    model = httpx.get(f"{server.url}/v1/models").json()["data"][0]
    assert model["tasks"] == ["embed", "classify", "score"] and model["classes"]["labels"] == ["fits"]
    assert model["architecture"] == "LlamaForSequenceClassification"
    assert (model["embedding"]["pooling"], model["embedding"]["normalize"], model["embedding"]["declared"]) == (
        "mean",
        False,
        True,
    )
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(judge, dtype=torch.float32).eval()
    with torch.no_grad():
        wanted = plain.model(torch.tensor([ids_of(TEXTS[1])])).last_hidden_state[0].mean(0)
    found = torch.tensor(post(server, "/v1/embeddings", input=TEXTS[1])["data"][0]["embedding"])
    torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/completions", {"prompt": "a", "stream": True}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 0, "echo": True, "logprobs": 1}),
        ("/v1/responses", {"input": "a"}),
    ],
)
def test_nothing_is_generated(server: RealServer, path: str, body: dict[str, Any]) -> None:
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["code"] in ("no_generation", "no_chat_template")
    assert httpx.get(f"{server.url}/ready").status_code == 200


@pytest.mark.slow
def test_the_head_stays_as_it_is_when_the_rest_is_quantized(tmp_path: Path) -> None:
    labels = ["bad", "so-so", "good"]
    directory = make(tmp_path, labels)
    wanted = torch.softmax(logits(directory, [ids_of(text) for text in TEXTS]), dim=1)
    with serve("--quantization", "int8", model=directory) as server:
        answer = post(server, "/classify", input=TEXTS)
    found = torch.tensor([item["probs"] for item in answer["data"]])
    torch.testing.assert_close(found, wanted, atol=0.03, rtol=0)
    assert [item["label"] for item in answer["data"]] == [labels[i] for i in found.argmax(1).tolist()]
