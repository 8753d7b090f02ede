"""Embeddings, classes and rankings of decoders and encoders over real servers, compared with transformers, and refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
import torch
import transformers
from helpers.marks import slow_but
from helpers.real_server import RealServer, serve
from helpers.tiny_encoders import make_encoder
from tokenizers import models, normalizers, pre_tokenizers, processors

from windlass.clients import BadRequestError, Client

DEMO = Path(__file__).parents[2] / "models" / "demo"
STORY = ["Once upon a time", "The sea is wide and the king is old. " * 12, "a"]
WORDS = "[PAD] [CLS] [SEP] [UNK] the sea is wide king said ship went out morning old and deep a".split()
TEXTS = ["the sea is wide", "the old king said and the ship went out", "deep"]
LABELS = ["person", "place", "other"]
SMALL_STEPS = ("--max-num-batched-tokens", "64")


def labelled(labels: list[str]) -> dict[str, Any]:
    return {"id2label": dict(enumerate(labels)), "label2id": {label: i for i, label in enumerate(labels)}}


def load(head: str, directory: Path) -> Any:
    return getattr(transformers, f"AutoModel{head}").from_pretrained(directory, dtype=torch.float32).eval()


# ---- the bundled model ---------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def demo() -> Iterator[RealServer]:
    with serve(*SMALL_STEPS, model=DEMO) as server:
        yield server


def demo_ids(text: str) -> list[int]:
    return tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json")).encode(text).ids


def embed(server: RealServer, **body: object) -> torch.Tensor:
    return torch.tensor([item["embedding"] for item in server.ask("/v1/embeddings", **body)["data"]])


@pytest.fixture(scope="module")
def states() -> list[torch.Tensor]:
    """[T, hidden] of each text."""
    model = load("ForCausalLM", DEMO).model
    with torch.no_grad():
        return [model(torch.tensor([demo_ids(text)]), use_cache=False).last_hidden_state[0] for text in STORY]


@pytest.mark.parametrize("pooling", slow_but(["last", "mean", "first"], "mean"))
def test_embeddings_equal_those_of_transformers(demo: RealServer, states: list[torch.Tensor], pooling: str) -> None:
    pooled = {"last": [s[-1] for s in states], "mean": [s.mean(0) for s in states], "first": [s[0] for s in states]}
    wanted = torch.nn.functional.normalize(torch.stack(pooled[pooling]))
    found = embed(demo, input=STORY, pooling=pooling)
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(embed(demo, input=STORY[1], pooling=pooling)[0], found[1], atol=2e-4, rtol=2e-4)


def test_embeddings_and_completions_share_the_engine(demo: RealServer) -> None:
    def complete() -> str:
        return demo.complete(STORY[0], max_tokens=24)["choices"][0]["text"]

    alone = complete()
    many = [f"{text} {n}" for n in range(20) for text in STORY]
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(complete) for _ in range(2)]
        vectors = pool.submit(embed, demo, input=many, pooling="mean")
        assert [answer.result() for answer in answers] == [alone] * 2
    assert vectors.result().shape[0] == len(many)
    torch.testing.assert_close(vectors.result().norm(dim=1), torch.ones(len(many)))
    assert demo.metric("windlass_num_requests_running") == 0


# ---- the bundled model with a classification head ------------------------------------------------------------------------
def make_classifier(directory: Path, labels: list[str], *, pooling: str | None = None) -> Path:
    """Save it with a random head. pooling: written to the files of sentence-transformers."""
    head = transformers.AutoModelForSequenceClassification
    model = head.from_pretrained(DEMO, num_labels=len(labels), **labelled(labels))
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
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_classifier(tmp_path_factory.mktemp("judge"), ["fits"], pooling="pooling_mode_mean_tokens")


@pytest.fixture(scope="module")
def classifying(classifier: Path) -> Iterator[RealServer]:
    with serve(*SMALL_STEPS, "--served-model-name", "judge", model=classifier) as server:
        yield server


def logits(directory: Path, prompts: list[list[int]]) -> torch.Tensor:
    model = load("ForSequenceClassification", directory)
    with torch.no_grad():
        return torch.cat([model(torch.tensor([ids])).logits for ids in prompts])


def test_pairs_are_ranked_by_the_head(classifying: RealServer, classifier: Path) -> None:
    answer = classifying.ask("/v1/rerank", query=STORY[0], documents=STORY)
    wanted = torch.sigmoid(logits(classifier, [demo_ids(STORY[0]) + demo_ids(text) for text in STORY]))[:, 0]
    assert [result["index"] for result in answer["results"]] == wanted.argsort(descending=True).tolist()
    found = torch.tensor([result["relevance_score"] for result in answer["results"]])
    torch.testing.assert_close(found, wanted.sort(descending=True).values, atol=1e-4, rtol=1e-4)


def test_pooling_is_read_from_the_files_of_sentence_transformers(classifying: RealServer, classifier: Path) -> None:
    model = classifying.get("/v1/models")["data"][0]
    assert model["tasks"] == ["embed", "classify", "score"] and model["classes"]["labels"] == ["fits"]
    assert model["architecture"] == "LlamaForSequenceClassification"
    embedding = model["embedding"]
    assert (embedding["pooling"], embedding["normalize"], embedding["declared"]) == ("mean", False, True)
    with torch.no_grad():
        states = load("ForSequenceClassification", classifier).model(torch.tensor([demo_ids(STORY[1])]))
    wanted = states.last_hidden_state[0].mean(0)
    torch.testing.assert_close(embed(classifying, input=STORY[1])[0], wanted, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/completions", {"prompt": "a", "stream": True}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 0, "echo": True, "logprobs": 1}),
        ("/v1/responses", {"input": "a"}),
    ],
)
def test_generation_is_refused_by_a_classifier(classifying: RealServer, path: str, body: dict[str, Any]) -> None:
    assert classifying.refuse(path, **body)["code"] in ("no_generation", "no_chat_template")
    assert httpx.get(f"{classifying.url}/ready").status_code == 200


@pytest.mark.slow
def test_head_of_a_quantized_model_is_not_quantized(tmp_path: Path) -> None:
    labels = ["bad", "so-so", "good"]
    directory = make_classifier(tmp_path, labels)
    wanted = torch.softmax(logits(directory, [demo_ids(text) for text in STORY]), dim=1)
    with serve("--quantization", "int8", model=directory) as server:
        answer = server.ask("/classify", input=STORY)
    found = torch.tensor([item["probs"] for item in answer["data"]])
    torch.testing.assert_close(found, wanted, atol=0.03, rtol=0)
    assert [item["label"] for item in answer["data"]] == [labels[i] for i in found.argmax(1).tolist()]


# ---- encoders ------------------------------------------------------------------------------------------------------------
def tokenizer() -> tokenizers.Tokenizer:
    """Words as tokens, with BERT's template of a pair."""
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
    make_encoder(family, directory, head, **labelled(labels))
    tokenizer().save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cross-encoder that distinguishes the texts of a pair by token types."""
    return make(tmp_path_factory.mktemp("judge"), "roformer", "ForSequenceClassification", ["fits"])


@pytest.fixture(scope="module")
def judging(judge: Path) -> Iterator[RealServer]:
    with serve(*SMALL_STEPS, model=judge) as server:
        yield server


@pytest.fixture(scope="module")
def tagger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("tagger"), "modernbert", "ForTokenClassification", LABELS)


@pytest.fixture(scope="module")
def tagging(tagger: Path) -> Iterator[RealServer]:
    with serve(model=tagger) as server:
        yield server


def test_pairs_are_encoded_by_the_template_of_the_tokenizer(judging: RealServer, judge: Path) -> None:
    model = load("ForSequenceClassification", judge)
    pairs = [tokenizer().encode(TEXTS[0], text) for text in TEXTS]
    wanted, without_types = [], []
    for pair in pairs:
        with torch.no_grad():
            ids, types = torch.tensor([pair.ids]), torch.tensor([pair.type_ids])
            wanted.append(float(torch.sigmoid(model(ids, token_type_ids=types).logits)))
            without_types.append(float(torch.sigmoid(model(ids).logits)))
    answer = judging.ask("/v1/rerank", query=TEXTS[0], documents=TEXTS)
    found = {result["index"]: result["relevance_score"] for result in answer["results"]}
    assert [found[i] for i in range(3)] == pytest.approx(wanted, abs=5e-6)
    assert all(abs(one - other) > 5e-5 for one, other in zip(wanted, without_types, strict=True))
    assert answer["usage"]["prompt_tokens"] == sum(len(pair.ids) for pair in pairs)
    with Client(judging.url) as client:
        assert client.score(TEXTS[0], TEXTS).scores == pytest.approx(wanted, abs=1e-4)
        ranking = client.rerank(TEXTS[0], TEXTS, 1)
        assert ranking.results[0].index == wanted.index(max(wanted))
        (model_card,) = client.models()
        assert model_card.tasks == ("embed", "classify", "score")


def test_second_text_of_a_long_pair_is_truncated(judging: RealServer) -> None:
    cut = judging.ask("/score", text_1=TEXTS[0], text_2=TEXTS[1], truncate_prompt_tokens=9)
    assert cut["usage"]["prompt_tokens"] == 9  # 7, and 2 tokens of the second text
    short = judging.ask("/score", text_1=TEXTS[0], text_2="the old", truncate_prompt_tokens=-1)
    assert cut["data"] == short["data"]
    error = judging.refuse("/score", text_1=TEXTS[1], text_2=TEXTS[1], truncate_prompt_tokens=9)
    assert "for the second" in error["message"] and error["param"] == "text_1"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "sea " * 80}),
        ("/v1/embeddings", {"input": [5] * 65}),
        ("/classify", {"input": ["sea", "sea " * 80]}),
        ("/v1/rerank", {"query": "sea", "documents": ["deep", "sea " * 80]}),
    ],
)
def test_texts_longer_than_a_step_are_refused(judging: RealServer, path: str, body: dict[str, Any]) -> None:
    error = judging.refuse(path, **body)
    assert error["code"] == "context_length_exceeded"
    assert "holds 64 tokens" in error["message"] and "--max-num-batched-tokens is 64" in error["message"]


def test_more_tokens_than_a_step_holds_are_embedded(judging: RealServer) -> None:
    assert len(embed(judging, input=[[4 + i % 9 for i in range(n)] for n in (62, 1, 40, 7, 62)])) == 5


def test_classes_and_embeddings_of_an_encoder(judging: RealServer, judge: Path) -> None:
    model, ids = load("ForSequenceClassification", judge), torch.tensor([tokenizer().encode(TEXTS[0]).ids])
    with torch.no_grad():
        (raw,) = model(ids).logits[0].tolist()
        states = model.roformer(ids).last_hidden_state[0]
    found = judging.ask("/classify", input=TEXTS[0], use_activation=False)["data"][0]
    assert found["label"] == "fits" and found["probs"] == pytest.approx([raw], abs=1e-4)
    pooled = judging.ask("/pooling", input=TEXTS[0], task="classify", use_activation=False)["data"][0]
    assert pooled["data"] == pytest.approx([raw], abs=1e-4)
    wanted = torch.nn.functional.normalize(states.mean(0), dim=0)
    torch.testing.assert_close(embed(judging, input=TEXTS[0])[0], wanted, atol=1e-5, rtol=1e-4)


def test_token_classes_equal_those_of_transformers(tagging: RealServer, tagger: Path) -> None:
    model = load("ForTokenClassification", tagger)
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
        for score, code in (
            (lambda: client.classify("sea"), "no_classifier"),
            (lambda: client.rerank("sea", ["deep"]), "no_score"),
        ):
            with pytest.raises(BadRequestError, match=r"token.*use /pooling") as caught:
                score()
            assert caught.value.code == code
        with pytest.raises(BadRequestError, match="remove it"):
            client.pooling("sea", task="token_classify", dimensions=2)
        with pytest.raises(BadRequestError, match="SequenceClassification"):
            client.pooling("sea", task="classify")


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"max_tokens": 0, "echo": True, "logprobs": 1}], ids=str)
def test_generation_is_refused_by_an_encoder(tagging: RealServer, fields: dict[str, Any]) -> None:
    error = tagging.refuse("/v1/completions", prompt="sea", **fields)
    assert error["code"] == "no_generation" and "/pooling" in error["message"]


def test_scaling_of_a_request_to_an_encoder(tagging: RealServer) -> None:
    scaling = {"rope_type": "linear", "factor": 4}
    plain, scaled = (embed(tagging, input=TEXTS[1], **fields)[0] for fields in ({}, {"rope_scaling": scaling}))
    assert plain.tolist() != pytest.approx(scaled.tolist(), abs=1e-4)
    error = tagging.refuse("/v1/embeddings", input="sea", rope_scaling={"rope_type": "self_extend"})
    assert "those behind them" in error["message"]
    error = tagging.refuse("/v1/embeddings", input="sea", attention_window=4)
    assert "sees the whole text" in error["message"]
