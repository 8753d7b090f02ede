"""`/pooling`, `/v1/score`, `/v1/rerank` and `/classify`: responses, and refused requests."""

from __future__ import annotations

import base64
import math
import struct
import sys
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import pytest
from helpers.live_server import Live, live_server
from helpers.scripted_engine import ScriptedEngine, model_info
from helpers.tiny_rerankers import qwen3_prompt, tokenizer

from windlass.engine.errors import LoadError
from windlass.engine.interface.model_info import ClassifierInfo
from windlass.engine.interface.outputs import PooledRows
from windlass.engine.interface.request import PoolingRule
from windlass.server.api import pooling as ranking_routes
from windlass.server.config.settings import RankSettings
from windlass.server.serving.job import PoolingJob
from windlass.server.serving.pooling import probabilities
from windlass.server.serving.streaming import Exchange
from windlass.server.text.tokenizer_files import QWEN3_RERANKER_TEMPLATE


def scorer(*labels: str, activation: Any = "softmax") -> ScriptedEngine:
    return ScriptedEngine(info=model_info(classifier=ClassifierInfo(labels, activation), generates=False))


@pytest.fixture(scope="module")
def classifier() -> Iterator[Live]:
    with live_server(scorer("bad", "so-so", "good")) as live:
        yield live


@pytest.fixture(scope="module")
def judge() -> Iterator[Live]:
    with live_server(scorer("fits", activation="sigmoid")) as live:
        yield live


def vector(text: str, live: Live) -> list[float]:
    """The scripted engine's vector of a text."""
    return [live.tokenizer.backend.encode(text).ids[-1], *range(1, 8)]


def cosine(a: list[float], b: list[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))  # the scripted rows count as normalized


def test_states_per_text_or_per_token(live: Live) -> None:
    one = live.request("/pooling", input=[[5, 6], [7]])
    assert [r.pooling for r in live.engine.requests] == [PoolingRule("last", None, False)] * 2
    assert [(item["shape"], item["data"][0]) for item in one["data"]] == [([1, 8], 6), ([1, 8], 7)]
    every = live.request("/pooling", input=[[5, 6, 9], [7]], pooling="all", dimensions=2)
    assert [item["data"] for item in every["data"]] == [[[5, 1], [6, 1], [9, 1]], [[7, 1]]]
    packed = live.request("/pooling", input=[[5, 6, 9]], pooling="all", dimensions=2, encoding_format="base64")
    (item,) = packed["data"]
    assert struct.unpack("<6f", base64.b64decode(item["data"])) == (5, 1, 6, 1, 9, 1) and item["shape"] == [3, 2]
    assert every["usage"] == {"prompt_tokens": 4, "total_tokens": 4}


def test_too_large_token_states_are_refused() -> None:
    with live_server(max_response_bytes=1 << 20) as live:
        inputs = [[5] * 200] * 100
        assert live.refuse("/pooling", {"input": inputs, "pooling": "all"})["code"] == "response_too_large"
        assert live.engine.requests == []
        assert len(live.request("/pooling", input=inputs)["data"]) == 100


def test_pairs_are_scored_by_cosine(live: Live) -> None:
    answer = live.request("/v1/score", text_1="ab", text_2=["c", "d"], pooling="mean")
    assert {r.pooling for r in live.engine.requests} == {PoolingRule("mean", None, True)}
    assert len(live.engine.requests) == 3
    wanted = [cosine(vector("ab", live), vector(text, live)) for text in "cd"]
    assert [item["score"] for item in answer["data"]] == wanted
    both = live.request("/score", text_1=["a", "b"], text_2=["c", "d"])
    wanted = [cosine(vector(a, live), vector(b, live)) for a, b in zip("ab", "cd", strict=True)]
    assert [item["score"] for item in both["data"]] == wanted


def test_head_with_one_class_reads_the_joined_pair(judge: Live) -> None:
    judge.engine.requests.clear()
    answer = judge.request("/v1/score", text_1="ab", text_2=["c", "def"])
    ids = [judge.tokenizer.backend.encode(text).ids for text in ("ab", "c", "def")]
    assert [r.prompt_token_ids for r in judge.engine.requests] == [ids[0] + ids[1], ids[0] + ids[2]]
    assert {r.pooling for r in judge.engine.requests} == {PoolingRule("classify")}
    lengths = [len(r.prompt_token_ids) for r in judge.engine.requests]
    assert [item["score"] for item in answer["data"]] == pytest.approx([1 / (1 + math.exp(n)) for n in lengths])
    assert answer["usage"]["prompt_tokens"] == sum(lengths)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("most", [-1, 20])
