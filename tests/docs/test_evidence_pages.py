"""The pages with measured numbers show the numbers that lie beside them."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import re
import sys
from itertools import pairwise
from pathlib import Path
from statistics import mean

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def stale_keys():
    spec = importlib.util.spec_from_file_location("stale_keys", ROOT / "benchmarks" / "stale_keys.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def test_the_page_on_stale_keys_has_the_tables_of_its_numbers(stale_keys):
    page = (DOCS / "stale-keys.md").read_text(encoding="utf-8")
    report = json.loads((DOCS / "stale_keys.json").read_text(encoding="utf-8"))
    for part in stale_keys.table(report).split("\n\n"):
        assert part in page
    assert report["date"] in page


def test_the_numbers_say_what_the_page_says():
    models = json.loads((DOCS / "stale_keys.json").read_text(encoding="utf-8"))["models"]
    assert len(models) >= 5
    for comparisons in models.values():
        first = {c["way"]: c for c in reversed(comparisons)}
        stale = first.pop("transformers, cached")
        assert stale["agree"] < stale["rows"] and stale["relative"] > 0.01
        assert len(first) >= 3
        for comparison in first.values():
            assert comparison["relative"] < 1e-5 and comparison["agree"] == comparison["rows"]


def test_the_sweep_page_and_the_report_show_one_measurement():
    page = (DOCS / "rope_sweep.md").read_text(encoding="utf-8")
    report = (DOCS / "sweep.html").read_text(encoding="utf-8")
    (date,) = re.findall(r"Measured (\d{4}-\d\d-\d\d)", page)
    assert f"Measured {date}" in report
    rows = [re.split(r" *\| *", line.strip("| ")) for line in page.splitlines() if line.startswith("| ")]
    assert len(rows) > 10
    cells = re.findall(r"<t[hd]>(.*?)</t[hd]>", report)
    assert [cell.strip("*") for row in rows for cell in row if cell] == [cell for cell in cells if cell]


def numbers_of(heading: str) -> dict[str, list[float]]:
    """The numbers that the cells of a part's rows begin with, by the first cell; the last row of a name."""
    page = (DOCS / "real-model.md").read_text(encoding="utf-8")
    part = page.split(f"\n{heading}\n")[1].split("\n## ")[0]
    cells = [line.replace("*", "").split("|")[1:-1] for line in part.splitlines() if line.startswith("| ")]
    return {row[0].strip(): [float(c.split()[0]) for c in row[1:] if re.match(r" [\d.]+( |$)", c)] for row in cells}


def test_the_table_of_every_kind_shows_its_numbers():
    """Mean losses over both texts, or of the novel where it alone was read."""
    rows = numbers_of("## Every kind")
    report = json.loads((DOCS / "kinds_by_position.json").read_text(encoding="utf-8"))
    names = {"longrope, untrained ramp to 2, frozen": "longrope, an untrained ramp to 2, frozen"}
    assert report["edges"] == [*range(0, 16385, 2048)] and len(report["loss"]) == 16
    for name, texts in report["loss"].items():
        if name == "text cut to the trained length":
            continue  # in both tables, once of both texts and once of the novel
        means = [mean(at) for at in zip(*texts.values(), strict=True)]
        expected = [mean(means[:4]), *means[4:]]
        assert rows[names.get(name, name)][:5] == pytest.approx([math.exp(x) for x in expected], rel=1e-3), name


def test_the_page_on_a_real_model_shows_its_numbers():
    """Every perplexity of its tables is that of the mean loss in the files beside it."""
    rows = numbers_of("## Which scaling holds where")
    sweep = json.loads((DOCS / "real_model_sweep.json").read_text(encoding="utf-8"))
    assert (
        list(sweep["loss"]) == ["no scaling", "yarn 2", "dynamic 2, frozen", "dual_chunk"] and len(sweep["texts"]) == 3
    )
    for at, (low, high) in enumerate(pairwise(sweep["edges"])):
        means = [mean(text[at] for text in texts) for texts in sweep["loss"].values()]
        assert rows[f"{low:,}–{high:,}"] == pytest.approx([math.exp(x) for x in means], rel=5e-4)
    stale = json.loads((DOCS / "real_model_stale.json").read_text(encoding="utf-8"))
    rows = numbers_of("## Stale keys")
    for way, texts in stale["loss"].items():
        means = [mean(text[at] for text in texts) for at in range(3)]
        assert rows[way][:3] == pytest.approx([math.exp(x) for x in means], rel=5e-4)


