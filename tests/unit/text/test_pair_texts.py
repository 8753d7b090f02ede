"""Pairs on their way to the tokenizer: in batches, and never all of them at once."""

from __future__ import annotations

import asyncio
from typing import Any

from windlass.server.text.pair_prompts import PairPrompt
from windlass.server.text.service import PairOptions, PairTokenizer
from windlass.server.text.workers.frames import TaskCall, pack_ids
from windlass.server.text.workers.pool import LARGE_JOB, Limits


def test_pairs_go_to_the_tokenizer_a_few_at_a_time_and_unjoined() -> None:
    """All of them in one string each would take the query's length times the documents."""

    class Whole(str):
        def __add__(self, other: str) -> str:
            raise AssertionError("copied")

    class Pool:
        async def run(self, call: TaskCall[Any], *, size: int, **rest: Any) -> list[Any]:
            batch = call.args[0] if call.task == "encode_pairs" else call.args[2]
            sizes.append((len(batch), size))
            ids = [pack_ids([len(second)]) for _, second in batch]
            return [(each, 1) for each in ids] if call.task == "encode_pairs" else ids

    async def check_text_length(characters: int, max_model_len: int, *, truncated: bool, param: str) -> None: ...

    sizes: list[tuple[int, int]] = []
    texts = PairTokenizer(Pool(), Limits(seconds=1.0, memory=1), check_text_length)  # type: ignore[arg-type]
    pairs = [(Whole("a" * 9), Whole("b" * (n % 7))) for n in range(40)] + [(Whole("a" * 9), Whole("b" * LARGE_JOB))]
    names = [str(n) for n in range(41)]
    job = PairOptions(
        max_tokens=2 * LARGE_JOB,
        truncate=None,
        keep_first=True,
        add_special_tokens=True,
        first="q",
        seconds=names,
        caller="",
    )
    wanted = [[len(second)] for _, second in pairs]
    assert asyncio.run(texts.join(pairs, job)) == [(ids, 1) for ids in wanted]
    lengths = [9 + len(second) for _, second in pairs]
    assert sizes == [(32, sum(lengths[:32])), (8, sum(lengths[32:40])), (1, lengths[40])]
    sizes.clear()
    prompt = PairPrompt(("", "", ""), ("query", "document"), (False, False))
    assert asyncio.run(texts.fill(prompt, "", pairs, job)) == wanted
    assert [count for count, _ in sizes] == [32, 8, 1]
