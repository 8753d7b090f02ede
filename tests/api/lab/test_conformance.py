"""Each defect a server can have with rotary positions is found by the check that asks for it; a right server holds."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
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
    """One layer of rotary attention over letters, its base growing with the length past TRAINED, with one defect.

    It streams. "queued" answers one request at a time, "silent" reports no prefix hit, "texts" has no
    log-probabilities: no defects, but what a check must notice all the same. `fixed`: the base does not grow.
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


def run(*traits: str, only: tuple[str, ...] = ()) -> dict[str, CheckResult]:
    client = httpx.Client(transport=httpx.MockTransport(Faulty(*traits).answer))
    asker = ConformanceClient("http://letters", None, None, 10, client)
    suite = ConformanceSuite(asker, TRAINED, asker.context(), tolerance=1e-6)
    return {result.name: result for result in suite.run([one for one in CHECKS if not only or one[0] in only])}


def test_a_right_server_holds() -> None:
    results = run(only=tuple(one[0] for one in CHECKS[:-1]))
    verdicts = {name: result.verdict for name, result in results.items()}
    assert verdicts == dict.fromkeys(results, "holds")
    assert exit_status(list(results.values())) == 0


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
        assert results["continued"].verdict == "holds", "within the trained length nothing differs"
    assert "differs" in to_markdown("here", "letters", list(results.values()))


def test_a_text_is_as_long_as_was_asked_for() -> None:
    """Whatever the draw: a letter a token here, so words are of one to eight tokens."""
    lengths = []
    for seed in range(40):
        asker = ConformanceClient(
            "http://letters", None, None, 10, httpx.Client(transport=httpx.MockTransport(Faulty().answer))
        )
        lengths.append(len(ConformanceSuite(asker, TRAINED, 1024, 1e-6, seed).prompt(700)))
    assert all(abs(length - 700) < 20 for length in lengths), lengths


def test_coarse_angles_are_found_where_they_are_far() -> None:
    """Whatever the texts: a check that finds them in some only would find them by luck."""
    for seed in range(12):
        right, coarse = (ask_far(Faulty(*traits, fixed=True), seed) for traits in ((), ("coarse",)))
        assert right.verdict != "differs" and coarse.verdict == "differs", (right, coarse)
    assert ask_far(Faulty(fixed=True), 0).verdict == "holds"


def ask_far(server: Faulty, seed: int) -> CheckResult:
    asker = ConformanceClient(
        "http://letters", None, None, 10, httpx.Client(transport=httpx.MockTransport(server.answer))
    )
    suite = ConformanceSuite(asker, TRAINED, 1024, tolerance=0.03, seed=seed, far_len=900)
    (found,) = suite.run([one for one in CHECKS if one[0] == "far"])
    return found


def test_far_angles_are_not_shown_where_nothing_would_tell() -> None:
    blind = Faulty(fixed=True)
    blind.embedding[:] = 0.0  # no answer depends on anything
    found = ask_far(blind, 0)
    assert found.verdict == "not shown" and "order of words" in found.detail


def test_what_may_be_harmless_is_neither_held_nor_found() -> None:
    suite = ConformanceSuite(
        ConformanceClient(
            "http://letters", None, None, 10, httpx.Client(transport=httpx.MockTransport(Faulty().answer))
        ),
        TRAINED,
        1024,
        tolerance=0.05,
    )
    found = [
        ("one", "?", lambda suite, far=far: CheckOutcome(Agreement(far, 5), "", None, 0.25)) for far in (0.04, 0.2, 0.3)
    ]
    assert [one.verdict for one in suite.run(found)] == ["holds", "not shown", "differs"]


def test_a_context_that_is_too_short_is_told() -> None:
    asker = ConformanceClient(
        "http://letters", None, None, 10, httpx.Client(transport=httpx.MockTransport(Faulty().answer))
    )
    results = {
        one.name: one for one in ConformanceSuite(asker, 900, asker.context(), 1e-6).run(CHECKS[1:2] + CHECKS[-1:])
    }
    assert {one.verdict for one in results.values()} == {"not askable"}
    assert results["far"].detail.startswith("context 1024")
    assert exit_status(list(results.values())) == 2