def test_the_page_on_what_a_real_model_finds_shows_its_answers():
    """Every share in its tables is counted again from the answers in the file beside it."""
    page = (DOCS / "real-model-tasks.md").read_text(encoding="utf-8")
    report = json.loads((DOCS / "real_model_tasks.json").read_text(encoding="utf-8"))
    assert report["date"] in page and len(report["lengths"]) >= 2
    for part in report["lengths"]:
        documents = [document for document in report["documents"] if document["length"] == part["length"]]
        assert len(documents) == part["documents"] and f"{len(documents)} of {part['length']:,} tokens" in page
        section = page.split(f"\n## {part['length']:,} tokens\n")[1].split("\n## ")[0]
        rows = [line.replace("*", "").split("|")[1:-1] for line in section.splitlines() if line.startswith("| ")]
        first: dict[str, list[str]] = {}
        for row in rows:
            first.setdefault(row[0].strip(), row[1:])
        for candidate in part["candidates"]:
            for task, cell in zip(candidate["tasks"], first[candidate["name"]], strict=False):
                right: dict[str, list[int]] = {"chosen": [], "written": []}
                for document in documents:
                    for (asked, _), *found in zip(
                        document["questions"], *document["right"][candidate["name"]].values(), strict=True
                    ):
                        if asked == task:
                            for measure, hit in zip(document["right"][candidate["name"]], found, strict=True):
                                right[measure].append(hit)
                shown = [int(number) for number in re.findall(r"(\d+) %", cell)]
                assert shown == [round(100 * mean(right["chosen"])), round(100 * mean(right["written"]))]
                assert candidate["tasks"][task]["chosen"]["of"] == len(right["chosen"])


def test_the_page_on_endless_contexts_has_the_tables_of_its_numbers():
    page = (DOCS / "endless-context.md").read_text(encoding="utf-8")
    for name in ("shifted_context", "endless_stream", "turned_keys", "passage_reuse"):
        spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        report = json.loads((DOCS / f"{name}.json").read_text(encoding="utf-8"))
        for part in module.table(report).split("\n\n"):
            assert part in page, name
        assert f"{name}.json" in page
    stream = json.loads((DOCS / "endless_stream.json").read_text(encoding="utf-8"))
    assert stream["tokens"] >= 100_000 and len(stream["blocks_once_full"]) == 1
    assert stream["date"] in page
    reuse = json.loads((DOCS / "passage_reuse.json").read_text(encoding="utf-8"))["rows"]
    assert {len(rows) for rows in reuse.values()} == {20} and max(row["tokens"] for row in reuse["computed"]) <= 7500


