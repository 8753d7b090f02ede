"""Scores of pairs of texts: cosines of their vectors, or what a model with one class says of a pair.

Knows pooled rows; knows no JSON layouts and no HTTP.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul
from typing import Any

from windlass.engine.api.model_heads import Activation
from windlass.engine.api.pooling import PoolingRule
from windlass.server.errors import bad_request, context_length_exceeded
from windlass.server.generation.pooling import (
    Pool,
    PoolingJob,
    embedding_rule,
    numbers,
    read_inputs,
    telling_what_bounds,
)
from windlass.server.protocol.retrieval import MAX_INPUTS


@dataclass(frozen=True, slots=True)
class Scores:
    """values: one for each pair. tokens: that were computed or taken from the cache for them."""

    values: list[float]
    tokens: int


def check_texts(value: Any, param: str) -> list[str]:
    """One text or several; raises ApiError for others, for empty ones and for too many."""
    if isinstance(value, str):
        texts: list[Any] = [value]
    else:
        texts = value
    if len(texts) > MAX_INPUTS:
        raise bad_request(
            f"{param} holds {len(texts)} texts, at most {MAX_INPUTS} are taken at once", param, "too_many"
        )
    for index, text in enumerate(texts):
        where = param if isinstance(value, str) else f"{param}[{index}]"
        if not isinstance(text, str):
            raise bad_request(f"{where} must be a string", where)
        if not text:
            raise bad_request(f"{where} is empty: give at least one token", where, "empty_prompt")
    return texts


def check_head(job: PoolingJob, pooling: str | None) -> None:
    """Raise ApiError where this model cannot score pairs."""
    classifier = job.info.classifier
    if classifier is None:
        embedding_rule(job, pooling=pooling, normalize=True, dimensions=None)
    elif classifier.per_token:
        raise bad_request(
            "this model tells the class of each token and scores no pairs: use /pooling", "model", "no_score"
        )
    elif len(classifier.labels) != 1:
        raise bad_request(
            f"this model has {len(classifier.labels)} classes, and pairs are scored by a model of one class, or by one that "
            "embeds: use /classify",
            "model",
            "no_score",
        )
    elif pooling is not None:
        raise bad_request("pooling goes with a model that embeds: this one has a head that scores", "pooling")


async def score_pairs(
    job: PoolingJob,
    first: Sequence[str],
    second: Sequence[str],
    names: tuple[str, str],
    pooling: str | None,
    pool: Pool,
) -> Scores:
    """The scores of first[i] and second[i], or of first[0] and each. names: of the fields that they came from."""
    classifier = job.info.classifier
    if classifier is not None and job.info.sees_whole_texts:
        return await _by_encoder(job, first, second, names, classifier.activation, pool)
    ids = [await read_inputs(job, first, names[0]), await read_inputs(job, second, names[1])]
    if classifier is not None:
        return await _by_head(job, ids[0], ids[1], names[1], classifier.activation, pool)
    rule = embedding_rule(job, pooling=pooling, normalize=True, dimensions=None)
    rows = await pool([*ids[0], *ids[1]], rule)
    vectors = [numbers(row)[0] for row in rows]
    values = await job.state.text.on_thread(_cosines, vectors[: len(first)], vectors[len(first) :])
    return Scores(values, sum(map(len, (*ids[0], *ids[1]))))


async def _by_encoder(
    job: PoolingJob,
    first: Sequence[str],
    second: Sequence[str],
    names: tuple[str, str],
    activation: Activation,
    pool: Pool,
) -> Scores:
    """Pairs as the model's tokenizer joins them, with what tells the second text from the first."""
    if len(first) == 1:
        first = [first[0]] * len(second)
    wheres = [f"{names[1]}[{index}]" if len(second) > 1 else names[1] for index in range(len(second))]
    with telling_what_bounds(job):
        joined = await job.state.text.encode_pairs(
            list(zip(first, second, strict=True)),
            add_special_tokens=job.body.add_special_tokens is not False,
            max_model_len=job.longest,
            truncate=job.truncate,
            params=(names[0], wheres),
            caller=job.caller,
        )
    rules = [PoolingRule("classify", second_from=begin) for _, begin in joined]
    rows = await pool([ids for ids, _ in joined], rules)
    values = [probabilities(numbers(row)[0], activation)[0] for row in rows]
    return Scores(values, sum(len(ids) for ids, _ in joined))


async def _by_head(
    job: PoolingJob,
    first: list[list[int]],
    second: list[list[int]],
    param: str,
    activation: Activation,
    pool: Pool,
) -> Scores:
    """The second text behind the first, as tokenizers of decoders join a pair."""
    if len(first) == 1:
        first = first * len(second)
    prompts = [[*a, *b] for a, b in zip(first, second, strict=True)]
    for index, prompt in enumerate(prompts):
        if len(prompt) > job.longest:
            where = f"{param}[{index}]" if len(prompts) > 1 else param
            raise context_length_exceeded(job.longest, len(prompt), param=where)
    rows = await pool(prompts, PoolingRule("classify"))
    return Scores([probabilities(numbers(row)[0], activation)[0] for row in rows], sum(map(len, prompts)))


def _cosines(first: list[array[float]], second: list[array[float]]) -> list[float]:
    """Products of vectors of length 1."""
    if len(first) == 1:
        first = first * len(second)
    return [sum(map(mul, a, b)) for a, b in zip(first, second, strict=True)]


def probabilities(logits: Sequence[float], activation: Activation) -> list[float]:
    """What the head gives, as probabilities."""
    if activation == "softmax":
        most = max(logits)
        weights = [math.exp(value - most) for value in logits]
        total = math.fsum(weights)
        return [weight / total for weight in weights]
    if activation == "sigmoid":
        return [_sigmoid(value) for value in logits]
    return list(logits)


def _sigmoid(value: float) -> float:
    """1 / (1 + e^-x), without an overflow."""
    small = math.exp(-abs(value))
    return (1.0 if value >= 0 else small) / (1.0 + small)
