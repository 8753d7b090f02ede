"""Budget of body bytes: per caller, in total, and released completely."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.server.app.middleware import UNCOUNTED_BYTES, BodyBudget
from windlass.server.errors import ApiError


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
