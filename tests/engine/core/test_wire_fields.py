"""Every field of an output crosses the boundary between the processes."""

from __future__ import annotations

import asyncio
import dataclasses

from windlass.engine.client.request_router import RequestRouter, StatsCalls
from windlass.engine.core.messages import FrameReader, PromptLogprobs, StepDone, decode, encode
from windlass.engine.errors import RequestError
from windlass.engine.interface.context import ContextReport
from windlass.engine.interface.outputs import MAX_TIMING_SAMPLES, EngineStats, PooledRows, RequestOutput, TokenLogprobs
from windlass.engine.interface.request import EngineRequest, SamplingParams
from windlass.engine.rotary.rotary_policy import RotaryReport
from windlass.engine.scheduling.scheduler_counters import SchedulerCounters


def test_every_field_of_an_output_is_transmitted() -> None:
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
        "context": ContextReport(2048, 16, 160, 10, 96, 2),
        "error": RequestError("no", "field", "code"),
        "pooled": PooledRows(b"\0\0\x80?", 1),
        "scheduled_at": 12.5,
        "prompt_computed": 9,
    }
    assert set(values) == {field.name for field in dataclasses.fields(RequestOutput)}
    output = RequestOutput(**values)
    decoded = decode(encode(StepDone((output,), 0.5, None))[4:])
    assert isinstance(decoded, StepDone)
    (received,) = decoded.outputs
    for name, value in values.items():
        if name != "error":
            assert getattr(received, name) == value, name
    error = received.error
    assert isinstance(error, RequestError) and (error.message, error.param, error.code) == ("no", "field", "code")


def test_long_prompt_logprobs_are_sent_in_parts() -> None:
    entries = (None, *(TokenLogprobs(token, -float(token), 1, ((token, -0.5),)) for token in range(1, 3000)))
    short = RequestOutput("short", prompt_logprobs=entries[:5])
    long = RequestOutput("long", token_ids=(1,), prompt_logprobs=entries)
    frames = FrameReader()
    data = encode(StepDone((short, long), 0.5, None))
    messages = [message for start in range(0, len(data), 1000) for message in frames.feed(data[start : start + 1000])]
    parts, (step,) = messages[:-1], messages[-1:]
    assert len(parts) == 5 and all(isinstance(part, PromptLogprobs) for part in parts)
    assert max(len(part.entries) for part in parts) == 512

    async def delivered() -> dict[str, RequestOutput]:
        router = RequestRouter(lambda message: None, lambda: None)
        sampling = SamplingParams(max_tokens=1)
        streams = {name: router.generate(EngineRequest(name, [1], sampling)) for name in ("short", "long")}
        waiting = {name: asyncio.create_task(anext(stream)) for name, stream in streams.items()}
        await asyncio.sleep(0)
        for message in messages:
            assert router.deliver(message)
        outputs = {name: await task for name, task in waiting.items()}
        for stream in streams.values():
            await stream.aclose()
        return outputs

    assert isinstance(step, StepDone)
    outputs = asyncio.run(delivered())
    assert outputs == {"short": short, "long": long}


def test_unread_timing_samples_are_bounded() -> None:
    """The newest are retained and returned once; counters are those of the last snapshot."""
    kinds = ("queue_seconds", "prefill_seconds", "decode_seconds", "inference_seconds")
    joined = StatsCalls(lambda message: None, lambda: None)
    for kind in kinds:
        for part in range(0, MAX_TIMING_SAMPLES + 3000, 1000):
            samples = tuple(map(float, range(part, part + 1000)))
            joined.add(EngineStats(num_steps=part, **{kind: samples}))
    end = part + 1000
    taken = joined.take()
    for kind in kinds:
        assert getattr(taken, kind) == tuple(map(float, range(end - MAX_TIMING_SAMPLES, end))), kind
        assert getattr(SchedulerCounters(), kind).maxlen == MAX_TIMING_SAMPLES, (
            "some users of an engine never read them"
        )
    assert taken.num_steps == part
    joined.add(EngineStats(queue_seconds=(1.0,)))
    assert [(stats.queue_seconds, stats.decode_seconds) for stats in (joined.take(), joined.take())] == [
        ((1.0,), ()),
        ((), ()),
    ]
