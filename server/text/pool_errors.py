"""The errors of the text processes as callers read them. Knows the pool's errors and the API's; knows no job."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from windlass.engine.errors import LoadError
from windlass.server.errors import ApiError, bad_request, unavailable
from windlass.server.text.workers.lanes import LaneFullError
from windlass.server.text.workers.pool import ClosedError, Limits, OutOfMemoryError, RefusedError
from windlass.server.text.workers.processes import KilledError, ProcessDiedError, TooSlowError


@contextmanager
def told(param: str, subject: str, limits: Limits, kind: str = "text") -> Iterator[None]:
    """The pool's errors as the caller shall read them. subject: what was at work. kind: "text", "template" or "grammar"."""
    try:
        yield
    except RefusedError as error:
        code = {"template": "chat_template_error", "grammar": "invalid_grammar"}.get(kind)
        raise bad_request(str(error), param, code) from None
    except TooSlowError:
        raise bad_request(f"{subject} took more than {limits.seconds:g} s", param, f"{kind}_timeout") from None
    except OutOfMemoryError:
        mib = limits.memory >> 20
        raise bad_request(f"{subject} took more than {mib} MiB of memory", param, f"{kind}_memory") from None
    except KilledError:
        message = f"{subject} was ended from outside, perhaps for lack of memory: send it again"
        raise unavailable(message, code="text_unavailable", retry_after=1) from None
    except ProcessDiedError as error:
        raise bad_request(f"{subject} ended the process it ran in ({error})", param, f"{kind}_failed") from None
    except LaneFullError:
        raise ApiError(
            429,
            "too much text waits to be tokenized already: try again later",
            type="rate_limit_error",
            code="too_much_text",
            retry_after=1,
        ) from None
    except (ClosedError, LoadError) as error:
        raise unavailable(str(error), code="text_unavailable", retry_after=1) from None
