"""`windlass rope inspect`: values against formulas, pictures and errors."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from windlass.server.cli import main as cli
from windlass.server.cli import rope

YARN = '{"rope_type": "yarn", "factor": 4}'


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A config.json only, which suffices."""
    directory = tmp_path / "toy"
    directory.mkdir()
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "head_dim": 16,
        "rope_theta": 5000.0,
        "max_position_embeddings": 100,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def inspect_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert cli.run(["rope", "inspect", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def plain(theta: float = 5000.0) -> list[float]:
    return [theta ** (-2 * j / 16) for j in range(8)]


def test_linear_scaling_and_the_models_own(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = inspect_json(capsys, '{"rope_type": "linear", "factor": 4}', "--model", str(model))
    assert found["inv_freq"] == pytest.approx([w / 4 for w in plain()], rel=1e-12)
    assert found["wavelengths"] == pytest.approx([2 * math.pi * 4 / w for w in plain()], rel=1e-12)
    assert found["model"]["inv_freq"] == pytest.approx(plain(), rel=1e-12)
    assert found["changed_pairs"] == 8 and found["attention_factor"] == 1.0
    assert found["effective_length"] is None and found["length"] == 100


def test_dynamic_follows_the_length(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scaling = '{"rope_type": "dynamic", "factor": 2}'
    found = inspect_json(capsys, scaling, "--model", str(model), "--length", "150")
    effective = 100 * 2**0.75  # 168.2, the first grid point from 150 on
    assert found["effective_length"] == pytest.approx(effective) and found["last_length"] == 168
    assert found["inv_freq"] == pytest.approx(plain(5000 * (2 * effective / 100 - 1) ** (16 / 14)), rel=1e-12)
    assert found["changed_pairs"] == 7
    short = inspect_json(capsys, scaling, "--model", str(model))
    assert short["changed_pairs"] == 0 and short["inv_freq"] == pytest.approx(plain(), rel=1e-12)


def test_null_is_the_scaling_of_the_model(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = inspect_json(capsys, "null", "--model", str(model))
    assert found["changed_pairs"] == 0 and found["fingerprint"] == found["model"]["fingerprint"]


@pytest.mark.slow
def test_table_and_picture(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    png = tmp_path / "yarn.png"
    assert cli.run(["rope", "inspect", YARN, "--model", str(model), "--png", str(png)]) == 0
    shown = capsys.readouterr().out
    factor = 0.1 * math.log(4) + 1
    assert f"attention factor {factor:.6g}" in shown
    assert f"{2 * math.pi / plain()[0]:.1f}" in shown and f"{2 * math.pi * 4 / plain()[7]:,.1f}" in shown
    assert sum(line.startswith("│") for line in shown.splitlines()) == 8
    import matplotlib.image

    picture = matplotlib.image.imread(png)
    assert picture.shape[0] > 300 and picture.shape[1] > 800 and picture[..., :3].std() > 0.02


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("kind", ["linear", "yarn", "proportional"])
def test_overflowing_wavelength_is_none(
    kind: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scaling = json.dumps({"rope_type": kind, "factor": 1e308})
    found = inspect_json(capsys, scaling, "--model", str(model))
    assert found["wavelengths"][-1] is None and found["inv_freq"][-1] > 0
    assert cli.run(["rope", "inspect", scaling, "--model", str(model), "--png", str(tmp_path / "x.png")]) == 0
    assert "never turns" in capsys.readouterr().out and (tmp_path / "x.png").stat().st_size


def test_default_model_is_that_of_other_commands(
    model: Path, error_of: Callable[..., str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    requested = []
    monkeypatch.setattr(rope, "choose_model", lambda given: (requested.append(given) or "first", model))
    assert inspect_json(capsys, YARN)["trained_length"] == 100
    assert cli.run(["rope", "inspect", YARN]) == 0 and capsys.readouterr().out.startswith("first, full_attention: yarn")
    assert requested == [None, None]
    assert "rope_scaling.factor" in error_of("inspect", '{"rope_type": "yarn", "factor": 0}') and len(requested) == 2


def test_short_form_equals_its_object(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = json.dumps({"rope_type": "yarn", "factor": 8, "beta_fast": 16})
    expected = inspect_json(capsys, written, "--model", str(model))
    assert inspect_json(capsys, "yarn 8 beta_fast=16", "--model", str(model)) == expected


def test_known_model_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect_json(capsys, YARN, "--model", "demo")["trained_length"] == 512


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{"], "not valid JSON"),
        (['{"rope_type": "yarn", "factor": 0}'], "rope_scaling.factor"),
        (['{"rope_type": "spiral"}'], "yarn"),
        (["[1]"], "must be an object"),
        (["yarn x"], "rope_scaling.factor must be a number, got 'x'"),
        ([YARN, "--length", "0"], "--length must be between 1 and 2147483647, got 0"),
        ([YARN, "--length", "2147483648"], "--length must be between 1 and 2147483647, got 2147483648"),
        ([YARN, "--length", "9" * 400], "got a huge integer"),
        ([YARN, "--length", "9" * 9000], "--length"),
        ([YARN, "--png", "{missing}/x.png"], "cannot write --png"),
        ([YARN, "--png", "{missing}/../"], "is a directory"),
        ([YARN, "--model", "{missing}"], "is neither a file or directory nor a hub id"),
    ],
)
def test_errors_are_one_line(
    arguments: list[str], words: str, model: Path, tmp_path: Path, error_of: Callable[..., str]
) -> None:
    missing = str(tmp_path / "missing--here")
    given = ["inspect", "--model", str(model), *(a.replace("{missing}", missing) for a in arguments)]
    assert words in error_of(*given)


def test_invalid_config_json(model: Path, error_of: Callable[..., str]) -> None:
    (model / "config.json").write_text("{oops")
    assert "not valid JSON" in error_of("inspect", YARN, "--model", str(model))


def test_pictures_without_matplotlib_name_the_package_to_install(
    model: Path, error_of: Callable[..., str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else find(name, *rest)
    )
    advice = ".venv/bin/pip install -c constraints.txt -e '.[plots]'"
    assert advice in error_of("inspect", YARN, "--model", str(model), "--png", "x.png")
    assert advice in error_of("sweep", "--text", "x.txt", "--out", "x.html")
    assert inspect_json(capsys, YARN, "--model", str(model))["rope_type"] == "yarn"


def test_inspect_imports_neither_torch_nor_matplotlib(model: Path) -> None:
    code = (
        "import sys; from windlass.server.cli import main as cli; "
        f"assert cli.run(['rope', 'inspect', {YARN!r}, '--model', {str(model)!r}, '--json']) == 0; "
        "assert not {'torch', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
