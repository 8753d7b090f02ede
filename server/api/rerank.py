"""`POST /v1/score`, `POST /v1/rerank` and `POST /classify`."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from windlass.engine.interface.model_info import ClassifierInfo
from windlass.engine.interface.outputs import PooledRows
from windlass.engine.interface.request import PoolingRule
from windlass.server.api.embeddings import max_vector_bytes
from windlass.server.api.router import GENERATION_ERRORS, ApiRouter, Operation
from windlass.server.errors import bad_request, response_too_large
from windlass.server.schemas import pooling as schemas
from windlass.server.schemas.base import without_nulls
from windlass.server.serving.job import envelope
from windlass.server.serving.pooling import (
    begin_pooling,
    check_scores_pairs,
    check_texts,
    encode_inputs,
    pool,
    probabilities,
    score_pairs,
    split_inputs,
    unpack_rows,
)
from windlass.server.serving.streaming import Exchange

router = ApiRouter("Ranking", "Similarity of texts, and documents in order of relevance.")


classify_router = ApiRouter("Classes", "Classes of texts, for models trained to classify.")

_ROW_BYTES = 60  # of the JSON around the classes of a text


@router.endpoint(
    "POST",
    "/v1/score",
    Operation(
        body=schemas.ScoreRequest,
        response=schemas.ScoreList,
        errors=GENERATION_ERRORS,
        examples={
            "one": ("Two texts", {"text_1": "The king said", "text_2": "The king spoke"}),
            "several": (
                "One text with several others",
                {"text_1": "The sea", "text_2": ["The sea is wide", "The king said"]},
            ),
        },
    ),
    aliases=("/score",),
)
async def create_score(request: Request) -> Response:
    """Score the similarity or relevance of text pairs."""
    body, job = await begin_pooling(request, schemas.ScoreRequest)
    check_scores_pairs(job, body.pooling)
    first, second = check_texts(body.text_1, "text_1"), check_texts(body.text_2, "text_2")
    if len(first) not in (1, len(second)):
        raise bad_request(
            f"text_1 holds {len(first)} texts and text_2 {len(second)}: give as many of both, or one text_1", "text_1"
        )

    async def work(exchange: Exchange) -> None:
        names = ("text_1", "text_2")
        scores = await score_pairs(exchange, job, first, second, names, body.pooling, body.instruction)
        data = [
            schemas.PairScore.model_construct(object="score", index=i, score=x) for i, x in enumerate(scores.values)
        ]
        answer = schemas.ScoreList(
            **envelope("score", "list", job), data=data, usage=schemas.PromptUsage.of(scores.tokens)
        )
        await exchange.send_json([answer.json_bytes()])

    return Exchange(job.state, work, deadline=job.deadline)


@router.endpoint(
    "POST",
    "/v1/rerank",
    Operation(
        body=schemas.RerankRequest,
        response=schemas.Reranking,
        errors=GENERATION_ERRORS,
        examples={
            "best": (
                "The best of several documents",
                {"query": "Where is the sea?", "documents": ["The king said", "The sea is wide"], "top_n": 1},
            ),
        },
    ),
    aliases=("/rerank", "/v2/rerank"),
)
async def create_reranking(request: Request) -> Response:
    """Rank documents by their relevance for a query."""
    body, job = await begin_pooling(request, schemas.RerankRequest)
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
        results = [schemas.RankedDocument.model_construct(index=i, relevance_score=values[i]) for i in order]
        if body.return_documents is not False:
            for result in results:
                result.document = schemas.RankedText(text=documents[result.index])
        answer = schemas.Reranking(
            **envelope("rerank", "list", job), results=results, usage=schemas.PromptUsage.of(scores.tokens)
        )
        data = await job.state.text.run_in_thread(answer.json_bytes)
        if request.scope["path"].endswith("/v2/rerank"):  # some of Cohere's clients require this field
            data = data[:-1] + b',"meta":{"api_version":{"version":"2"}}}'
        await exchange.send_json([data])

    return Exchange(job.state, work, deadline=job.deadline)


def _documents(documents: list[Any]) -> list[str]:
    """Texts of the documents; raises ApiError unless each is a string or an object with only a text."""
    if len(documents) > schemas.MAX_INPUTS:  # checked before the contents
        check_texts(documents, "documents")
    texts = []
    for index, document in enumerate(documents):
        if isinstance(document, dict):
            where = f"documents[{index}]"
            document = without_nulls(document)
            if set(document) != {"text"} or not isinstance(document["text"], str):
                raise bad_request(f"{where} must be a string, or an object with a text and nothing else", where)
            document = document["text"]
        texts.append(document)
    return check_texts(texts, "documents")


@classify_router.endpoint(
    "POST",
    "/classify",
    Operation(
        body=schemas.ClassifyRequest,
        response=schemas.ClassList,
        errors=GENERATION_ERRORS,
        examples={"plain": ("Two texts", {"input": ["so good", "so bad"]})},
    ),
)
async def classify(request: Request) -> Response:
    """Classify texts with a model that has a classification head."""
    body, job = await begin_pooling(request, schemas.ClassifyRequest)
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
            f"this model is a {job.info.architecture}, which classifies tokens instead of texts: use /pooling",
            "model",
            "no_classifier",
        )
    inputs = split_inputs(body.input)
    row = _ROW_BYTES + max_vector_bytes(2 * len(classifier.labels), base64=False) + 6 * max(map(len, classifier.labels))
    if len(inputs) * row > job.state.settings.max_response_bytes:
        raise response_too_large(len(inputs) * row, job.state.settings.max_response_bytes)

    async def work(exchange: Exchange) -> None:
        prompts = await encode_inputs(job, inputs, "input")
        rows = await pool(exchange, job, prompts, PoolingRule("classify"))
        head, usage = envelope("classify", "list", job), schemas.PromptUsage.of(sum(map(len, prompts)))

        def render() -> bytes:
            data = _classified(rows, classifier, apply_activation=body.use_activation is not False)
            return schemas.ClassList(**head, data=data, usage=usage).json_bytes()

        await exchange.send_json([await job.state.text.run_in_thread(render)])

    return Exchange(job.state, work, deadline=job.deadline)


def _classified(
    rows: list[PooledRows], classifier: ClassifierInfo, *, apply_activation: bool
) -> list[schemas.ClassifiedText]:
    data = []
    for index, row in enumerate(rows):
        logits = list(unpack_rows(row)[0])
        probs = probabilities(logits, classifier.activation) if apply_activation else logits
        label = classifier.labels[logits.index(max(logits))]
        data.append(
            schemas.ClassifiedText.model_construct(index=index, label=label, probs=probs, num_classes=len(logits))
        )
    return data
