"""Stored responses: continued, read, listed, deleted, removed when too many, and visible only to their owner."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from api_helpers.named_events import named_events
from helpers.live_server import Live, live_server, server_fixture
from hypothesis import given, settings
from hypothesis import strategies as st

from windlass.server.app.response_store import ResponseStore, items_until

PATH = "/v1/responses"
shared = server_fixture(api_keys=("one", "two"))


@pytest.fixture
def live(live: Live) -> Live:
    live.http.headers = {"authorization": "Bearer one"}
    return live


def ask(live: Live, text: str | list[Any] = "hello", **fields: Any) -> dict[str, Any]:
    return live.request(PATH, input=text, max_output_tokens=3, **fields)


def prompt_of(live: Live) -> str:
    return live.tokenizer.decode(live.engine.requests[-1].prompt_token_ids, skip_special_tokens=True)


def test_conversation_is_continued(live: Live) -> None:
    first = ask(live, "a", instructions="old rules")
    said = first["output"][0]["content"][0]["text"]
    events = named_events(
        live, PATH, {"input": "b", "previous_response_id": first["id"], "instructions": "new", "max_output_tokens": 3}
    )
    second = events[-1]["response"]
    third = ask(live, "c", previous_response_id=second["id"])
    assert prompt_of(live) == f"[user]a\n[assistant]{said}\n[user]b\n[assistant]{said}\n[user]c\n[assistant]"
    assert third["previous_response_id"] == second["id"]


def test_stored_response_is_returned(live: Live) -> None:
    whole = ask(live)
    assert live.http.get(f"{PATH}/{whole['id']}").json() == whole
    last = named_events(live, PATH, {"input": "a"})[-1]["response"]
    assert live.http.get(f"{PATH}/{last['id']}").json() == last
    assert live.http.get(f"{PATH}/{last['id']}?stream=true").json()["error"]["param"] == "stream"


def test_store_false_stores_nothing(live: Live) -> None:
    before = len(live.state.responses)
    answer = ask(live, store=False)
    assert answer["store"] is False and len(live.state.responses) == before
    assert live.http.get(f"{PATH}/{answer['id']}").json()["error"]["code"] == "response_not_found"


def test_deleting(live: Live) -> None:
    first = ask(live, "a")
    second = ask(live, "b", previous_response_id=first["id"])
    assert live.http.delete(f"{PATH}/{first['id']}").json() == {
        "id": first["id"],
        "object": "response",
        "deleted": True,
    }
    assert live.http.delete(f"{PATH}/{first['id']}").status_code == 404
    ask(live, "c", previous_response_id=second["id"])
    assert prompt_of(live).startswith("[user]a\n")  # its continuation keeps the conversation


def test_input_items_are_listed_in_pages(live: Live) -> None:
    first = ask(live, "a")
    second = ask(live, "b", previous_response_id=first["id"])
    path = f"{PATH}/{second['id']}/input_items"
    listed = live.http.get(path, params={"order": "asc"}).json()
    texts = [item["content"][0]["text"] for item in listed["data"]]
    assert texts == ["a", first["output"][0]["content"][0]["text"], "b"] and listed["has_more"] is False
    assert [item["role"] for item in listed["data"]] == ["user", "assistant", "user"]
    backwards = live.http.get(path, params={"limit": "2"}).json()
    assert backwards["data"] == listed["data"][:0:-1] and backwards["has_more"] is True
    assert (backwards["first_id"], backwards["last_id"]) == (listed["last_id"], listed["data"][1]["id"])
    rest = live.http.get(path, params={"after": backwards["last_id"]}).json()
    assert rest["data"] == listed["data"][:1] and rest["has_more"] is False
    for query in (
        {"order": "up"},
        {"limit": "0"},
        {"limit": "x"},
        {"limit": "101"},
        {"limit": "²"},
        {"after": "msg_none"},
    ):
        error = live.http.get(path, params=query)
        assert error.status_code == 400 and error.json()["error"]["param"] == next(iter(query))


def test_pages_with_repeated_ids_end(live: Live) -> None:
    """For example of output items that are sent back with their response."""
    first = ask(live, "a")
    mine = [{"id": "msg_mine", "role": "user", "content": text} for text in "bcd"]
    second = ask(live, [*first["output"], *mine], previous_response_id=first["id"])
    third = ask(live, mine[:1], previous_response_id=second["id"])
    path = f"{PATH}/{third['id']}/input_items"
    for order in ("asc", "desc"):
        whole = live.http.get(path, params={"order": order}).json()["data"]
        assert len({item["id"] for item in whole}) == len(whole) == 8
        paged: list[Any] = []
        after: dict[str, str] = {}
        for _ in range(9):
            page = live.http.get(path, params={"order": order, "limit": "1", **after}).json()
            paged, after = paged + page["data"], {"after": page["last_id"]}
            if not page["has_more"]:
                break
        assert paged == whole
    assert [item["id"] for item in whole].count("msg_mine") == 1  # the first one keeps its id


def test_items_are_referenced_by_id(live: Live) -> None:
    """Clients that store ids may send them in place of the items."""
    first = ask(live, "a")
    said = first["output"][0]
    (inputs,) = live.http.get(f"{PATH}/{first['id']}/input_items").json()["data"]
    whole = [inputs, said, {"role": "user", "content": "b"}]
    named = [{"type": "item_reference", "id": item["id"]} for item in whole[:2]]
    second = ask(live, [*named, whole[2]])
    by_name = prompt_of(live)
    ask(live, whole)
    assert prompt_of(live) == by_name
    listed = live.http.get(f"{PATH}/{second['id']}/input_items", params={"order": "asc"}).json()["data"]
    assert [item["id"] for item in listed[:2]] == [inputs["id"], said["id"]]
    ask(live, named[1:], previous_response_id=first["id"])  # the same item twice: the later one is listed by another id
    ask(live, [*named, whole[2]])
    assert prompt_of(live) == by_name
    assert live.http.get(f"{PATH}/{first['id']}").json() == first


def test_unknown_item_is_not_found(live: Live) -> None:
    mine = ask(live)["output"][0]["id"]
    unkept = ask(live, store=False)["output"][0]["id"]

    def refused(*ids: str, status: int = 404) -> dict[str, Any]:
        items = [{"type": "item_reference", "id": each} for each in ids]
        error: dict[str, Any] = live.refuse(PATH, {"input": [{"role": "user", "content": "a"}, *items]}, status)
        return error

    for unknown in (unkept, mine[:-1] + "9", "msg_mine", "x" * 256):
        error = refused(mine, unknown)
        assert (error["param"], error["code"]) == ("input[2].id", "item_not_found") and "send the item" in error[
            "message"
        ]
    assert refused(mine, mine, status=400)["param"] == "input[2].id"  # so that a short request stays a short one
    live.http.headers = {"x-api-key": "two"}
    assert refused(mine)["code"] == "item_not_found"


def test_an_input_is_counted(live: Live) -> None:
    count = f"{PATH}/input_tokens"
    for fields in ({"instructions": "Be kind."}, {"temperature": 0.5, "stream": True, "tool_choice": "auto"}):
        counted = live.post(count, {"input": "a", **fields})
        assert counted.status_code == 200, counted.text
        usage = ask(live, "a", **{**fields, "stream": False})["usage"]
        assert counted.json() == {"object": "response.input_tokens", "input_tokens": usage["input_tokens"]}
    first = ask(live, "a")
    second = ask(live, "b", previous_response_id=first["id"])
    counted = live.post(count, {"input": "b", "previous_response_id": first["id"]}).json()
    assert counted["input_tokens"] == second["usage"]["input_tokens"]
    named = [{"type": "item_reference", "id": first["output"][0]["id"]}]
    alone = live.post(count, {"previous_response_id": first["id"]}).json()["input_tokens"]
    again = live.post(count, {"previous_response_id": first["id"], "input": named}).json()["input_tokens"]
    assert counted["input_tokens"] > alone and again > alone
    for body, param in (
        ({}, "input"),
        ({"input": "a", "colour": 1}, "colour"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
    ):
        assert live.refuse(count, body)["param"] == param
    assert live.refuse(count, {"input": "a", "model": "other"}, 404)["code"] == "model_not_found"
    live.http.headers = {"x-api-key": "two"}
    error = live.refuse(count, {"input": "b", "previous_response_id": first["id"]}, 404)
    assert error["code"] == "previous_response_not_found"


def test_compaction_is_refused(live: Live) -> None:
    error = live.refuse(f"{PATH}/compact", {"input": "a", "model": "toy"}, 404)
    assert error["code"] == "not_found" and "previous_response_id" in error["message"]
    assert live.http.get(f"{PATH}/compact").json()["error"]["code"] == "response_not_found"


def test_other_keys_cannot_read_responses(live: Live) -> None:
    mine = ask(live)["id"]
    live.http.headers = {"x-api-key": "two"}
    error = live.refuse(PATH, {"input": "a", "previous_response_id": mine}, 404)
    assert (error["param"], error["code"]) == ("previous_response_id", "previous_response_not_found")
    for method, path in (("GET", mine), ("DELETE", mine), ("GET", f"{mine}/input_items")):
        assert live.http.request(method, f"{PATH}/{path}").status_code == 404
    assert live.refuse(PATH, {"input": "a", "previous_response_id": "resp_unknown"}, 404)["param"]
    live.http.headers = {"x-api-key": "one"}  # the same key in the other header
    assert live.http.get(f"{PATH}/{mine}").status_code == 200
    live.http.headers = {"x-api-key": "three"}
    assert live.http.get(f"{PATH}/{mine}").status_code == 401


def test_oldest_responses_are_removed() -> None:
    with live_server(response_store_bytes=20_000) as live:
        ids = [ask(live, "x" * 100)["id"] for _ in range(12)]
        assert live.state.responses.size <= 20_000
        found = [live.http.get(f"{PATH}/{each}").status_code == 200 for each in ids]
        assert found == sorted(found) and 1 < sum(found) < 12
        assert live.refuse(PATH, {"input": "a", "previous_response_id": ids[0]}, 404)["code"]


def test_too_long_conversation_displaces_no_other_owner() -> None:
    with live_server(api_keys=("one", "two"), response_store_bytes=20_000) as live:
        live.http.headers = {"x-api-key": "two"}
        theirs = ask(live)["id"]
        live.http.headers = {"x-api-key": "one"}
        last = ask(live, "x" * 6000, truncate_prompt_tokens=50)
        longer = ask(live, "x" * 6000, previous_response_id=last["id"], truncate_prompt_tokens=50)
        assert longer["store"] is True  # as requested
        refused = live.refuse(PATH, {"input": "a", "previous_response_id": longer["id"]}, 404)
        assert "response-store" in refused["message"]
        assert live.http.get(f"{PATH}/{last['id']}").status_code == 200
        live.http.headers = {"x-api-key": "two"}
        assert live.http.get(f"{PATH}/{theirs}").status_code == 200


def test_largest_owner_displaces_its_own_responses() -> None:
    store = ResponseStore(most=100, max_bytes=100)

    def put(name: str, owner: str, size: int, previous: str | None = None) -> bool:
        before = None if previous is None else store.get(previous, owner)
        store.put(name, owner, b"", previous=before, inputs=[], outputs=[], sizes=(size, 0))
        return store.get(name, owner) is not None

    assert put("a1", "a", 30) and put("a2", "a", 60, "a1") is True  # no other response needs it
    store.delete("a2", "a")
    assert put("b1", "b", 20)
    assert all(put(f"c{number}", "c", 10) for number in range(40))
    assert [name for name in ("a1", "b1", "c34", "c35", "c39") if store.get(name, name[0])] == [
        "a1",
        "b1",
        "c35",
        "c39",
    ]
    assert put("a2", "a", 20, "a1") and store.get("b1", "b")  # c is equally large now: its oldest ones are removed
    assert not put("a3", "a", 1, "a2"), "more than half, and others have the rest"
    assert not put("d1", "d", 101) and store.get("a2", "a") and store.get("b1", "b")


def test_too_many_responses_displace_those_of_the_largest_owner() -> None:
    """By number of responses, whatever their size."""
    store = ResponseStore(most=10, max_bytes=1000)

    def put(name: str, size: int) -> None:
        store.put(name, name[0], b"", previous=None, inputs=[], outputs=[], sizes=(size, 0))

    put("a1", 300)
    put("a2", 300)
    for number in range(20):
        put(f"b{number}", 1)
    assert store.get("a1", "a") and store.get("a2", "a") and len(store) == 10
    assert [number for number in range(20) if store.get(f"b{number}", "b")] == list(range(12, 20))
    put("c1", 400)  # too many bytes as well, once one of b's has gone
    assert not store.get("a1", "a") and not store.get("b12", "b") and store.get("b13", "b") and store.get("c1", "c")
    assert len(store) == 9 and store.size == 707
    for name in ("a2", "c1", *(f"b{number}" for number in range(13, 20))):
        assert store.delete(name, name[0])
    assert len(store) == store.size == 0


@given(
    st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 30), st.integers(0, 9)), max_size=80),
    st.integers(1, 20),
)
@settings(max_examples=100, deadline=None)
def test_displacement_matches_brute_force(steps: list[tuple[str, int, int]], most: int) -> None:
    store = ResponseStore(most=most, max_bytes=100)
    kept: dict[str, dict[str, int]] = {}  # sizes of each owner's responses, oldest first; owners by their first
    for number, (owner, size, choice) in enumerate(steps):
        name = f"{owner}{number}"
        if choice == 0 and owner in kept:  # it deletes its newest
            gone = list(kept[owner])[-1]
            assert store.delete(gone, owner)
            del kept[owner][gone]
        else:
            store.put(name, owner, b"", previous=None, inputs=[], outputs=[], sizes=(size, 0))
            others = sum(sum(sizes.values()) for each, sizes in kept.items() if each != owner)
            if size <= max(50, 100 - others):
                kept.setdefault(owner, {})[name] = size
        while (count := sum(map(len, kept.values()))) > most or sum(
            sum(sizes.values()) for sizes in kept.values()
        ) > 100:
            whose = max(
                (each for each in kept if list(kept[each]) != [name]),
                key=lambda each: len(kept[each]) if count > most else sum(kept[each].values()),
                default=owner,
            )
            del kept[whose][next(iter(kept[whose]))]
            kept = {each: sizes for each, sizes in kept.items() if sizes}
        kept = {each: sizes for each, sizes in kept.items() if sizes}
        assert len(store) == sum(map(len, kept.values()))
        assert all(store.get(each, of) for of, sizes in kept.items() for each in sizes)


def test_displacing_many_owners_does_not_scan_all_each_time() -> None:
    """Measured in calls, as the event loop waits for it."""
    owners = 1000
    store = ResponseStore(most=10_000, max_bytes=10 * owners)
    for number in range(owners):
        store.put("r", f"o{number}", b"", previous=None, inputs=[], outputs=[], sizes=(10, 0))
    calls: list[str] = []
    sys.setprofile(lambda frame, event, of: calls.append(event) if event == "call" else None)
    try:
        store.put("large", "me", b"", previous=None, inputs=[], outputs=[], sizes=(5 * owners, 0))
    finally:
        sys.setprofile(None)
    assert store.get("large", "me") and len(store) == owners // 2 + 1
    assert len(calls) < 50 * owners


def test_heap_does_not_grow_with_removed_responses() -> None:
    store = ResponseStore(most=10, max_bytes=1000)
    for number in range(2000):
        store.put("r", f"o{number}", b"", previous=None, inputs=[], outputs=[], sizes=(10, 0))
    assert len(store._largest_number._heap) < 200 and len(store._largest_size._heap) < 200


def test_server_without_response_store() -> None:
    with live_server(response_store_bytes=0) as live:
        answer = ask(live)
        assert live.http.get(f"{PATH}/{answer['id']}").status_code == 404


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30), st.booleans()), max_size=40), st.integers(1, 8))
@settings(max_examples=60, deadline=None)
def test_store_accounting_is_consistent(steps: list[tuple[int, int, bool]], most: int) -> None:
    """Compared with brute force: the counted bytes are those of the stored responses, each link once."""
    store = ResponseStore(most=most, max_bytes=100)
    ids: list[str] = []
    for number, (choice, size, delete) in enumerate(steps):
        name = ids[choice % len(ids)] if ids else ""
        if delete:
            store.delete(name, "me")
        else:
            new = f"r{number}"
            store.put(new, "me", b"x" * 3, previous=store.get(name, "me"), inputs=[new], outputs=[new], sizes=(size, 1))
            ids.append(new)
        kept = [found for each in ids if (found := store.get(each, "me")) is not None]
        links = {}
        for found in kept:
            link = found.outputs
            while link is not None:
                links[id(link)] = link.size
                link = link.before
        assert store.size == 3 * len(kept) + sum(links.values()) <= 100
        assert len(kept) == len(store) <= most
        for found in kept:
            assert items_until(found.outputs) == [*items_until(found.inputs), found.outputs.items[0]]
