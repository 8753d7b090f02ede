"""`windlass rope sweep`: perplexities against transformers, reports, recommendations and errors."""

from __future__ import annotations

import json
import math
import re
import shlex
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.rotary_oracles import Uncached, dynamic_frequencies, plain_frequencies

from windlass.engine.interface.context import ContextRule
from windlass.lab.perplexity_results import Curve, ScalingSweep, recommend
from windlass.lab.scoring import Scorer
from windlass.lab.sweep_texts import SweptText
from windlass.server.cli import main as cli
from windlass.server.cli import rope
from windlass.server.startup import launch
from windlass.server.text.tokenizer import Tokenizer

TRAINED, MAX_LEN, WINDOWS, DIM = 32, 128, 3, 16


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "a <b> & c.txt"
    path.write_text(" ".join(f"line {i} says {i * i % 97} apples;" for i in range(60)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def sweep(model: Path, text: Path, run_sweep: Callable[..., int]) -> Callable[..., int]:
    options = ["--text", text, "--max-len", MAX_LEN, "--windows", WINDOWS, "--samples", 8]
    return lambda out, *more: run_sweep(model, out, *options, "--png", out / "plot.png", *more)


@pytest.fixture(scope="module")
def report(sweep: Callable[..., int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report")
    assert sweep(out) == 0
    return out


@pytest.fixture(scope="module")
def measured(report: Path) -> dict:
    return json.loads((report / "report.json").read_text())


def windows(model: Path, text: Path, starts: list[int]) -> list[list[int]]:
    """Token ids of each window. The tokenizer begins every text, and so every window, with a token."""
    tokenizer = Tokenizer.from_directory(model)
    (bos,) = tokenizer.encode("")
    ids = tokenizer.encode(text.read_text())[1:]
    assert starts[0] == 0 and starts[-1] == len(ids) - MAX_LEN and len(starts) == WINDOWS
    return [[bos, *ids[start : start + MAX_LEN]] for start in starts]


def losses(logits: torch.Tensor, ids: list[int]) -> np.ndarray:
    chosen = logits[: len(ids) - 1].double().log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])
    return -chosen[:, 0].numpy()


def perplexity(rows: list[np.ndarray], low: int, high: int) -> float:
    return float(np.exp(np.mean([row[low:high] for row in rows])))


REFERENCES = {
    "no scaling": lambda model, ids: model.logits(ids, plain_frequencies(10_000.0, DIM)),
    "linear 4": lambda model, ids: model.logits(ids, plain_frequencies(10_000.0, DIM) / 4),
    "ntk 2": lambda model, ids: model.logits(ids, plain_frequencies(10_000.0 * 2 ** (DIM / (DIM - 2)), DIM)),
    "dynamic 2, frozen": lambda model, ids: model.logits(
        ids, dynamic_frequencies(10_000.0, DIM, 2.0, TRAINED, grid=True)(MAX_LEN)
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(REFERENCES))
def test_perplexities_equal_transformers(name: str, model: Path, text: Path, measured: dict) -> None:
    reference = Uncached(model)
    rows = [
        losses(REFERENCES[name](reference, ids), ids) for ids in windows(model, text, measured["texts"][0]["windows"])
    ]
    (curve,) = [curve for curve in measured["curves"] if curve["name"] == name]
    expected = [perplexity(rows, low, high) for low, high in measured["buckets"]]
    assert curve["by_bucket"] == pytest.approx(expected, rel=1e-3)
    assert curve["perplexity"]["all positions"] == pytest.approx(perplexity(rows, 0, MAX_LEN), rel=1e-3)
    assert curve["perplexity"]["at 2× (64)"] == pytest.approx(perplexity(rows, 48, 64), rel=1e-3)


@pytest.mark.slow
def test_recompute_reads_every_length_again(model: Path, text: Path, measured: dict) -> None:
    (curve,) = [curve for curve in measured["curves"] if curve["rope_update"] == "recompute"]
    frequencies = dynamic_frequencies(10_000.0, DIM, curve["rope_scaling"]["factor"], TRAINED, grid=True)
    reference = Uncached(model)
    rows = [
        losses(reference.at_each_length(ids[:-1], frequencies), ids)
        for ids in windows(model, text, measured["texts"][0]["windows"])
    ]
    assert curve["by_bucket"] == pytest.approx([perplexity(rows, a, b) for a, b in measured["buckets"]], rel=1e-3)
    assert measured["exact"]["sampled_rows"] == WINDOWS * 8


def test_cut_text_is_read_in_trained_lengths(model: Path, text: Path, measured: dict) -> None:
    """Each row reads at least half a trained length before it, as a separate text."""
    reference, plain = Uncached(model), plain_frequencies(10_000.0, DIM)
    rows = []
    for ids in windows(model, text, measured["texts"][0]["windows"]):
        row = losses(reference.logits(ids[:TRAINED], plain), ids[: TRAINED + 1])
        for end in range(TRAINED + 16, MAX_LEN + 1, 16):
            piece = [ids[0], *ids[end - TRAINED + 1 : end + 1]]
            row = np.append(row, losses(reference.logits(piece[:-1], plain), piece)[-16:])
        rows.append(row)
    (curve,) = [curve for curve in measured["curves"] if curve["name"].startswith("text cut")]
    assert curve["by_bucket"] == pytest.approx([perplexity(rows, a, b) for a, b in measured["buckets"]], rel=1e-3)


@pytest.mark.slow
def test_reports_are_reproducible(sweep: Callable[..., int], report: Path, tmp_path: Path) -> None:
    assert sweep(tmp_path) == 0
    for name in ("report.html", "report.json", "report.md", "plot.png"):
        assert (tmp_path / name).read_bytes() == (report / name).read_bytes(), name


def test_page_is_self_contained_and_escapes_its_input(report: Path, measured: dict) -> None:
    page = (report / "report.html").read_text(encoding="utf-8")
    seen: list[tuple[str, dict]] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            seen.append((tag, dict(attrs)))

    Reader().feed(page)
    assert not {tag for tag, _ in seen} & {"script", "link", "img", "iframe", "image"}
    for tag, attributes in seen:
        for name in ("src", "href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith("#"), (tag, attributes)
    assert "@import" not in page and not re.search(r"url\((?!#)", page)
    assert "a &lt;b&gt; &amp; c.txt" in page and "a <b> & c" not in page
    svg = ElementTree.fromstring(re.search(r"<svg.*</svg>", page, re.DOTALL)[0])
    drawn = "".join(svg.itertext())
    for label in (
        "no scaling",
        "YaRN (yarn), factor 4",
        "PI (linear), factor 4",
        "NTK-aware (ntk), factor 4",
        "rotate",
    ):
        assert label in drawn
    assert "currentColor" in page and "#010203" not in page
    assert page.count("<tr") == len(measured["curves"]) + 1 + len(measured["curves"])  # the second table omits one
    assert "\\<b\\>" in (report / "report.md").read_text(encoding="utf-8")


def test_recommended_command_is_valid(measured: dict, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.setattr(launch, "serve", lambda *arguments: started.append(arguments) or 0)
    command = measured["recommendation"]["command"]
    words = shlex.split(command)
    assert words[:3] == ["windlass", "serve", str(model)]
    assert cli.run(words[1:]) == 0
    config = started[0][1].to_config(model)
    (curve,) = [c for c in measured["curves"] if c["name"] == measured["recommendation"]["curve"]]
    assert config.max_model_len == MAX_LEN
    if curve["name"] != "no scaling":
        assert config.rotary.scaling.to_dict() == curve["rope_scaling"]
    assert config.rotary.update == curve["rope_update"]


@pytest.mark.slow
def test_target_and_trained_length(sweep: Callable[..., int], tmp_path: Path) -> None:
    assert sweep(tmp_path, "--target-len", "64", "--trained-len", "24", "--samples", "0") == 0
    found = json.loads((tmp_path / "report.json").read_text())
    names = {curve["name"]: curve for curve in found["curves"]}
    assert names["yarn 2.667"]["rope_scaling"]["original_max_position_embeddings"] == 24
    assert names["dynamic 1, frozen for 64"]["frozen_for"] == 64
    assert names["dynamic 1, frozen for 64"]["perplexity"]["all positions"] is None  # its context ends at 64
    assert found["exact"] is None and found["recommendation"]["target_length"] == 64
    assert "--max-model-len 64" in found["recommendation"]["command"]


def test_frozen_scaling_is_also_measured_for_the_target(sweep: Callable[..., int], tmp_path: Path) -> None:
    scaling = '{"rope_type": "dynamic", "factor": 2}'
    chosen = ("--scaling", scaling, "--policy", "frozen", "--no-cut", "--target-len", "64")
    assert sweep(tmp_path, *chosen) == 0
    found = json.loads((tmp_path / "report.json").read_text())
    frozen_for = {curve["name"]: curve["frozen_for"] for curve in found["curves"]}
    assert frozen_for == {"no scaling": None, "dynamic 2, frozen for 128": 128, "dynamic 2, frozen for 64": 64}
    # The recommendation considers the one for the target.
    reasons = " ".join(found["recommendation"]["reasons"])
    assert "dynamic 2, frozen for 64" in found["recommendation"]["curve"] + reasons


def curve(name: str, kind: str, level: float, inside: float, policy: str | None = None, rows: int = 64) -> Curve:
    nll = np.full((2, rows), math.log(level))
    nll[:, :16] = math.log(inside)
    scaling = {"rope_type": "default"} if kind == "none" else {"rope_type": kind, "factor": 2.0}
    longest = rows if policy == "frozen" else None
    return Curve(name, kind, scaling, policy, label=name, longest=longest, plotted=True, nll=nll)  # type: ignore[arg-type]


def result(*curves: Curve) -> ScalingSweep:
    return ScalingSweep("toy", "toy", (SweptText("t", 100, "", (0, 30)),), 16, 64, 64, curves)


NONE, CUT = curve("no scaling", "none", 90, 10), curve("cut", "cut", 11, 10)


def test_lowest_perplexity_wins_except_for_the_reference() -> None:
    found = recommend(result(NONE, CUT, curve("yarn", "yarn", 20, 12), curve("linear", "linear", 30, 13)))
    assert found.curve == "yarn"
    assert shlex.split(found.command)[-1] == '{"rope_type": "yarn", "factor": 2.0}'
    assert any("does not reach" in reason for reason in found.reasons)
    assert any("20 %" in reason and "per request" in reason for reason in found.reasons)


def test_recommendation_states_few_windows_and_unclear_differences() -> None:
    def of(count: int, *curves: Curve) -> list[str]:
        wide = [replace(c, nll=np.repeat(c.nll[:1], count, axis=0)) for c in curves]
        text = SweptText("t", 1000, "", tuple(range(0, 30 * count, 30)))
        return list(recommend(ScalingSweep("toy", "toy", (text,), 16, 64, 64, tuple(wide))).reasons)

    yarn, linear = curve("yarn", "yarn", 20, 12), curve("linear", "linear", 30, 13)
    assert any("based on 1 window only" in reason for reason in of(1, NONE, CUT, yarn, linear))
    assert any("based on 2 windows only" in reason for reason in of(2, NONE, CUT, yarn, linear))
    assert not any("based on" in reason or "distinguish" in reason for reason in of(5, NONE, CUT, yarn, linear))
    # Equal on average, better in one window and worse in the other.
    unsure = replace(linear, nll=yarn.nll + np.array([[0.3], [-0.28]]))
    assert "This text cannot distinguish the two." in recommend(result(NONE, CUT, yarn, unsure)).reasons


def test_simpler_scaling_wins_within_one_per_cent() -> None:
    rotate, frozen = curve("r", "dynamic", 20, 10, "rotate"), curve("f", "dynamic", 20.1, 10, "frozen")
    assert recommend(result(NONE, CUT, rotate, frozen)).curve == "f"
    assert recommend(result(NONE, CUT, rotate, replace(frozen, nll=frozen.nll * 1.05))).curve == "r"
    assert "--rope-update rotate" in recommend(result(NONE, CUT, rotate)).command
    assert recommend(result(replace(NONE, nll=frozen.nll), CUT, rotate, frozen)).curve == "no scaling"


def test_negligible_difference_is_reported_as_the_same() -> None:
    linear = curve("l", "linear", 20, 10)
    for level, words in ((20, "Next comes l: the same."), (20.005, "the same."), (20.02, "0.1 ± 0.0 % worse.")):
        other = curve("y", "yarn", 40 - level, 10)  # better by as much as level is above 20
        reasons = recommend(result(NONE, CUT, other, linear)).reasons
        assert any(words in reason for reason in reasons), reasons
        assert not any(": 0.0 " in reason for reason in reasons)


def test_scaling_frozen_for_another_length_is_not_recommended() -> None:
    other = replace(curve("f", "dynamic", 12, 10, "frozen"), longest=200)
    assert recommend(result(NONE, CUT, other, curve("yarn", "yarn", 20, 12))).curve == "yarn"


def test_window_is_compared_and_not_recommended() -> None:
    window = replace(curve("w", "window", 10, 10), context=ContextRule(attention_window=8, attention_sinks=2))
    found = recommend(result(NONE, CUT, window, curve("yarn", "yarn", 20, 12)))
    assert found.curve == "yarn" and not any("w:" in reason for reason in found.reasons)


def test_length_up_to_which_a_scaling_holds() -> None:
    breaks = curve("b", "yarn", 12, 10)
    breaks.nll[:, 40:] = math.log(40)
    found = result(NONE, CUT, breaks)
    assert found.holds_to(breaks) == 40 and found.holds_to(NONE) == 16 and found.holds_to(CUT) == 64


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--text", "{text}", "--max-len", "100000"], "give a longer text"),
        (["--text", "{text}", "--max-len", "32"], "trained length of 32"),
        (["--text", "{text}", "--max-len", "128", "--target-len", "20"], "--target-len"),
        (["--text", "{text}", "--max-len", "128", "--target-len", "129"], "--target-len"),
        (["--text", "{text}", "--max-len", "128", "--attention-window", "0"], "--attention-window must be between 1"),
        (
            ["--text", "{text}", "--max-len", "128", "--attention-window", "129"],
            "--attention-window must be between 1",
        ),
        (
            ["--text", "{text}", "--max-len", "128", "--attention-window", "9", "--attention-sinks", "-1"],
            "--attention-sinks",
        ),
        (["--text", "{missing}"], "cannot read --text"),
        (["--text", "{binary}"], "not UTF-8"),
        (["--text", "{text}", "--json", "{missing}/x.json"], "cannot write --json"),
        (["--text", "{text}", "--out", "{missing}/.."], "is a directory, give the name of a file"),
        (["--text", "{text}", "--markdown", "{missing}/../r.html"], "--out and --markdown are both"),
        (["--text", "{text}", "--json", "{missing}.1", "--png", "{missing}.1"], "--json and --png are both"),
        (["--text", "{text}", "--png", "{text}"], "--text and --png are both"),
        (["--text", "{text}", "--windows", "0"], "--windows"),
        (["--text", "{text}", "--text", "{text}"], "given twice"),
        (["--text", "{empty}"], "a directory without a file"),
        (["--text", "{text}", "--scaling", "[]"], "--scaling must be an object"),
        (["--text", "{text}", "--scaling", '{"rope_type": "yarm"}'], "yarm"),
        (["--text", "{text}", "--policy", "rotate"], "give --scaling too"),
        (["--text", "{text}", "--scaling", '{"rope_type": "ntk", "factor": 2}', "--policy", "x"], "none of frozen"),
        (["--text", "{text}", "--max-len", "128", "--keep", "{binary}"], "--keep"),
        (["--text", "{text}", "--kv-cache-dtype", "int7"], "--kv-cache-dtype"),
    ],
)
def test_invalid_options_are_one_line(
    arguments: list[str],
    words: str,
    model: Path,
    text: Path,
    tmp_path: Path,
    error_of: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00x")
    (tmp_path / "empty").mkdir()
    places = {"{text}": text, **{f"{{{name}}}": tmp_path / name for name in ("missing", "binary", "empty")}}
    given = list(arguments)
    for mark, path in places.items():
        given = [word.replace(mark, str(path)) for word in given]
    monkeypatch.setattr(Scorer, "load", None)  # options are checked before the model is loaded
    assert words in error_of("sweep", str(model), "--out", str(tmp_path / "r.html"), *given)
    assert not (tmp_path / "r.html").exists()


def test_missing_model(text: Path, tmp_path: Path, error_of: Callable[..., str]) -> None:
    missing = str(tmp_path / "nowhere--here")
    assert missing in error_of("sweep", missing, "--text", str(text), "--out", str(tmp_path / "r.html"))


@pytest.mark.parametrize("tasks", [False, True])
def test_default_model_is_that_of_serve(
    tasks: bool, model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = {False: "windlass.lab.perplexity_sweep.run_sweep", True: "windlass.lab.retrieval_sweep.run_tasks"}
    runs: list[Any] = []
    monkeypatch.setattr(run[tasks], runs.append)
    monkeypatch.setattr(rope, "choose_model", lambda given: (given or "first", model))
    more = ["--tasks", "passkey"] if tasks else ["--text", str(text)]
    for given in ([], [str(model)]):
        assert cli.run(["rope", "sweep", *given, "--out", str(tmp_path / "r.html"), *more]) == 0
    assert [(options.model_name, options.model) for options in runs] == [("first", model), (str(model), model)]
