"""Each defect a server can have with rotary positions is found by the check that asks for it; a right server holds."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from helpers.real_server import serve
from typer.testing import CliRunner

from windlass.clients.conformance.asking import Asker, NotAskableError, Step, distance
from windlass.clients.conformance.checks import CheckResult, Suite
from windlass.clients.conformance.report import exit_status, to_markdown
from windlass.server.cli.main import rope

TRAINED = 128
LETTERS = "abcdefghijklmnopqrstuvwxyz ."
DIM = 16


class Faulty:
    """One layer of rotary attention over letters, its base growing with the length past TRAINED, with one defect."""

    def __init__(self, defect: str) -> None:
        self.defect = defect
        made = torch.Generator().manual_seed(3)
        self.embedding, self.key, self.out = (
            torch.randn(len(LETTERS), DIM, generator=made, dtype=torch.float64) for _ in range(3)
        )
        self.lock = threading.Lock()
        self.running: dict[int, int] = {}
        self.kept: list[str] = []

    def base(self, length: int) -> float:
        return 50.0 * max(length / TRAINED, 1.0) ** 6

    def turn(self, rows: torch.Tensor, positions: torch.Tensor, bases: torch.Tensor) -> torch.Tensor:
        exponents = torch.arange(0, DIM, 2, dtype=torch.float64) / DIM
        angles = positions[:, None] * bases[:, None] ** -exponents
        even, odd = rows[:, : DIM // 2], rows[:, DIM // 2 :]
        return torch.cat((even * angles.cos() - odd * angles.sin(), odd * angles.cos() + even * angles.sin()), 1)

    def logprobs(self, ids: list[int], prompt: int, hit: int) -> torch.Tensor:
        length, count = len(ids), torch.arange(len(ids), dtype=torch.float64)
        used = length
        if self.defect == "neighbour":
            used = max([length, *self.running.values()])
        if self.defect == "switch":
            used = prompt
        bases = torch.full((length,), self.base(used), dtype=torch.float64)
        if self.defect == "stale":
            bases[:prompt] = self.base(prompt)
        if self.defect == "turns" and hit:
            bases[:hit] = self.base(hit)
        positions = count.clone()
        if self.defect == "prefix" and hit:
            positions[hit:] -= 3
        if self.defect == "chunk" and prompt > 64:
            positions[64:] += 5
        rows = torch.tensor(ids)
        keys = self.turn(self.key[rows], positions, bases)
        query = self.turn(self.embedding[rows[-1:]], positions[-1:], bases[-1:])
        weights = torch.softmax(query @ keys.T / 2, 1)
        return torch.log_softmax((weights @ self.out[rows] @ self.embedding.T)[0], 0)

    def answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/models"):
            return httpx.Response(200, json={"data": [{"id": "letters", "max_model_len": 1024}]})
        body: dict[str, Any] = json.loads(request.content)
        text: str = body["prompt"]
        ids = [LETTERS.index(letter) for letter in text]
        prompt, me = len(ids), threading.get_ident()
        with self.lock:
            warm = "cache_salt" not in body
            hit = max((len(one) for one in self.kept if warm and text.startswith(one) and one != text), default=0)
            self.running[me] = prompt
        tokens, tops = [], []
        for _ in range(body["max_tokens"]):
            row = self.logprobs(ids, prompt, hit)
            values, indices = row.topk(5)
            tops.append({LETTERS[i]: float(v) for v, i in zip(values, indices, strict=True)})
            tokens.append(LETTERS[int(indices[0])])
            ids.append(int(indices[0]))
            if self.defect == "neighbour" and body["max_tokens"] > 12:
                time.sleep(0.002)
        with self.lock:
            del self.running[me]
            if warm:
                self.kept.append(text)
        logprobs = {"tokens": tokens, "top_logprobs": tops}
        return httpx.Response(
            200,
            json={
                "choices": [{"text": "".join(tokens), "logprobs": logprobs}],
                "usage": {"prompt_tokens": prompt, "prompt_tokens_details": {"cached_tokens": hit}},
            },
        )


def run(defect: str) -> dict[str, CheckResult]:
    client = httpx.Client(transport=httpx.MockTransport(Faulty(defect).answer))
    asker = Asker("http://letters", None, None, 10, client)
    suite = Suite(asker, TRAINED, asker.context(), tolerance=1e-6)
    return {result.name: result for result in suite.run()}


def test_a_right_server_holds() -> None:
    results = run("none")
    verdicts = {name: result.verdict for name, result in results.items()}
    assert verdicts == dict.fromkeys(results, "holds")
    assert exit_status(list(results.values())) == 0


@pytest.mark.parametrize(
    ("defect", "check"),
    [
        ("stale", "switch"),
        ("switch", "switch"),
        ("turns", "stale"),
        ("neighbour", "neighbour"),
        ("prefix", "prefix"),
        ("chunk", "chunking"),
    ],
)
def test_each_defect_is_found_by_its_check(defect: str, check: str) -> None:
    results = run(defect)
    assert results[check].verdict == "differs"
    assert (results[check].effect or 0) > 0.01
    assert exit_status(list(results.values())) == 1
    if defect in ("stale", "switch", "neighbour"):
        assert results["continued"].verdict == "holds", "within the trained length nothing differs"
    assert "differs" in to_markdown("here", "letters", list(results.values()))


def test_distance_bounds_what_only_one_list_has() -> None:
    one, other = Step("a", {"a": -0.1, "b": -3.0}), Step("a", {"a": -0.2, "c": -2.5})
    assert distance(one, other) == pytest.approx(0.5)  # c is at most -3.0 in the first list
    assert distance(one, one) == 0


def test_a_refused_field_is_left_out_and_missing_logprobs_are_told() -> None:
    seen: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/models"):
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        seen.append(json.loads(request.content))
        if "cache_salt" in seen[-1]:
            return httpx.Response(400, json={"error": "unknown field cache_salt"})
        return httpx.Response(200, json={"choices": [{"text": "x", "logprobs": None}], "usage": {"prompt_tokens": 1}})

    asker = Asker("http://m/v1", None, None, 10, httpx.Client(transport=httpx.MockTransport(answer)))
    with pytest.raises(NotAskableError, match="top_logprobs"):
        asker.ask("a", 1, fresh=True)
    assert "cache_salt" in seen[0] and "cache_salt" not in seen[1] and "cache_prompt" in seen[1]


@pytest.mark.slow
def test_a_server_of_this_project_holds_under_a_scaling_that_follows_the_length(tmp_path: Path) -> None:
    scaling = json.dumps({"rope_type": "dynamic", "factor": 4.0})
    with serve("--kv-cache-memory", "64MiB", "--max-model-len", "1024", "--rope-scaling", scaling) as running:
        options = ["--trained-len", "512", "--json", str(tmp_path / "found.json")]
        done = CliRunner().invoke(rope, ["conform", running.url, *options])
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["checks"]
    verdicts = {one["name"]: one["verdict"] for one in found}
    assert verdicts == dict.fromkeys(verdicts, "holds")


def test_an_error_of_another_kind_costs_no_fresh_request() -> None:
    sent: list[dict] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/models"):
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        body = json.loads(request.content)
        sent.append(body)
        if len(body["prompt"]) > 9:
            return httpx.Response(400, json={"error": {"message": "prompt too long"}})
        if "cache_prompt" in body:
            return httpx.Response(400, json={"error": {"message": "unknown field cache_prompt"}})
        tokens = {"tokens": ["a"], "top_logprobs": [{"a": -0.1}]}
        usage = {"prompt_tokens": 1, "completion_tokens": 1}
        return httpx.Response(200, json={"choices": [{"text": "a", "logprobs": tokens}], "usage": usage})

    asker = Asker("http://x", None, None, 10, httpx.Client(transport=httpx.MockTransport(answer)))
    with pytest.raises(NotAskableError, match="too long"):
        asker.ask("far too long", 1, fresh=True)
    asker.ask("short", 1, fresh=True)
    assert "cache_salt" in sent[-1] and "cache_prompt" not in sent[-1]
