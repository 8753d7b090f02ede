"""`POST /v1/embeddings` and `POST /pooling`."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from windlass.engine.api.pooling import PooledRows, PoolingRule
from windlass.server.answers.vectors import base64_json, vector_bytes, vector_json
from windlass.server.errors import answer_too_large
from windlass.server.exchange.streaming import Exchange
from windlass.server.generation.pooling import PoolingJob, embedding_rule, numbers, pool, read_inputs, split_inputs
from windlass.server.protocol.retrieval import EmbeddingList, EmbeddingRequest, PoolingRequest, RowsList
from windlass.server.routes.common import GENERATION_ERRORS, answers, body_of
from windlass.server.routes.retrieval.beginning import begin, envelope, usage

router = APIRouter()

_ITEM_BYTES = 80  # of JSON around a vector
_BATCH = 256 * 1024  # numbers written before others get their turn


@router.post(
    "/v1/embeddings",
    openapi_extra=body_of(EmbeddingRequest),
    responses=answers(EmbeddingList, errors=GENERATION_ERRORS),
)
async def create_embeddings(request: Request) -> Response:
    """A vector for each text."""
    body, job = await begin(request, EmbeddingRequest)
    given = split_inputs(body.input)
    rule = embedding_rule(job, pooling=body.pooling, normalize=body.normalize, dimensions=body.dimensions)
    return _answer(job, given, rule, "embd", base64=body.encoding_format == "base64")


@router.post("/pooling", openapi_extra=body_of(PoolingRequest), responses=answers(RowsList, errors=GENERATION_ERRORS))
async def create_pooling(request: Request) -> Response:
    """The hidden states of texts, pooled or token by token."""
    body, job = await begin(request, PoolingRequest)
    given = split_inputs(body.input)
    rule = embedding_rule(job, pooling=body.pooling, normalize=bool(body.normalize), dimensions=body.dimensions)
    return _answer(job, given, rule, "pool", base64=body.encoding_format == "base64")


def _answer(
    job: PoolingJob, given: list[str] | list[list[int]], rule: PoolingRule, prefix: str, *, base64: bool
) -> Exchange:
    """Refused where it would become too large: before the texts are tokenized, or of single tokens right after."""
    width = rule.dimensions or job.info.hidden_size
    _check_size(job, len(given), len(given), width, base64=base64)

    async def work(exchange: Exchange) -> None:
        prompts = await read_inputs(job, given, "input")
        count = sum(map(len, prompts))
        if rule.kind == "all":
            _check_size(job, len(prompts), count, width, base64=base64)
        pieces = [to_json(envelope(prefix, job))[:-1], b',"data":[']
        batch: list[PooledRows] = []
        first = 0
        for number, rows in enumerate(await pool(job, prompts, rule), start=1):
            batch.append(rows)
            if number == len(prompts) or sum(len(each.values) for each in batch) >= 4 * _BATCH:
                pieces.append(await job.state.text.on_thread(_data, batch, first, prefix, rule, base64))
                batch, first = [], number
        await exchange.send_json([*pieces, b'],"usage":', to_json(usage(count)), b"}"])

    return Exchange(job.state, work, deadline=job.deadline)


def _check_size(job: PoolingJob, items: int, rows: int, width: int, *, base64: bool) -> None:
    size, most = items * _ITEM_BYTES + rows * vector_bytes(width, base64=base64), job.state.settings.max_response_bytes
    if size > most:
        raise answer_too_large(size, most)


def _data(batch: list[PooledRows], first: int, prefix: str, rule: PoolingRule, base64: bool) -> bytes:
    """The items of a few texts."""
    parts = []
    for index, rows in enumerate(batch, start=first):
        if base64:
            vector = base64_json(rows)
        elif rule.kind == "all":
            vector = b"[" + b",".join([vector_json(row) for row in numbers(rows)]) + b"]"
        else:
            vector = vector_json(numbers(rows)[0])
        comma = b"," if index else b""
        if prefix == "embd":
            parts.append(b'%s{"object":"embedding","index":%d,"embedding":%s}' % (comma, index, vector))
        else:
            shape = (rows.num_rows, rows.width)
            parts.append(
                b'%s{"object":"pooling","index":%d,"shape":[%d,%d],"data":%s}' % (comma, index, *shape, vector)
            )
    return b"".join(parts)
