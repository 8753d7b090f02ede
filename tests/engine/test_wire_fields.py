"""Every field of an output crosses the boundary between the processes."""

from __future__ import annotations

import dataclasses

from windlass.engine.client.wire import StepDone, decode, encode
from windlass.engine.errors import RequestError
from windlass.engine.request import RequestOutput, TokenLogprobs
from windlass.engine.rotary.policy import RotaryReport


def test_no_field_of_an_output_is_lost_or_shifted() -> None:
    drawn = TokenLogprobs(5, -0.5, 1, ((5, -0.5),))
    report = RotaryReport("dynamic", {"factor": 4.0}, "rotate", 181.02, "f0", 2, {"full_attention": {"rope_type": "x"}})
    values = {
        "request_id": "r",
        "index": 3,
        "token_ids": (5, 6),
        "logprobs": (drawn, drawn),
        "prompt_logprobs": (None, drawn),
        "finish_reason": "stop",
        "stop_token_id": 6,
        "cached_tokens": 7,
        "rotary": report,
        "error": RequestError("no", "field", "code"),
    }
    assert set(values) == {field.name for field in dataclasses.fields(RequestOutput)}
    output = RequestOutput(**values)  # type: ignore[arg-type]
    decoded = decode(encode(StepDone((output,), 0.5, None))[4:])
    assert isinstance(decoded, StepDone)
    (received,) = decoded.outputs
    for name, value in values.items():
        if name != "error":
            assert getattr(received, name) == value, name
    error = received.error
    assert isinstance(error, RequestError) and (error.message, error.param, error.code) == ("no", "field", "code")
