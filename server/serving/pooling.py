"""Pooling requests: from texts to pooled rows."""

from __future__ import annotations

import asyncio
import sys
import time
from array import array
from collections.abc import Collection, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import TypeVar

from starlette.requests import Request

from windlass.engine.errors import EngineDeadError
from windlass.engine.interface.outputs import PooledRows, RequestOutput
from windlass.engine.interface.request import PoolingRule, SamplingParams
from windlass.server.app.request_body import read_body
from windlass.server.app.state import caller_of, state_of
from windlass.server.errors import ApiError, bad_request
from windlass.server.observability.logging import request_id
from windlass.server.schemas.pooling import MAX_INPUTS, PromptRequest
from windlass.server.serving.context_rules import resolve_window_rule
from windlass.server.serving.job import (
    PoolingJob,
    admit_request,
    build_engine_request,
    scaling_hint,
)
from windlass.server.serving.observers import observe_request, pooling_observers
from windlass.server.serving.prompts import check_token_prompts
from windlass.server.serving.request_rotation import resolve_rotation
from windlass.server.serving.streaming import Exchange

B = TypeVar("B", bound=PromptRequest)
_NO_SAMPLING = SamplingParams(max_tokens=0, temperature=0.0)


async def begin_pooling(request: Request, model: type[B]) -> tuple[B, PoolingJob]:
    """The body and its job; raises ApiError or RequestError naming the field at fault."""
    arrival = time.monotonic()
    state, caller = state_of(request), caller_of(request)
    settings = state.settings
    body = await read_body(request, model)
    info = admit_request(request, body)
    rule = resolve_window_rule(body, settings)
    rotation = resolve_rotation(body.rope_scaling, body.rope_update, settings, info)
    longest, truncate = rotation.limit_context(info.size(rule)).longest_prompt, body.truncate_prompt_tokens
    if truncate == 0 or (truncate is not None and truncate > longest):
        raise bad_request(
            f"truncate_prompt_tokens must be between 1 and the context of {longest} tokens, or -1 for that; got {truncate}",
            "truncate_prompt_tokens",
        )
    job = PoolingJob(
        state=state,
        body=body,
        info=info,
        request_id=request_id(request.scope),
        caller=caller,
        arrival=arrival,
        rotation=rotation,
        rule=rule,
        longest=longest,
        truncate=longest if truncate == -1 else truncate,
        priority=state.callers.priority(caller, body.priority),
        adapter=state.adapters.find(body.model),
    )
    return body, job


@contextmanager
def length_limit_hint(job: PoolingJob) -> Iterator[None]:
    """Scope in which errors about a text's length name the option that limits it, if that is not the model's own limit."""
    step = job.info.max_num_batched_tokens
    try:
        with scaling_hint(job):
            yield
    except ApiError as error:
        if error.code != "context_length_exceeded" or not job.info.is_bidirectional or job.info.max_model_len < step:
            raise
        why = f"each token of this model sees the entire text, which one step computes: --max-num-batched-tokens is {step}"
        raise bad_request(f"{error.message} ({why})", error.param, error.code) from None


async def encode_inputs(job: PoolingJob, given: Sequence[str] | Sequence[list[int]], param: str) -> list[list[int]]:
    """The token ids of texts or id lists, truncated as requested. Errors name `param` and the index."""
    many, side = len(given) > 1, job.body.truncation_side
    prompts: list[list[int]]
    if isinstance(given[0], str):
        with length_limit_hint(job):
            encoded = await job.state.text.encode(
                given,  # type: ignore[arg-type]
                add_special_tokens=job.body.add_special_tokens is not False,
                max_model_len=job.longest,
                truncate=job.truncate,
                keep_first=side != "left",
                param=param,
                caller=job.caller,
                numbered=many,
            )
        prompts = [prompt.token_ids for prompt in encoded]
    else:
        with length_limit_hint(job):
            prompts = await job.state.text.run_in_thread(
                lambda: check_token_prompts(
                    given,  # type: ignore[arg-type]
                    job.info.vocab_size,
                    job.longest,
                    truncate=job.truncate,
                    keep_first=side != "left",
                    param=param,
                    numbered=many,
                )
            )
    for index, ids in enumerate(prompts):
        if not ids:
            where = f"{param}[{index}]" if many else param
            raise bad_request(f"{where} is empty: give at least one token", where, "empty_prompt")
    return prompts


