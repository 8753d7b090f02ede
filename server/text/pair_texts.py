"""Tokenizing pairs of texts: as the model's tokenizer joins them, or in the prompt that a template puts around them.

A part of `TextService`. Knows its pool; knows nothing of endpoints or the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from windlass.server.errors import context_length_exceeded
from windlass.server.text.pair_prompt import PairPrompt, PairTemplate
from windlass.server.text.pool_errors import told
from windlass.server.text.workers.frames import count_ids, unpack_ids
from windlass.server.text.workers.pool import LARGE_JOB, Limits, TextPool
from windlass.server.text.workers.tasks import TextTasks, call

T = TypeVar("T")

BATCH = 32  # short prompts tokenized in one job: between jobs others have their turn


class RefuseLong(Protocol):
    """See `TextService.refuse_long`."""

    async def __call__(self, characters: int, max_model_len: int, *, truncated: bool, param: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PairJob:
    """What holds for all pairs of a request. most: tokens that a pair may have. truncate: to which its second text is cut.

    keep_first: whether it is cut at its end. first, seconds: what the texts are called, the second of each pair.
    """

    most: int
    truncate: int | None
    keep_first: bool
    add_special_tokens: bool
    first: str
    seconds: Sequence[str]
    caller: str


class PairTexts:
    """refuse_long: refuses a text by its length, before it is tokenized."""

    def __init__(self, pool: TextPool, limits: Limits, refuse_long: RefuseLong) -> None:
        self._pool, self._limits, self._refuse_long = pool, limits, refuse_long

    def template(self) -> PairTemplate | None:
        """How pairs are put to the model, if a template says so; blocks while the text processes load. Raises ApiError."""
        with told("model", "loading the chat template", self._limits, "template"):
            return self._pool.pairs()

    async def cut(self, documents: Sequence[str], most: int, *, longest: int, param: str, caller: str) -> list[str]:
        """The beginning of each, of at most so many tokens. longest: tokens of the context. Raises ApiError for a giant one."""
        for index, document in enumerate(documents):
            await self._refuse_long(len(document), longest, truncated=True, param=f"{param}[{index}]")
        found: list[str] = []
        for batch in batches(documents, len):
            with told(param, "tokenizing this text", self._limits):
                asked = call(TextTasks.cut, batch, most=most)
                cut = await self._pool.run(asked, size=sum(map(len, batch)), limits=self._limits, caller=caller)
            found += cut
        return found

    async def join(self, pairs: Sequence[tuple[str, str]], job: PairJob) -> list[tuple[list[int], int]]:
        """The token ids of pairs as the tokenizer joins them, each with where the second text begins.

        The second is cut at its end so that both have no more than `truncate` tokens. Raises ApiError for a pair that cannot fit,
        before tokenizing it where its length tells.
        """
        await self._refuse(pairs, job)
        found: list[tuple[list[int], int]] = []
        for batch in batches(pairs, _length):
            with told(job.first, "tokenizing this text", self._limits):
                asked = call(
                    TextTasks.encode_pairs, batch, add_special_tokens=job.add_special_tokens, most=job.truncate
                )
                size = sum(map(_length, batch))
                joined = await self._pool.run(asked, size=size, limits=self._limits, caller=job.caller)
            for ids, begin in joined:
                found.append((_within(ids, job.most, job.seconds[len(found)]), begin))
        return found

    async def fill(
        self, prompt: PairPrompt, instruction: str, pairs: Sequence[tuple[str, str]], job: PairJob
    ) -> list[list[int]]:
        """The token ids of the prompt with each pair of query and document in it. Cuts and raises as `join` does."""
        await self._refuse_long(len(instruction), job.most, truncated=False, param="instruction")
        await self._refuse(pairs, job)
        around = prompt.length + len(instruction)
        found: list[list[int]] = []
        for batch in batches(pairs, _length):
            with told(job.first, "tokenizing this text", self._limits):
                asked = call(
                    TextTasks.encode_filled,
                    prompt,
                    instruction,
                    batch,
                    add_special_tokens=job.add_special_tokens,
                    most=job.truncate,
                    keep_first=job.keep_first,
                )
                size = sum(around + _length(pair) for pair in batch)
                filled = await self._pool.run(asked, size=size, limits=self._limits, caller=job.caller)
            for ids in filled:
                found.append(_within(ids, job.most, job.seconds[len(found)]))
        return found

    async def _refuse(self, pairs: Sequence[tuple[str, str]], job: PairJob) -> None:
        for (first, second), name in zip(pairs, job.seconds, strict=True):
            await self._refuse_long(len(first), job.most, truncated=False, param=job.first)
            await self._refuse_long(len(second), job.most, truncated=job.truncate is not None, param=name)


def batches(texts: Sequence[T], length: Callable[[T], int]) -> Iterator[list[T]]:
    """Short texts, or pairs of them, together; a long one alone."""
    batch: list[T] = []
    size = 0
    for text in texts:
        if batch and (len(batch) == BATCH or size + length(text) > LARGE_JOB):
            yield batch
            batch, size = [], 0
        batch.append(text)
        size += length(text)
    if batch:
        yield batch


def _length(pair: tuple[str, str]) -> int:
    return len(pair[0]) + len(pair[1])


def _within(packed: bytes, most: int, param: str) -> list[int]:
    """The ids; raises ApiError where there are too many."""
    count = count_ids(packed)
    if count > most:
        raise context_length_exceeded(most, count, param=param)
    return unpack_ids(packed)
