"""The other benchmark scripts: all start, and short runs on tiny models."""

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
from transformers import LlamaForCausalLM

from windlass import LLM

BENCHMARKS = ROOT / "benchmarks"
TINY = {
    "moe": {"layers": 2, "hidden": 64, "width": 32, "experts": 8, "vocab": 96},
    "mla": {"layers": 2, "hidden": 1024, "width": 32, "rank": 32, "vocab": 96},
}


@pytest.fixture(autouse=True)
def search_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.mark.parametrize("script", sorted(BENCHMARKS.glob("*.py")), ids=lambda path: path.stem)
def test_a_script_describes_its_options(script: Path) -> None:
    done = subprocess.run([sys.executable, str(script), "--help"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.startswith(f"usage: {script.name}"), done.stderr


def test_a_decode_step_is_split_into_kernels_and_overhead() -> None:
    overhead = importlib.import_module("step_overhead")
    core = overhead.build(str(ROOT / "models" / "demo"), 8, 16, temperature=0.0, top_p=1.0, seed=0)
    for _ in range(10):  # the scheduler learns the duration of a step
        core.step()
    assert overhead.measure(core, overhead.Clock(), {}, 4, 8)["whole step"]["min_us"] > 0


@pytest.fixture
def experts() -> ModuleType:
    return importlib.import_module("experts_and_latent")


def test_the_bound_counts_the_bytes_that_a_token_reads(experts: ModuleType) -> None:
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


def test_the_output_of_llama_bench_is_parsed(
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
def test_the_trained_checkpoint_is_the_same_model_in_transformers_and_windlass(tmp_path: Path) -> None:
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
