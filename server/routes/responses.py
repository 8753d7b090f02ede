"""`POST /v1/responses` and `…/input_tokens`, and what is kept of answers: `GET`, `DELETE` and `GET …/input_items` of
`/v1/responses/{id}`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from windlass.server.answers.responses import ResponseWriter, begun_response, unbegun_failure
from windlass.server.errors import ApiError, bad_request
from windlass.server.exchange.body import read_body
from windlass.server.exchange.response_store import Kept, items_until
from windlass.server.exchange.slices import LargeJson
from windlass.server.exchange.state import ServerState
from windlass.server.exchange.streaming import Exchange, StreamForm
from windlass.server.generation.deltas import Tally
from windlass.server.generation.translation.names import Translated
from windlass.server.generation.translation.responses import chat_of_response
from windlass.server.protocol.responses.answers import DeletedResponse, InputTokens, ItemList, ResponseAnswer
from windlass.server.protocol.responses.events import ResponseEvent
from windlass.server.protocol.responses.items import Item, kept_items, known_items
from windlass.server.protocol.responses.request import CountInputRequest, ResponseRequest
from windlass.server.routes.common import (
    BODY_ERRORS,
    GENERATION_ERRORS,
    answers,
    body_of,
    caller_of,
    owner_of,
    query,
    state_of,
    while_connected,
)
from windlass.server.routes.conversation import check_chat, count_chat, prepare
from windlass.server.routes.pipeline import run
from windlass.server.routes.references import resolve_references
from windlass.server.text.service import Prompt

router = APIRouter()

MANY_ITEMS = 500  # items from which making a chat of them leaves the event loop
ITEM_BYTES = 1024  # what an item takes in memory beside its text


@router.post(
    "/v1/responses",
    openapi_extra=body_of(ResponseRequest),
    responses=answers(ResponseAnswer, events=ResponseEvent, errors=GENERATION_ERRORS, named=True),
)
async def create_response(request: Request) -> Response:
    """Answer an input, or go on with an earlier response's conversation."""
    arrival = time.monotonic()
    state, owner = state_of(request), owner_of(request)
    body = await read_body(request, ResponseRequest, stall_seconds=state.settings.body_stall_seconds)
    previous = _previous(state, body, owner)
    translated = await _translated(state, body, owner, previous)
    with translated.names.told():
        chat = await check_chat(state, request, translated.body, arrival=arrival)
    writers: list[ResponseWriter] = []  # one, once it is made

    async def work(exchange: Exchange) -> None:
        if body.stream:
            exchange.begin_stream()
        with translated.names.told():
            prompts, job = await prepare(chat)
            response = begun_response(
                body, model=job.model_name, sampling=job.sampling, drops_turns=job.overflow == "drop_turns"
            )

            def keep(answer: bytes, output: list[dict[str, Any]]) -> None:
                _keep(state, owner, str(response["id"]), body, previous, answer, output)

            def make_writer(prompts: Sequence[Prompt], tally: Tally) -> ResponseWriter:
                writer = ResponseWriter(
                    state.tokenizer,
                    tally,
                    job.options,
                    job.parsing,
                    response=response,
                    keep=None if body.store is False else keep,
                )
                writers.append(writer)
                return writer

            await run(exchange, job, prompts, param="messages", make_writer=make_writer)

    def failure(error: ApiError) -> bytes:
        return writers[0].failure(error) if writers and writers[0].begun else unbegun_failure(error)

    return Exchange(state, work, deadline=chat.job.deadline, form=StreamForm(failure, done=b""))


@router.post(
    "/v1/responses/input_tokens",
    openapi_extra=body_of(CountInputRequest),
    responses=answers(InputTokens, errors=BODY_ERRORS),
)
async def count_input_tokens(request: Request) -> Response:
    """How many tokens an input comes to, without generating. It needs the tokenizer only, so it works while the engine starts."""
    state, owner = state_of(request), owner_of(request)
    body = await read_body(request, CountInputRequest, stall_seconds=state.settings.body_stall_seconds)
    state.check_model(body.model)
    translated = await _translated(state, body, owner, _previous(state, body, owner))
    with translated.names.told():
        count = await while_connected(request, count_chat(state, translated.body, caller_of(request)))
    return LargeJson(to_json({"object": "response.input_tokens", "input_tokens": count}))


@router.post("/v1/responses/compact", include_in_schema=False)
async def compact_response(request: Request) -> Response:
    """Told apart from a response of this id."""
    raise ApiError(
        404,
        "conversations are not compacted here: send the turns that shall count, or go on from previous_response_id, where "
        "truncation 'auto' or context_overflow says what becomes of one that is longer than the context",
    )


async def _translated(state: ServerState, body: ResponseRequest, owner: str, previous: Kept | None) -> Translated:
    """The chat that a body asks for. What its input names by ids stands in it afterwards."""
    earlier: list[Item] = [] if previous is None else items_until(previous.answered)

    def translate() -> Translated:
        resolve_references(body, state.responses, owner)
        return chat_of_response(body, earlier)

    many = len(earlier) + len(body.input) > MANY_ITEMS
    return await state.text.on_thread(translate) if many else translate()


