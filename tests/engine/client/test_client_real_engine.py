"""Both clients around the real engine and the bundled model: the same tokens, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest
from helpers.configs import engine_config

from windlass.engine.api.request import EngineRequest, SamplingParams
from windlass.engine.client.inline import InlineClient
from windlass.engine.client.process import ProcessClient
from windlass.engine.errors import LoadError, RequestError

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]

CONFIG = engine_config(
    str(Path(__file__).parents[3] / "models" / "demo"), device="cpu", threads=1, kv_cache_memory=32 * 2**20
)


@pytest.fixture
def anyio_backend():
    return "asyncio"


async def tokens(client, name: str, prompt: list[int], max_tokens: int = 12) -> list[int]:
    request = EngineRequest(name, prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True))
    return [token async for output in client.generate(request) for token in output.token_ids]


async def test_a_process_and_a_thread_make_the_same_tokens():
    prompts = [[5, 17, 400, 33, 8], list(range(100, 180)), [7]]
    results = []
    for client in (ProcessClient(CONFIG), InlineClient(CONFIG)):
        info = await client.start()
        assert info.vocab_size > 400 and info.device == "cpu"
        results.append(await asyncio.gather(*[tokens(client, f"r{i}", prompt) for i, prompt in enumerate(prompts)]))
        with pytest.raises(RequestError):
            await tokens(client, "outside", [info.vocab_size])
        stream = client.generate(EngineRequest("abandoned", [9, 9], SamplingParams(max_tokens=400, ignore_eos=True)))
        await anext(stream)
        await stream.aclose()
        stats = await client.stats()
        assert (stats.num_running, stats.num_waiting, stats.kv_blocks_used) == (0, 0, 0)
        assert stats.generation_tokens >= 36
        await client.close()
    assert results[0] == results[1]
    assert [len(result) for result in results[0]] == [12, 12, 12]


async def test_a_directory_without_a_model_is_a_load_error(tmp_path):
    client = ProcessClient(engine_config(tmp_path))
    with pytest.raises(LoadError, match=r"config\.json"):
        await client.start()
    await client.close()


async def test_a_sample_that_is_ended_frees_its_blocks_and_the_others_go_on():
    async with contextlib.AsyncExitStack() as stack:
        client = InlineClient(CONFIG)
        stack.push_async_callback(client.close)
        await client.start()
        sampling = SamplingParams(max_tokens=300, n=3, temperature=1.0, seed=5, ignore_eos=True)
        made: dict[int, list[int]] = {0: [], 1: [], 2: []}
        freed = 0
        stream = client.generate(EngineRequest("three", list(range(100, 150)), sampling))
        async for output in stream:
            made[output.index] += output.token_ids
            if len(made[1]) >= 100 and not freed:
                before = (await client.stats()).kv_blocks_used
                client.end_sample("three", 0)  # the one that the others were forked from
                client.end_sample("three", 2)
                stats = await client.stats()
                freed = before - stats.kv_blocks_used
                assert stats.num_running == 1
        assert freed >= 2 * (100 // 16)  # what stands behind the prompt, which they share
        assert len(made[1]) == 300 and max(len(made[0]), len(made[2])) < 150
        stats = await client.stats()
        assert (stats.num_running, stats.kv_blocks_used) == (0, 0)
        alone = client.generate(EngineRequest("again", list(range(100, 150)), sampling))
        whole = [token async for output in alone if output.index == 1 for token in output.token_ids]
        assert whole == made[1]
