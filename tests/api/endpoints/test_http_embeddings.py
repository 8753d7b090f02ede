"""`POST /v1/embeddings`: requests to the engine, responses, and refused requests."""

from __future__ import annotations

import base64
import struct
import time
from typing import Any

import pytest
from helpers.live_server import Live, live_server
from helpers.raw_client import connect, request
from helpers.scripted_engine import ScriptedEngine, model_info

from windlass.engine.errors import EngineDeadError, RequestError
from windlass.engine.interface.model_info import PoolingDefaults
from windlass.engine.interface.outputs import PooledRows
from windlass.engine.interface.request import PoolingRule
from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.server.api import pooling
from windlass.server.serving.job import PoolingJob
from windlass.server.serving.streaming import Exchange

PATH = "/v1/embeddings"


def embed(live: Live, given: Any, **fields: Any) -> dict[str, Any]:
    return live.request(PATH, input=given, **fields)


def test_vector_of_a_text(live: Live) -> None:
    answer = embed(live, "abc", user="me", model="toy")
    (request,) = live.engine.requests
    assert request.pooling == PoolingRule("last", None, True)
    assert (request.sampling.max_tokens, request.sampling.n, request.reuse) == (0, 1, None)
    (item,) = answer["data"]
    assert item == {"object": "embedding", "index": 0, "embedding": [request.prompt_token_ids[-1], *range(1, 8)]}
    tokens = len(request.prompt_token_ids)
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert (answer["object"], answer["model"]) == ("list", "toy")


@pytest.mark.parametrize(
    ("given", "last"),
    [([5, 6, 7], [7]), ([[5], [6, 9], [8]], [5, 9, 8]), ([[3]] * 2048, [3] * 2048)],
)
def test_token_ids_are_used_unchanged_and_in_order(live: Live, given: Any, last: list[int]) -> None:
    answer = embed(live, given)
    assert [item["embedding"][0] for item in answer["data"]] == last
    assert [item["index"] for item in answer["data"]] == list(range(len(last)))
    assert live.engine.most_running <= 8


def test_base64_is_little_endian_float32(live: Live) -> None:
    plain = embed(live, ["a", "bcd"])
    packed = embed(live, ["a", "bcd"], encoding_format="base64")
    for one, other in zip(plain["data"], packed["data"], strict=True):
        raw = base64.b64decode(other["embedding"], validate=True)
        assert list(struct.unpack(f"<{len(raw) // 4}f", raw)) == one["embedding"]


def test_fields_reach_the_engine(live: Live) -> None:
    before = time.monotonic()
    scaling = {"rope_type": "yarn", "factor": 4.0}
    fields = {"dimensions": 3, "pooling": "mean", "normalize": False, "rope_update": "recompute", "cache_salt": "mine"}
    fields |= {"priority": -3, "timeout": 30, "request_id": "mine.1", "attention_window": 64, "attention_sinks": 4}
    answer = embed(live, "abc", rope_scaling=scaling, **fields)
    (request,) = live.engine.requests
    assert request.pooling == PoolingRule("mean", 3, False)
    assert request.rope_scaling == RopeScaling.from_dict(scaling) and request.rope_update == "recompute"
    assert (request.cache_salt, request.priority) == ("salt mine", -3)
    assert (request.context.attention_window, request.context.attention_sinks) == (64, 4)
    assert request.deadline is not None and before + 30 <= request.deadline <= time.monotonic() + 30
    assert len(answer["data"][0]["embedding"]) == 3 and answer["id"] == "embd-mine.1"


@pytest.mark.parametrize(
    ("given", "fields", "kept"),
    [
        ([5, 6, 7, 8], {"truncate_prompt_tokens": 2}, [5, 6]),
        ([5, 6, 7, 8], {"truncate_prompt_tokens": 2, "truncation_side": "left"}, [7, 8]),
        ([5] * 300, {"truncate_prompt_tokens": -1}, [5] * 256),
        ([5] * 256, {}, [5] * 256),
    ],
)
def test_truncation_on_request(live: Live, given: list[int], fields: dict[str, Any], kept: list[int]) -> None:
    embed(live, given, **fields)
    assert live.engine.requests[0].prompt_token_ids == kept
    live.engine.requests.clear()
    embed(live, "x" * 300, truncate_prompt_tokens=-1, add_special_tokens=False)
    assert len(live.engine.requests[0].prompt_token_ids) == 256


def test_one_failure_ends_the_request_with_its_error(live: Live) -> None:
    def refuse(request: Any) -> Exception | None:
        return RequestError("no", "input", "odd") if request.prompt_token_ids == [7] else None

    live.engine.refuse = refuse
    live.engine.first_delay = 5.0
    started = time.monotonic()
    error = live.refuse(PATH, {"input": [[5], [6], [7], [8]]})
    assert error["code"] == "odd" and time.monotonic() - started < 4
    live.wait(lambda: live.engine.running == 0)
    assert len(live.engine.aborted) >= 2


def test_dead_engine_is_a_503(live: Live) -> None:
    live.engine.refuse = lambda request: EngineDeadError("gone")
    assert live.refuse(PATH, {"input": "a"}, 503)["code"] == "engine_unavailable"


def test_disconnect_aborts_the_prompts(live: Live) -> None:
    live.engine.first_delay = 300.0
    with connect(live.url) as connection:
        connection.sendall(request(PATH, {"input": [[5], [6]]}))
        live.wait(lambda: live.engine.running == 2)
    live.wait(lambda: len(live.engine.aborted) == 2)


def test_too_large_answer_is_refused_before_any_work() -> None:
    with live_server(ScriptedEngine(info=model_info(hidden_size=4096)), max_response_bytes=1 << 20) as live:
        assert live.refuse(PATH, {"input": [[5]] * 100})["code"] == "response_too_large"
        assert live.engine.requests == []


def test_vectors_are_rendered_in_batches_and_counted_once(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []
    written: list[int] = []

    class Measured(bytes):
        def __len__(self) -> int:
            measured.append(1)
            return super().__len__()

    async def pool(
        exchange: Exchange, job: PoolingJob, prompts: list[list[int]], rule: PoolingRule
    ) -> list[PooledRows]:
        return [PooledRows(Measured(struct.pack("<f", index)), 1) for index in range(len(prompts))]

    def data(batch: list[PooledRows], *rest: Any) -> bytes:
        written.append(len(batch))
        return render_items(batch, *rest)

    render_items = pooling._render_items
    monkeypatch.setattr(pooling, "pool", pool)
    monkeypatch.setattr(pooling, "_render_items", data)
    monkeypatch.setattr(pooling, "_VALUES_PER_BATCH", 80)  # numbers
    answer = embed(live, [[5]] * 200)
    assert written == [80, 80, 40] and len(measured) == 200
    assert [(item["index"], item["embedding"]) for item in answer["data"]] == [(n, [n]) for n in range(200)]


@pytest.mark.slow
def test_model_files_set_the_defaults() -> None:
    declared = PoolingDefaults("mean", False, declared=True)
    with live_server(ScriptedEngine(info=model_info(pooling=declared))) as live:
        embed(live, "a")
        embed(live, "a", pooling="last", normalize=True)
        assert [r.pooling for r in live.engine.requests] == [
            PoolingRule("mean", None, False),
            PoolingRule("last", None, True),
        ]
    refused = PoolingDefaults(refusal="the model's files ask for pooling max, which is not offered", declared=True)
    with live_server(ScriptedEngine(info=model_info(pooling=refused))) as live:
        assert live.refuse(PATH, {"input": "a"})["param"] == "pooling"
        embed(live, "a", pooling="first")