def _previous(state: ServerState, body: ResponseRequest, owner: str) -> Kept | None:
    if body.previous_response_id is None:
        return None
    return _found(state, body.previous_response_id, owner, param="previous_response_id")


def _found(state: ServerState, response_id: str, owner: str, *, param: str | None = None) -> Kept:
    kept = state.responses.get(response_id, owner)
    if kept is None:
        raise ApiError(
            404,
            f"there is no response {response_id[:64]!r} (any more): responses are kept in memory, the oldest are forgotten, and "
            "those of store: false, or of conversations too long for --response-store, are not kept",
            param=param,
            code="previous_response_not_found" if param else "response_not_found",
        )
    return kept


def _keep(
    state: ServerState,
    owner: str,
    response_id: str,
    body: ResponseRequest,
    previous: Kept | None,
    answer: bytes,
    output: list[dict[str, Any]],
) -> None:
    asked, answered = known_items(body.input), kept_items(output)
    # Pages begin behind an id: one that a caller repeats, such as an output item's beside its response, would lead back.
    taken = {item.id for item in ([] if previous is None else items_until(previous.answered))}
    for number, item in enumerate(asked):
        if item.id is None or item.id in taken:
            item.id = f"{_PREFIX[item.type]}_{response_id.removeprefix('resp_')}i{number:04x}"
        taken.add(item.id)
    sizes = [len(to_json(items)) + ITEM_BYTES * (1 + len(items)) for items in (asked, answered)]
    state.responses.put(
        response_id,
        owner,
        answer,
        previous=previous,
        asked=asked,
        answered=answered,
        sizes=(sizes[0], sizes[1]),
    )


_PREFIX = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


_STREAM = query("stream", {"enum": ["false"]}, "Only `false`: a response that is kept is not streamed again.")
_PAGING = [
    query("order", {"enum": ["asc", "desc"], "default": "desc"}, "The last item first (`desc`), or the first one."),
    query("limit", {"type": "integer", "minimum": 1, "maximum": 100, "default": 20}, "Items on a page."),
    query(
        "after",
        {"type": "string"},
        "The id of the item that the page begins behind, such as the last page's `last_id`.",
    ),
]


@router.get(
    "/v1/responses/{response_id}",
    openapi_extra={"parameters": [_STREAM]},
    responses=answers(ResponseAnswer, errors=(400, 404)),
)
async def get_response(request: Request, response_id: str) -> Response:
    """A response that is kept, as it was answered."""
    if request.query_params.get("stream", "false") != "false":
        raise bad_request("a response that is kept is not streamed again: leave stream out", "stream")
    return LargeJson(_found(state_of(request), response_id, owner_of(request)).body)


@router.delete("/v1/responses/{response_id}", responses=answers(DeletedResponse, errors=(404,)))
async def delete_response(request: Request, response_id: str) -> Response:
    """Forget a response. Those that went on from it keep their conversation."""
    state, owner = state_of(request), owner_of(request)
    _found(state, response_id, owner)
    state.responses.delete(response_id, owner)
    return LargeJson(to_json({"id": response_id, "object": "response", "deleted": True}))


@router.get(
    "/v1/responses/{response_id}/input_items",
    openapi_extra={"parameters": _PAGING},
    responses=answers(ItemList, errors=(400, 404)),
)
async def list_input_items(request: Request, response_id: str) -> Response:
    """The items that a response answered, those of the responses before it included."""
    query = request.query_params
    order, limit, after = query.get("order", "desc"), query.get("limit", "20"), query.get("after")
    if order not in ("asc", "desc"):
        raise bad_request("order should be 'asc' or 'desc'", "order")
    if not (limit.isascii() and limit.isdigit() and len(limit) < 4 and 1 <= int(limit) <= 100):
        raise bad_request("limit should be a number from 1 to 100", "limit")
    state = state_of(request)
    kept = _found(state, response_id, owner_of(request))
    items: list[Item] = items_until(kept.asked)
    if order == "desc":
        items.reverse()
    if after is not None:
        places = [place for place, item in enumerate(items) if item.id == after]
        if not places:
            raise bad_request("after names no item of this response", "after")
        items = items[places[0] + 1 :]
    page, more = items[: int(limit)], len(items) > int(limit)
    listed = {
        "object": "list",
        "data": [listed_item(item) for item in page],
        "first_id": page[0].id if page else None,
        "last_id": page[-1].id if page else None,
        "has_more": more,
    }
    return LargeJson(await state.text.on_thread(to_json, listed))


def listed_item(item: Item) -> dict[str, Any]:
    """An item of an input as it is listed: with its status, and the texts of calls' results in one string."""
    shown = item.model_dump(exclude_none=True)
    if item.type == "function_call_output":
        shown["output"] = "\n".join(part.get("text", part.get("refusal", "")) for part in shown["output"])
    return {**shown, "status": "completed"}