def test_what_was_not_seen_to_come_about_is_not_said_to_hold() -> None:
    queued = run("queued", only=("neighbour", "together", "prefix"))
    assert [one.verdict for one in queued.values()] == ["not shown", "not shown", "holds"]
    silent = run("silent", only=("continued", "prefix", "stale"))
    assert [one.verdict for one in silent.values()] == ["holds", "not shown", "not shown"]
    assert "no prefix hit" in silent["stale"].detail
    assert run("silent", "turns", only=("stale",))["stale"].verdict == "differs", "what differs differs all the same"
    assert exit_status([queued["neighbour"]]) == 2


def test_keys_that_an_earlier_run_left_show_nothing() -> None:
    client = httpx.Client(transport=httpx.MockTransport(Faulty("again").answer))
    stale = [one for one in CHECKS if one[0] == "stale"]
    verdicts = []
    for seed in (0, 0, 1):
        (found,) = ConformanceSuite(
            ConformanceClient("http://letters", None, None, 10, client), TRAINED, 1024, 1e-6, seed
        ).run(stale)
        verdicts.append(found.verdict)
        if len(verdicts) == 2:
            assert "--seed" in found.detail
    assert verdicts == ["holds", "not shown", "holds"]


def test_where_only_texts_can_be_compared_many_other_tokens_differ() -> None:
    right = run("texts")
    assert {name: one.verdict for name, one in right.items()} == dict.fromkeys(right, "holds") | {"far": "not askable"}
    assert all(one.effect is None for one in right.values())
    wrong = run("texts", "stale", only=("switch",))["switch"]
    assert wrong.verdict == "differs" and f"{wrong.parted} of {wrong.compared}" in wrong.detail


def test_a_few_other_tokens_may_be_near_ties() -> None:
    asker = ConformanceClient(
        "http://letters", None, None, 10, httpx.Client(transport=httpx.MockTransport(Faulty("texts").answer))
    )
    suite = ConformanceSuite(asker, TRAINED, 1024, 1e-6)
    found = [
        ("one", "?", lambda suite, parted=parted: CheckOutcome(Agreement(0.0, 20, parted), ""))
        for parted in (0, 2, 4, 5)
    ]
    assert [one.verdict for one in suite.run(found)] == ["holds", "not shown", "not shown", "differs"]


def test_the_time_of_a_run_is_bounded() -> None:
    client = httpx.Client(transport=httpx.MockTransport(Faulty().answer))
    suite = ConformanceSuite(
        ConformanceClient("http://letters", None, None, 10, client, time_limit=1.0), TRAINED, 1024, 1e-6
    )

    def slow(suite: ConformanceSuite) -> CheckOutcome:
        time.sleep(1.0)
        return CheckOutcome(Agreement(), "")

    first, *rest = suite.run([("slow", "?", slow), *CHECKS[:3]])
    assert first.verdict == "holds"
    assert all(one.verdict == "not askable" and "--time-limit" in one.detail for one in rest)


def test_an_answer_without_end_is_left() -> None:
    def drip() -> Iterator[bytes]:
        while True:
            time.sleep(0.01)
            yield event({"choices": [{"text": "a", "logprobs": None}]})

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/models"):
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, content=drip())

    asker = ConformanceClient("http://m", None, None, 0.2, httpx.Client(transport=httpx.MockTransport(answer)))
    with pytest.raises(CheckUnavailableError, match="--timeout"):
        asker.ask("a", 1)