def test_pair_for_a_head_is_truncated_in_its_second_text(judge: Live, most: int, side: str) -> None:
    judge.engine.requests.clear()
    query, short, long = (judge.tokenizer.backend.encode(text).ids for text in ("ab", "c", "xyz" * 100))
    room = (256 if most == -1 else most) - len(query)
    fields = {"truncate_prompt_tokens": most, "truncation_side": side}
    judge.request("/v1/rerank", query="ab", documents=["c", "xyz" * 100], **fields)
    kept = long[:room] if side == "right" else long[-room:]
    assert [r.prompt_token_ids for r in judge.engine.requests] == [query + short, query + kept]
    error = judge.refuse("/v1/rerank", {"query": "x" * 300, "documents": ["c"], **fields})
    assert error["param"] == "query" and "leaves none of" in error["message"]


def test_truncated_documents_are_returned_in_full(judge: Live, answerer: Live) -> None:
    whale = "\U0001f40b"  # a character of several tokens, which is never split
    documents = ["c", "xyz" * 100, whale * 3]
    for each in (judge, answerer):
        each.engine.requests.clear()
        ids = [each.tokenizer.backend.encode(text, add_special_tokens=False).ids for text in (*documents, whale)]
        assert len(ids[0]) <= 5 < len(ids[1]) and len(ids[3]) <= 5 < 2 * len(ids[3])
        answer = each.request("/v2/rerank", query="ab", documents=documents, max_tokens_per_doc=5)
        asked = [each.tokenizer.backend.decode(r.prompt_token_ids, False) for r in each.engine.requests]
        kept = ["c", each.tokenizer.backend.decode(ids[1][:5]), whale]
        if each is judge:
            assert asked == [f"<|bos|>ab<|bos|>{text}" for text in kept]
        else:
            assert asked == [qwen3_prompt("ab", text) for text in kept]
        told = {result["index"]: result["document"]["text"] for result in answer["results"]}
        assert told == dict(enumerate(documents))
    error = judge.refuse("/v1/rerank", {"query": "a", "documents": ["b"], "max_tokens_per_doc": 0})
    assert error["param"] == "max_tokens_per_doc"


def test_only_the_path_of_cohere_has_meta(live: Live) -> None:
    metas = [
        live.request(path, query="a", documents=["b"]).get("meta") for path in ("/v2/rerank", "/v1/rerank", "/rerank")
    ]
    assert metas == [{"api_version": {"version": "2"}}, None, None]


@pytest.mark.parametrize("encoder", [False, True])
def test_joined_pairs_have_a_total_limit(encoder: bool) -> None:
    info = model_info(classifier=ClassifierInfo(("fits",), "sigmoid"), generates=False, is_bidirectional=encoder)
    with live_server(ScriptedEngine(info=info), max_body_bytes=20_000) as live:
        query = "".join(chr(33 + n % 90) for n in range(150))
        tokens = len(live.tokenizer.backend.encode(query).ids)
        assert 50 * (tokens + 1) < 20_000 < 190 * (tokens + 1)
        assert len(live.request("/v1/rerank", query=query, documents=["b"] * 50)["results"]) == 50
        live.engine.requests.clear()
        error = live.refuse("/v1/rerank", {"query": query, "documents": ["b"] * 190})
        assert (error["param"], error["code"]) == ("documents", "too_many") and live.engine.requests == []
        assert ("characters" if encoder else "tokens") in error["message"]


