"""The measurements on long texts: each on a tiny model, against what it says it measures."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from helpers.gguf_models import WIDE, make_gguf
from helpers.rotary_oracles import CachedInOnePass, cached_by_transformers, dynamic_frequencies
from helpers.tiny_models import make_model
from helpers.toy_tokenizers import byte_level

from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.engine.rotary.rotary_tables import RotaryTables
from windlass.lab.scoring import Scorer
from windlass.server.text.tokenizer import Tokenizer

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
TRAINED, LENGTH = 32, 96


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = byte_level()
    make_model(
        "llama",
        directory,
        vocab_size=tokenizer.get_vocab_size(),
        max_position_embeddings=TRAINED,
        num_hidden_layers=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for name, step in (("a", 11), ("b", 7)):
        lines = "\n\n".join(f"{name} {i} costs {i * step % 89} pence;" for i in range(200))
        (folder / f"{name}.txt").write_text(lines, encoding="utf-8")
    return folder


def run(module: ModuleType, monkeypatch: pytest.MonkeyPatch, out: Path, *arguments: object) -> dict:
    monkeypatch.setattr(sys, "argv", ["x", *map(str, arguments), "--out", str(out)])
    module.main()
    return json.loads(out.read_text())


def test_one_pass_gives_what_transformers_cache_gives(tmp_path: Path) -> None:
    """Random weights forgive nothing: a key at any other frequencies would show in the first digits."""
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    directory = make_model(
        "llama", tmp_path, num_hidden_layers=3, max_position_embeddings=TRAINED, rope_parameters=dynamic
    )
    ids = torch.randint(3, 128, (LENGTH,), generator=torch.Generator().manual_seed(0)).tolist()
    frequencies = dynamic_frequencies(10_000.0, 16, 2.0, TRAINED, grid=False)
    for prompt in (1, 48):
        expected = cached_by_transformers(directory, ids, prompt)
        one_pass = CachedInOnePass(directory)
        with torch.no_grad():
            found = one_pass.model.lm_head(one_pass.hidden(ids, frequencies, prompt))
        assert (found - expected).abs().max() / expected.abs().max() < 1e-5


def test_stale_keys_of_a_model(
    model: Path,
    texts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    module = load("stale_keys_model")
    arguments = [model, "--text", texts, "--max-len", LENGTH, "--work", tmp_path / "work"]
    found = run(module, monkeypatch, tmp_path / "r.json", *arguments)
    assert found["edges"] == [0, 32, 39, 46, 54, 64, 77, 91, 96] and found["trained_length"] == TRAINED
    tokenizer, scorer = Tokenizer.from_directory(model), Scorer.load(model, device="cpu", dtype="float32")
    dynamic = RopeScaling.from_dict({"rope_type": "dynamic", "factor": 2.0})
    for index, name in enumerate(("a", "b")):
        ids = tokenizer.encode((texts / f"{name}.txt").read_text())[: LENGTH + 1]
        for way in ("recompute", "rotate", "frozen"):
            nll = -scorer.logprobs(ids, scorer.plan(LENGTH, dynamic, way)).double().numpy()
            assert found["loss"][way][index][1] == pytest.approx(nll[32:39].mean(), abs=1e-4)
        plain, recomputed = (
            scorer.logits(ids[:-1], plan).double().log_softmax(-1)[TRAINED::8]
            for plan in (scorer.plan(LENGTH, RopeScaling()), scorer.plan(LENGTH, dynamic, "recompute"))
        )
        kl = (recomputed.exp() * (recomputed - plain)).sum(-1).mean()
        assert found["kl_from_recompute"]["no scaling"][index] == pytest.approx(float(kl), rel=1e-3)
    # Up to the trained length nothing has changed yet; past it transformers' cache is another thing than a recompute.
    stale, recompute = (np.array(found["loss"][way]) for way in ("transformers, cached", "recompute"))
    assert stale[:, 0] == pytest.approx(recompute[:, 0], abs=1e-5) and abs(stale - recompute)[:, 2:].min() > 1e-5
    assert capsys.readouterr().out.count("\n") == 2 + len(module.WAYS)
    monkeypatch.setattr(module, "hidden_states", None)  # all of them are kept
    assert run(module, monkeypatch, tmp_path / "r.json", *arguments) == found


def test_narrower_caches_by_position(
    model: Path,
    texts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = [model, "--text", texts, "--max-len", 64, "--stretch", 32, "--keep", tmp_path / "k"]
    found = run(load("kv_by_position"), monkeypatch, tmp_path / "r.json", *arguments)
    assert [(row["from"], row["to"]) for row in found["rows"]] == [(0, 32), (32, 64), (0, 64)]
    tokenizer = Tokenizer.from_directory(model)
    apart = []
    for name in ("a", "b"):
        ids = tokenizer.encode((texts / f"{name}.txt").read_text())[:65]
        narrow, plain = (
            Scorer.load(model, device="cpu", dtype="float32", kv_cache_dtype=dtype) for dtype in ("int8", "float32")
        )
        losses = [-s.logprobs(ids, s.plan(64, RopeScaling())).double()[32:].mean().item() for s in (narrow, plain)]
        apart.append(losses[0] - losses[1])
    assert found["rows"][1]["int8"]["nats"] == pytest.approx(np.mean(apart), abs=1e-6)
    reach = 12.7062 * abs(apart[0] - apart[1]) / 2  # Student's t at one degree of freedom
    low, high = found["rows"][1]["int8"]["interval"]
    assert (high - low) / 2 == pytest.approx(reach, rel=1e-3) and math.isfinite(low)
    assert "| 32–64 |" in capsys.readouterr().out


def test_every_kind_by_position(
    model: Path,
    texts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    module = load("kinds_by_position")
    keep = tmp_path / "passes.jsonl"
    arguments = [model, "--text", texts, "--max-len", LENGTH, "--stretch", 16, "--sinks", 2, "--keep", keep]
    found = run(module, monkeypatch, tmp_path / "r.json", *arguments, "--plot", tmp_path / "plot.png")
    names = set(found["loss"])
    assert {"no scaling", "text cut to the trained length", "window 30 and 2 sinks", "yarn 3", "rerope"} <= names
    assert {
        "dynamic 2, frozen",
        "dynamic 2, recompute",
        "dynamic 2, rotate",
        "longrope, untrained ramp to 3, frozen",
    } <= names
    assert found["edges"] == [0, 16, 32, 48, 64, 80, 96] and (tmp_path / "plot.png").stat().st_size > 1000
    assert [found[key] for key in ("weights", "activations", "cache")] == ["float32"] * 3
    tokenizer, scorer = Tokenizer.from_directory(model), Scorer.load(model, device="cpu")
    ids = tokenizer.encode((texts / "a.txt").read_text())[: LENGTH + 1]
    for name in (
        "no scaling",
        "yarn 3",
        "self_extend 4",
        "dynamic 2, recompute",
        "longrope, untrained ramp to 3, frozen",
    ):
        scaling = RopeScaling.from_dict(found["scalings"][name])
        policy = name.split(", ")[-1] if "dynamic" in name else "frozen"
        nll = -scorer.logprobs(ids, scorer.plan(LENGTH, scaling, policy)).double().numpy()
        assert found["loss"][name]["a.txt"] == pytest.approx(nll.reshape(6, 16).mean(1).tolist(), abs=1e-5)
    shown = capsys.readouterr().out
    assert shown.count("| a, b | 0–32 | 32–48 |") == 1 and shown.count("\n") == 2 + len(names)
    late = {n: np.array([np.array(found["loss"][n][t])[4:].mean() for t in ("a.txt", "b.txt")]) for n in names}
    apart = late["yarn 3"] - late["text cut to the trained length"]
    row = next(line for line in shown.splitlines() if line.startswith("| yarn 3 |"))
    assert row.split("|")[-2].split()[0] == module._percent(float(apart.mean()))
    # A run that was cut short: what one text alone was read under stands in a table of its own.
    lines = keep.read_text().splitlines(keepends=True)
    lost = [line for line in lines if ("rerope" in line or "cut to" in line) and "b.txt" in line]
    keep.write_text("".join(line for line in lines if line not in lost))
    monkeypatch.setattr(Scorer, "logprobs", None)  # nothing is read
    report_only = ["--report-only", "--plot", tmp_path / "none.png"]
    part = run(module, monkeypatch, tmp_path / "r.json", *arguments, *report_only)
    assert not (tmp_path / "none.png").exists()  # but a line that says why
    assert part["loss"]["rerope"] == {"a.txt": found["loss"]["rerope"]["a.txt"]}
    assert part["loss"]["yarn 3"] == found["loss"]["yarn 3"]
    shown = capsys.readouterr().out
    assert shown.endswith("no picture: not all texts have been read as text cut to the trained length yet\n")
    assert "| a | 0–32" in shown and shown.index("| yarn 3 |") < shown.index("| a | 0–32") < shown.index("| rerope |")


def test_a_report_says_in_what_types_it_was_read(tmp_path: Path) -> None:
    """Blocks meet rows of 8 bits; with compiled kernels, `auto` caches them in less than float32."""
    source = make_model("llama", tmp_path / "source", **{**WIDE, "num_hidden_layers": 1})
    made = make_gguf(source, tmp_path / "made", lambda name: "Q4_1")
    scorer = Scorer.load(made.derived, device="cpu")
    cache = "float16" if scorer.cache_dtype == torch.float16 else "float32"
    expected = {"weights": "q4_1", "activations": "int8", "cache": cache}
    assert load("kinds_by_position")._types(scorer) == expected


def test_columns_begin_and_end_where_their_headings_say() -> None:
    """Whatever the stretch and the length: a loss that is its position shows which positions a mean is over."""
    module = load("kinds_by_position")
    for length, stretch in ((10240, 2048), (9216, 2048), (16384, 3000), (16384, 20000)):
        edges = module.edges_of(8192, length, stretch)
        late = (8192 + length) // 2
        assert {0, 8192, late, length} <= set(edges) and edges == sorted(set(edges))
        means = [(a + b) / 2 for a, b in pairwise(edges)]
        report = {"edges": edges, "trained_length": 8192, "texts": [{"name": "a.txt"}]}
        report["loss"] = {"no scaling": {"a.txt": means}, module.CUT: {"a.txt": [0.0] * len(means)}}
        assert module.mean_over(report, means, 0, 8192) == 4096
        assert module.mean_over(report, means, late, length) == (late + length) / 2
        head = module.table(report).splitlines()[0]
        assert "| 0–8,192 | 8,192–" in head and f"| {late:,}–{length:,} against cut text |" in head


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--kinds", "yarn", "--plot", "p.png"], "is read with the kind none: add it to --kinds"),
        (["--max-len", str(TRAINED)], f"--max-len {TRAINED} is not past the trained length, {TRAINED}"),
    ],
)
def test_what_has_no_report_is_refused_before_anything_is_read(
    more: list[str],
    message: str,
    model: Path,
    texts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    module = load("kinds_by_position")
    monkeypatch.setattr(module, "Scorer", None)
    with pytest.raises(SystemExit) as refused:
        run(module, monkeypatch, tmp_path / "r.json", model, "--text", texts, "--keep", tmp_path / "k", *more)
    assert message in capsys.readouterr().err + str(refused.value)


def test_angles_of_less_precision_show_at_far_positions(
    model: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = load("far_angles")
    arguments = [model, "--text", texts / "a.txt", "--tokens", 64, "--positions", 5000, 10**6]
    found = run(module, monkeypatch, tmp_path / "r.json", *arguments)
    nats = {(row["angles"], row["first_position"]): row["nats"] for row in found["rows"]}
    for first in (5000, 10**6):
        assert nats["as served", first]["largest"] < 1e-4
        assert nats["cosines and sines in bfloat16", first]["mean"] > 10 * nats["as served", first]["mean"]
    assert nats["angles in bfloat16", 5000]["mean"] > 100 * nats["as served", 5000]["largest"]
    assert nats["angles in float32", 10**6]["mean"] > 10 * nats["angles in float32", 5000]["mean"]
    assert "| as served |" in capsys.readouterr().out
    # What is replaced is put back, and a text from position `first` on is one that stands behind as many tokens unseen.
    scorer, ids = Scorer.load(model, device="cpu"), Tokenizer.from_directory(model).encode("one two three")[:40]
    before = scorer.logprobs(ids, scorer.plan(40))
    positions = torch.arange(7, 12)
    tables = RotaryTables(1, [scorer.decoder.spec.rotary_groups[0].base], scorer.decoder.backend)
    tables.write(0, scorer.plan(40).stage(40).specs)
    expected = tables.cos_sin(torch.zeros(5, dtype=torch.int64), positions)
    for kind, bound in ((None, 1e-9), (module._in_float32, 1e-4)):
        with module.rotated_by(kind, 7):
            moved = tables.cos_sin(torch.zeros(5, dtype=torch.int64), positions - 7)
        assert (moved.cos - expected.cos).abs().max() < bound and (moved.sin - expected.sin).abs().max() < bound
    assert torch.equal(scorer.logprobs(ids, scorer.plan(40)), before)


def test_hidden_numbers_stand_where_the_questions_say(model: Path, texts: Path) -> None:
    module = load("passkeys")
    tokenizer = Tokenizer.from_directory(model)
    ids, questions = module.hide(tokenizer, (texts / "a.txt").read_text(), 4000, seed=1, every=40)
    assert len(ids) == 4001 and len(questions) > 5
    for question in questions:
        digits = list(question.answer)
        asked, told = question.position, question.position - question.distance
        assert ids[asked : asked + len(digits)] == digits == ids[told : told + len(digits)]
        words = tokenizer.decode(ids[asked - 60 : asked + len(digits)])
        name = words.rsplit("number of ", 1)[1].split(" ")[0]
        assert f"number of {name} is" in tokenizer.decode(ids[told - 60 : told])
    assert len({question.answer for question in questions}) == len(questions)


def test_a_number_is_found_when_every_digit_is(model: Path, texts: Path) -> None:
    """Against argmaxes of logits: random weights find nothing, so the answers are set to what they say, then spoilt."""
    module = load("passkeys")
    scorer = Scorer.load(model, device="cpu")
    ids = Tokenizer.from_directory(model).encode((texts / "a.txt").read_text())[:65]
    scaling = {"rope_type": "linear", "factor": 2.0}
    best = scorer.logits(ids, scorer.plan(64, RopeScaling.from_dict(scaling))).argmax(-1).tolist()
    right = module.Question(20, 5, tuple(best[19:22]))
    spoilt = module.Question(40, 5, (best[39], best[40], (best[41] + 1) % 100))
    assert module.ask(scorer, ids, [right, spoilt], scaling) == [True, False]


def test_answers_that_are_kept_are_not_asked_for_again(
    model: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By each step that `real_model.py` calls: all the others have `--keep`, or a folder of their own."""
    module, keep = load("passkeys"), tmp_path / "kept.jsonl"
    arguments = [model, "--text", texts, "--max-len", 300, "--every", 20, "--pool", 1, "--keep", keep]
    arguments += ["--scaling", '{"rope_type": "linear", "factor": 2.0}']
    asked, ask = [], module.ask

    def count(*given: object) -> list[bool]:
        asked.append(given)
        return [index % 3 == 0 for index, _ in enumerate(ask(*given))]  # random weights find nothing

    monkeypatch.setattr(module, "ask", count)
    found = run(module, monkeypatch, tmp_path / "r.json", *arguments)
    assert len(asked) == 4 and len({question["found"] for question in found["questions"]}) == 2
    keep.write_text("".join(keep.read_text().splitlines(keepends=True)[:3]))  # interrupted in the last pass
    assert run(module, monkeypatch, tmp_path / "r.json", *arguments) == found and len(asked) == 5
    run(module, monkeypatch, tmp_path / "r.json", *arguments, "--seed", 2)  # other questions
    assert len(asked) == 9
    options = argparse.Namespace(model=Path("m"), work=Path("work"), docs=Path("docs"))
    for step in load("real_model").STEPS:
        words = sys.modules["real_model"].command(step, options, 32, [Path("novel.txt")])
        assert any(word.startswith("work") for word in words), step


