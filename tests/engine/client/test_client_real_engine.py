"""The process client with the real engine and the bundled model: equal tokens, and no remaining processes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from helpers.configs import engine_config
from helpers.engines import greedy, run

from windlass.engine.client.process_client import ProcessClient
from windlass.engine.core.engine_core import EngineCore
from windlass.engine.errors import LoadError, RequestError
from windlass.engine.interface.request import EngineRequest, SamplingParams

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]

CONFIG = engine_config(
    str(Path(__file__).parents[3] / "models" / "demo"), device="cpu", threads=1, kv_cache_memory=32 * 2**20
)


@pytest.fixture
def anyio_backend():
    return "asyncio"


async def tokens(client, name: str, prompt: list[int], max_tokens: int = 12) -> list[int]:
    request = EngineRequest(name, prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True))
    return [token async for output in client.generate(request) for token in output.token_ids]


async def test_process_returns_the_tokens_of_its_core(monkeypatch):
    monkeypatch.setattr("windlass.engine.client.request_router.STATS_TIMEOUT", 30.0)  # asserts that a new one is clean
    prompts = [[5, 17, 400, 33, 8], list(range(100, 180)), [7]]
    client = ProcessClient(CONFIG)
    info = await client.start()
    assert info.vocab_size > 400 and info.device == "cpu"
    made = await asyncio.gather(*[tokens(client, f"r{i}", prompt) for i, prompt in enumerate(prompts)])
    with pytest.raises(RequestError):
        await tokens(client, "outside", [info.vocab_size])
    stream = client.generate(EngineRequest("abandoned", [9, 9], SamplingParams(max_tokens=400, ignore_eos=True)))
    await anext(stream)
    await stream.aclose()
    stats = await client.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_blocks_used) == (0, 0, 0)
    assert stats.generation_tokens >= 36
    await client.close()
    wanted = run(
        EngineCore(CONFIG), [greedy(f"r{i}", prompt, 12) for i, prompt in enumerate(prompts)], every_logit=False
    )
    assert made == [wanted[f"r{i}", 0].token_ids for i in range(3)]
    assert [len(result) for result in made] == [12, 12, 12]


@pytest.mark.slow
async def test_directory_without_a_model_is_a_load_error(tmp_path):
    client = ProcessClient(engine_config(tmp_path))
    with pytest.raises(LoadError, match=r"config\.json"):
        await client.start()
    await client.close()
