"""Limits of callers: rates compared with a simulation, concurrency, reloaded keys, and the budget of body bytes."""

from __future__ import annotations

import math
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.server.app.auth import Callers
from windlass.server.app.middleware import UNCOUNTED_BYTES, BodyBudget
from windlass.server.config.api_keys import ApiKey
from windlass.server.errors import ApiError


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def key(name: str = "alice", **limits: object) -> ApiKey:
    return ApiKey(digest=name, name=name, admin=False, **limits)  # type: ignore[arg-type]


def answer(callers: Callers, caller: str) -> None:
    """Begin and end a request."""
    with callers.running(caller):
        pass


def retry_after(error: pytest.ExceptionInfo[ApiError]) -> int:
    assert (error.value.status, error.value.code) == (429, "rate_limit_exceeded")
    return int(error.value.headers["retry-after"])


def test_owners_of_cached_blocks() -> None:
    callers = Callers([ApiKey(digest="1", name="alice")])
    alone = callers.cache_owner("1")
    callers.replace([ApiKey(digest="1", name="alice"), ApiKey(digest="2", name="bob"), ApiKey.plain("3")])
    plain = ApiKey.plain("3").digest
    assert callers.cache_owner("1") == alone  # a second key does not take the blocks of the first from it
    assert len({callers.cache_owner(caller) for caller in ("1", "2", plain)}) == 3
    callers.replace([ApiKey(digest="4", name="alice"), ApiKey(digest="5", name=plain), ApiKey.plain("3")])
    assert callers.cache_owner("4") == alone  # the key was changed
    assert callers.cache_owner("5") != callers.cache_owner(plain)  # a name that reads as the digest of a key
    assert not any(" " in callers.cache_owner(caller) for caller in ("4", "5", plain, "1"))


def test_requests_a_minute() -> None:
    clock = Clock()
    callers = Callers([key(requests_per_minute=2), key("bob")], clock)
    answer(callers, "alice")
    answer(callers, "alice")
    with pytest.raises(ApiError) as error:
        answer(callers, "alice")
    assert retry_after(error) == 30
    answer(callers, "bob")
    clock.now += 30
    answer(callers, "alice")
    clock.now += 1000  # at most the amount of a minute accumulates
    answer(callers, "alice")
    answer(callers, "alice")
    with pytest.raises(ApiError):
        answer(callers, "alice")
    assert callers.usage["alice"].requests == 5
    assert callers.usage["alice"].refused == {"requests_per_minute": 2}


def test_generated_tokens_delay_later_requests() -> None:
    clock = Clock()
    callers = Callers([key(tokens_per_minute=600)], clock)
    callers.charge_prompt_tokens("alice", 100)
    callers.charge_generated_tokens("alice", 700)  # 200 more than were available
    with pytest.raises(ApiError) as error:
        callers.charge_prompt_tokens("alice", 50)
    assert retry_after(error) == 25
    clock.now += 24.9
    with pytest.raises(ApiError):
        callers.charge_prompt_tokens("alice", 50)
    clock.now += 0.2
    callers.charge_prompt_tokens("alice", 50)


def test_a_prompt_over_the_limit_of_a_minute_waits_for_a_full_bucket() -> None:
    clock = Clock()
    callers = Callers([key(tokens_per_minute=100)], clock)
    callers.charge_prompt_tokens("alice", 1000)
    with pytest.raises(ApiError) as error:
        callers.charge_prompt_tokens("alice", 1)
    assert retry_after(error) == math.ceil((900 + 1) * 0.6)


@given(
    rate=st.integers(1, 1000),
    events=st.lists(st.tuples(st.floats(0, 100), st.integers(1, 300)), min_size=1, max_size=40),
)
def test_admission_never_exceeds_the_rate(rate: int, events: list[tuple[float, int]]) -> None:
    clock = Clock()
    callers = Callers([key(tokens_per_minute=rate)], clock)
    let_in = 0.0
    largest = max(tokens for _, tokens in events)
    for pause, tokens in events:
        clock.now += pause
        try:
            callers.charge_prompt_tokens("alice", tokens)
        except ApiError as error:
            seconds = int(error.headers["retry-after"])
            later = Clock()
            later.now = clock.now + seconds
            saved = callers._clock
            callers._clock = later
            callers.charge_prompt_tokens("alice", tokens)  # the stated waiting time is sufficient
            callers._clock, clock.now = saved, later.now
        let_in += tokens
        assert let_in <= rate + rate * clock.now / 60 + largest + 1e-6


