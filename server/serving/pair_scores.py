"""Scores of pairs of texts: cosine, classification head, or logits of answer tokens."""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import mul
from typing import Any

from windlass.engine.interface.model_info import Activation
from windlass.engine.interface.request import PoolingRule
from windlass.server.errors import bad_request, context_length_exceeded
from windlass.server.schemas.pooling import MAX_INPUTS
from windlass.server.serving.job import PoolingJob
from windlass.server.serving.pooling import PoolFunction, embedding_rule, encode_inputs, length_limit_hint, unpack_rows
from windlass.server.text.pair_prompts import PairTemplate
from windlass.server.text.service import PairOptions


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
            f"{param} holds {len(texts)} texts, at most {MAX_INPUTS} are taken at once", param, "too_many"
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
            raise bad_request(
                "pooling goes with a model that embeds: this one judges pairs by answer tokens", "pooling"
            )
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
        raise bad_request("pooling goes with a model that embeds: this one has a head that scores", "pooling")


async def score_pairs(
    job: PoolingJob,
    first: Sequence[str],
    second: Sequence[str],
    names: tuple[str, str],
    pooling: str | None,
    instruction: str | None,
    pool: PoolFunction,
) -> Scores:
    """Scores of first[i] and second[i], or of first[0] and each of `second`. names: fields of the texts.

    instruction: criterion of the score; raises ApiError if the model's prompt has no gap for it.
    """
    classifier = job.info.classifier
    template = await _template(job, instruction)
    if template is not None:
        return await _by_prompt(job, first, second, names, template, instruction, pool)
    if classifier is not None and job.info.is_bidirectional:
        return await _by_encoder(job, first, second, names, classifier.activation, pool)
    ids = [await encode_inputs(job, first, names[0]), await encode_inputs(job, second, names[1])]
    if classifier is not None:
        return await _by_head(job, ids[0], ids[1], names, classifier.activation, pool)
    rule = embedding_rule(job, pooling=pooling, normalize=True, dimensions=None)
    rows = await pool([*ids[0], *ids[1]], rule)
    vectors = [unpack_rows(row)[0] for row in rows]
    values = await job.state.text.run_in_thread(_cosines, vectors[: len(first)], vectors[len(first) :])
    return Scores(values, sum(map(len, (*ids[0], *ids[1]))))


async def _by_encoder(
    job: PoolingJob,
    first: Sequence[str],
    second: Sequence[str],
    names: tuple[str, str],
    activation: Activation,
    pool: PoolFunction,
) -> Scores:
    """Scores of pairs joined by the model's tokenizer, with segment ids."""
    pairs = _pairs(first, second)
    _check_total_size(job, sum(len(a) + len(b) for a, b in pairs), len(pairs), "characters", names[1])
    special = job.body.add_special_tokens is not False
    with length_limit_hint(job):
        joined = await job.state.text.pairs.join(
            pairs, _pair_options(job, names, len(pairs), add_special_tokens=special)
        )
    rules = [PoolingRule("classify", second_from=begin) for _, begin in joined]
    rows = await pool([ids for ids, _ in joined], rules)
    values = [probabilities(unpack_rows(row)[0], activation)[0] for row in rows]
    return Scores(values, sum(len(ids) for ids, _ in joined))


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


async def _by_prompt(
    job: PoolingJob,
    first: Sequence[str],
    second: Sequence[str],
    names: tuple[str, str],
    template: PairTemplate,
    instruction: str | None,
    pool: PoolFunction,
) -> Scores:
    """Scores of pairs in the model's prompt, by its next token or its head."""
    classifier, ranking = job.info.classifier, job.state.settings.ranking
    if instruction is None and ranking is not None and template.instructed is not None:
        instruction = ranking.instruction
    prompt = template.plain if instruction is None or template.instructed is None else template.instructed
    pairs = _pairs(first, second)
    special = job.body.add_special_tokens is True  # the prompt has its own
    asked = _pair_options(job, names, len(pairs), add_special_tokens=special)
    _check_total_size(job, sum(prompt.length + len(a) + len(b) for a, b in pairs), len(pairs), "characters", names[1])
    prompts = await job.state.text.pairs.fill(prompt, instruction or "", pairs, asked)
    rule = (
        PoolingRule("classify")
        if classifier is not None
        else PoolingRule("answer", answers=job.state.rerank_answer_ids)
    )
    rows = await pool(prompts, rule)
    activation = "sigmoid" if classifier is None else classifier.activation
    return Scores([probabilities(unpack_rows(row)[0], activation)[0] for row in rows], sum(map(len, prompts)))


def _pairs(first: Sequence[str], second: Sequence[str]) -> list[tuple[str, str]]:
    return list(zip([first[0]] * len(second) if len(first) == 1 else first, second, strict=True))


def _check_total_size(job: PoolingJob, size: int, count: int, unit: str, param: str) -> None:
    """Bound the prompts of all pairs like a body: the query of a small body is repeated for every document."""
    most = job.state.settings.max_body_bytes
    if size > most:
        raise bad_request(
            f"the prompts of these {count} pairs hold {size} {unit}, at most {most} are taken: send fewer at once",
            param,
            "too_many",
        )


def _pair_options(job: PoolingJob, names: tuple[str, str], count: int, *, add_special_tokens: bool) -> PairOptions:
    return PairOptions(
        max_tokens=job.longest,
        truncate=job.truncate,
        keep_first=job.body.truncation_side != "left",
        add_special_tokens=add_special_tokens,
        first_param=names[0],
        second_params=[f"{names[1]}[{index}]" if count > 1 else names[1] for index in range(count)],
        caller=job.caller,
    )


async def _by_head(
    job: PoolingJob,
    first: list[list[int]],
    second: list[list[int]],
    names: tuple[str, str],
    activation: Activation,
    pool: PoolFunction,
) -> Scores:
    """Scores of the second text appended to the first, as tokenizers of decoders join a pair."""
    if len(first) == 1:
        first = first * len(second)
    prompts = [
        _ConcatenatedIds(a, _truncate_second(job, len(a), b, names[0])) for a, b in zip(first, second, strict=True)
    ]
    for index, prompt in enumerate(prompts):
        if len(prompt) > job.longest:
            where = f"{names[1]}[{index}]" if len(prompts) > 1 else names[1]
            raise context_length_exceeded(job.longest, len(prompt), param=where)
    tokens = sum(map(len, prompts))
    _check_total_size(job, tokens, len(prompts), "tokens", names[1])
    rows = await pool(prompts, PoolingRule("classify"))
    return Scores([probabilities(unpack_rows(row)[0], activation)[0] for row in rows], tokens)


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