async def pool(
    exchange: Exchange,
    job: PoolingJob,
    prompts: Sequence[Collection[int]],
    rule: PoolingRule | Sequence[PoolingRule],
) -> list[PooledRows]:
    """The rows of each prompt, in order. rule: for all prompts, or one for each.

    Raises the engine's errors. Cancelling it aborts all prompts.
    """
    state, found = job.state, {}
    rules = [rule] * len(prompts) if isinstance(rule, PoolingRule) else rule
    todo = iter(enumerate(prompts))

    async def work() -> None:
        for index, ids in todo:
            output = await _pool_one(job, list(ids), rules[index])
            assert output.pooled is not None
            found[index] = output.pooled
            if observe_output is not None:
                observe_output(index, output)
            await asyncio.sleep(0)

    with observe_request(exchange, pooling_observers(exchange, job, prompts, rules)) as observe_output:
        state.callers.charge_prompt_tokens(job.caller, sum(map(len, prompts)))
        with state.adapters.using(job.adapter):
            if job.adapter is not None:
                state.metrics.count_adapter_request(job.adapter.source.name)
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(job.info.max_num_seqs, len(prompts))):
                        group.create_task(work())
            except* Exception as errors:
                raise _first_error(errors) from None
    return [found[index] for index in range(len(prompts))]


def _first_error(errors: BaseExceptionGroup[Exception]) -> Exception:
    """One of the errors; the others are its consequences or the same error of other prompts."""
    error = errors.exceptions[0]
    return _first_error(error) if isinstance(error, BaseExceptionGroup) else error


async def _pool_one(job: PoolingJob, ids: list[int], rule: PoolingRule) -> RequestOutput:
    """The output with the rows of a prompt."""
    state, request = job.state, build_engine_request(job, ids, _NO_SAMPLING, pooling=rule)
    async with aclosing(state.engine.generate(request)) as outputs:  # type: ignore[type-var]
        async for output in outputs:
            if output.error is not None:
                raise output.error
            if output.finish_reason is not None and output.pooled is not None:
                now = time.monotonic()
                state.metrics.time_to_first_token.observe(now - job.arrival)
                state.metrics.finished(output.finish_reason, now - job.arrival, prompt_tokens=len(ids))
                state.metrics.observe_prompt_finished(1, 0)
                return output
    raise EngineDeadError("the engine ended this request early: send it again")


def embedding_rule(
    job: PoolingJob, *, pooling: str | None, normalize: bool | None, dimensions: int | None
) -> PoolingRule:
    """The pooling rule of embeddings, by the request or else the model. Raises ApiError for unsupported values."""
    info, defaults = job.info, job.info.pooling
    if pooling is None and defaults.refusal is not None:
        raise bad_request(f"{defaults.refusal}: set pooling", "pooling", "unsupported_value")
    if dimensions is not None and dimensions > info.hidden_size:
        raise bad_request(
            f"dimensions is {dimensions}, this model's vectors have {info.hidden_size}: ask for at most that",
            "dimensions",
        )
    return PoolingRule(
        kind=pooling or defaults.kind,  # type: ignore[arg-type]
        dimensions=dimensions,
        normalize=defaults.normalize if normalize is None else normalize,
    )


def split_inputs(value: object) -> list[str] | list[list[int]]:
    """A list of texts or a list of token-id lists; raises ApiError for mixed kinds, empty and too long lists."""
    if value == "":
        raise bad_request("input is empty: give at least one token", "input", "empty_prompt")
    if isinstance(value, str):
        return [value]
    assert isinstance(value, list)
    kind = type(value[0])
    if kind is int:
        return [value]
    if len(value) > MAX_INPUTS:
        raise bad_request(
            f"input holds {len(value)} texts, at most {MAX_INPUTS} are allowed in a request", "input", "too_many"
        )
    for index, item in enumerate(value):
        if type(item) is not kind:
            name = "string" if kind is str else "list of token ids"
            raise bad_request(f"input mixes kinds: item {index} is not a {name}", f"input[{index}]")
        if not item:
            raise bad_request(f"input[{index}] is empty: give at least one token", f"input[{index}]", "empty_prompt")
    return value


def unpack_rows(rows: PooledRows) -> list[array[float]]:
    """The rows as float32."""
    flat = array("f")
    flat.frombytes(rows.values)
    if sys.byteorder == "big":
        flat.byteswap()
    return [flat[start : start + rows.width] for start in range(0, len(flat), rows.width)]
