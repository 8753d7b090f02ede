"""Pooling requests: from texts to pooled rows, and scores of pairs: cosine, classification head, or logits of answer tokens."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from array import array
from collections.abc import Collection, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from itertools import chain
from operator import mul
from typing import Any, TypeVar

from starlette.requests import Request

from windlass.engine.errors import EngineDeadError
from windlass.engine.interface.model_info import Activation
from windlass.engine.interface.outputs import PooledRows, RequestOutput
from windlass.engine.interface.request import PoolingRule, SamplingParams
from windlass.server.app.request_body import read_body
from windlass.server.app.state import caller_of, state_of
from windlass.server.errors import ApiError, bad_request, context_length_exceeded
from windlass.server.observability.logging import request_id
from windlass.server.schemas.pooling import MAX_INPUTS, PromptRequest
from windlass.server.serving.job import (
    PoolingJob,
    admit_request,
    build_engine_request,
    resolve_window_rule,
    scaling_hint,
)
from windlass.server.serving.observers import observe_request, pooling_observers
from windlass.server.serving.prompts import check_token_prompts
from windlass.server.serving.request_rotation import resolve_rotation
from windlass.server.serving.streaming import Exchange
from windlass.server.text.service import PairOptions
from windlass.server.text.tokenizer_files import PairTemplate

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
    exchange: Exchange, job: PoolingJob, prompts: Sequence[Collection[int]], rule: PoolingRule | Sequence[PoolingRule]
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


@dataclass(frozen=True, slots=True)
class Scores:
    """values: one for each pair. tokens: number of tokens in the prompts."""

    values: list[float]
    tokens: int


def check_texts(value: Any, param: str) -> list[str]:
    """The texts of one text or several; raises ApiError for other types, empty texts and too many."""
    texts: list[Any] = [value] if isinstance(value, str) else value
    if len(texts) > MAX_INPUTS:
        raise bad_request(
            f"{param} holds {len(texts)} texts, at most {MAX_INPUTS} are allowed in a request", param, "too_many"
        )
    for index, text in enumerate(texts):
        where = param if isinstance(value, str) else f"{param}[{index}]"
        if not isinstance(text, str):
            raise bad_request(f"{where} must be a string", where)
        if not text:
            raise bad_request(f"{where} is empty: give at least one token", where, "empty_prompt")
    return texts


def check_scores_pairs(job: PoolingJob, pooling: str | None) -> None:
    """Raise ApiError if this model cannot score pairs."""
    classifier = job.info.classifier
    if classifier is None and job.state.rerank_answer_ids:
        if pooling is not None:
            raise bad_request("pooling requires a model that embeds: this one judges pairs by answer tokens", "pooling")
    elif classifier is None:
        embedding_rule(job, pooling=pooling, normalize=True, dimensions=None)
    elif classifier.per_token:
        raise bad_request("this model classifies tokens and does not score pairs: use /pooling", "model", "no_score")
    elif len(classifier.labels) != 1:
        raise bad_request(
            f"this model has {len(classifier.labels)} classes, and pairs are scored by a model of one class, or by one that "
            "embeds: use /classify",
            "model",
            "no_score",
        )
    elif pooling is not None:
        raise bad_request("pooling requires a model that embeds: this one has a head that scores", "pooling")


async def score_pairs(
    exchange: Exchange,
    job: PoolingJob,
    first: Sequence[str],
    second: Sequence[str],
    names: tuple[str, str],
    pooling: str | None,
    instruction: str | None,
) -> Scores:
    """Scores of first[i] and second[i], or of first[0] and each of `second`. names: fields of the texts.

    instruction: criterion of the score; raises ApiError if the model's prompt has no gap for it.
    """
    classifier = job.info.classifier
    template = await _template(job, instruction)
    scorer = _Scorer(exchange, job, first, second, names)
    if template is not None:
        return await scorer.by_prompt(template, instruction)
    if classifier is None:
        return await scorer.by_cosine(pooling)
    if job.info.is_bidirectional:
        return await scorer.by_encoder(classifier.activation)
    return await scorer.by_head(classifier.activation)


@dataclass(frozen=True, slots=True)
class _Scorer:
    """Scores the pairs of a request in one of four ways."""

    exchange: Exchange
    job: PoolingJob
    first: Sequence[str]
    second: Sequence[str]
    names: tuple[str, str]

    async def by_cosine(self, pooling: str | None) -> Scores:
        """Cosine of the embeddings."""
        first, second = await self._encode_inputs()
        rule = embedding_rule(self.job, pooling=pooling, normalize=True, dimensions=None)
        rows = await pool(self.exchange, self.job, [*first, *second], rule)
        vectors = [unpack_rows(row)[0] for row in rows]
        values = await self.job.state.text.run_in_thread(_cosines, vectors[: len(first)], vectors[len(first) :])
        return Scores(values, sum(map(len, (*first, *second))))

    async def by_encoder(self, activation: Activation) -> Scores:
        """Classification head over pairs joined by the model's tokenizer, with segment ids."""
        job, pairs = self.job, self._pairs()
        self._check_total_size(sum(len(a) + len(b) for a, b in pairs), len(pairs), "characters")
        special = job.body.add_special_tokens is not False
        with length_limit_hint(job):
            joined = await job.state.text.pairs.join(pairs, self._options(len(pairs), special))
        rules = [PoolingRule("classify", second_from=begin) for _, begin in joined]
        return await self._probabilities([ids for ids, _ in joined], rules, activation)

    async def by_prompt(self, template: PairTemplate, instruction: str | None) -> Scores:
        """Classification head or answer tokens after the prompt that the model was trained with."""
        job, classifier, ranking = self.job, self.job.info.classifier, self.job.state.settings.ranking
        if instruction is None and ranking is not None and template.instructed is not None:
            instruction = ranking.instruction
        prompt = template.plain if instruction is None or template.instructed is None else template.instructed
        pairs = self._pairs()
        options = self._options(len(pairs), job.body.add_special_tokens is True)  # the prompt contains its own
        self._check_total_size(sum(prompt.length + len(a) + len(b) for a, b in pairs), len(pairs), "characters")
        prompts = await job.state.text.pairs.fill(prompt, instruction or "", pairs, options)
        if classifier is not None:
            return await self._probabilities(prompts, PoolingRule("classify"), classifier.activation)
        return await self._probabilities(prompts, PoolingRule("answer", answers=job.state.rerank_answer_ids), "sigmoid")

    async def by_head(self, activation: Activation) -> Scores:
        """Classification head over the second text appended to the first, as tokenizers of decoders join a pair."""
        job, name = self.job, self.names[1]
        first, second = await self._encode_inputs()
        if len(first) == 1:
            first = first * len(second)
        prompts = [
            _ConcatenatedIds(a, _truncate_second(job, len(a), b, self.names[0]))
            for a, b in zip(first, second, strict=True)
        ]
        for index, prompt in enumerate(prompts):
            if len(prompt) > job.longest:
                where = f"{name}[{index}]" if len(prompts) > 1 else name
                raise context_length_exceeded(job.longest, len(prompt), param=where)
        self._check_total_size(sum(map(len, prompts)), len(prompts), "tokens")
        return await self._probabilities(prompts, PoolingRule("classify"), activation)

    async def _encode_inputs(self) -> tuple[list[list[int]], list[list[int]]]:
        first = await encode_inputs(self.job, self.first, self.names[0])
        return first, await encode_inputs(self.job, self.second, self.names[1])

    async def _probabilities(
        self, prompts: Sequence[Collection[int]], rule: PoolingRule | Sequence[PoolingRule], activation: Activation
    ) -> Scores:
        rows = await pool(self.exchange, self.job, prompts, rule)
        return Scores([probabilities(unpack_rows(row)[0], activation)[0] for row in rows], sum(map(len, prompts)))

    def _pairs(self) -> list[tuple[str, str]]:
        first = [self.first[0]] * len(self.second) if len(self.first) == 1 else self.first
        return list(zip(first, self.second, strict=True))

    def _options(self, count: int, add_special_tokens: bool) -> PairOptions:
        job, name = self.job, self.names[1]
        return PairOptions(
            max_tokens=job.longest,
            truncate=job.truncate,
            keep_first=job.body.truncation_side != "left",
            add_special_tokens=add_special_tokens,
            first_param=self.names[0],
            second_params=[f"{name}[{index}]" if count > 1 else name for index in range(count)],
            caller=job.caller,
        )

    def _check_total_size(self, size: int, count: int, unit: str) -> None:
        """Bound the prompts of all pairs like a body: the query of a small body is repeated for every document."""
        most = self.job.state.settings.max_body_bytes
        if size > most:
            raise bad_request(
                f"the prompts of these {count} pairs hold {size} {unit}, at most {most} are allowed: send fewer at once",
                self.names[1],
                "too_many",
            )


