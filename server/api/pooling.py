"""`POST /v1/embeddings`, `/pooling`, `/v1/score`, `/v1/rerank` and `/classify`."""

from __future__ import annotations

import sys
from array import array
from base64 import b64encode
from collections.abc import Sequence
from typing import Any

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from windlass.engine.interface.model_info import Activation, ClassifierInfo
from windlass.engine.interface.outputs import PooledRows
from windlass.engine.interface.request import PoolingRule
from windlass.server.api.router import GENERATION_ERRORS, ApiRouter
from windlass.server.errors import bad_request, response_too_large
from windlass.server.schemas import pooling as schemas
from windlass.server.schemas.base import without_nulls
from windlass.server.serving.job import PoolingJob, envelope
from windlass.server.serving.pooling import (
    begin_pooling,
    check_scores_pairs,
    check_texts,
    embedding_rule,
    encode_inputs,
    pool,
    probabilities,
    score_pairs,
    split_inputs,
    unpack_rows,
)
from windlass.server.serving.streaming import Exchange

_NUMBER_BYTES = 16  # such as "-0.000123456789,"

embeddings_router = ApiRouter("Embeddings", "Texts as vectors.")
ranking_router = ApiRouter("Ranking", "Similarity of texts, and documents in order of relevance.")
classes_router = ApiRouter("Classes", "Classes of texts, for models trained to classify.")

_ITEM_BYTES = 80  # of the JSON around a vector
_PER_TOKEN_KINDS = ("all", "classify tokens")  # kinds of pooling with a row for each token
_CLASS_KINDS = ("classify", "classify tokens", "answer")
_VALUES_PER_BATCH = 256 * 1024  # numbers rendered before other tasks get their turn


