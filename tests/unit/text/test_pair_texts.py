"""Batches of pairs for the tokenizer."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from windlass.server.text.service import PairOptions, PairTokenizer
from windlass.server.text.tokenizer_files import PairPrompt
from windlass.server.text.workers.frames import pack_ids
from windlass.server.text.workers.pool import LARGE_JOB
from windlass.server.text.workers.tasks import TextTasks


def test_pairs_are_tokenized_in_batches_without_joining_them_first() -> None:
    """Joining all of them would take memory for the query's length times the number of documents."""

    class Whole(str):
        def __add__(self, other: str) -> str:
            raise AssertionError("copied")

    class Service:
        async def run(self, task: partial[Any], *, size: int, **rest: Any) -> list[Any]:
            batch = task.keywords["pairs"]
            sizes.append((len(batch), size))
            ids = [pack_ids([len(second)]) for _, second in batch]
            return [(each, 1) for each in ids] if task.func is TextTasks.encode_pairs else ids

        async def check_text_length(
            self, characters: int, max_model_len: int, *, truncated: bool, param: str
        ) -> None: ...

    sizes: list[tuple[int, int]] = []
    texts = PairTokenizer(Service())  # type: ignore[arg-type]
    pairs = [(Whole("a" * 9), Whole("b" * (n % 7))) for n in range(40)] + [(Whole("a" * 9), Whole("b" * LARGE_JOB))]
    options = PairOptions(
        max_tokens=2 * LARGE_JOB,
        truncate=None,
        keep_first=True,
        add_special_tokens=True,
        first_param="q",
        second_params=[str(n) for n in range(41)],
        caller="",
    )
    wanted = [[len(second)] for _, second in pairs]
    assert asyncio.run(texts.join(pairs, options)) == [(ids, 1) for ids in wanted]
    lengths = [9 + len(second) for _, second in pairs]
    assert sizes == [(32, sum(lengths[:32])), (8, sum(lengths[32:40])), (1, lengths[40])]
    sizes.clear()
    prompt = PairPrompt(("", "", ""), ("query", "document"), (False, False))
    assert asyncio.run(texts.fill(prompt, "", pairs, options)) == wanted
    assert [count for count, _ in sizes] == [32, 8, 1]
