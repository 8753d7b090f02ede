"""Methods of both clients that generate no text, against an app."""

from __future__ import annotations

import math
from typing import Any

import pytest
from api_helpers.any_client import any_client
from helpers.live_server import Live, live_server
from helpers.scripted_engine import ScriptedEngine, model_info
from helpers.scripted_http import answer, scripted_server

from windlass.clients import BadRequestError, Client, DocumentText, ResponseError, RopeScaling
from windlass.engine.interface.model_info import ClassifierInfo

pytestmark = pytest.mark.anyio


async def test_embeddings_in_both_encodings(live: Live, kind: str) -> None:
    async with any_client(kind, live.url) as client:
        packed = await client.embeddings([[5], [6, 7]], dimensions=3, deadline=30)
        plain = await client.embeddings([[5], [6, 7]], dimensions=3, encoding_format="float")
        assert packed.vectors == plain.vectors == [(5, 1, 2), (7, 1, 2)]
        assert packed.usage.prompt_tokens == packed.usage.total_tokens == 3 and packed.request_id
        one = await client.embeddings("hello", pooling="mean", normalize=False, rope_scaling=RopeScaling.linear(2))
        assert len(one.data) == 1
    request = live.engine.requests[-1]
    assert request.pooling is not None and (request.pooling.kind, request.pooling.normalize) == ("mean", False)
    assert request.rope_scaling is not None and live.engine.requests[0].deadline is not None


@pytest.mark.parametrize("encoding", [None, "float", "base64"])
async def test_pooled_states_in_both_encodings(live: Live, kind: str, encoding: str | None) -> None:
    async with any_client(kind, live.url) as client:
        several = await client.pooling([[5, 6], [7]], pooling="all", dimensions=2, encoding_format=encoding)
        assert [item.rows for item in several.data] == [((5, 1), (6, 1)), ((7, 1),)]
        single = await client.pooling([5, 6], dimensions=2, encoding_format=encoding)
        assert [item.rows for item in single.data] == [((6, 1),)]


async def test_score_and_rerank(live: Live, kind: str) -> None:
    async with any_client(kind, live.url) as client:
        scores = await client.score("q", ["a", "z"])
        ranking = await client.rerank("q", ["a", {"text": "z"}], top_n=1)
        assert [result.index for result in ranking.results] == [1]
        assert ranking.results[0].relevance_score == max(scores.scores) and scores.scores[0] < scores.scores[1]
        assert ranking.results[0].document == DocumentText(text="z")
        bare = await client.rerank("q", ["a"], return_documents=False)
        assert bare.results[0].document is None


async def test_classify(live: Live, kind: str) -> None:
    async with any_client(kind, live.url) as client:
        with pytest.raises(BadRequestError) as caught:
            await client.classify("x")
        assert caught.value.code == "no_classifier"
    engine = ScriptedEngine(info=model_info(classifier=ClassifierInfo(("bad", "good"), "softmax"), generates=False))
    with live_server(engine) as other:
        async with any_client(kind, other.url) as client:
            (item,) = (await client.classify([5, 6])).data
            assert item.label == "good" and math.isclose(item.probs[1], 1 / (1 + math.exp(-3)))
            (model,) = await client.models()
            assert model.tasks == ("embed", "classify") and model.classes == {
                "labels": ["bad", "good"],
                "activation": "softmax",
                "per_token": False,
            }


@pytest.mark.parametrize(
    ("method", "data"),
    [
        ("embeddings", [{"index": 0, "embedding": "AAA"}]),
        ("embeddings", [{"index": 0, "embedding": "?"}]),
        ("embeddings", [{"index": 0}]),
        ("embeddings", None),
        ("pooling", [{"index": 0, "data": "AACAPw=="}]),
        ("pooling", [{"index": 0, "data": "AACAPw==", "shape": [1, 0]}]),
    ],
)
def test_malformed_pooling_responses(method: str, data: Any) -> None:
    with scripted_server(answer({"data": data})) as server, Client(server.url) as client, pytest.raises(ResponseError):
        getattr(client, method)("x")
