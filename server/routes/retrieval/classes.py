"""`POST /classify`."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from windlass.engine.interface.model_info import ClassifierInfo
from windlass.engine.interface.outputs import PooledRows
from windlass.engine.interface.request import PoolingRule
from windlass.server.answers.vectors import vector_bytes
from windlass.server.errors import answer_too_large, bad_request
from windlass.server.exchange.streaming import Exchange
from windlass.server.protocol.ranking import ClassifyRequest, ClassList
from windlass.server.routes.common import GENERATION_ERRORS, answers, body_of
from windlass.server.routes.job import envelope
from windlass.server.routes.retrieval.beginning import begin, usage
from windlass.server.routes.retrieval.pooling import numbers, pool, read_inputs, split_inputs
from windlass.server.routes.retrieval.scores import probabilities

router = APIRouter()

_ROW_BYTES = 60  # of JSON around the classes of a text


@router.post(
    "/classify", openapi_extra=body_of(ClassifyRequest), responses=answers(ClassList, errors=GENERATION_ERRORS)
)
async def classify(request: Request) -> Response:
    """The classes of texts, by a model with a classification head."""
    body, job = await begin(request, ClassifyRequest)
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
    row = _ROW_BYTES + vector_bytes(2 * len(classifier.labels), base64=False) + 6 * max(map(len, classifier.labels))
    if len(given) * row > job.state.settings.max_response_bytes:
        raise answer_too_large(len(given) * row, job.state.settings.max_response_bytes)

    async def work(exchange: Exchange) -> None:
        prompts = await read_inputs(job, given, "input")
        rows = await pool(exchange, job, prompts, PoolingRule("classify"))
        data = await job.state.text.on_thread(_data, rows, classifier, body.use_activation is not False)
        end = to_json({"usage": usage(sum(map(len, prompts)))})
        head = to_json(envelope("classify", "list", job))
        await exchange.send_json([head[:-1], b',"data":', data, b",", end[1:]])

    return Exchange(job.state, work, deadline=job.deadline)


def _data(rows: list[PooledRows], classifier: ClassifierInfo, activated: bool) -> bytes:
    data = []
    for index, row in enumerate(rows):
        logits = list(numbers(row)[0])
        probs = probabilities(logits, classifier.activation) if activated else logits
        label = classifier.labels[logits.index(max(logits))]
        data.append({"index": index, "label": label, "probs": probs, "num_classes": len(logits)})
    return to_json(data)
