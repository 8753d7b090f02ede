"""Unloading an adapter while a stream uses it: no further requests, and it is unloaded when the stream ends."""

from __future__ import annotations

import threading
from pathlib import Path

import httpx
import pytest
from helpers.live_server import Live, live_server
from helpers.scripted_engine import ScriptedEngine

from windlass.engine.interface.model_info import AdapterSource

STREAM = {"model": "poet", "prompt": "a", "stream": True, "max_tokens": 200}


def post(live: Live, path: str, **body: object) -> httpx.Response:
    return httpx.post(f"{live.url}/v1/{path}", json=body, timeout=20)


def test_unloading_waits_for_streams_up_to_its_timeout(tmp_path: Path) -> None:
    engine = ScriptedEngine(delay=0.02)
    poet = AdapterSource(1, "poet", str(tmp_path))
    settings = {"adapters": (poet,), "max_loras": 1, "lora_folder": tmp_path, "adapter_drain_seconds": 0.1}
    (tmp_path / "new").mkdir()
    with live_server(engine, **settings) as live:
        with httpx.stream("POST", f"{live.url}/v1/completions", json=STREAM, timeout=20) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            engine.delay = 300.0  # it ends when its client leaves
            answer = post(live, "unload_lora_adapter", lora_name="poet")
            assert (answer.status_code, answer.json()["status"]) == (200, "draining")
            assert engine.dropped == [] and engine.running == 1
            refused = post(live, "completions", model="poet", prompt="a")
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
            again = post(live, "unload_lora_adapter", lora_name="poet")
            assert again.status_code == 404
            full = post(live, "load_lora_adapter", lora_name="late", lora_path="new")  # it still counts
            assert (full.status_code, full.json()["error"]["code"]) == (400, "too_many_adapters")
        live.wait(lambda: engine.dropped == [1])
        assert post(live, "load_lora_adapter", lora_name="late", lora_path="new").json()["status"] == "loaded"


@pytest.mark.slow
def test_an_adapter_that_a_restarted_engine_lacks_is_not_listed(tmp_path: Path) -> None:
    """Its files were missing when the engine restarted."""
    engine = ScriptedEngine(delay=0.02)
    sources = (AdapterSource(1, "poet", str(tmp_path)), AdapterSource(2, "clerk", str(tmp_path)))
    (tmp_path / "new").mkdir()
    with live_server(engine, adapters=sources, max_loras=2, lora_folder=tmp_path) as live:

        def listed() -> list[str]:
            return [model["id"] for model in live.http.get("/v1/models").json()["data"][1:]]

        with httpx.stream("POST", f"{live.url}/v1/completions", json=STREAM | {"max_tokens": 20}, timeout=20) as stream:
            lines = stream.iter_lines()
            next(lines)
            assert listed() == ["poet", "clerk"]
            engine.adapter_ids = frozenset({2})
            assert listed() == ["clerk"] and live.http.get("/v1/models/poet").status_code == 404
            for path, field in (("completions", "prompt"), ("embeddings", "input")):
                refused = post(live, path, model="poet", **{field: "a"})
                assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
            assert post(live, "unload_lora_adapter", lora_name="poet").status_code == 404
            assert "data: [DONE]" in list(lines)
        engine.adapter_ids = frozenset({2, 3})
        assert post(live, "load_lora_adapter", lora_name="poet", lora_path="new").json()["status"] == "loaded"
        assert listed() == ["clerk", "poet"]


@pytest.mark.slow
def test_unloading_responds_when_the_last_stream_has_ended(tmp_path: Path) -> None:
    engine = ScriptedEngine(delay=0.01)
    settings = {"adapters": (AdapterSource(1, "poet", str(tmp_path)),), "lora_folder": tmp_path}
    with live_server(engine, **settings) as live:
        answers: list[httpx.Response] = []
        with httpx.stream("POST", f"{live.url}/v1/completions", json=STREAM | {"max_tokens": 40}, timeout=20) as stream:
            lines = stream.iter_lines()
            next(lines)
            unloading = threading.Thread(
                target=lambda: answers.append(post(live, "unload_lora_adapter", lora_name="poet"))
            )
            unloading.start()
            assert engine.dropped == []
            rest = list(lines)
        unloading.join(20)
        assert "data: [DONE]" in rest and any('"length"' in line for line in rest)  # complete
        assert answers[0].json()["status"] == "unloaded" and engine.dropped == [1]
