"""How many bytes the bodies of all requests in progress may have together, and those of one caller. Knows no ASGI."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from windlass.server.errors import ApiError

SMALL = 64 * 1024  # bytes of each body that are not counted: such requests are bounded by their number


class HeldBody:
    """What one request's body has been given. Set `caller` before the first `add`."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self.caller = ""
        self.received = self.counted = 0

    def add(self, num_bytes: int) -> None:
        """So many more have come; raises ApiError 429 where that is too much now."""
        self.received += num_bytes
        counted = max(0, self.received - SMALL)
        if counted > self.counted:
            self._budget.take(self, counted - self.counted)


class BodyBudget:
    """most: bytes of all bodies together, of which one caller may have half."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: Counter[str] = Counter()

    @property
    def held(self) -> int:
        """Bytes that are counted now."""
        return self._held.total()

    @contextmanager
    def hold(self) -> Iterator[HeldBody]:
        """A body that counts until the block ends, since its texts are kept as long as the request."""
        body = HeldBody(self)
        try:
            yield body
        finally:
            self._held[body.caller] -= body.counted
            if self._held[body.caller] == 0:
                del self._held[body.caller]

    def take(self, body: HeldBody, num_bytes: int) -> None:
        """Count more bytes of a body; see `HeldBody.add`."""
        of_caller = self._held[body.caller] + num_bytes
        if self.held + num_bytes > self._most:
            who, most = "all requests in progress", self._most
        elif of_caller > self._most // 2:
            who, most = "your requests in progress", self._most // 2
        else:
            self._held[body.caller] = of_caller
            body.counted += num_bytes
            return
        raise ApiError(
            429,
            f"the bodies of {who} may have {most} bytes together: wait until others are answered, or send less at once",
            type="rate_limit_error",
            code="too_many_bytes",
            retry_after=1,
            headers={"connection": "close"},  # the rest of the body is not read
        )