@pytest.mark.parametrize("kind", ["comments", "whole", "error"])
def test_what_trickles_is_left_when_the_time_is_up(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(conformance_client, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def trickle() -> Iterator[bytes]:
        for _ in range(100):  # a second each
            now[0] += 1.0
            yield b": still here\n\n" if kind == "comments" else b" "

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/models"):
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        headers = {"content-type": "text/event-stream"} if kind == "comments" else {}
        return httpx.Response(500 if kind == "error" else 200, headers=headers, content=trickle())

    asker = ConformanceClient("http://m", None, None, 5, httpx.Client(transport=httpx.MockTransport(answer)))
    with pytest.raises(CheckUnavailableError, match="--timeout"):
        asker.ask("a", 1)
    assert now[0] == 6.0
    asker = ConformanceClient("http://m", None, None, 50, asker._http, time_limit=8)
    with pytest.raises(CheckUnavailableError, match="--time-limit"):
        asker.ask("a", 1)


def test_what_was_found_is_told_when_the_server_dies_and_then_the_error(
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


def test_a_report_that_cannot_be_written_is_one_line(
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
def test_lengths_are_those_that_the_list_of_models_tells(
    card: dict[str, Any], trained: int | None, context: int | None
) -> None:
    reply = httpx.Response(200, json={"data": [{"id": "m", **card}]})
    asker = ConformanceClient(
        "http://m", None, None, 10, httpx.Client(transport=httpx.MockTransport(lambda request: reply))
    )
    assert (asker.trained(), asker.context()) == (trained, context)


def test_distance_bounds_what_only_one_list_has() -> None:
    one, other = Step("a", {"a": -0.1, "b": -3.0}), Step("a", {"a": -0.2, "c": -2.5})
    assert distance(one, other) == pytest.approx(0.5)  # c is at most -3.0 in the first list
    assert distance(one, one) == 0


@pytest.mark.parametrize("given", ["NaN", "Infinity", "-Infinity"])
def test_log_probabilities_that_are_no_numbers_are_not_compared(given: str) -> None:
    part = {"choices": [{"text": "a", "logprobs": {"tokens": ["a"], "top_logprobs": [{"a": json.loads(given)}]}}]}
    with pytest.raises(CheckUnavailableError, match="finite"):
        AnswerParser().part(part, 0.0)


def test_a_refused_field_is_left_out_and_without_log_probabilities_texts_are_read() -> None:
    seen: list[dict[str, Any]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/models"):
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        seen.append(json.loads(request.content))
        if "cache_salt" in seen[-1]:
            return httpx.Response(400, json={"error": "unknown field cache_salt"})
        return httpx.Response(200, json={"choices": [{"text": "x", "logprobs": None}], "usage": {"prompt_tokens": 1}})

    asker = ConformanceClient("http://m/v1", None, None, 10, httpx.Client(transport=httpx.MockTransport(answer)))
    assert asker.ask("a", 1, fresh=True).steps == (Step("x", {}),) and asker.by_text
    assert "cache_salt" in seen[0] and "cache_salt" not in seen[1] and "cache_prompt" in seen[1]


@pytest.mark.slow
def test_a_server_of_this_project_holds_under_a_scaling_that_follows_the_length(tmp_path: Path) -> None:
    scaling = json.dumps({"rope_type": "dynamic", "factor": 4.0})
    with serve(
        "--kv-cache-memory", "64MiB", "--max-model-len", "1024", "--rope-scaling", scaling, "--rope-update", "recompute"
    ) as running:
        options = ["--far-len", "900", "--json", str(tmp_path / "found.json")]
        done = CliRunner().invoke(rope, ["conform", running.url, *options])
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["checks"]
    verdicts = {one["name"]: one["verdict"] for one in found}
    # No key is kept from one length to the next, so there is none that could be stale.
    assert verdicts == dict.fromkeys(verdicts, "holds") | {"stale": "not shown"}


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

    asker = ConformanceClient("http://x", None, None, 10, httpx.Client(transport=httpx.MockTransport(answer)))
    with pytest.raises(CheckUnavailableError, match="too long"):
        asker.ask("far too long", 1, fresh=True)
    asker.ask("short", 1, fresh=True)
    assert "cache_salt" in sent[-1] and "cache_prompt" not in sent[-1]


def test_an_answer_that_is_read_back_does_not_go_on_with_the_last_word_of_its_prompt() -> None:
    """ " iron" and "s" may be the two tokens " ir" and "ons" when they are read as one text: the count would not tell."""

    class Says:
        def __init__(self, *texts: str) -> None:
            self.texts, self.asked = list(texts), list[str]()

        def ask(self, prompt: str, length: int, *, fresh: bool) -> Answer:
            assert fresh and length == 3
            self.asked.append(prompt)
            return Answer(self.texts.pop(0), (), len(prompt), None)

    for texts, taken in ((("s and", " then", "x"), 2), ((". And",), 1), (("s", "s", "s", "s", " no"), 4)):
        suite, says = ConformanceSuite.__new__(ConformanceSuite), Says(*texts)
        suite.client = says  # type: ignore[assignment]
        prompt, answer = suite.begin_answer(iter(["old iron", "old rope", "old wool", "old lamp"]).__next__, 3)
        assert len(says.asked) == taken and prompt == says.asked[-1] and answer.text == texts[taken - 1]
