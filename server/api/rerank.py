"""`POST /v1/score`, `POST /v1/rerank` and `POST /classify`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from windlass.engine.interface.model_info import ClassifierInfo
from windlass.engine.interface.outputs import PooledRows
from windlass.engine.interface.request import PoolingRule
from windlass.server.api.embeddings import max_vector_bytes
from windlass.server.errors import bad_request, response_too_large
from windlass.server.schemas.base import without_nulls
from windlass.server.schemas.openapi import GENERATION_ERRORS, openapi_body, openapi_responses
from windlass.server.schemas.pooling import (
    MAX_INPUTS,
    ClassifyRequest,
    ClassList,
    Reranking,
    RerankRequest,
    ScoreList,
    ScoreRequest,
)
from windlass.server.serving.job import envelope
from windlass.server.serving.pair_scores import check_scores_pairs, check_texts, probabilities, score_pairs
from windlass.server.serving.pooling import begin_pooling, encode_inputs, pool, split_inputs, unpack_rows, usage
from windlass.server.serving.streaming import Exchange

router = APIRouter(tags=["Ranking"])


@router.post(
    "/v1/score",
    openapi_extra=openapi_body(ScoreRequest),
    responses=openapi_responses(ScoreList, errors=GENERATION_ERRORS),
)
@router.post("/score", include_in_schema=False)
async def create_score(request: Request) -> Response:
    """How well texts go together, pair by pair."""
    body, job = await begin_pooling(request, ScoreRequest)
    check_scores_pairs(job, body.pooling)
    first, second = check_texts(body.text_1, "text_1"), check_texts(body.text_2, "text_2")
    if len(first) not in (1, len(second)):
        raise bad_request(
            f"text_1 holds {len(first)} texts and text_2 {len(second)}: give as many of both, or one text_1", "text_1"
        )

    async def work(exchange: Exchange) -> None:
        names = ("text_1", "text_2")
        scores = await score_pairs(exchange, job, first, second, names, body.pooling, body.instruction)
        data = [{"object": "score", "index": i, "score": value} for i, value in enumerate(scores.values)]
        answer = {**envelope("score", "list", job), "data": data, "usage": usage(scores.tokens)}
        await exchange.send_json([to_json(answer)])

    return Exchange(job.state, work, deadline=job.deadline)


@router.post(
    "/v1/rerank",
    openapi_extra=openapi_body(RerankRequest),
    responses=openapi_responses(Reranking, errors=GENERATION_ERRORS),
)
@router.post("/v2/rerank", include_in_schema=False)
@router.post("/rerank", include_in_schema=False)
async def create_reranking(request: Request) -> Response:
    """Documents in the order in which they answer a query."""
    body, job = await begin_pooling(request, RerankRequest)
    check_scores_pairs(job, body.pooling)
    documents = _documents(body.documents)

    async def work(exchange: Exchange) -> None:
        names = ("query", "documents")
        read, most = documents, body.max_tokens_per_doc
        if most is not None:
            read = await job.state.text.pairs.truncate(
                documents, most, max_model_len=job.longest, param="documents", caller=job.caller
            )
        scores = await score_pairs(exchange, job, [body.query], read, names, body.pooling, body.instruction)
        values = scores.values
        order = sorted(range(len(values)), key=lambda index: (-values[index], index))[: body.top_n]
        results: list[dict[str, Any]] = [{"index": index, "relevance_score": values[index]} for index in order]
        if body.return_documents is not False:
            for result in results:
                result["document"] = {"text": documents[result["index"]]}
        answer = {**envelope("rerank", "list", job), "results": results, "usage": usage(scores.tokens)}
        if request.scope["path"].endswith("/v2/rerank"):  # Cohere's; some of its clients take no answer without
            answer["meta"] = {"api_version": {"version": "2"}}
        await exchange.send_json([await job.state.text.run_in_thread(to_json, answer)])

    return Exchange(job.state, work, deadline=job.deadline)


def _documents(given: list[Any]) -> list[str]:
    """Their texts; raises ApiError for what is neither a string nor an object with a text alone."""
    if len(given) > MAX_INPUTS:  # before any of them is looked at
        check_texts(given, "documents")
    texts = []
    for index, document in enumerate(given):
        if isinstance(document, dict):
            where = f"documents[{index}]"
            document = without_nulls(document)
            if set(document) != {"text"} or not isinstance(document["text"], str):
                raise bad_request(f"{where} must be a string, or an object with a text and nothing else", where)
            document = document["text"]
        texts.append(document)
    return check_texts(texts, "documents")


classify_router = APIRouter(tags=["Classes"])

_ROW_BYTES = 60  # of JSON around the classes of a text


@classify_router.post(
    "/classify",
    openapi_extra=openapi_body(ClassifyRequest),
    responses=openapi_responses(ClassList, errors=GENERATION_ERRORS),
)
async def classify(request: Request) -> Response:
    """The classes of texts, by a model with a classification head."""
    body, job = await begin_pooling(request, ClassifyRequest)
    classifier = job.info.classifier
    if classifier is None:
        raise bad_request(
            f"this model is a {job.info.architecture} and has no classification head: serve a "
            "…ForSequenceClassification, or use /v1/embeddings",
            "model",
            "no_classifier",
        )
    if classifier.per_token:
        raise bad_request(
            f"this model is a {job.info.architecture}, which tells the class of each token and not of a text: use /pooling",
            "model",
            "no_classifier",
        )
    given = split_inputs(body.input)
    row = _ROW_BYTES + max_vector_bytes(2 * len(classifier.labels), base64=False) + 6 * max(map(len, classifier.labels))
    if len(given) * row > job.state.settings.max_response_bytes:
        raise response_too_large(len(given) * row, job.state.settings.max_response_bytes)

    async def work(exchange: Exchange) -> None:
        prompts = await encode_inputs(job, given, "input")
        rows = await pool(exchange, job, prompts, PoolingRule("classify"))
        data = await job.state.text.run_in_thread(_render_classes, rows, classifier, body.use_activation is not False)
        end = to_json({"usage": usage(sum(map(len, prompts)))})
        head = to_json(envelope("classify", "list", job))
        await exchange.send_json([head[:-1], b',"data":', data, b",", end[1:]])

    return Exchange(job.state, work, deadline=job.deadline)


def _render_classes(rows: list[PooledRows], classifier: ClassifierInfo, apply_activation: bool) -> bytes:
    data = []
    for index, row in enumerate(rows):
        logits = list(unpack_rows(row)[0])
        probs = probabilities(logits, classifier.activation) if apply_activation else logits
        label = classifier.labels[logits.index(max(logits))]
        data.append({"index": index, "label": label, "probs": probs, "num_classes": len(logits)})
    return to_json(data)
