"""`windlass rope sweep --tasks`: scores against transformers, reports and resumption."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.engines import make_core
from helpers.rotary_oracles import Uncached, plain_frequencies

from windlass.engine.errors import RequestError
from windlass.engine.interface.context import ContextRule
from windlass.engine.interface.request import EngineRequest, SamplingParams
from windlass.engine.scheduling.sequence import Sequence
from windlass.lab.retrieval_documents import Document, DocumentMaker
from windlass.lab.scoring import BatchScorer, TextToScore
from windlass.server.cli import main as cli
from windlass.server.startup import launch
from windlass.server.text.tokenizer import Tokenizer

TRAINED, LENGTH, DIM = 512, 768, 16
TASKS = ("passkey", "key-tokens")
LINEAR = '{"rope_type": "linear", "factor": 1.5}'


@pytest.fixture(scope="module")
def run(model: Path, run_sweep: Callable[..., int]) -> Callable[..., int]:
    """Run the tasks, with all passes in kept.jsonl of the folder."""

    def run(out: Path, *more: object, tasks: str = ",".join(TASKS)) -> int:
        options = ["--tasks", tasks, "--lengths", LENGTH, "--documents", 2, "--kv-cache-memory", "64MiB"]
        return run_sweep(model, out, *options, "--keep", out / "kept.jsonl", *more)

    return run


@pytest.fixture(scope="module")
def report(run: Callable[..., int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report")
    assert run(out, "--lengths", f"{TRAINED},{LENGTH}", "--png", str(out / "plot.png")) == 0
    return out


@pytest.fixture(scope="module")
def measured(report: Path) -> dict[str, Any]:
    return json.loads((report / "report.json").read_text())


@pytest.fixture(scope="module")
def kept(report: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (report / "kept.jsonl").read_text().splitlines()]


def document(model: Path, length: int, number: int, tasks: tuple[str, ...] = TASKS) -> Document:
    maker = DocumentMaker(Tokenizer.from_directory(model), tasks, {}, seed=1, trained_len=TRAINED)
    return maker.make(length, number)


def log_probabilities(reference: Uncached, ids: tuple[int, ...], factor: float = 1.0) -> torch.Tensor:
    return reference.logits(ids, plain_frequencies(10_000.0, DIM) / factor).double().log_softmax(-1)


def total(rows: torch.Tensor, start: int, ids: tuple[int, ...]) -> float:
    return sum(float(rows[i - 1, ids[i]]) for i in range(start, len(ids)))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "factor"), [("no scaling", 1.0), ("linear 2", 2.0)])
def test_scores_of_choices_and_segments_equal_transformers(
    name: str, factor: float, model: Path, kept: list[dict[str, Any]]
) -> None:
    reference = Uncached(model)
    for number in (0, 1):
        doc = document(model, LENGTH, number)
        (entry,) = [e for e in kept if (e["scaling"], e["length"], e["document"]) == (name, LENGTH, number)]
        rows = log_probabilities(reference, doc.ids, factor)
        expected = [float(rows[i - 1, doc.ids[i]]) for i in range(len(doc.ids) - doc.segment, len(doc.ids))]
        assert entry["segment"] == pytest.approx(expected, abs=2e-3)
        (question,) = doc.questions
        for choice, score in zip(question.choices, entry["choices"][0], strict=True):
            ids = (*doc.ids, *question.ending, *choice)
            rows = log_probabilities(reference, ids, factor)
            assert score == pytest.approx(total(rows, len(ids) - len(choice), ids), abs=5e-3)
        written = (*doc.ids, *question.ending, *question.choices[0])
        first = len(written) - len(question.choices[0])
        best = log_probabilities(reference, written, factor)[first - 1 : -1].argmax(-1).tolist()
        assert entry["exact"] == [best[: question.answer_len] == list(question.choices[0][: question.answer_len])]


@pytest.mark.slow
def test_cut_text_is_its_head_and_its_last_tokens(model: Path, kept: list[dict[str, Any]]) -> None:
    doc = document(model, LENGTH, 0)
    name = "text cut to the trained length"
    (entry,) = [e for e in kept if (e["scaling"], e["length"], e["document"]) == (name, LENGTH, 0)]
    (question,) = doc.questions
    tail = len(question.ending) + max(map(len, question.choices))
    cut = doc.ids[: doc.head] + doc.ids[len(doc.ids) - (TRAINED - tail - doc.head) :]
    ids = (*cut, *question.ending, *question.choices[1])
    rows = log_probabilities(Uncached(model), ids)
    expected = total(rows, len(ids) - len(question.choices[1]), ids)
    assert len(ids) <= TRAINED and entry["choices"][0][1] == pytest.approx(expected, abs=5e-3)


def test_key_tokens_differ_between_a_long_and_a_short_context(
    model: Path, measured: dict[str, Any], kept: list[dict[str, Any]]
) -> None:
    reference, count = Uncached(model), 0
    for number in (0, 1):
        doc = document(model, LENGTH, number)
        by_name = {e["scaling"]: e for e in kept if (e["length"], e["document"]) == (LENGTH, number)}
        ids = doc.ids[-(TRAINED // 8 + doc.segment) :]
        rows = log_probabilities(reference, ids)
        short = [float(rows[i - 1, ids[i]]) for i in range(TRAINED // 8, len(ids))]
        assert by_name["a short context"]["segment"] == pytest.approx(short, abs=2e-3)
        long = by_name["text cut to the trained length"]["segment"]
        count += sum(a - b > 2 and a > -2 for a, b in zip(long, short, strict=True))
    (found,) = [part for part in measured["lengths"] if part["length"] == LENGTH]
    assert {c["key_tokens"]["tokens"] for c in found["candidates"]} == {count}


def test_equal_readings_are_computed_once(measured: dict[str, Any], kept: list[dict[str, Any]]) -> None:
    """Within the trained length, the cut text, dynamic, longrope and log-n equal no scaling."""
    names = [candidate["name"] for candidate in measured["lengths"][0]["candidates"]]
    short = [entry["scaling"] for entry in kept if (entry["length"], entry["document"]) == (TRAINED, 0)]
    alike = {"text cut to the trained length", "dynamic 2", "log_n", "longrope, untrained ramp to 2"}
    assert alike <= set(names) and not alike & set(short)
    long = [entry["scaling"] for entry in kept if (entry["length"], entry["document"]) == (LENGTH, 0)]
    assert sorted(long) == sorted([*names, "a short context"])
    right = {name: measured["documents"][0]["right"][name] for name in ["no scaling", *alike]}
    assert measured["documents"][0]["length"] == TRAINED and all(r == right["no scaling"] for r in right.values())


@pytest.mark.slow
def test_interrupted_run_is_resumed(
    run: Callable[..., int], report: Path, measured: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    lines = (report / "kept.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "kept.jsonl").write_text("".join(lines[:-3]) + lines[-3][:40])
    scores, texts = BatchScorer.scores, []

    def counting(self: BatchScorer, given: Any, computed: Any = None) -> Any:
        texts.extend(given)
        return scores(self, given, computed)

    monkeypatch.setattr(BatchScorer, "scores", counting)
    # Complete documents can be reported.
    assert run(tmp_path, "--lengths", f"{TRAINED},{LENGTH}", "--report-only") == 0 and not texts
    part = json.loads((tmp_path / "report.json").read_text())
    assert part["documents"] == measured["documents"][:3]
    assert run(tmp_path, "--lengths", f"{TRAINED},{LENGTH}") == 0
    assert len(texts) == 3 * 5  # a segment and four choices each
    again = json.loads((tmp_path / "report.json").read_text())
    assert again.keys() == measured.keys() and all(
        again[part] == measured[part] for part in ("documents", "verdicts", "tasks")
    )
    texts.clear()
    capsys.readouterr()
    assert run(tmp_path, "--lengths", f"{TRAINED},{LENGTH}") == 0 and not texts
    assert "passes" not in capsys.readouterr().err
    # Another seed makes other documents.
    assert run(tmp_path, "--documents", "1", "--seed", "2", "--scaling", LINEAR) == 0 and texts


def test_report_has_verdicts_and_commands(
    model: Path, report: Path, measured: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    page, words = ((report / name).read_text() for name in ("report.html", "report.md"))
    assert "<script" not in page and "http" not in page.replace("http://www.w3.org", "")
    assert (report / "plot.png").read_bytes().startswith(b"\x89PNG")
    for verdict in measured["verdicts"]:
        assert verdict["command"] in words and all(reason.split(" (")[0] in words for reason in verdict["reasons"])
        assert any(reason.startswith("passkey: ") for reason in verdict["reasons"])
        started: list[Any] = []
        monkeypatch.setattr(launch, "serve", lambda *arguments, started=started: started.append(arguments) or 0)
        given = shlex.split(verdict["command"])
        assert given[:3] == ["windlass", "serve", str(model)] and cli.run(given[1:]) == 0
        (names,) = [c for c in measured["lengths"][0]["candidates"] if c["name"] == verdict["chosen"]]
        config = started[0][1].to_config(model)
        scaling = config.rotary.scaling
        assert (scaling.to_dict() if scaling else None) == names["request"].get("rope_scaling")
    assert "McNemar" in words and "Wilson" in words and "bootstrap over questions" in words


def test_chosen_scalings(run: Callable[..., int], tmp_path: Path) -> None:
    assert run(tmp_path, "--documents", "1", "--scaling", LINEAR, "--no-cut", tasks="passkey") == 0
    found = json.loads((tmp_path / "report.json").read_text())
    candidates = found["lengths"][0]["candidates"]
    assert [c["name"] for c in candidates] == ["no scaling", "linear 1.5"]
    assert candidates[1]["request"] == {"rope_scaling": {"rope_type": "linear", "factor": 1.5}}
    assert all(c["key_tokens"] is None for c in candidates) and found["tasks"] == ["passkey"]


def test_window_is_measured_where_it_is_given(model: Path, run: Callable[..., int], tmp_path: Path) -> None:
    window = ["--attention-window", "400", "--attention-sinks", "16"]
    assert run(tmp_path, "--documents", "1", "--scaling", LINEAR, "--no-cut", *window, tasks="passkey") == 0
    found = json.loads((tmp_path / "report.json").read_text())["lengths"][0]["candidates"]
    assert found[2]["request"] == {"attention_window": 400, "attention_sinks": 16}
    lines = [json.loads(line) for line in (tmp_path / "kept.jsonl").read_text().splitlines()]
    plain, seen = (next(x for x in lines if x["scaling"].startswith(name)) for name in ("no scaling", "window"))
    asked = document(model, LENGTH, 0, ("passkey",))
    assert len(asked.ids) > 400 and plain["choices"] != seen["choices"]
    # The engine computes the same values with a request per text.
    core = make_core(model, max_model_len=LENGTH, prefix_caching=False)
    rule = ContextRule(attention_window=400, attention_sinks=16)
    for question, choices in zip(asked.questions, seen["choices"], strict=True):
        for choice, expected in zip(question.choices, choices, strict=True):
            tokens = [*asked.ids, *question.ending, *choice]
            core.add(EngineRequest("a", tokens, SamplingParams(max_tokens=0, prompt_logprobs=0), context=rule))
            entries: list[Any] = []
            while core.has_work():
                entries += [entry for output in core.step() for entry in output.prompt_logprobs or ()]
            found = sum(entry.logprob for entry in entries[len(tokens) - len(choice) :])
            assert found == pytest.approx(expected, abs=1e-4)


def test_texts_with_windows_share_their_beginnings(model: Path) -> None:
    """Texts with two windows and without one in one call: equal to separate calls, with common beginnings read once."""
    scorer = BatchScorer.load(model, max_model_len=512, device="cpu", kv_cache_memory=64 << 20)
    ids = torch.randint(3, 250, (300,), generator=torch.Generator().manual_seed(2)).tolist()
    rules = [ContextRule(attention_window=n, attention_sinks=4) for n in (64, 100)]
    texts = [TextToScore(tuple(ids), 200, context=rules[0])]
    texts += [TextToScore((*ids, 9, last), 301, context=rule) for rule in (*rules, ContextRule()) for last in (5, 6, 7)]
    alone = [dict(scorer.scores([text]))[0] for text in texts]
    passed: list[int] = []
    found = dict(scorer.scores(texts, passed.append))
    assert sorted(found) == list(range(len(texts)))
    for index, entries in enumerate(alone):
        assert [e.token_id for e in entries] == list(texts[index].token_ids[texts[index].first :])
        assert [e.logprob for e in found[index]] == pytest.approx([e.logprob for e in entries], abs=1e-4)
    assert sum(passed) < 5 * 320
    with pytest.raises(RequestError, match="may be at most"):
        list(scorer.scores([TextToScore(tuple(ids), 200, context=ContextRule(attention_window=4096))]))


def test_custom_texts(run: Callable[..., int], tmp_path: Path) -> None:
    text = tmp_path / "own.txt"
    text.write_text(" ".join(f"Line {i} says nothing of it." for i in range(400)), encoding="utf-8")
    assert run(tmp_path, "--documents", "1", "--scaling", LINEAR, "--text", str(text), tasks="passkey") == 0
    assert json.loads((tmp_path / "report.json").read_text())["texts"] == ["own.txt"]
    assert "cut from own.txt" in (tmp_path / "report.md").read_text()


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tasks", "passkeys"], "did you mean"),
        (["--tasks", ","], "names none"),
        (["--tasks", "all", "--lengths", "100"], "--lengths 100: the facts of"),
        (["--tasks", "passkey", "--lengths", "many"], "--lengths takes numbers"),
        (["--tasks", "passkey", "--lengths", "0"], "--lengths takes numbers"),
        (["--tasks", "passkey", "--lengths", "99999999999999"], "--lengths takes numbers"),
        (["--tasks", "all", "--lengths", "999999999", "--device", "cpu"], "a context of 999999999 tokens does not fit"),
        (["--tasks", "passkey", "--lengths", "8192", "--documents", "10000"], "make 81,920,000 tokens, and the limit"),
        (["--tasks", "passkey", "--documents", "0"], "--documents"),
        (["--tasks", "passkey", "--max-len", "900"], "--max-len applies to perplexity"),
        (["--tasks", "passkey", "--samples", "3"], "--samples applies to perplexity"),
        (["--text", "{text}", "--lengths", "900"], "--lengths is for --tasks"),
        (["--text", "{text}", "--kv-cache-memory", "1GiB"], "--kv-cache-memory is for --tasks"),
        ([], "--text is missing"),
        (["--tasks", "passkey", "--text", "{text}"], "give a longer text"),
        (["--tasks", "passkey", "--text", "{text}", "--text", "{other}"], "same name"),
        (["--tasks", "passkey", "--report-only"], "give that file too"),
        (["--text", "{text}", "--report-only"], "--report-only is for --tasks"),
        (["--tasks", "passkey", "--keep", "{foreign}"], "line 1, is not a pass"),
        (["--tasks", "passkey", "--attention-sinks", "4"], "needs an --attention-window"),
        (["--tasks", "passkey", "--attention-window", "0"], "--attention-window must be at least 1"),
        (["--text", "{text}", "--attention-sinks", "4"], "needs an --attention-window"),
        (["--tasks", "passkey", "--policy", "rotate"], "give --scaling too"),
        (["--tasks", "passkey", "--lengths", "768", "--trained-len", "200"], "too short for the questions"),
        (["--tasks", "passkey", "--kv-cache-memory", "much"], "--kv-cache-memory"),
        (["--tasks", "passkey", "--json", "{text}", "--png", "{text}"], "are both"),
    ],
)
def test_invalid_options_are_one_line(
    arguments: list[str],
    words: str,
    model: Path,
    tmp_path: Path,
    error_of: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "other").mkdir()
    for place in ("short.txt", "other/short.txt"):
        (tmp_path / place).write_text("Too short.", encoding="utf-8")
    (tmp_path / "foreign").write_text('{"key": "0", "nll": [1.0]}\n', encoding="utf-8")
    places = {"{text}": "short.txt", "{other}": "other/short.txt", "{foreign}": "foreign"}
    given = [str(tmp_path / places[word]) if word in places else word for word in arguments]
    monkeypatch.setattr(BatchScorer, "load", None)  # options are checked before the model is loaded
    assert words in error_of("sweep", str(model), "--out", str(tmp_path / "r.html"), *given)
    assert not (tmp_path / "r.html").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--kv-cache-memory", "100KiB"], "memory"),
        (["--report-only"], "has no complete document"),
        (["--scaling", '{"rope_type": "learned"}'], "learned"),
    ],
)
def test_errors_of_the_engine_are_one_line(
    arguments: list[str], words: str, run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, *arguments) == 2
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith("error: ") and words in last, last


def test_scorer_has_no_queue_limit(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All readings of a long document are queued at once, beyond the limit of a server's queue."""
    scorer = BatchScorer.load(model, max_model_len=LENGTH)
    with monkeypatch.context() as patched:
        patched.setattr(Sequence, "num_tokens", property(lambda self: 100_000_000))
        for number in range(3):
            scorer._core.add(EngineRequest(str(number), list(range(5, 15)), SamplingParams(max_tokens=1)))