def test_concurrency() -> None:
    callers = Callers([key(concurrency=2), key("bob")], Clock())
    with callers.running("alice"), callers.running("bob"):
        answer(callers, "alice")
        with callers.running("alice"):
            with pytest.raises(ApiError) as error:
                answer(callers, "alice")
            assert retry_after(error) == 1
            with pytest.raises(ApiError):
                callers.running("alice").__enter__()
            answer(callers, "bob")
        answer(callers, "alice")
    assert not callers._in_flight


def test_priorities() -> None:
    callers = Callers([key(priority=5), key("bob")], Clock())
    assert [callers.priority("alice", asked) for asked in (None, 5, 9)] == [5, 5, 9]
    assert [callers.priority("bob", asked) for asked in (None, -7)] == [0, -7]
    assert callers.priority("127.0.0.1", None) == 0
    with pytest.raises(ApiError, match="priority must be 5 or higher"):
        callers.priority("alice", 4)


def test_administrators() -> None:
    assert Callers([]).is_admin("")
    callers = Callers([ApiKey.plain("k"), key(), ApiKey(digest="root", name="root", admin=True)])
    assert callers.is_admin(ApiKey.plain("k").digest) and callers.is_admin("root")
    assert not callers.is_admin("alice") and not callers.is_admin("") and not callers.is_admin("gone")


def test_remaining_callers_keep_their_usage() -> None:
    clock = Clock()
    callers = Callers([key(requests_per_minute=1), key("bob", requests_per_minute=1)], clock)
    answer(callers, "bob")
    with callers.running("alice"):
        callers.replace([ApiKey(digest="new", name="alice", requests_per_minute=1, concurrency=1, admin=False)])
        assert callers.find("alice") is None and callers.find("bob") is None and callers.find("new") is not None
        with pytest.raises(ApiError):
            answer(callers, "new")  # another key of the same caller, whose request of this minute is used
        clock.now += 60
        with pytest.raises(ApiError, match="in progress"):
            answer(callers, "new")
    answer(callers, "new")
    assert set(callers.usage) == {"alice"} and callers.usage["alice"].requests == 2
    callers.replace([key("bob", requests_per_minute=1)])
    answer(callers, "bob")  # a caller that was removed starts from zero


# ---- budget of body bytes ---------------------------------------------------------------------------------------------
def test_one_caller_may_have_half() -> None:
    budget = BodyBudget(1000)
    with ExitStack() as stack:
        bodies = [stack.enter_context(budget.reserve()) for _ in range(4)]
        for body, caller in zip(bodies, "aabb", strict=True):
            body.caller = caller
        bodies[0].add(UNCOUNTED_BYTES + 400)
        with pytest.raises(ApiError, match="of your requests in progress may have 500 bytes"):
            bodies[1].add(UNCOUNTED_BYTES + 101)
        bodies[2].add(UNCOUNTED_BYTES + 500)
        with pytest.raises(ApiError, match="of your requests"):
            bodies[3].add(UNCOUNTED_BYTES + 1)
        assert budget.reserved_bytes == 900
    assert budget.reserved_bytes == 0


def test_all_callers_share_the_total() -> None:
    budget = BodyBudget(1000)
    with ExitStack() as stack:
        for caller in "abc":
            body = stack.enter_context(budget.reserve())
            body.caller = caller
            body.add(UNCOUNTED_BYTES)
            body.add(300)
        body = stack.enter_context(budget.reserve())
        body.caller = "d"
        with pytest.raises(ApiError, match="of all requests in progress may have 1000 bytes") as refused:
            body.add(UNCOUNTED_BYTES + 101)
        assert refused.value.status == 429 and refused.value.headers["retry-after"] == "1"


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 3 * UNCOUNTED_BYTES), max_size=5)), max_size=12)
)
def test_the_limit_holds_and_all_bytes_are_released(wanted: list[tuple[str, list[int]]]) -> None:
    most = 4 * UNCOUNTED_BYTES
    budget = BodyBudget(most)
    with ExitStack() as stack:
        for caller, pieces in wanted:
            body = stack.enter_context(budget.reserve())
            body.caller = caller
            for piece in pieces:
                try:
                    body.add(piece)
                except ApiError:
                    break
                assert budget.reserved_bytes <= most
            assert body.counted <= max(0, body.received - UNCOUNTED_BYTES)
    assert budget.reserved_bytes == 0
