"""A real server with the bundled model under mixed load for a while: memory stays flat and every request is accounted for.

The long form, marked soak, takes half an hour or SOAK_SECONDS; the short one, marked slow, two minutes.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from e2e_helpers.soaking import Memory, soak
from helpers.adapters import save_adapter
from helpers.eventually import eventually
from helpers.real_server import serve

DEMO = Path(__file__).parents[2] / "models" / "demo"
LONG = float(os.environ.get("SOAK_SECONDS", "1800"))
# MiB that a process may grow by behind the first half of a run, whose caches and pools are still filling then.
TOLERANCE = 24.0


@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param(120.0, id="two minutes", marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
        pytest.param(LONG, id="half an hour", marks=[pytest.mark.soak, pytest.mark.timeout(4 * 3600)]),
    ],
)
def test_mixed_load_leaves_nothing_behind(seconds: float, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "first", DEMO, seed=1, strength=0.2)
    options = ["--lora", f"first={adapter}", "--max-num-seqs", "6", "--kv-cache-memory", "24MiB"]
    with serve(*options, model=DEMO) as server:
        engine = server.engine_pid()
        memories = [Memory(server.process.pid), Memory(engine)]
        accounts = soak(server.url, seconds, memories)
        print(accounts.table())
        assert not accounts.wrong, "\n".join(accounts.wrong[:10])
        assert sum(accounts.sent.values()) == sum(accounts.ended.values())
        asked_for = {"plain", "scaled", "shifted", "reused", "adapted", "tools", "form", "embedding", "refused"}
        assert set(accounts.sent) == asked_for
        assert any(outcome == "left" for _, outcome in accounts.ended)

        eventually(lambda: server.metric("windlass_num_requests_running") == 0, 60.0)
        assert server.metric("windlass_num_requests_waiting") == 0
        assert server.metric("windlass_kv_cache_usage_perc") == 0
        assert server.metric("windlass_engine_restarts_total") == 0 and server.engine_pid() == engine
        finished = server.metric("windlass_request_success_total")
        assert accounts.finished_samples <= finished <= accounts.finished_samples + accounts.left_samples
        for memory, name in zip(memories, ("server", "engine"), strict=True):
            slope, grown = memory.growth(0.5)
            print(
                f"{name}: {memory.samples[-1][1]:.0f} MiB, {slope:+.2f} MiB a minute, {grown:+.1f} in the second half"
            )
            assert grown < TOLERANCE, f"the {name} has grown by {grown:.0f} MiB"
        print(f"{sum(accounts.sent.values())} requests, {accounts.tokens} tokens, preemptions:", end=" ")
        print(
            server.metric("windlass_num_preemptions_total"), "shifts:", server.metric("windlass_context_shifts_total")
        )
        assert "Traceback" not in server.log.read_text()
