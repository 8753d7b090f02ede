"""Activity lines of a server, and its summary at the start."""

from __future__ import annotations

import asyncio
import json
import shlex
from dataclasses import replace

import httpx
import pytest
from helpers.scripted_engine import model_info
from helpers.served import Served
from helpers.toy_tokenizers import byte_level

from windlass.engine.client.engine_client import EngineClient
from windlass.engine.interface.outputs import EngineStats
from windlass.engine.rotary.rope_scaling import RopeScaling, apply_scaling
from windlass.server.observability.metrics import ServerMetrics
from windlass.server.startup import display
from windlass.server.startup.display import activity_line, link_lines, report_activity, summary

BEFORE = EngineStats(
    num_steps=10, prompt_tokens=1_000, generation_tokens=50, prefix_cache_queries=900, prefix_cache_hits=9
)


def test_activity_between_two_snapshots():
    after = replace(
        BEFORE,
        num_running=3,
        num_waiting=1,
        prompt_tokens=21_000,
        generation_tokens=473,
        kv_cache_usage=0.126,
        prefix_cache_queries=1_900,
        prefix_cache_hits=259,
    )
    assert activity_line(BEFORE, after, 10.0) == (
        "running 3, waiting 1; prompts 2,000 tokens/s, answers 42.3 tokens/s; cache 13% in use, 25% of prompts found in it"
    )
    more = replace(after, spec_decode_num_draft_tokens=40, spec_decode_num_accepted_tokens=30, num_preemptions=2)
    line = activity_line(BEFORE, more, 10.0)
    assert line is not None and line.endswith("; 75% of draft tokens accepted; 2 preempted")


def test_no_line_without_activity():
    assert activity_line(BEFORE, BEFORE, 10.0) is None
    assert activity_line(BEFORE, replace(BEFORE, num_waiting=1), 10.0) is not None
    assert activity_line(BEFORE, replace(BEFORE, generation_tokens=51), 10.0) is not None


def test_a_restarted_engine_counts_from_zero(monkeypatch):
    lines: list[str] = []
    given = [BEFORE, None, EngineStats(num_steps=2, num_running=1, generation_tokens=4)]

    class Metrics:
        async def refresh(self) -> EngineStats | None:
            return given.pop(0) if given else None

    monkeypatch.setattr(display, "print_status", lines.append)

    async def main() -> None:
        task = asyncio.create_task(report_activity(Metrics(), 0.01))  # type: ignore[arg-type]
        while given:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.02)
        task.cancel()

    asyncio.run(main())
    assert len(lines) == 2 and "answers -" not in lines[1] and "running 1" in lines[1]


def test_activity_lines_do_not_consume_request_times():
    class Engine(EngineClient):
        restarts, state = 0, "ready"

        async def stats(self) -> EngineStats:
            return EngineStats(queue_seconds=(0.02, 0.03))

    metrics = ServerMetrics(Engine())  # type: ignore[arg-type]

    async def main() -> str:
        assert (await metrics.refresh()) is not None
        return (await metrics.render()).decode()

    assert "windlass_request_queue_time_seconds_count 4.0" in asyncio.run(main())


@pytest.mark.slow
@pytest.mark.parametrize(("interval", "printed"), [("0.2", True), ("0", False)])
def test_a_busy_server_prints_its_throughput(interval, printed, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    byte_level().save(str(tmp_path / "tokenizer.json"))
    with Served(tmp_path, WINDLASS_STATS_INTERVAL=interval) as served:
        url = served.wait_ready()
        body = {"model": tmp_path.name, "prompt": "hi", "max_tokens": 30}
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=20.0).status_code == 200
        assert bool([line for line in served.lines if "answers" in line and "tokens/s" in line]) is printed
        assert [line for line in served.lines if line.startswith("  chats     none: ")]  # the model has no template


@pytest.mark.parametrize(
    ("blocks", "longest", "at_once", "room"),
    [
        ((1024,), 512, 64, "16,384 tokens: enough for 32 requests of 512, or 64 of 256"),
        ((64,), 1000, 4, "1,024 tokens: enough for 1 request of 1,000, or 4 of 256"),
        ((64,), 100, 4, "1,024 tokens: enough for 10 requests of 100"),
        ((64, 8), 100, 4, "1,024 + 128 tokens, one number for each kind of layer"),
    ],
)
def test_the_summary_shows_capacity(blocks, longest, at_once, room):
    info = model_info(
        num_kv_blocks=blocks,
        max_model_len=longest,
        max_num_seqs=at_once,
        block_size=16,
        weight_bytes=3 << 20,
        kv_cache_bytes=5 << 20,
    )
    text = "\n".join(summary(info, "toy", "http://x/v1"))
    assert f"  cache     {room}\n" in text
    assert "  memory    3.0 MiB for the weights, at most 5.0 MiB for the cache (" in text
    beyond = "beyond them it needs a scaling: --rope-scaling auto, or rope_scaling in requests" in text
    assert beyond is (longest > info.trained_len)
    chats = "\n".join(summary(info, "toy", "http://x/v1", chats=False))
    line = "\n  chats     none: the model has no chat template (--chat-template FILE sets one)"
    assert chats.replace(line, "") == text and line in chats
    neutral = "temperature 1, unless a request sets its own (--override-generation-config changes it)"
    assert f"\n  sampling  {neutral}" in text
    said = "\n".join(summary(info, "toy", "http://x/v1", sampling="top_k 9 (a file)"))
    assert "\n  sampling  top_k 9 (a file), unless a request sets its own\n" in said + "\n" and neutral not in said
    silent = "\n".join(summary(replace(info, generates=False), "toy", "http://x/v1", chats=False))
    assert "chats" not in silent and "sampling" not in silent
    scaled = replace(info, rotary_groups=apply_scaling(info.rotary_groups, RopeScaling("linear", (("factor", 4.0),))))
    assert "beyond them" not in "\n".join(summary(scaled, "toy", "http://x/v1"))


@pytest.mark.parametrize(
    ("facts", "command"),
    [
        ({"chats": True, "generates": True, "key": False}, "windlass chat --url http://x:1"),
        ({"chats": True, "generates": True, "key": True}, "windlass chat --url http://x:1 --api-key KEY"),
        ({"chats": False, "generates": True, "key": False}, 'windlass generate "Once upon a time" --url http://x:1'),
    ],
)
def test_the_summary_ends_with_addresses_and_a_command(facts, command):
    lines = link_lines("http://x:1", page=True, **facts)
    assert [line.split(maxsplit=1)[1] for line in lines[:2]] == ["http://x:1", "http://x:1/v1"]
    assert lines[2:] == ["  API docs  http://x:1/docs", f"  try       {command}"]
    assert link_lines("http://x:1", page=False, **facts) == lines[1:]


@pytest.mark.parametrize("key", [False, True])
def test_the_command_to_try_embeddings_is_valid(key):
    command = shlex.split(link_lines("http://x:1", page=False, key=key, chats=False, generates=False)[-1])[1:]
    assert command[:2] == ["curl", "http://x:1/v1/embeddings"] and json.loads(command[5]) == {"input": "hello"}
    assert ("Authorization: Bearer KEY" in command) is key
