"""Encoders through real servers: vectors, classes, rankings and the classes of tokens beside transformers, and the refusals."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
import torch
import transformers
from helpers.real_server import RealServer, serve
from helpers.tiny_encoders import make_encoder
from tokenizers import models, normalizers, pre_tokenizers, processors

from windlass.clients import BadRequestError, Client

WORDS = "[PAD] [CLS] [SEP] [UNK] the sea is wide king said ship went out morning old and deep a".split()
TEXTS = ["the sea is wide", "the old king said and the ship went out", "deep"]
LABELS = ["person", "place", "other"]


def tokenizer() -> tokenizers.Tokenizer:
    """Whole words, with BERT's way of joining two texts."""
    made = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(["[PAD]", "[CLS]", "[SEP]", "[UNK]"])
    made.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    return made


def make(directory: Path, family: str, head: str, labels: list[str]) -> Path:
    named = {"id2label": dict(enumerate(labels)), "label2id": {label: i for i, label in enumerate(labels)}}
    make_encoder(family, directory, head, **named)
    tokenizer().save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cross-encoder that tells the two texts apart by token types."""
    return make(tmp_path_factory.mktemp("judge"), "roformer", "ForSequenceClassification", ["fits"])


@pytest.fixture(scope="module")
def judging(judge: Path) -> Iterator[RealServer]:
    with serve("--max-num-batched-tokens", "64", model=judge) as server:
        yield server


@pytest.fixture(scope="module")
def tagger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("tagger"), "modernbert", "ForTokenClassification", LABELS)


@pytest.fixture(scope="module")
def tagging(tagger: Path) -> Iterator[RealServer]:
    with serve(model=tagger) as server:
        yield server


def post(server: RealServer, path: str, **body: object) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(server: RealServer, path: str, **body: object) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def test_pairs_are_joined_as_the_tokenizer_has_it(judging: RealServer, judge: Path) -> None:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(judge, dtype=torch.float32).eval()
    wanted, swapped = [], []
    for text in TEXTS:
        pair = tokenizer().encode(TEXTS[0], text)
        with torch.no_grad():
            ids, types = torch.tensor([pair.ids]), torch.tensor([pair.type_ids])
            wanted.append(float(torch.sigmoid(model(ids, token_type_ids=types).logits)))
            swapped.append(float(torch.sigmoid(model(ids).logits)))
    answer = post(judging, "/v1/rerank", query=TEXTS[0], documents=TEXTS)
    found = {result["index"]: result["relevance_score"] for result in answer["results"]}
    assert [found[i] for i in range(3)] == pytest.approx(wanted, abs=5e-6)
    assert all(abs(one - other) > 5e-5 for one, other in zip(wanted, swapped, strict=True))  # types count
    assert answer["usage"]["prompt_tokens"] == sum(len(tokenizer().encode(TEXTS[0], text).ids) for text in TEXTS)
    with Client(judging.url) as client:
        assert client.score(TEXTS[0], TEXTS).scores == pytest.approx(wanted, abs=1e-4)
        ranking = client.rerank(TEXTS[0], TEXTS, 1)
        assert ranking.results[0].index == wanted.index(max(wanted))
        (model_card,) = client.models()
        assert model_card.tasks == ("embed", "classify", "score")


def test_a_pair_that_is_too_long_is_cut_at_its_second_text(judging: RealServer, judge: Path) -> None:
    cut = post(judging, "/score", text_1=TEXTS[0], text_2=TEXTS[1], truncate_prompt_tokens=9)
    assert cut["usage"]["prompt_tokens"] == 9  # of 7 + 2 tokens of the second
    short = post(judging, "/score", text_1=TEXTS[0], text_2="the old", truncate_prompt_tokens=-1)
    assert cut["data"] == short["data"]
    error = refused(judging, "/score", text_1=TEXTS[1], text_2=TEXTS[1], truncate_prompt_tokens=9)
    assert "no room for the second" in error["message"] and error["param"] == "text_1"


def test_what_bounds_a_text_is_told(judging: RealServer) -> None:
    for path, body in (
        ("/v1/embeddings", {"input": "sea " * 80}),
        ("/v1/embeddings", {"input": [5] * 65}),
        ("/classify", {"input": ["sea", "sea " * 80]}),
        ("/v1/rerank", {"query": "sea", "documents": ["deep", "sea " * 80]}),
    ):
        error = refused(judging, path, **body)
        assert error["code"] == "context_length_exceeded"
        assert "holds 64 tokens" in error["message"] and "--max-num-batched-tokens is 64" in error["message"]
    many = post(judging, "/v1/embeddings", input=[[4 + i % 9 for i in range(n)] for n in (62, 1, 40, 7, 62)])
    assert len(many["data"]) == 5  # more than a step holds


def test_classes_and_vectors(judging: RealServer, judge: Path) -> None:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(judge, dtype=torch.float32).eval()
    with torch.no_grad():
        (raw,) = model(torch.tensor([tokenizer().encode(TEXTS[0]).ids])).logits[0].tolist()
        states = model.roformer(torch.tensor([tokenizer().encode(TEXTS[0]).ids])).last_hidden_state[0]
    found = post(judging, "/classify", input=TEXTS[0], use_activation=False)["data"][0]
    assert found["label"] == "fits" and found["probs"] == pytest.approx([raw], abs=1e-4)
    assert post(judging, "/pooling", input=TEXTS[0], task="classify", use_activation=False)["data"][0][
        "data"
    ] == pytest.approx([raw], abs=1e-4)
    vector = torch.tensor(post(judging, "/v1/embeddings", input=TEXTS[0])["data"][0]["embedding"])
    torch.testing.assert_close(vector, torch.nn.functional.normalize(states.mean(0), dim=0), atol=1e-5, rtol=1e-4)


def test_a_class_for_each_token(tagging: RealServer, tagger: Path) -> None:
    model = transformers.AutoModelForTokenClassification.from_pretrained(tagger, dtype=torch.float32).eval()
    with Client(tagging.url) as client:
        (card,) = client.models()
        assert card.tasks == ("embed", "token_classify")
        assert card.classes == {"labels": LABELS, "activation": "softmax", "per_token": True}
        for task in (None, "token_classify"):
            states = client.pooling(TEXTS, task=task)
            for text, item in zip(TEXTS, states.data, strict=True):
                with torch.no_grad():
                    wanted = model(torch.tensor([tokenizer().encode(text).ids])).logits[0].softmax(-1)
                torch.testing.assert_close(torch.tensor(item.rows), wanted, atol=1e-5, rtol=1e-4)
        assert len(client.pooling("sea", task="token_embed").data[0].rows[0]) == 64
        with pytest.raises(BadRequestError, match="class of each token"):
            client.classify("sea")
        with pytest.raises(BadRequestError, match="leave it out"):
            client.pooling("sea", task="token_classify", dimensions=2)
        with pytest.raises(BadRequestError, match="SequenceClassification"):
            client.pooling("sea", task="classify")
        with pytest.raises(BadRequestError, match="scores no pairs"):
            client.rerank("sea", ["deep"])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "sea"}),
        ("/v1/completions", {"prompt": "sea", "stream": True}),
        ("/v1/completions", {"prompt": "sea", "max_tokens": 0, "echo": True, "logprobs": 1}),
    ],
)
def test_nothing_is_generated(tagging: RealServer, path: str, body: dict[str, Any]) -> None:
    error = refused(tagging, path, **body)
    assert error["code"] == "no_generation" and "/pooling" in error["message"]


def test_a_scaling_of_the_request_and_what_is_refused(tagging: RealServer) -> None:
    plain, scaled = (
        post(tagging, "/v1/embeddings", input=TEXTS[1], **fields)["data"][0]["embedding"]
        for fields in ({}, {"rope_scaling": {"rope_type": "linear", "factor": 4}})
    )
    assert plain != pytest.approx(scaled, abs=1e-4)
    error = refused(tagging, "/v1/embeddings", input="sea", rope_scaling={"rope_type": "self_extend"})
    assert "those behind them" in error["message"]
    error = refused(tagging, "/v1/embeddings", input="sea", attention_window=4)
    assert "sees the whole text" in error["message"]