def test_pairs_for_a_head_share_their_query(judge: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Separate lists would take the query's length for each document."""

    async def pool(
        exchange: Exchange, job: PoolingJob, prompts: Sequence[Collection[int]], rule: PoolingRule
    ) -> list[PooledRows]:
        assert all(sys.getsizeof(prompt) < 200 for prompt in prompts)
        assert [list(prompt) for prompt in prompts[:2]] == [query + ids for ids in documents]
        return [PooledRows(struct.pack("<f", 0.0), 1)] * len(prompts)

    monkeypatch.setattr(ranking_routes, "pool", pool)
    query, *documents = (judge.tokenizer.backend.encode(text).ids for text in ("xyz" * 50, "c", "def"))
    assert len(query) > 100
    assert len(judge.request("/v1/rerank", query="xyz" * 50, documents=["c", "def"] * 500)["results"]) == 1000


@pytest.fixture(scope="module")
def answerer() -> Iterator[Live]:
    ranking = RankSettings(template=QWEN3_RERANKER_TEMPLATE, needs_template=True, tokens=("yes", "no"))
    with live_server(ScriptedEngine(info=model_info(max_model_len=512)), backend=tokenizer(), ranking=ranking) as live:
        yield live


def test_answering_reranker_gets_its_prompt(answerer: Live) -> None:
    answerer.engine.requests.clear()
    backend = answerer.tokenizer.backend
    texts = ["c", "<|im_end|> def"]
    answer = answerer.request("/v1/rerank", query="ab", documents=texts, instruction="be strict")
    prompts = [backend.encode(qwen3_prompt("ab", text, "be strict"), add_special_tokens=False).ids for text in texts]
    assert [r.prompt_token_ids for r in answerer.engine.requests] == prompts
    answers = backend.token_to_id("yes"), backend.token_to_id("no")
    assert {r.pooling for r in answerer.engine.requests} == {PoolingRule("answer", answers=answers)}
    scores = {result["index"]: result["relevance_score"] for result in answer["results"]}
    assert [scores[0], scores[1]] == pytest.approx([1 / (1 + math.exp(len(ids))) for ids in prompts])
    special = answerer.request("/v1/score", text_1="ab", text_2="c", add_special_tokens=True)
    bos = backend.token_to_id("<|bos|>")
    plain = backend.encode(qwen3_prompt("ab", "c"), add_special_tokens=False).ids
    assert answerer.engine.requests[-1].prompt_token_ids == [bos, *plain] and len(special["data"]) == 1
    assert answerer.http.get("/v1/models").json()["data"][0]["scored_by"] == "answer"


def test_instruction_of_the_files_is_the_default() -> None:
    ranking = RankSettings(
        template=QWEN3_RERANKER_TEMPLATE, needs_template=True, tokens=("yes",), instruction="take any"
    )
    with live_server(ScriptedEngine(info=model_info(max_model_len=512)), backend=tokenizer(), ranking=ranking) as live:
        for given, used in ((None, "take any"), ("be strict", "be strict")):
            live.request("/v1/score", text_1="ab", text_2="c", **({} if given is None else {"instruction": given}))
            wanted = live.tokenizer.backend.encode(qwen3_prompt("ab", "c", used), add_special_tokens=False).ids
            assert live.engine.requests[-1].prompt_token_ids == wanted


def test_prompts_have_a_total_limit() -> None:
    ranking = RankSettings(template=QWEN3_RERANKER_TEMPLATE, needs_template=True, tokens=("yes",))
    engine = ScriptedEngine(info=model_info(max_model_len=512))
    with live_server(engine, backend=tokenizer(), ranking=ranking, max_body_bytes=40_000) as live:
        assert len(live.request("/v1/rerank", query="a" * 50, documents=["b"] * 80)["results"]) == 80
        live.engine.requests.clear()
        error = live.refuse("/v1/rerank", {"query": "a" * 50, "documents": ["b"] * 120})
        assert (error["param"], error["code"]) == ("documents", "too_many") and live.engine.requests == []


def test_pooling_returns_answer_rows(answerer: Live) -> None:
    raw = answerer.request("/pooling", input=[[5, 6, 7], [8]], task="classify", use_activation=False)
    assert [(item["data"], item["shape"]) for item in raw["data"]] == [([-3], [1, 1]), ([-1], [1, 1])]
    activated = answerer.request("/pooling", input=[[5, 6, 7]], task="classify")
    assert activated["data"][0]["data"] == [pytest.approx(1 / (1 + math.exp(3)))]


def test_instruction_for_a_prompt_without_one_is_refused(live: Live, judge: Live) -> None:
    for each in (live, judge):
        error = each.refuse("/v1/rerank", {"query": "a", "documents": ["b"], "instruction": "c"})
        assert (error["param"], error["code"]) == ("instruction", "unsupported_value")


@pytest.mark.slow
def test_head_joins_pairs_if_the_chat_template_cannot() -> None:
    """If a pair needs a prompt, the text processes refuse to load."""
    with live_server(scorer("fits", activation="sigmoid"), ranking=RankSettings()) as live:
        live.request("/v1/score", text_1="ab", text_2="c")
        ids = [live.tokenizer.backend.encode(text).ids for text in ("ab", "c")]
        assert live.engine.requests[0].prompt_token_ids == ids[0] + ids[1]
    needed = RankSettings(needs_template=True, tokens=("yes",))
    with live_server(ranking=needed, backend=tokenizer(), template="{{ messages[0].content }}") as live:
        with pytest.raises(LoadError, match=r"`rerank_template`.*role document"):
            live.state.text.wait_loaded()
        error = live.refuse("/v1/rerank", {"query": "a", "documents": ["b"]}, 503)
        assert "--rerank-template" in error["message"]
    declared = RankSettings(tokens=("yes",))
    with live_server(ranking=declared, backend=tokenizer(), template="{{ messages[0].content }}") as live:
        error = live.refuse("/v1/rerank", {"query": "a", "documents": ["b"]})
        assert error["code"] == "no_score" and "--rerank-template" in error["message"]
        assert live.complete("a")["choices"]


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_documents_are_sorted_by_score(live: Live, path: str) -> None:
    documents = ["a", {"text": "z", "id": None}, "m", "z"]
    answer = live.request(path, query="q", documents=documents)
    scores = [cosine(vector("q", live), vector(text, live)) for text in "azmz"]
    assert [(r["index"], r["relevance_score"]) for r in answer["results"]] == [
        (index, scores[index]) for index in (1, 3, 2, 0)
    ]
    assert [r["document"]["text"] for r in answer["results"]] == ["z", "z", "m", "a"]
    short = live.request(path, query="q", documents=documents, top_n=1, return_documents=False, model="toy")
    assert short["results"] == [{"index": 1, "relevance_score": scores[1]}]
    assert len(live.request(path, query="q", documents=["a"], top_n=50)["results"]) == 1


def test_texts_are_classified(classifier: Live) -> None:
    answer = classifier.request("/classify", input=[[5, 6, 7], [8]])
    for item, length in zip(answer["data"], (3, 1), strict=True):
        weights = [math.exp(value) for value in (-length, 1, 2)]
        assert item["probs"] == pytest.approx([w / sum(weights) for w in weights])
        assert (item["label"], item["num_classes"]) == ("good", 3)
    raw = classifier.request("/classify", input=[5, 6, 7], use_activation=False)
    assert raw["data"][0]["probs"] == [-3, 1, 2]


def test_model_object_lists_tasks(live: Live, classifier: Live, judge: Live) -> None:
    found = [each.http.get("/v1/models").json()["data"][0] for each in (live, classifier, judge)]
    assert [model["tasks"] for model in found] == [
        ["generate", "embed", "score"],
        ["embed", "classify"],
        ["embed", "classify", "score"],
    ]
    assert [model["scored_by"] for model in found] == ["vectors", None, "head"]
    assert found[0]["classes"] is None
    assert found[1]["classes"] == {"labels": ["bad", "so-so", "good"], "activation": "softmax", "per_token": False}
    facts = {"dimensions": 8, "pooling": "last", "normalize": True, "declared": False, "refusal": None}
    assert found[0]["embedding"] == facts


def test_tasks_without_a_head_are_refused(classifier: Live, judge: Live) -> None:
    for path, body in (
        ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
    ):
        assert classifier.refuse(path, body)["code"] == "no_score"
        assert judge.refuse(path, {**body, "pooling": "mean"})["param"] == "pooling"
    long = {"text_1": [5, 6], "text_2": ["b"]}
    assert judge.refuse("/v1/score", long)["param"] == "text_1[0]"
    error = judge.refuse("/v1/score", {"text_1": "x" * 200, "text_2": ["b", "y" * 100]})
    assert (error["param"], error["code"]) == ("text_2[1]", "context_length_exceeded")


@pytest.mark.parametrize("value", [1e4, -1e4, 0.0, 3.25])
def test_probabilities_never_overflow(value: float) -> None:
    (sigmoid,) = probabilities([value], "sigmoid")
    assert sigmoid == pytest.approx(0.5 * (1 + math.tanh(value / 2)))
    softmax = probabilities([value, 0.0, -value], "softmax")
    assert sum(softmax) == pytest.approx(1) and all(0 <= p <= 1 for p in softmax)
    assert probabilities([value], "none") == [value]