def test_the_page_on_speed_has_the_tables_of_its_numbers(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from harness.report import by_contestant, check

    page, earlier = ((DOCS / name).read_text(encoding="utf-8") for name in ("benchmarks.md", "benchmarks-history.md"))
    for name in ("peers_135m.json", "peers_1b.json"):
        report = json.loads((DOCS / name).read_text(encoding="utf-8"))
        check(report)
        dates = [run["date"].split()[0] for run in report["runs"]]
        for run, date in zip(report["runs"], dates, strict=True):
            assert by_contestant(run) in page + earlier and date in page + earlier
        assert max(dates) in page
        assert name in page


def test_the_page_on_conformance_has_the_tables_of_its_runs_and_they_claim_no_more_than_was_seen():
    spec = importlib.util.spec_from_file_location("conformance_table", ROOT / "benchmarks" / "conformance_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = (DOCS / "conformance.md").read_text(encoding="utf-8")
    report = json.loads((DOCS / "conformance.json").read_text(encoding="utf-8"))
    for part in module.table(report).split("\n\n"):
        assert part in page
    assert len({run["server"].split(",")[0] for run in report["runs"]}) >= 3
    assert len({run["seed"] for run in report["runs"]}) == len(report["runs"]), "texts of one run's own"
    for run in report["runs"]:
        assert len(run["checks"]) == 8
        for check in run["checks"]:
            if check["verdict"] == "holds" and check["effect"] is not None:
                assert check["effect"] <= check["bound"]
            if check["verdict"] == "holds" and check["name"] == "stale":
                assert re.search(r"[1-9]\d* kept", check["detail"])


def test_the_page_on_conformance_has_the_errors_of_angles(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    page = (DOCS / "conformance.md").read_text(encoding="utf-8")
    report = json.loads((DOCS / "far_angles.json").read_text(encoding="utf-8"))
    assert importlib.import_module("far_angles").table(report) in page and report["date"] in page
    nats = {(row["angles"], row["first_position"]): row["nats"]["largest"] for row in report["rows"]}
    assert nats["as served", 100_000] < 1e-4 < nats["angles in float32", 100_000] < 0.05
    assert nats["angles in bfloat16", 10_000] > 0.05
    runs = json.loads((DOCS / "conformance.json").read_text(encoding="utf-8"))["runs"]
    ((far, words),) = [
        (check["effect"], run["server"]) for run in runs for check in run["checks"] if "of 9998" in check["detail"]
    ]
    assert far < 1e-4 and "a window of 256" in words and f"{far:.1g} nats" in page


def test_the_page_on_longer_contexts_has_the_requests_of_its_load_test(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    mixed = importlib.import_module("mixed_scalings")
    page = (DOCS / "longer-context.md").read_text(encoding="utf-8")
    words = " ".join(page.split())
    run = json.loads((DOCS / "mixed_scalings.json").read_text(encoding="utf-8"))
    assert mixed.table(run) in page and f"{mixed.overlapping(run)} pairs" in words
    assert f" {mixed.in_one_batch(run)} of them were answered in the same steps" in words
    assert mixed.in_one_batch(run) > 10
    assert run["completed"] == len(run["requests"]) and not run["interrupted"] and run["started_at"][:10] in page
    lengths = sorted(request["input_tokens"] for request in run["requests"])
    assert f" {len(lengths)} requests of {lengths[0]:,} to {lengths[-1]:,} tokens" in words
    assert sum(length > 8192 for length in lengths) == 4 and "Four were longer than the 8,192 tokens" in words
    assert f"{run['started_at'][:10]}" in page and (DOCS / "mixed_scalings.html").stat().st_size > 50_000


def test_the_page_on_llama_2_has_the_numbers_of_its_request():
    page = (DOCS / "llama-2.md").read_text(encoding="utf-8")
    found = json.loads((DOCS / "llama2_100k.json").read_text(encoding="utf-8"))
    seconds = found["time_to_first_token"]
    assert found["prompt_tokens"] == 100_000 and found["rotary"] == "yarn" and found["date"] in page
    assert f"{seconds:.0f} s, {found['prompt_tokens'] / seconds:.0f} tokens/s" in page
    assert f"| {1000 * found['seconds_per_token']:.0f} ms |" in page
    assert f"{found['peak_bytes'] / 1e9:.2f} GB" in page
    # Two layers of 32 heads: keys and values of 128 codes and a float32 scale each.
    assert f"{2 * 2 * 32 * (128 + 4) * 100_000 / 1e9:.2f} of keys and values" in page


def test_the_page_on_longer_contexts_has_the_costs_that_were_measured(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    page = (DOCS / "longer-context.md").read_text(encoding="utf-8")
    words = " ".join(page.split())
    report = json.loads((DOCS / "distance_cost.json").read_text(encoding="utf-8"))
    for part in importlib.import_module("distance_cost").table(report).split("\n\n"):
        assert part in page
    assert report["date"] in page
    rates = dict(report["measured"]["one stream"]["prompt_tokens_per_second"])
    plain = rates.pop("none")
    slowest, quickest = min(rates.values()), max(rates.values())
    assert f"{slowest:.0f} to {quickest:.0f} tokens/s at 16,384 tokens, against {plain:.0f} without" in words
