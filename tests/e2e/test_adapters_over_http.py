"""Adapters over HTTP: selected by model name, mixed with plain requests, loaded and unloaded at run time."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from helpers.adapters import merged, save_adapter
from helpers.eventually import eventually
from helpers.real_server import RealServer, serve
from safetensors.torch import load_file, save_file

DEMO = Path(__file__).parents[2] / "models" / "demo"
PROMPT = "Once upon a time there was a little girl who lived in a house near the sea"


@dataclass
class Adapted:
    server: RealServer
    folder: Path
    outside: Path

    def complete(self, model: str, prompt: str = PROMPT, **fields: object) -> dict[str, Any]:
        return self.server.complete(prompt, model=model, **{"max_tokens": 12, **fields})

    def post(self, route: str, **body: object) -> httpx.Response:
        return self.server.post(f"/v1/{route}_lora_adapter", body)

    def load(self, name: str, path: str) -> dict[str, Any]:
        return self.server.ask("/v1/load_lora_adapter", lora_name=name, lora_path=path)

    def unload(self, name: str) -> dict[str, Any]:
        return self.server.ask("/v1/unload_lora_adapter", lora_name=name)

    def listed(self) -> list[dict[str, Any]]:
        return self.server.get("/v1/models")["data"]


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    root = tmp_path_factory.mktemp("adapters")
    folder = root / "allowed"
    for seed, name in enumerate(("first", "second", "third")):
        save_adapter(folder / name, DEMO, seed=seed, strength=0.4)
    outside = save_adapter(root / "outside", DEMO)
    (folder / "link").symlink_to(outside)
    (folder / "half").mkdir()
    shutil.copy(outside / "adapter_config.json", folder / "half")
    (folder / "half" / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    arguments = ["--lora", f"first={folder / 'first'}", "--lora-folder", str(folder), "--max-loras", "3"]
    with serve(*arguments, "--served-model-name", "base", model=DEMO) as server:
        yield Adapted(server, folder, outside)


def text_of(answer: dict) -> str:
    return answer["choices"][0]["text"]


def test_overflowing_adapter_is_a_named_error_without_a_traceback(adapted: Adapted) -> None:
    file = save_adapter(adapted.folder / "huge", DEMO) / "adapter_model.safetensors"
    save_file({name: tensor.sign() * 3e38 for name, tensor in load_file(file).items()}, file)
    plain = text_of(adapted.complete("base"))
    adapted.load("huge", "huge")
    for path, body in (
        ("/v1/completions", {"prompt": PROMPT}),
        ("/v1/completions", {"prompt": PROMPT, "stream": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}]}),
        ("/v1/embeddings", {"input": PROMPT}),
    ):
        answer = adapted.server.post(path, {"model": "huge", **body})
        assert answer.status_code == 500 and answer.json()["error"]["code"] == "not_finite", answer.text
        assert "adapter" in answer.json()["error"]["message"]
    assert text_of(adapted.complete("base")) == plain
    adapted.unload("huge")
    assert "Traceback" not in adapted.server.log.read_text()


@pytest.mark.slow
def test_answers_equal_those_of_the_merged_model(adapted: Adapted, tmp_path: Path) -> None:
    plain, changed = adapted.complete("base"), adapted.complete("first")
    assert (plain["model"], changed["model"]) == ("base", "first")
    assert text_of(plain) != text_of(changed)
    assert plain["system_fingerprint"] != changed["system_fingerprint"]
    with serve(model=merged(DEMO, adapted.folder / "first", tmp_path / "merged")) as other:
        assert text_of(changed) == text_of(other.complete(PROMPT, max_tokens=12))


def answers_of(server: RealServer, model: str) -> dict[str, list[Any]]:
    """Results of every endpoint for one text and model."""
    chat = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 12, "temperature": 0}
    bodies = {
        "chat/completions": chat,
        "responses": {"input": PROMPT, "max_output_tokens": 16, "temperature": 0, "store": False},
        "messages": chat,
        "embeddings": {"input": PROMPT},
    }
    found: dict[str, list[Any]] = {}
    for path, body in bodies.items():
        answer = server.ask(f"/v1/{path}", **body, model=model)
        assert answer["model"] == model
        match path:
            case "chat/completions":
                found[path] = [answer["choices"][0]["message"]["content"]]
            case "responses":
                found[path] = [part["text"] for item in answer["output"] for part in item.get("content", ())]
            case "messages":
                found[path] = [block["text"] for block in answer["content"]]
            case _:
                found[path] = answer["data"][0]["embedding"]
    return found


def test_every_endpoint_accepts_an_adapter(adapted: Adapted, tmp_path: Path) -> None:
    got, plain = (answers_of(adapted.server, name) for name in ("first", "base"))
    with serve("--served-model-name", "x", model=merged(DEMO, adapted.folder / "first", tmp_path / "merged")) as other:
        wanted = answers_of(other, "x")
    vectors = [torch.tensor(found.pop("embeddings")) for found in (got, plain, wanted)]
    assert torch.allclose(vectors[0], vectors[2], atol=1e-4) and vectors[0] @ vectors[1] < 0.5
    assert got == wanted
    assert not any(got[path] == plain[path] for path in got)


def test_restarted_engine_reloads_existing_adapters(adapted: Adapted) -> None:
    shutil.copytree(adapted.folder / "third", adapted.folder / "lost")
    for name, path in (("late", "second"), ("lost", "lost")):
        adapted.load(name, path)
    shutil.rmtree(adapted.folder / "lost")
    try:
        before = {name: text_of(adapted.complete(name)) for name in ("base", "first", "late")}
        assert len(set(before.values())) == 3
        os.kill(adapted.server.engine_pid(), signal.SIGKILL)
        eventually(lambda: adapted.server.metric("windlass_engine_restarts_total") == 1, 60)
        eventually(lambda: httpx.get(f"{adapted.server.url}/ready").status_code == 200, 60)
        assert {name: text_of(adapted.complete(name)) for name in before} == before
        assert [model["id"] for model in adapted.listed()] == ["base", "first", "late"]
        assert "adapter lost could not be loaded again after the restart: " in adapted.server.log.read_text()
    finally:
        adapted.unload("late")


def test_adapters_are_listed_with_their_parent(adapted: Adapted) -> None:
    listed = {model["id"]: model for model in adapted.listed()}
    assert listed["base"].get("parent") is None
    assert listed["first"]["parent"] == "base"
    assert listed["first"]["adapter"]["rank"] == 4 and listed["first"]["adapter"]["num_bytes"] > 0
    assert adapted.server.get("/v1/models/first") == listed["first"]


def test_adapters_share_no_cache_with_the_model(adapted: Adapted) -> None:
    prompt = "The same long prompt is used with the model and with an adapter, one after the other. " * 3

    def cached(model: str) -> int:
        details = adapted.complete(model, prompt)["usage"].get("prompt_tokens_details") or {}
        return details.get("cached_tokens") or 0

    assert [cached("base"), cached("first")] == [0, 0]
    assert min(cached("base"), cached("first")) > 0


def test_adapter_is_loaded_and_unloaded_at_run_time(adapted: Adapted) -> None:
    loaded = adapted.load("late", "second")
    assert (loaded["status"], loaded["rank"]) == ("loaded", 4)
    prompt = "A prompt that is long enough to fill some blocks of the cache, so that a hit would be seen. " * 3
    second = adapted.complete("late", prompt)
    assert adapted.unload("late")["status"] == "unloaded"
    gone = adapted.server.post("/v1/completions", {"model": "late", "prompt": "x"})
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")
    adapted.load("late", str(adapted.folder / "third"))
    third = adapted.complete("late", prompt)
    assert text_of(third) != text_of(second)
    assert not (third["usage"].get("prompt_tokens_details") or {}).get("cached_tokens")
    adapted.unload("late")


def test_unloading_waits_for_streams(adapted: Adapted) -> None:
    adapted.load("busy", "second")
    expected = text_of(adapted.complete("busy", max_tokens=150, ignore_eos=True))
    body = {"model": "busy", "prompt": PROMPT, "max_tokens": 150, "temperature": 0, "ignore_eos": True, "stream": True}
    pieces: list[str] = []
    answers: list[httpx.Response] = []
    with httpx.stream("POST", f"{adapted.server.url}/v1/completions", json=body, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        unloading = threading.Thread(target=lambda: answers.append(adapted.post("unload", lora_name="busy")))
        unloading.start()
        for line in lines:
            if line.startswith("data: {"):
                pieces.append(json.loads(line[6:])["choices"][0]["text"])
    unloading.join(30)
    assert answers[0].status_code == 200
    streamed = "".join(pieces)
    assert expected.endswith(streamed) and len(streamed) > 0.8 * len(expected)


PATHS = ["../outside", "/etc", "link", "half", "nowhere", "a\0b", "y" * 4000, "."]


@pytest.mark.parametrize(
    ("route", "body", "status", "param"),
    [
        *(("load", {"lora_name": "x", "lora_path": path}, 400, "lora_path") for path in PATHS),
        ("load", {"lora_name": "first", "lora_path": "second"}, 400, "lora_name"),
        ("load", {"lora_name": "base", "lora_path": "second"}, 400, "lora_name"),
        ("load", {"lora_name": "no spaces", "lora_path": "second"}, 400, "lora_name"),
        ("load", {"lora_name": "x"}, 400, "lora_path"),
        ("load", {"lora_name": "x", "lora_path": "second", "extra": 1}, 400, "extra"),
        ("unload", {"lora_name": "nobody"}, 404, "lora_name"),
        ("unload", {"lora_name": "base"}, 404, "lora_name"),
    ],
)
def test_refused_adapters(adapted: Adapted, route: str, body: dict, status: int, param: str) -> None:
    answer = adapted.post(route, **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text
    assert str(adapted.outside.parent) not in answer.text.replace(str(body.get("lora_path")), "")


def test_number_of_adapters_is_limited(adapted: Adapted) -> None:
    for name in ("one", "two"):
        adapted.load(name, "second")
    full = adapted.post("load", lora_name="three", lora_path="third")
    assert (full.status_code, full.json()["error"]["code"]) == (400, "too_many_adapters")
    for name in ("one", "two"):
        adapted.unload(name)
    assert adapted.server.metric("windlass_adapters_loaded") == 1
