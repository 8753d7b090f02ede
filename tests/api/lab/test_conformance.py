"""Conformance checks of rotary positions: each defect is found by its check, and a correct server passes all."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
from helpers.real_server import serve
from typer.testing import CliRunner

from windlass.lab import conformance, conformance_client
from windlass.lab.conformance import CHECKS, CheckOutcome, CheckResult, ConformanceSuite, exit_status, to_markdown
from windlass.lab.conformance_client import (
    Agreement,
    Answer,
    AnswerParser,
    CheckUnavailableError,
    ConformanceClient,
    Step,
    distance,
)
from windlass.server.cli import main as cli
from windlass.server.cli.main import rope

TRAINED = 128
LETTERS = "abcdefghijklmnopqrstuvwxyz ."
DIM = 16


class Faulty:
    """A server with one layer of rotary attention over letters, whose base grows with the length above TRAINED.

    traits: its defects, and properties that a check must notice: "queued" (one request at a time), "silent" (reports no
    prefix hits), "texts" (no log-probabilities). fixed: the base does not grow.
    """

    def __init__(self, *traits: str, fixed: bool = False) -> None:
        self.traits, self.fixed = set(traits), fixed
        made = torch.Generator().manual_seed(3)
        self.embedding, self.key, self.out = (
            torch.randn(len(LETTERS), DIM, generator=made, dtype=torch.float64) for _ in range(3)
        )
        self.lock, self.queue = threading.Lock(), threading.Lock()
        self.running: dict[int, int] = {}
        self.kept: list[str] = []

    def base(self, length: int) -> float:
        return 50.0 if self.fixed else 50.0 * max(length / TRAINED, 1.0) ** 6

    def turn(self, rows: torch.Tensor, positions: torch.Tensor, bases: torch.Tensor) -> torch.Tensor:
        exponents = torch.arange(0, DIM, 2, dtype=torch.float64) / DIM
        angles = positions[:, None] * bases[:, None] ** -exponents
        if "coarse" in self.traits:
            angles = angles.bfloat16().double()
        even, odd = rows[:, : DIM // 2], rows[:, DIM // 2 :]
        return torch.cat((even * angles.cos() - odd * angles.sin(), odd * angles.cos() + even * angles.sin()), 1)

    def logprobs(self, ids: list[int], prompt: int, hit: int) -> torch.Tensor:
        length, count = len(ids), torch.arange(len(ids), dtype=torch.float64)
        used = length
        if "neighbour" in self.traits:
            used = max([length, *list(self.running.values())])
        if "switch" in self.traits:
            used = prompt
        bases = torch.full((length,), self.base(used), dtype=torch.float64)
        if "stale" in self.traits:
            bases[:prompt] = self.base(prompt)
        if "turns" in self.traits and hit:
            bases[:hit] = self.base(hit)
        positions = count.clone()
        if "decode" in self.traits:
            positions[prompt:] += 3
        if "prefix" in self.traits and hit:
            positions[hit:] -= 3
        if "chunk" in self.traits and prompt > 64:
            positions[64:] += 5
        if "batch" in self.traits:
            positions[length // 2 :] += 4 * (len(self.running) - 1)
        rows = torch.tensor(ids)
        keys = self.turn(self.key[rows], positions, bases)
        query = self.turn(self.embedding[rows[-1:]], positions[-1:], bases[-1:])
        weights = torch.softmax(query @ keys.T / 2, 1)
        return torch.log_softmax((weights @ self.out[rows] @ self.embedding.T)[0], 0)

    def answer(self, request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/models"):
            return httpx.Response(200, json={"data": [{"id": "letters", "max_model_len": 1024}]})
        parts = self.parts(json.loads(request.content))
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, content=parts)

    def parts(self, body: dict[str, Any]) -> Iterator[bytes]:
        text: str = body["prompt"]
        ids = [LETTERS.index(letter) for letter in text]
        prompt, me = len(ids), id(body)
        with self.queue if "queued" in self.traits else contextlib.nullcontext():
            with self.lock:
                warm = "cache_salt" not in body
                hit = max(
                    (
                        len(one)
                        for one in self.kept
                        if warm and text.startswith(one) and (one != text or "again" in self.traits)
                    ),
                    default=0,
                )
                self.running[me] = prompt
            for _ in range(body["max_tokens"]):
                row = self.logprobs(ids, prompt, hit)
                values, indices = row.topk(5)
                top = {LETTERS[i]: float(v) for v, i in zip(values, indices, strict=True)}
                letter = LETTERS[int(indices[0])]
                ids.append(int(indices[0]))
                given = None if "texts" in self.traits else {"tokens": [letter], "top_logprobs": [top]}
                yield event({"choices": [{"text": letter, "logprobs": given}]})
                if body["max_tokens"] > 12:
                    time.sleep(0.001)
            with self.lock:
                del self.running[me]
                if warm:
                    self.kept.append(text)
            usage: dict[str, Any] = {"prompt_tokens": prompt}
            if "silent" not in self.traits:
                usage["prompt_tokens_details"] = {"cached_tokens": hit}
            yield event({"choices": [], "usage": usage})
            yield b"data: [DONE]\n\n"


def event(part: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(part)}\n\n".encode()


def client_of(
    answer: Callable[[httpx.Request], httpx.Response], timeout: float = 10, **options: Any
) -> ConformanceClient:
    """A client of a server that is a function."""
    return ConformanceClient(
        "http://letters", None, None, timeout, httpx.Client(transport=httpx.MockTransport(answer)), **options
    )


def models(request: httpx.Request, **card: Any) -> httpx.Response | None:
    """The list of models, None for another request."""
    return httpx.Response(200, json={"data": [{"id": "m", **card}]}) if request.url.path.endswith("/models") else None


def run(*traits: str, only: tuple[str, ...] = ()) -> dict[str, CheckResult]:
    client = client_of(Faulty(*traits).answer)
    suite = ConformanceSuite(client, TRAINED, client.context(), tolerance=1e-6)
    return {result.name: result for result in suite.run([one for one in CHECKS if not only or one[0] in only])}


@pytest.mark.slow
def test_correct_server_passes_all_checks() -> None:
    results = run(only=tuple(one[0] for one in CHECKS[:-1]))
    verdicts = {name: result.verdict for name, result in results.items()}
    assert verdicts == dict.fromkeys(results, "holds")
    assert exit_status(list(results.values())) == 0


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("defect", "check"),
    [
        ("decode", "continued"),
        ("stale", "switch"),
        ("switch", "switch"),
        ("turns", "stale"),
        ("neighbour", "neighbour"),
        ("batch", "together"),
        ("prefix", "prefix"),
        ("chunk", "chunking"),
    ],
)
def test_each_defect_is_found_by_its_check(defect: str, check: str) -> None:
    results = run(defect, only=("continued", check))
    assert results[check].verdict == "differs"
    assert (results[check].effect or 0) > 0.01
    assert exit_status(list(results.values())) == 1
    if defect in ("stale", "switch", "neighbour"):
        assert results["continued"].verdict == "holds", "there is no difference within the trained length"
    assert "differs" in to_markdown("here", "letters", list(results.values()))


def test_texts_have_the_requested_length() -> None:
    """Each letter is a token, so that words have one to eight tokens."""
    lengths = []
    for seed in range(40):
        client = client_of(Faulty().answer)
        lengths.append(len(ConformanceSuite(client, TRAINED, 1024, 1e-6, seed).prompt(700)))
    assert all(abs(length - 700) < 20 for length in lengths), lengths


@pytest.mark.slow
def test_coarse_angles_are_found_at_far_positions() -> None:
    """Independent of the random texts."""
    for seed in range(12):
        right, coarse = (run_far(Faulty(*traits, fixed=True), seed) for traits in ((), ("coarse",)))
        assert right.verdict != "differs" and coarse.verdict == "differs", (right, coarse)
    assert run_far(Faulty(fixed=True), 0).verdict == "holds"


def run_far(server: Faulty, seed: int) -> CheckResult:
    client = client_of(server.answer)
    suite = ConformanceSuite(client, TRAINED, 1024, tolerance=0.03, seed=seed, far_len=900)
    (found,) = suite.run([one for one in CHECKS if one[0] == "far"])
    return found


def test_far_check_is_inconclusive_for_insensitive_models() -> None:
    blind = Faulty(fixed=True)
    blind.embedding[:] = 0.0  # responses do not depend on the prompt
    found = run_far(blind, 0)
    assert found.verdict == "not shown" and "order of words" in found.detail


def test_small_differences_are_inconclusive() -> None:
    suite = ConformanceSuite(
        client_of(Faulty().answer),
        TRAINED,
        1024,
        tolerance=0.05,
    )
    found = [
        ("one", "?", lambda suite, far=far: CheckOutcome(Agreement(far, 5), "", None, 0.25)) for far in (0.04, 0.2, 0.3)
    ]
    assert [one.verdict for one in suite.run(found)] == ["holds", "not shown", "differs"]


def test_too_short_context_is_reported() -> None:
    client = client_of(Faulty().answer)
    results = {
        one.name: one for one in ConformanceSuite(client, 900, client.context(), 1e-6).run(CHECKS[1:2] + CHECKS[-1:])
    }
    assert {one.verdict for one in results.values()} == {"not askable"}
    assert results["far"].detail.startswith("context 1024")
    assert exit_status(list(results.values())) == 2


@pytest.mark.slow
def test_unobserved_cases_are_inconclusive() -> None:
    queued = run("queued", only=("neighbour", "together", "prefix"))
    assert [one.verdict for one in queued.values()] == ["not shown", "not shown", "holds"]
    silent = run("silent", only=("continued", "prefix", "stale"))
    assert [one.verdict for one in silent.values()] == ["holds", "not shown", "not shown"]
    assert "no prefix hit" in silent["stale"].detail
    assert run("silent", "turns", only=("stale",))["stale"].verdict == "differs", "without prefix hits, too"
    assert exit_status([queued["neighbour"]]) == 2


def test_keys_cached_by_an_earlier_run_are_inconclusive() -> None:
    server = Faulty("again")
    stale = [one for one in CHECKS if one[0] == "stale"]
    verdicts = []
    for seed in (0, 0, 1):
        (found,) = ConformanceSuite(client_of(server.answer), TRAINED, 1024, 1e-6, seed).run(stale)
        verdicts.append(found.verdict)
        if len(verdicts) == 2:
            assert "--seed" in found.detail
    assert verdicts == ["holds", "not shown", "holds"]


@pytest.mark.slow
def test_texts_are_compared_without_log_probabilities() -> None:
    right = run("texts")
    assert {name: one.verdict for name, one in right.items()} == dict.fromkeys(right, "holds") | {"far": "not askable"}
    assert all(one.effect is None for one in right.values())
    wrong = run("texts", "stale", only=("switch",))["switch"]
    assert wrong.verdict == "differs" and f"{wrong.parted} of {wrong.compared}" in wrong.detail


def test_few_different_tokens_are_inconclusive() -> None:
    client = client_of(Faulty("texts").answer)
    suite = ConformanceSuite(client, TRAINED, 1024, 1e-6)
    found = [
        ("one", "?", lambda suite, parted=parted: CheckOutcome(Agreement(0.0, 20, parted), ""))
        for parted in (0, 2, 4, 5)
    ]
    assert [one.verdict for one in suite.run(found)] == ["holds", "not shown", "not shown", "differs"]


@pytest.mark.slow
def test_time_limit_of_a_run() -> None:
    suite = ConformanceSuite(client_of(Faulty().answer, time_limit=1.0), TRAINED, 1024, 1e-6)

    def slow(suite: ConformanceSuite) -> CheckOutcome:
        time.sleep(1.0)
        return CheckOutcome(Agreement(), "")

    first, *rest = suite.run([("slow", "?", slow), *CHECKS[:3]])
    assert first.verdict == "holds"
    assert all(one.verdict == "not askable" and "--time-limit" in one.detail for one in rest)


def test_endless_response_times_out() -> None:
    def drip() -> Iterator[bytes]:
        while True:
            time.sleep(0.01)
            yield event({"choices": [{"text": "a", "logprobs": None}]})

    def answer(request: httpx.Request) -> httpx.Response:
        if listed := models(request):
            return listed
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, content=drip())

    client = client_of(answer, timeout=0.2)
    with pytest.raises(CheckUnavailableError, match="--timeout"):
        client.ask("a", 1)


@pytest.mark.parametrize("kind", ["comments", "whole", "error"])
def test_trickling_responses_time_out(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(conformance_client, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def trickle() -> Iterator[bytes]:
        for _ in range(100):  # one second each
            now[0] += 1.0
            yield b": still here\n\n" if kind == "comments" else b" "

    def answer(request: httpx.Request) -> httpx.Response:
        if listed := models(request):
            return listed
        headers = {"content-type": "text/event-stream"} if kind == "comments" else {}
        return httpx.Response(500 if kind == "error" else 200, headers=headers, content=trickle())

    client = client_of(answer, timeout=5)
    with pytest.raises(CheckUnavailableError, match="--timeout"):
        client.ask("a", 1)
    assert now[0] == 6.0
    client = client_of(answer, timeout=50, time_limit=8)
    with pytest.raises(CheckUnavailableError, match="--time-limit"):
        client.ask("a", 1)


def test_results_are_reported_before_the_error_of_an_absent_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    server = Faulty()

    def answer(request: httpx.Request) -> httpx.Response:
        if "dead" in server.traits:
            raise httpx.ConnectError("refused")
        return server.answer(request)

    def die(suite: ConformanceSuite) -> CheckOutcome:
        server.traits.add("dead")
        suite.client.ask("a", 1)
        raise AssertionError

    client = httpx.Client(transport=httpx.MockTransport(answer))
    monkeypatch.setattr(httpx, "Client", lambda **options: client)
    monkeypatch.setattr(conformance, "CHECKS", [CHECKS[0], ("last", "?", die), ("left", "?", die)])
    report = tmp_path / "found.json"
    arguments = ["rope", "conform", "http://letters", "--trained-len", str(TRAINED), "--json", str(report)]
    assert cli.run(arguments) == 2
    verdicts = {one["name"]: one["verdict"] for one in json.loads(report.read_text(encoding="utf-8"))["checks"]}
    assert verdicts == {CHECKS[0][0]: "holds", "last": "not askable", "left": "not askable"}
    out, err = capfd.readouterr()
    assert "holds" in out and err.splitlines()[-1].startswith(
        "error: the server at http://letters/v1 stopped answering"
    )


def test_unwritable_report_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    report, client = tmp_path / "found.md", httpx.Client(transport=httpx.MockTransport(Faulty().answer))
    monkeypatch.setattr(httpx, "Client", lambda **options: client)

    def remove(suite: ConformanceSuite) -> CheckOutcome:
        report.mkdir()
        return CheckOutcome(Agreement(), "")

    monkeypatch.setattr(conformance, "CHECKS", [("one", "?", remove)])
    assert cli.run(["rope", "conform", "http://letters", "--markdown", str(report)]) == 2
    out, err = capfd.readouterr()
    assert "holds" in out and err.splitlines()[-1].startswith(f"error: cannot write {report}")


@pytest.mark.parametrize(
    ("card", "trained", "context"),
    [
        ({"trained_len": 512, "max_model_len": 2048}, 512, 2048),
        ({"meta": {"n_ctx_train": 8192, "n_ctx": 4096}}, 8192, 4096),
        ({"max_model_len": 2048}, None, 2048),
        ({}, None, None),
    ],
)
def test_lengths_from_the_list_of_models(card: dict[str, Any], trained: int | None, context: int | None) -> None:
    reply = httpx.Response(200, json={"data": [{"id": "m", **card}]})
    client = client_of(lambda request: reply)
    assert (client.trained(), client.context()) == (trained, context)


def test_distance_of_tokens_in_one_list_only() -> None:
    one, other = Step("a", {"a": -0.1, "b": -3.0}), Step("a", {"a": -0.2, "c": -2.5})
    assert distance(one, other) == pytest.approx(0.5)  # c is at most -3.0 in the first list
    assert distance(one, one) == 0


@pytest.mark.parametrize("given", ["NaN", "Infinity", "-Infinity"])
def test_non_finite_log_probabilities_are_refused(given: str) -> None:
    part = {"choices": [{"text": "a", "logprobs": {"tokens": ["a"], "top_logprobs": [{"a": json.loads(given)}]}}]}
    with pytest.raises(CheckUnavailableError, match="finite"):
        AnswerParser().part(part, 0.0)


def test_refused_fields_are_omitted_and_texts_compared() -> None:
    seen: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if listed := models(request):
            return listed
        seen.append(json.loads(request.content))
        if "cache_salt" in seen[-1]:
            return httpx.Response(400, json={"error": "unknown field cache_salt"})
        return httpx.Response(200, json={"choices": [{"text": "x", "logprobs": None}], "usage": {"prompt_tokens": 1}})

    client = client_of(answer)
    assert client.ask("a", 1, fresh=True).steps == (Step("x", {}),) and client.by_text
    assert "cache_salt" in seen[0] and "cache_salt" not in seen[1] and "cache_prompt" in seen[1]


@pytest.mark.slow
def test_windlass_server_passes_with_dynamic_scaling(tmp_path: Path) -> None:
    scaling = json.dumps({"rope_type": "dynamic", "factor": 4.0})
    with serve(
        "--kv-cache-memory", "64MiB", "--max-model-len", "1024", "--rope-scaling", scaling, "--rope-update", "recompute"
    ) as running:
        options = ["--far-len", "900", "--json", str(tmp_path / "found.json")]
        done = CliRunner().invoke(rope, ["conform", running.url, *options])
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["checks"]
    verdicts = {one["name"]: one["verdict"] for one in found}
    # With recompute no key is cached from one length to the next, so that none can be stale.
    assert verdicts == dict.fromkeys(verdicts, "holds") | {"stale": "not shown"}


def test_other_errors_do_not_drop_fields() -> None:
    sent: list[dict] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if listed := models(request):
            return listed
        body = json.loads(request.content)
        sent.append(body)
        if len(body["prompt"]) > 9:
            return httpx.Response(400, json={"error": {"message": "prompt too long"}})
        if "cache_prompt" in body:
            return httpx.Response(400, json={"error": {"message": "unknown field cache_prompt"}})
        tokens = {"tokens": ["a"], "top_logprobs": [{"a": -0.1}]}
        usage = {"prompt_tokens": 1, "completion_tokens": 1}
        return httpx.Response(200, json={"choices": [{"text": "a", "logprobs": tokens}], "usage": usage})

    client = client_of(answer)
    with pytest.raises(CheckUnavailableError, match="too long"):
        client.ask("far too long", 1, fresh=True)
    client.ask("short", 1, fresh=True)
    assert "cache_salt" in sent[-1] and "cache_prompt" not in sent[-1]


def test_continued_response_begins_with_a_new_word() -> None:
    """Joined texts may be tokenized differently: " iron" and "s" as " ir" and "ons", with an equal count."""

    class ScriptedClient:
        def __init__(self, *texts: str) -> None:
            self.texts, self.prompts = list(texts), list[str]()

        def ask(self, prompt: str, length: int, *, fresh: bool) -> Answer:
            assert fresh and length == 3
            self.prompts.append(prompt)
            return Answer(self.texts.pop(0), (), len(prompt), None)

    for texts, taken in ((("s and", " then", "x"), 2), ((". And",), 1), (("s", "s", "s", "s", " no"), 4)):
        suite, client = ConformanceSuite.__new__(ConformanceSuite), ScriptedClient(*texts)
        suite.client = client  # type: ignore[assignment]
        prompt, answer = suite.begin_answer(iter(["old iron", "old rope", "old wool", "old lamp"]).__next__, 3)
        assert len(client.prompts) == taken and prompt == client.prompts[-1] and answer.text == texts[taken - 1]