async def _template(job: PoolingJob, instruction: str | None) -> PairTemplate | None:
    """The template of pairs, if there is one. Raises ApiError for an instruction that it has no gap for."""
    state, found = job.state, None
    if state.settings.ranking is not None:
        found = await state.text.run_in_thread(state.text.pair_template)
        if found is None and job.info.classifier is None:
            raise bad_request(
                "this model ranks by answer tokens, and its chat template does not show a query and a document: start the server "
                "with --rerank-template",
                "model",
                "no_score",
            )
    if instruction is not None and (found is None or found.instructed is None):
        raise bad_request(
            "this model scores pairs without an instruction: leave it out, or add it to the query",
            "instruction",
            "unsupported_value",
        )
    return found


@dataclass(frozen=True, slots=True)
class _ConcatenatedIds(Collection[int]):
    """Concatenation of two lists that many pairs share; only copied when the pair is sent."""

    first: list[int]
    second: list[int]

    def __len__(self) -> int:
        return len(self.first) + len(self.second)

    def __iter__(self) -> Iterator[int]:
        return chain(self.first, self.second)

    def __contains__(self, token_id: object) -> bool:
        return token_id in self.first or token_id in self.second


def _truncate_second(job: PoolingJob, taken: int, second: list[int], param: str) -> list[int]:
    """The second text cut for a pair whose first text has `taken` tokens. param: of the first text."""
    if job.truncate is None or taken + len(second) <= job.truncate:
        return second
    left = job.truncate - taken
    if left < 1:
        raise bad_request(
            f"the first text has {taken} tokens or more, which leaves none of {job.truncate} for the second: shorten it",
            param,
        )
    return second[-left:] if job.body.truncation_side == "left" else second[:left]


def _cosines(first: list[array[float]], second: list[array[float]]) -> list[float]:
    """Dot products of unit vectors."""
    if len(first) == 1:
        first = first * len(second)
    return [sum(map(mul, a, b)) for a, b in zip(first, second, strict=True)]


def probabilities(logits: Sequence[float], activation: Activation) -> list[float]:
    """The logits of a head as probabilities."""
    if activation == "softmax":
        most = max(logits)
        weights = [math.exp(value - most) for value in logits]
        total = math.fsum(weights)
        return [weight / total for weight in weights]
    if activation == "sigmoid":
        return [_sigmoid(value) for value in logits]
    return list(logits)


def _sigmoid(value: float) -> float:
    """1 / (1 + e^-x) without overflow."""
    small = math.exp(-abs(value))
    return (1.0 if value >= 0 else small) / (1.0 + small)
