"""Slow consumers do not delay other requests, and a finished engine is not stuck."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from helpers.configs import engine_config

from windlass.engine.client import request_router as router
from windlass.engine.client.process_client import ProcessClient
from windlass.engine.client.request_router import RequestRouter
from windlass.engine.client.supervision import INACTIVE_SECONDS
from windlass.engine.core.messages import Message, StepDone
from windlass.engine.errors import SlowConsumerError
from windlass.engine.interface.outputs import RequestOutput
from windlass.engine.interface.request import EngineRequest, SamplingParams

TESTS = Path(__file__).parents[2]


def request(name: str, max_tokens: int = 2) -> EngineRequest:
    return EngineRequest(name, [50, 7], SamplingParams(max_tokens=max_tokens))


def test_finished_unread_request_is_not_in_flight() -> None:
    async def main() -> None:
        sent: list[Message] = []
        router = RequestRouter(sent.append, lambda: None)
        outputs = router.generate(request("a"))
        first = asyncio.ensure_future(anext(outputs))
        await asyncio.sleep(0)
        assert router.in_flight == 1
        router.deliver(StepDone((RequestOutput("a", token_ids=(1,)),), 0.1))
        await first
        assert router.in_flight == 1
        router.deliver(StepDone((RequestOutput("a", token_ids=(2,), finish_reason="length"),), 0.1))
        assert router.in_flight == 0  # its last output has not been read
        assert (await anext(outputs)).token_ids == (2,)
        await outputs.aclose()
        assert len(sent) == 1  # nothing to abort

    asyncio.run(main())


def test_read_outputs_are_not_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "MAX_BUFFERED_OUTPUT", 10)  # two outputs

    async def main() -> None:
        requests = RequestRouter(lambda _: None, lambda: None)
        outputs = requests.generate(request("a", 100))
        for number in range(20):
            taken = asyncio.ensure_future(anext(outputs))
            await asyncio.sleep(0)
            requests.deliver(StepDone((RequestOutput("a", token_ids=(number,)),), 0.1))
            assert (await taken).token_ids == (number,)
        for number in range(3):
            requests.deliver(StepDone((RequestOutput("a", token_ids=(number,)),), 0.1))
        with pytest.raises(SlowConsumerError):
            await anext(outputs)

    asyncio.run(main())


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_unread_outputs_do_not_kill_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH")))))

    async def main() -> None:
        client = ProcessClient(engine_config("scripted"), core="helpers.scripted_core:ScriptedCore")
        try:
            await client.start()
            pid = client.pid
            outputs = client.generate(request("a", 5))
            await anext(outputs)
            await asyncio.sleep(INACTIVE_SECONDS + 2.0)
            assert client.pid == pid and client.restarts == 0 and client.state == "ready"
            assert len([output async for output in outputs]) == 4
        finally:
            await client.close()

    asyncio.run(main())