def max_vector_bytes(values: int, *, base64: bool) -> int:
    """Maximum size of a vector in JSON, in bytes."""
    return 2 + (-(-4 * values // 3) + 4 if base64 else _NUMBER_BYTES * values)


def vector_json(values: Sequence[float]) -> bytes:
    """A list of float32 numbers. Nine digits distinguish any two of them."""
    return b"[" + ",".join([format(value, ".9g") for value in values]).encode() + b"]"


def base64_json(rows: PooledRows) -> bytes:
    """The bytes of the rows as a JSON string in base64."""
    return b'"' + b64encode(rows.values) + b'"'


@embeddings_router.endpoint(
    "POST",
    "/v1/embeddings",
    body=schemas.EmbeddingRequest,
    response=schemas.EmbeddingList,
    errors=GENERATION_ERRORS,
    examples={
        "plain": ("A vector per text", {"input": ["The king said", "The sea is wide"]}),
        "packed": (
            "A short vector in base64",
            {"input": "The king said", "pooling": "mean", "dimensions": 8, "encoding_format": "base64"},
        ),
    },
)
async def create_embeddings(request: Request) -> Response:
    """Compute a vector for each text."""
    body, job = await begin_pooling(request, schemas.EmbeddingRequest)
    inputs = split_inputs(body.input)
    rule = embedding_rule(job, pooling=body.pooling, normalize=body.normalize, dimensions=body.dimensions)
    return _respond(job, inputs, rule, "embd", base64=body.encoding_format == "base64")


@embeddings_router.endpoint(
    "POST",
    "/pooling",
    body=schemas.PoolingRequest,
    response=schemas.RowsList,
    errors=GENERATION_ERRORS,
    examples={"states": ("The state of each token", {"input": "The king said", "pooling": "all", "dimensions": 4})},
)
async def create_pooling(request: Request) -> Response:
    """Return the hidden states or classes of texts, pooled or per token."""
    body, job = await begin_pooling(request, schemas.PoolingRequest)
    inputs = split_inputs(body.input)
    rule = _pooling_rule(job, body)
    apply_activation = rule.kind in _CLASS_KINDS and body.use_activation is not False
    return _respond(
        job, inputs, rule, "pool", base64=body.encoding_format == "base64", apply_activation=apply_activation
    )


def _pooling_rule(job: PoolingJob, body: schemas.PoolingRequest) -> PoolingRule:
    """The pooling rule of a request. Raises ApiError if the model has no suitable head, or if fields conflict."""
    classifier, task = job.info.classifier, body.task
    if task is None and classifier is not None and classifier.per_token and body.pooling is None:
        task = "token_classify"
    if task not in ("classify", "token_classify"):
        if body.use_activation is not None:
            raise bad_request("use_activation applies only to classes: set task", "use_activation")
        pooling = body.pooling
        if task is not None:
            if (pooling == "all") != (task == "token_embed") and pooling is not None:
                raise bad_request(f"pooling {pooling!r} conflicts with task {task!r}: remove one of them", "pooling")
            pooling = "all" if task == "token_embed" else pooling
        return embedding_rule(job, pooling=pooling, normalize=bool(body.normalize), dimensions=body.dimensions)
    for field in ("pooling", "normalize", "dimensions"):
        if getattr(body, field) is not None:
            raise bad_request(f"{field} applies only to hidden states, and {task} returns classes: remove it", field)
    if task == "classify" and classifier is None and job.state.rerank_answer_ids:
        return PoolingRule("answer", answers=job.state.rerank_answer_ids)
    wanted = "…ForTokenClassification" if task == "token_classify" else "…ForSequenceClassification"
    if classifier is None or classifier.per_token != (task == "token_classify"):
        raise bad_request(
            f"this model is a {job.info.architecture}, which has no head for these classes: serve a {wanted}",
            "task",
            "no_classifier",
        )
    return PoolingRule("classify tokens" if task == "token_classify" else "classify")


def _respond(
    job: PoolingJob,
    inputs: list[str] | list[list[int]],
    rule: PoolingRule,
    prefix: str,
    *,
    base64: bool,
    apply_activation: bool = False,
) -> Exchange:
    """Pool the inputs and render the rows. Too large answers are refused before the texts are tokenized, or right
    after.

    apply_activation: the rows are logits of classes, which become probabilities.
    """
    classifier = job.info.classifier
    width = rule.dimensions or job.info.hidden_size
    if rule.kind in _CLASS_KINDS:
        width = 1 if classifier is None else len(classifier.labels)
    activation: Activation = "none"
    if apply_activation:
        activation = "sigmoid" if classifier is None else classifier.activation
    _check_size(job, len(inputs), len(inputs), width, base64=base64)

    async def work(exchange: Exchange) -> None:
        prompts = await encode_inputs(job, inputs, "input")
        count = sum(map(len, prompts))
        if rule.kind in _PER_TOKEN_KINDS:
            _check_size(job, len(prompts), count, width, base64=base64)
        pieces = [to_json(envelope(prefix, "list", job))[:-1], b',"data":[']
        batch: list[PooledRows] = []
        first = batch_bytes = 0
        for number, rows in enumerate(await pool(exchange, job, prompts, rule), start=1):
            batch.append(rows)
            batch_bytes += len(rows.values)
            if number == len(prompts) or batch_bytes >= 4 * _VALUES_PER_BATCH:
                if activation != "none":
                    batch = await job.state.text.run_in_thread(_apply_activation, batch, activation)
                pieces.append(await job.state.text.run_in_thread(_render_items, batch, first, prefix, rule, base64))
                batch, first, batch_bytes = [], number, 0
        await exchange.send_json([*pieces, b'],"usage":', schemas.PromptUsage.of(count).json_bytes(), b"}"])

    return Exchange(job.state, work, deadline=job.deadline)


def _check_size(job: PoolingJob, items: int, rows: int, width: int, *, base64: bool) -> None:
    size, most = (
        items * _ITEM_BYTES + rows * max_vector_bytes(width, base64=base64),
        job.state.settings.max_response_bytes,
    )
    if size > most:
        raise response_too_large(size, most)


def _apply_activation(batch: list[PooledRows], activation: Activation) -> list[PooledRows]:
    """Turn logits into probabilities."""
    found = []
    for rows in batch:
        flat = array("f", [value for row in unpack_rows(rows) for value in probabilities(row, activation)])
        if sys.byteorder == "big":
            flat.byteswap()
        found.append(PooledRows(flat.tobytes(), rows.width))
    return found


def _render_items(batch: list[PooledRows], first: int, prefix: str, rule: PoolingRule, base64: bool) -> bytes:
    """JSON of the items of some texts."""
    parts = []
    for index, rows in enumerate(batch, start=first):
        if base64:
            vector = base64_json(rows)
        elif rule.kind in _PER_TOKEN_KINDS:
            vector = b"[" + b",".join([vector_json(row) for row in unpack_rows(rows)]) + b"]"
        else:
            vector = vector_json(unpack_rows(rows)[0])
        comma = b"," if index else b""
        if prefix == "embd":
            parts.append(b'%s{"object":"embedding","index":%d,"embedding":%s}' % (comma, index, vector))
        else:
            shape = (rows.num_rows, rows.width)
            parts.append(
                b'%s{"object":"pooling","index":%d,"shape":[%d,%d],"data":%s}' % (comma, index, *shape, vector)
            )
    return b"".join(parts)


_ROW_BYTES = 60  # of the JSON around the classes of a text


@ranking_router.endpoint(
    "POST",
    "/v1/score",
    aliases=("/score",),
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


@ranking_router.endpoint(
    "POST",
    "/v1/rerank",
    aliases=("/rerank", "/v2/rerank"),
    body=schemas.RerankRequest,
    response=schemas.Reranking,
    errors=GENERATION_ERRORS,
    examples={
        "best": (
            "The best of several documents",
            {"query": "Where is the sea?", "documents": ["The king said", "The sea is wide"], "top_n": 1},
        ),
    },
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


@classes_router.endpoint(
    "POST",
    "/classify",
    body=schemas.ClassifyRequest,
    response=schemas.ClassList,
    errors=GENERATION_ERRORS,
    examples={"plain": ("Two texts", {"input": ["so good", "so bad"]})},
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
