"""Items that a response's input names by their ids, in place of the items themselves."""

from __future__ import annotations

from windlass.server.errors import ApiError, bad_request
from windlass.server.exchange.response_store import ResponseStore
from windlass.server.protocol.responses.items import Item, ItemReference
from windlass.server.protocol.responses.request import ResponseRequest

_SERIAL = 32  # characters of an item's id behind its prefix, which its response's id has, too


def resolve_references(body: ResponseRequest, responses: ResponseStore, owner: str) -> None:
    """Put the items into the input that it names, in place; raises ApiError where there is none.

    Each can be named once, and what of each response is looked at once: all in all no more than is kept.
    """
    found: dict[str, dict[str | None, Item]] = {}  # by response and by id
    named: set[str] = set()
    for number, item in enumerate(body.input):
        if not isinstance(item, ItemReference):
            continue
        param, shown = f"input[{number}].id", item.id[:64]
        if item.id in named:
            raise bad_request(f"{param} names {shown!r} for the second time: name an item once", param)
        named.add(item.id)
        response_id = "resp_" + item.id.partition("_")[2][:_SERIAL]
        if response_id not in found:
            kept = responses.get(response_id, owner)
            items = () if kept is None else (*kept.asked.items, *kept.answered.items)
            found[response_id] = {each.id: each for each in items}
        known = found[response_id].get(item.id)
        if known is None:
            raise ApiError(
                404,
                f"there is no item {shown!r} (any more): items are kept with their responses, the oldest are forgotten; those of "
                "store: false and calls that were cut short are not kept: send the item itself",
                param=param,
                code="item_not_found",
            )
        body.input[number] = known.model_copy()  # its id may become another one