@pytest.mark.slow  # five programs, each of which imports torch
def test_all_of_it_for_one_model(model: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step runs as a person would run it, and the page shows every table."""
    module = load("real_model")
    monkeypatch.setattr(sys, "argv", ["x", str(model), "--texts", str(texts), *_folders(tmp_path)])
    monkeypatch.setenv("PYTHONPATH", str(BENCHMARKS.parent / "src"))
    module.main()
    page = (tmp_path / "docs" / "real-model.md").read_text()
    report = json.loads((tmp_path / "docs" / "real_model_sweep.json").read_text())
    assert [curve["name"] for curve in report["curves"]][:3] == ["no scaling", "yarn 2", "dynamic 2, frozen"]
    assert page.count("\n## ") == 5 and "| yarn 2 | " in page and "| transformers, cached | " in page
    assert "int8, %" in page and "asked at 48–64" in page
    (tmp_path / "docs" / "real-model.md").unlink()
    monkeypatch.setattr(sys, "argv", ["x", "--page-only", *_folders(tmp_path)])
    module.main()
    assert (tmp_path / "docs" / "real-model.md").read_text() == page


def test_a_page_that_somebody_wrote_is_not_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, docs = load("real_model"), tmp_path / "docs"
    docs.mkdir()
    before = {
        name: (docs / name).write_bytes((BENCHMARKS.parent / "docs" / name).read_bytes())
        for name in ("real-model.md", "real_model_sweep.json")
    }
    for words in (["--page-only"], [str(tmp_path / "model")]):
        monkeypatch.setattr(sys, "argv", ["x", *words, *_folders(tmp_path)])
        with pytest.raises(SystemExit):
            module.main()
        assert "real-model.md was not made by this program" in capsys.readouterr().err
    assert {path.name: path.stat().st_size for path in docs.iterdir()} == before
    monkeypatch.chdir(tmp_path)  # by default it is not docs/ that is written to
    monkeypatch.setattr(sys, "argv", ["x", "--page-only"])
    with pytest.raises(SystemExit, match="there are no numbers in work/real/docs"):
        module.main()


def _folders(tmp_path: Path) -> list[str]:
    return ["--work", str(tmp_path / "work"), "--docs", str(tmp_path / "docs")]
