"""`POST /v1/embeddings` and `POST /pooling`."""

from __future__ import annotations

import sys
from array import array
from base64 import b64encode
from collections.abc import Sequence

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from windlass.engine.interface.model_info import Activation
from windlass.engine.interface.outputs import PooledRows
from windlass.engine.interface.request import PoolingRule
from windlass.server.api.router import GENERATION_ERRORS, ApiRouter, Operation
from windlass.server.errors import bad_request, response_too_large
from windlass.server.schemas.pooling import EmbeddingList, EmbeddingRequest, PoolingRequest, PromptUsage, RowsList
from windlass.server.serving.job import PoolingJob, envelope
from windlass.server.serving.pooling import (
    begin_pooling,
    embedding_rule,
    encode_inputs,
    pool,
    probabilities,
    split_inputs,
    unpack_rows,
)
from windlass.server.serving.streaming import Exchange

_NUMBER_BYTES = 16  # such as "-0.000123456789,"

router = ApiRouter("Embeddings", "Texts as vectors.")

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


@router.endpoint(
    "POST",
    "/v1/embeddings",
    Operation(
        body=EmbeddingRequest,
        response=EmbeddingList,
        errors=GENERATION_ERRORS,
        examples={
            "plain": ("A vector per text", {"input": ["The king said", "The sea is wide"]}),
            "packed": (
                "A short vector in base64",
                {"input": "The king said", "pooling": "mean", "dimensions": 8, "encoding_format": "base64"},
            ),
        },
    ),
)
async def create_embeddings(request: Request) -> Response:
    """Compute a vector for each text."""
    body, job = await begin_pooling(request, EmbeddingRequest)
    inputs = split_inputs(body.input)
    rule = embedding_rule(job, pooling=body.pooling, normalize=body.normalize, dimensions=body.dimensions)
    return _respond(job, inputs, rule, "embd", base64=body.encoding_format == "base64")


@router.endpoint(
    "POST",
    "/pooling",
    Operation(
        body=PoolingRequest,
        response=RowsList,
        errors=GENERATION_ERRORS,
        examples={"states": ("The state of each token", {"input": "The king said", "pooling": "all", "dimensions": 4})},
    ),
)
async def create_pooling(request: Request) -> Response:
    """Return the hidden states or classes of texts, pooled or per token."""
    body, job = await begin_pooling(request, PoolingRequest)
    inputs = split_inputs(body.input)
    rule = _pooling_rule(job, body)
    apply_activation = rule.kind in _CLASS_KINDS and body.use_activation is not False
    return _respond(
        job, inputs, rule, "pool", base64=body.encoding_format == "base64", apply_activation=apply_activation
    )


def _pooling_rule(job: PoolingJob, body: PoolingRequest) -> PoolingRule:
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
        await exchange.send_json([*pieces, b'],"usage":', PromptUsage.of(count).json_bytes(), b"}"])

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
