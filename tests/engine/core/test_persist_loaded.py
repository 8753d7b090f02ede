"""Kept blocks that come into the cache in the very step whose request has them written once more, for its own scope."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine_helpers.persisting import files_in, keeping
from helpers.engines import Finished, greedy, run
from helpers.eventually import eventually
from helpers.tiny_models import make_model

from windlass.engine.cache.block_store import Fetch
from windlass.engine.cache.cache_operations import LoadedBlock
from windlass.engine.core.engine_core import EngineCore
from windlass.engine.interface.context import NonPrefixReuseParams

_NUMBERS = random.Random(3)
OPTIONS: dict[str, Any] = {"max_model_len": 256, "deterministic": False}
OFFER, ANY = NonPrefixReuseParams(0, scope="me"), NonPrefixReuseParams(32, scope="me")


def tokens(count: int) -> list[int]:
    return [_NUMBERS.randrange(3, 128) for _ in range(count)]


def ask(core: EngineCore, prompt: list[int], max_tokens: int = 4, **fields: Any) -> Finished:
    return run(core, [greedy("a", prompt, max_tokens, **fields)], every_logit=False)["a", 0]


def contents(folder: Path) -> dict[str, str]:
    """By name a digest of each file, but for its header."""
    found = {}
    for file in files_in(folder):
        data = file.read_bytes()
        found[file.name] = hashlib.sha256(data[8 + int.from_bytes(data[:8], "little") :]).hexdigest()
    return found


def put_late(core: EngineCore, puts: list[int]) -> None:
    """Restore blocks together, into the cache, once the thread that writes files has finished all work queued by
    then."""
    store = core._store
    assert store is not None
    pages, write_queue = store.transfer, store._write_queue
    put, take, taken = pages.put, write_queue.take, list[float]()

    def late(loaded: Sequence[LoadedBlock]) -> None:
        if loaded:
            eventually(lambda: not len(write_queue), 30)
            count = len(taken)
            eventually(lambda: len(taken) > count, 30)  # what it took before is written
        puts.append(len(loaded))
        put(loaded)

    def all_read(fetches: Sequence[Fetch], seconds: float) -> bool:
        eventually(lambda: all(fetch.is_done for fetch in fetches), 30)
        return True

    def counted(seconds: float) -> Any:
        taken.append(seconds)
        return take(seconds)

    pages.put, write_queue.take, store.reader.wait = late, counted, all_read  # type: ignore[method-assign]


def test_a_block_is_not_written_before_its_bytes_are_there(tmp_path: Path) -> None:
    model, folder = make_model("llama", tmp_path / "model"), tmp_path / "kept"
    prefix, passage = tokens(64), tokens(48)
    with keeping(model, folder, **OPTIONS) as core:
        right = ask(core, [*prefix, 5, 6, 7], 6)  # in files that no scope finds
        ask(core, [*tokens(16), *passage, *tokens(9)], 1, reuse=OFFER)
    before, puts = contents(folder), list[int]()
    with keeping(model, folder, **OPTIONS) as core:
        put_late(core, puts)
        both = ask(core, [*prefix, *passage, 9, 9], reuse=ANY).outputs[-1]
        assert both.context is not None and both.context.reused_tokens == 48 and both.cached_tokens == 64 + 48
    assert puts == [4 + 3]
    assert before.items() <= contents(folder).items()
    with keeping(model, folder, **OPTIONS) as core:
        again = ask(core, [*prefix, 5, 6, 7], 6)
        assert again.outputs[-1].cached_tokens == 64 and again.token_ids == right.token_ids
        # And what came is found in the scope from then on.
        moved = ask(core, [*tokens(16), *prefix, 9, 9], reuse=ANY).outputs[-1]
        assert moved.context is not None and moved.context.reused_tokens == 64
