"""Benchmark scripts: all start, and short runs on tiny models."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from helpers.doc_examples import ROOT
from helpers.tiny_models import make_model
from helpers.toy_tokenizers import byte_level
from transformers import LlamaForCausalLM

from windlass import LLM
from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.lab.scoring import Scorer
from windlass.server.text.tokenizer import Tokenizer

BENCHMARKS = ROOT / "benchmarks"
TRAINED = 32
TINY = {
    "moe": {"layers": 2, "hidden": 64, "width": 32, "experts": 8, "vocab": 96},
    "mla": {"layers": 2, "hidden": 1024, "width": 32, "rank": 32, "vocab": 96},
}


@pytest.fixture(autouse=True)
def search_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture
def experts() -> ModuleType:
    return importlib.import_module("experts_and_latent")


@pytest.fixture
def gpu() -> ModuleType:
    return importlib.import_module("gpu")


@pytest.fixture
def real_model() -> ModuleType:
    return importlib.import_module("real_model")


@pytest.mark.parametrize("script", sorted(BENCHMARKS.glob("*.py")), ids=lambda path: path.stem)
def test_script_describes_its_options(script: Path) -> None:
    done = subprocess.run([sys.executable, str(script), "--help"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.startswith(f"usage: {script.name}"), done.stderr


def test_decode_step_is_split_into_kernels_and_overhead() -> None:
    overhead = importlib.import_module("step_overhead")
    core = overhead.build(str(ROOT / "models" / "demo"), 8, 16, temperature=0.0, top_p=1.0, seed=0)
    for _ in range(10):  # the scheduler learns the duration of a step
        core.step()
    assert overhead.measure(core, overhead.Clock(), {}, 4, 8)["whole step"]["min_us"] > 0


def test_speculation_returns_the_answers_of_plain_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, out = importlib.import_module("speculation"), tmp_path / "out.json"
    sizes = f"--streams 1,2 --length 48 --max-tokens 24 --repeats 1 --threads 1 --json {out}"
    monkeypatch.setattr(sys, "argv", ["speculation.py", *sizes.split()])
    script.main()
    report = json.loads(out.read_text())
    assert [name for name in report if name.startswith("repetitive")] == [f"repetitive, {n} streams" for n in (1, 2)]
    assert all(report[name]["same_answers"] and report[name]["accepted"] for name in report if name[0] == "r")
    assert all(found["on"]["median"] > 0 and found["off"]["median"] > 0 for found in report.values())


def test_bound_counts_the_bytes_that_a_token_reads(experts: ModuleType) -> None:
    shape = experts.moe_shape(**TINY["moe"] | {"experts": 16})
    attention = 64 * (64 + 16 + 16) + 64 * 64
    chosen, router, norms = 8 * 3 * 32 * 64, 16 * 64, 2 * 64 + 2 * 4
    blocks = 2 * (attention + chosen) + 96 * 64
    assert shape.active_bytes() == blocks * 34 / 32 + 4 * (2 * (router + norms) + 64)


def test_experts_and_latent_attention_are_measured(
    experts: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shapes = {name: lambda make=make, name=name: make(**TINY[name]) for name, make in experts.SHAPES.items()}
    monkeypatch.setattr(experts, "SHAPES", shapes)
    monkeypatch.setattr(experts.Rates, "__init__", lambda self, threads: None)
    monkeypatch.setattr(experts.Rates, "now", lambda self, name: 10.0)
    monkeypatch.setattr(experts, "our_samples", lambda *a, given=experts.our_samples: given(*a, cache=16 << 20))
    out = tmp_path / "report.json"
    sizes = f"--rounds 2 --threads 1 --steps 4 --prompt 48 --work {tmp_path} --out {out}"
    monkeypatch.setattr(sys, "argv", ["experts_and_latent.py", *sizes.split()])
    experts.main()
    report, shown = json.loads(out.read_text()), capsys.readouterr().out
    for name in shapes:
        result = report["results"][name]
        samples = result["samples"]["Windlass Q8_0"]
        assert {key: len(taken) for key, taken in samples.items()} == {"decode 1": 2, "decode 8": 2, "prefill": 2}
        assert all(value > 0 for taken in samples.values() for value in taken)
        share = experts.share_of_bound(result, "Windlass Q8_0")
        assert share == pytest.approx(sum(samples["decode 1"]) / 2 * result["active_bytes"] / 10e9)
        assert f"| {name} | one stream | 8 streams | prompt | of its bound |" in shown
    assert "llama.cpp: not measured" in shown


def test_output_of_llama_bench_is_parsed(
    experts: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tool = tmp_path / "llama-bench"
    rows = [{"n_prompt": 512, "n_gen": 0, "avg_ts": 300.5}, {"n_prompt": 0, "n_gen": 64, "avg_ts": 20.25}]
    tool.write_text(f"#!{sys.executable}\nprint('''{json.dumps(rows)}''')\n")
    tool.chmod(0o755)
    assert experts.their_samples(tool, tmp_path, 512, 64, 2) == {"prefill": 300.5, "decode 1": 20.25}
    tool.write_text(f"#!{sys.executable}\nimport sys\nsys.exit('no: ' + ' '.join(sys.argv[1:3]))\n")
    assert experts.their_samples(tool, tmp_path, 512, 64, 2, ["-rtr", "1"]) == {}
    assert capsys.readouterr().out == "llama-bench cannot: no: -rtr 1\n"


def test_training_lowers_the_loss_with_every_position_encoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = importlib.import_module("position_encodings")
    monkeypatch.setattr(study, "TOKENS", 256)
    monkeypatch.setattr(study, "EVERY", 8)
    monkeypatch.setattr(study, "held_out", lambda model, texts, scaling: {})
    texts = study.read_texts()
    for positions in study.POSITIONS:
        found = study.train("language model", positions, 1, 16, texts, tmp_path)
        assert found["curve"][1] < found["curve"][0] - 0.1, positions


@torch.no_grad()
def test_trained_checkpoint_is_the_same_model_in_transformers_and_windlass(tmp_path: Path) -> None:
    network = importlib.import_module("harness.small_transformer")
    torch.manual_seed(4)
    model = network.SmallTransformer("rotary", 128, 512, causal=True)
    for parameter in model.parameters():
        if parameter.ndim == 1:  # a missing norm shows only if its weights are not ones
            parameter.data.uniform_(0.5, 1.5)
    network.save_checkpoint(model, tmp_path / "rotary")
    text = "The quick brown fox, naïve; über 100 €"
    ids = [network.BEGINNING, *text.encode()]
    own = -model.losses(torch.tensor([ids]))[0]
    reference = LlamaForCausalLM.from_pretrained(tmp_path / "rotary", attn_implementation="eager")
    logits = reference(torch.tensor([ids])).logits
    expected = logits[0, :-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    torch.testing.assert_close(own, expected, atol=2e-4, rtol=0)
    with LLM(str(tmp_path / "rotary"), kv_cache_memory="16MiB") as llm:
        assert llm.client.tokenize(text, add_special_tokens=False).tokens == tuple(text.encode())
        (answer,) = llm.generate([ids], max_tokens=1, prompt_logprobs=0)
    found = [next(iter(position.values()))["logprob"] for position in answer.choices[0].prompt_logprobs[1:]]
    torch.testing.assert_close(torch.tensor(found), own, atol=2e-4, rtol=0)


# ---- gpu.py --------------------------------------------------------------------------------------------------------------
def test_verdicts(gpu: ModuleType) -> None:
    figure = gpu.Figure
    assert figure("a", 2.0, 1.0, 0.5).verdict == "met" and figure("a", 2.01, 1.0, 0.5).verdict == "missed"
    assert figure("a", 1e-3, wanted=1e-3).verdict == "met" and figure("a", 1.1e-3, wanted=1e-3).verdict == "missed"
    assert figure("a", 3.0).verdict == "" and figure("a", None, wanted=1.0).verdict == "not measured"
    assert figure("a", 2e-3, 1e-3, 0.75).line() == "| a | 2.000 ms | 1.000 ms | 50% | 75% | missed |"
    assert figure("a", 1.019, wanted=1.02, plain=True).line() == "| a | 1.019 |  |  | 1.02 | met |"
    report = gpu.Growing({"agreement": [{"name": "x", "verdict": "missed"}]}, None)
    report.add([figure("y", 2.0, 1.0, 0.5), figure("z", 3.0, 1.0, 0.5)])
    assert report.missed() == ["x", "z"]


@pytest.mark.parametrize("name", ["8b", "30b-a3b"])
def test_bounds_count_the_bytes_of_a_step_and_the_operations_of_a_prompt(
    gpu: ModuleType, name: str, tmp_path: Path
) -> None:
    bounds = gpu.Bounds(torch.device("cpu"), torch.float32, 1.0, 1.0)
    sizes = {"max_model_len": 64, "kv_cache_memory": 1 << 20, "dtype": "float32", "kv_cache_dtype": "float32"}
    streams = gpu.Streams(gpu.write_config(name, tmp_path, tiny=True), bounds, **sizes)
    hidden, layers, heads, kv_heads, dim, vocab = 64, 2, 4, 2, 16, 128
    attention = hidden * dim * (2 * heads + 2 * kv_heads)
    norms = layers * 2 * hidden + hidden + (0 if name == "8b" else layers * 2 * dim)
    router = 0 if name == "8b" else 4 * hidden
    expert = 3 * hidden * (96 if name == "8b" else 32)
    weights = streams.core.runner.decoder.weights()
    width = 2 if name == "8b" and weights["head"].nbytes == 2 * vocab * hidden else 4
    for count, read in ((1, 2), (3, 4 * (1 - 0.5**3))):  # expected number of chosen experts, of four
        experts = expert * (1 if name == "8b" else read)
        matrices = layers * (attention + experts) + vocab * hidden
        cached = count * 10 * layers * kv_heads * 2 * dim * 4
        stored = streams.bytes_of_step(count, 10) - cached
        assert stored == pytest.approx(matrices * width + 4 * (norms + layers * router), rel=2e-3)
    multiplied = layers * (attention + router + expert * (1 if name == "8b" else 2)) + norms
    pairs = layers * heads * dim * 4 * 20 * 21 / 2
    assert streams.operations_of_prompt(20) == 2 * multiplied * 20 + pairs


@pytest.mark.slow
def test_all_parts_run(
    gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    agreed = sys.modules["harness.gpu_agreement"]
    monkeypatch.setattr(agreed, "CASES", [agreed.CASES[0], agreed.CASES[-1]])
    out = tmp_path / "gpu.json"
    given = ["gpu.py", "--device", "cpu", "--tiny", "--shapes", "1b", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", given)
    code, printed, report = gpu.main(), capsys.readouterr().out, json.loads(out.read_text())
    names = [one["name"] for one in report["figures"]]
    for part in (
        "attention of decode",
        "attention of a prompt",
        "1b: 1 stream(s) behind 64",
        "1b: 8 stream(s)",
        "1b: a prompt",
    ):
        assert any(name.startswith(part) for name in names), part
    for part in ("8 scalings mixed", "a shift", "a step beyond its graph", "transformers"):
        assert any(part in name for name in names), part
    assert all(name in printed for name in names)
    assert [one["verdict"] for one in report["agreement"]] == ["met", "met"]
    assert {row["context"] for row in report["growth"]} >= {16, 64, 256} and all(
        r["bound"] > 0 for r in report["growth"]
    )
    missed = [one["name"] for one in report["figures"] if one["verdict"] == "missed"]
    assert code == bool(missed) and printed.rstrip().endswith(f"missed: {'; '.join(missed) or 'nothing'}")
    assert "not measured: " not in printed
    assert "| growth: 4 stream(s) behind 8 tokens, a token |" in printed


def test_unknown_shapes_and_cases_are_refused(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--shapes", "1b,2b"])
    with pytest.raises(SystemExit):
        gpu.main()
    assert "no shape 2b: choose from 1b, 8b, 30b-a3b" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--cases", "longrope"])
    with pytest.raises(SystemExit):
        gpu.main()
    assert "no case of the part agreement has longrope in its name" in capsys.readouterr().err


# ---- real_model.py -------------------------------------------------------------------------------------------------------
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


def test_questions_name_the_positions_of_the_hidden_numbers(real_model: ModuleType, model: Path, texts: Path) -> None:
    module = real_model.passkeys
    tokenizer = Tokenizer.from_directory(model)
    ids, questions = module.hide(tokenizer, (texts / "a.txt").read_text(), 4000, seed=1, every=40)
    assert len(ids) == 4001 and len(questions) > 5
    for question in questions:
        digits = list(question.answer)
        asked, noted = question.position, question.position - question.distance
        assert ids[asked : asked + len(digits)] == digits == ids[noted : noted + len(digits)]
        words = tokenizer.decode(ids[asked - 60 : asked + len(digits)])
        name = words.rsplit("number of ", 1)[1].split(" ")[0]
        assert f"number of {name} is" in tokenizer.decode(ids[noted - 60 : noted])
    assert len({question.answer for question in questions}) == len(questions)


def test_number_is_found_if_every_digit_is_the_likeliest(real_model: ModuleType, model: Path, texts: Path) -> None:
    """Random weights find nothing, so the expected answers are the argmaxes of the logits."""
    module = real_model.passkeys
    scorer = Scorer.load(model, device="cpu")
    ids = Tokenizer.from_directory(model).encode((texts / "a.txt").read_text())[:65]
    scaling = {"rope_type": "linear", "factor": 2.0}
    best = scorer.logits(ids, scorer.plan(64, RopeScaling.from_dict(scaling))).argmax(-1).tolist()
    right = module.Question(20, 5, tuple(best[19:22]))
    wrong = module.Question(40, 5, (best[39], best[40], (best[41] + 1) % 100))
    assert module.ask(scorer, ids, [right, wrong], scaling) == [True, False]


@pytest.mark.slow  # starts five programs that import torch
def test_all_measurements_of_a_model(
    real_model: ModuleType, model: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["x", str(model), "--texts", str(texts), *_folders(tmp_path)])
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    real_model.main()
    page = (tmp_path / "docs" / "real-model.md").read_text()
    report = json.loads((tmp_path / "docs" / "real_model_sweep.json").read_text())
    assert [curve["name"] for curve in report["curves"]][:3] == ["no scaling", "yarn 2", "dynamic 2, frozen"]
    assert page.count("\n## ") == 5 and "| yarn 2 | " in page and "| transformers, cached | " in page
    assert "int8, %" in page and "asked at 48–64" in page
    (tmp_path / "docs" / "real-model.md").unlink()
    monkeypatch.setattr(sys, "argv", ["x", "--page-only", *_folders(tmp_path)])
    real_model.main()
    assert (tmp_path / "docs" / "real-model.md").read_text() == page


def test_page_of_another_author_is_not_overwritten(
    real_model: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    sources = {
        "real-model.md": ROOT / "docs" / "internals" / "evidence.md",
        "real_model_sweep.json": BENCHMARKS / "results" / "real_model_sweep.json",
    }
    before = {name: (docs / name).write_bytes(path.read_bytes()) for name, path in sources.items()}
    for words in (["--page-only"], [str(tmp_path / "model")]):
        monkeypatch.setattr(sys, "argv", ["x", *words, *_folders(tmp_path)])
        with pytest.raises(SystemExit):
            real_model.main()
        assert "real-model.md was not written by this program" in capsys.readouterr().err
    assert {path.name: path.stat().st_size for path in docs.iterdir()} == before
    monkeypatch.chdir(tmp_path)  # the default output folder is not docs/
    monkeypatch.setattr(sys, "argv", ["x", "--page-only"])
    with pytest.raises(SystemExit, match="no numbers in work/real/docs"):
        real_model.main()


def _folders(tmp_path: Path) -> list[str]:
    return ["--work", str(tmp_path / "work"), "--docs", str(tmp_path / "docs")]


def test_facts_and_perplexity_continue_from_stored_results(
    real_model: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    evidence = real_model.scaling_evidence
    demo, yarn = ROOT / "models" / "demo", {"rope_type": "yarn", "factor": 8}
    monkeypatch.setattr(evidence, "SCALINGS", {3072: (yarn,)})
    monkeypatch.setattr(evidence, "PASSES", ((evidence.NONE, 64), (yarn, 64)))
    monkeypatch.setattr(evidence, "BUCKET", 32)
    prose, code = tmp_path / "own.txt", tmp_path / "own.py"
    prose.write_text("The ship left the harbor before the sun was up. " * 400)
    code.write_text("def ship(sea):\n    return sea + 1\n\n\n" * 400)
    arguments = [str(demo), "--text", str(prose), "--text", str(code), "--out", str(tmp_path)]

    def results() -> dict[str, str]:
        for name in ("facts", "perplexity"):
            more = ["--work", str(tmp_path / "work")] if name == "facts" else []
            monkeypatch.setattr(sys, "argv", [name, *arguments, *more])
            getattr(evidence, name)()
        return {path.name: path.read_text() for path in tmp_path.glob("scaling_*.json*")}

    first = results()
    facts = json.loads(first["scaling_facts.json"])
    (length,) = facts["lengths"]
    assert [candidate["name"] for candidate in length["candidates"]] == ["no scaling", "yarn 8"]
    assert length["auto"] == "yarn 8.0" and [d["kind"] for d in length["answers"]] == ["prose", "code"]
    passes = json.loads(first["scaling_perplexity.json"])["passes"]
    model = Scorer.load(demo)
    ids = Tokenizer.from_directory(demo).encode(prose.read_text())[:64]
    losses = -model.logprobs(ids, model.plan(64, RopeScaling())).double()
    expected = [losses[:32].mean().item(), losses[32:].mean().item()]
    assert passes[0]["scaling"] == "none" and passes[0]["nats"] == pytest.approx(expected, abs=1e-5)
    monkeypatch.setattr(Scorer, "logprobs", None)  # everything is stored
    monkeypatch.setattr(evidence, "run_tasks", None)
    assert results() == first
    monkeypatch.setattr(sys, "argv", ["draw", "--out", str(tmp_path)])
    evidence.draw()
    assert (tmp_path / "scaling_evidence.png").stat().st_size > 10_000
