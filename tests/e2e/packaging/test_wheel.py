"""Wheels of the server and of the client: their files, their requirements, a server that runs from both, and the client alone."""

from __future__ import annotations

import email
import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_helpers.builds import ROOT, build, copy_clone
from helpers.real_server import RealServer, serve
from packaging.requirements import Requirement

from windlass import __version__

pytestmark = pytest.mark.slow  # builds wheels and installs into an environment


@pytest.fixture(scope="module", autouse=True)
def host_kernels() -> Iterator[None]:
    """Wheels with the compiled kernels of this checkout. Compiling all instruction sets would take minutes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WINDLASS_ISAS", "host")
        yield


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_clone(tmp_path_factory.mktemp("clone"))


@pytest.fixture(scope="module")
def client(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(clone / "clients", "wheel", tmp_path_factory.mktemp("client"))


@pytest.fixture(scope="module")
def server(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel for publication."""
    return build(clone, "wheel", tmp_path_factory.mktemp("server"), WINDLASS_RELEASE="1")


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def metadata_of(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name))


def requirement_of_the_client(metadata: email.message.Message) -> str:
    (found,) = [text for text in metadata.get_all("Requires-Dist", []) if text.startswith("windlass")]
    return found


def test_wheel_of_the_client_has_the_files_of_its_folder(clone: Path, client: Path) -> None:
    folder = clone / "clients"
    wanted = {
        str(path.relative_to(folder)) for pattern in ("*.py", "*.j2", "assets/*") for path in folder.rglob(pattern)
    }
    wanted = {name for name in wanted if "build" not in Path(name).parts} - {"setup.py"} | {"py.typed"}
    assert len(wanted) > 30
    # No windlass/__init__.py: windlass is a namespace until the server is installed.
    assert names_in(client) == {f"windlass/clients/{name}" for name in wanted}
    assert metadata_of(client)["Name"] == "windlass-client" and metadata_of(client)["Version"] == __version__
    # The build leaves no files in the source folder.
    assert not (folder / "build").exists()


def test_both_wheels_serve_the_bundled_model(clone: Path, server: Path, client: Path, tmp_path: Path) -> None:
    names = names_in(server)
    for package in (
        "__init__.py",
        "_version.py",
        "server/application.py",
        "engine/core/engine_core.py",
        "kernels/torch/reference.py",
    ):
        assert f"windlass/{package}" in names
    page = clone / "server" / "app" / "ui"
    files = {f"windlass/server/app/ui/{path.relative_to(page)}" for path in page.rglob("*") if path.is_file()}
    assert files - {name for name in files if "__pycache__" in name} <= names and len(files) > 20
    assert not names & names_in(client) and not any(name.startswith("windlass/clients") for name in names)
    assert "windlass/py.typed" in names and "windlass/models/demo/model.safetensors" in names
    assert not [name for name in names if name.startswith("windlass/models/") and name.endswith(".py")]
    assert shutil.which("g++") is None or any(name.endswith(".so") for name in names)
    for wheel in (server, client):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(tmp_path)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) < 40 << 20
    code = "import windlass, sys; from windlass.server.cli.main import main; print(windlass.__file__, file=sys.stderr); main()"
    run = subprocess.run(
        [sys.executable, "-c", code, "generate", "The", "--model", "demo", "--max-tokens", "3", "--temperature", "0"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert str(tmp_path) in run.stderr and len(run.stdout) > 3


def planned_by_pip(folder: Path, *arguments: str | Path) -> dict[str, str]:
    """URLs of what pip would install, by name. Other requirements are installed, and no index is used."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "--no-build-isolation", "--quiet"]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PIP_FIND_LINKS")}
    planned = subprocess.run(
        [*command, "--report", "-", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert planned.returncode == 0, planned.stderr
    found = json.loads(planned.stdout)["install"]
    return {item["metadata"]["name"]: item["download_info"]["url"] for item in found}


def write_empty_wheels(metadata: email.message.Message, folder: Path) -> None:
    """Write an empty wheel of each external requirement, in its lowest accepted version."""
    for text in metadata.get_all("Requires-Dist", []):
        wanted = Requirement(text)
        if wanted.name.startswith("windlass") or wanted.marker is not None:
            continue
        versions = [part.version for part in wanted.specifier if part.operator in (">=", "==")]
        name, version = wanted.name.replace("-", "_"), versions[0]
        with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
            inside = f"{name}-{version}.dist-info"
            archive.writestr(f"{inside}/METADATA", f"Metadata-Version: 2.1\nName: {wanted.name}\nVersion: {version}\n")
            archive.writestr(f"{inside}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{inside}/RECORD", "")


def test_published_wheels_are_installed_together(server: Path, client: Path, tmp_path: Path) -> None:
    metadata = metadata_of(server)
    assert metadata["Name"] == "windlass-llm" and metadata["Version"] == __version__
    assert requirement_of_the_client(metadata) == f"windlass-client=={__version__}"
    for wheel in (server, client):
        write_empty_wheels(metadata_of(wheel), tmp_path)
    # As in an empty environment.
    planned = planned_by_pip(tmp_path, "--ignore-installed", "--find-links", tmp_path, server, client)
    assert planned["windlass-llm"] == server.as_uri() and planned["windlass-client"] == client.as_uri()
    assert len(planned) > 15


@pytest.mark.parametrize("arguments", [["."], ["-e", "."]], ids=["install", "editable"])
def test_pip_installs_a_clone_with_the_client_of_its_folder(clone: Path, arguments: list[str]) -> None:
    planned = planned_by_pip(clone, *arguments)
    assert set(planned) == {"windlass-llm", "windlass-client"}
    assert planned["windlass-client"] == (clone / "clients").as_uri()


def test_source_archive_requires_the_client_by_version(clone: Path, tmp_path: Path) -> None:
    archive = build(clone, "sdist", tmp_path / "sdist")
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path, filter="data")
    source = tmp_path / archive.name.removesuffix(".tar.gz")
    assert not (source / "clients").exists() and not list(source.glob("src/windlass/clients*"))
    code = (
        "import sys; from setuptools import build_meta; print(build_meta.prepare_metadata_for_build_wheel(sys.argv[1]))"
    )
    made = subprocess.run(
        [sys.executable, "-c", code, tmp_path], cwd=source, capture_output=True, text=True, timeout=60
    )
    assert made.returncode == 0, made.stderr
    (metadata,) = tmp_path.glob("*.dist-info/METADATA")
    assert (
        requirement_of_the_client(email.message_from_bytes(metadata.read_bytes())) == f"windlass-client=={__version__}"
    )


# ---- the client alone ----------------------------------------------------------------------------------------------------
LARGEST_MB = 200


@pytest.fixture(scope="module")
def alone(client: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment with the client's wheel and its requirements, without server and torch."""
    folder = tmp_path_factory.mktemp("alone")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "env")], check=True)
    command = [sys.executable, "-m", "pip", "--python", str(folder / "env" / "bin" / "python"), "install", "--retries"]
    command += ["1", "--quiet", "--disable-pip-version-check", "-c", str(ROOT / "constraints.txt"), str(client)]
    installed = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=240)
    if installed.returncode != 0 and "after connection broken by" in installed.stderr:
        pytest.skip("no package index can be reached from here")
    assert installed.returncode == 0, installed.stderr
    return folder / "env" / "bin"


@pytest.fixture(scope="module")
def running() -> Iterator[RealServer]:
    with serve("--kv-cache-memory", "64MiB") as server:
        yield server


def environment() -> dict[str, str]:
    """The environment without this checkout and without settings of Windlass."""
    return {k: v for k, v in os.environ.items() if k != "PYTHONPATH" and not k.startswith(("WINDLASS_", "OPENAI_"))}


def run(*command: object, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command outside the checkout, whose packages would be found first."""
    arguments = [str(word) for word in command]
    return subprocess.run(arguments, cwd=folder, env=environment(), capture_output=True, text=True, timeout=120)


def test_environment_is_small_and_has_no_server(alone: Path, tmp_path: Path) -> None:
    code = """
import importlib.util, json, windlass, windlass.clients
heavy = ("torch", "fastapi", "uvicorn", "tokenizers", "safetensors")
heavy += ("windlass.server", "windlass.engine", "windlass.kernels", "windlass.lab")
print(json.dumps([windlass.__file__, [name for name in heavy if importlib.util.find_spec(name)]]))
"""
    result = run(alone / "python", "-c", code, folder=tmp_path)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == [None, []]  # a namespace has no file
    size = sum(path.stat().st_size for path in alone.parent.rglob("*") if path.is_file() and not path.is_symlink())
    assert size < LARGEST_MB * 1_000_000


def test_client_works_alone(alone: Path, running: RealServer, tmp_path: Path) -> None:
    code = """
import asyncio, sys
from windlass.clients import AsyncClient, BadRequestError, Client, RopeScaling

url = sys.argv[1]
with Client(base_url=url) as client:
    answer = client.completions("The king", max_tokens=8, temperature=0, rope_scaling=RopeScaling.yarn(factor=2))
    assert answer.usage.completion_tokens == 8 and answer.rotary.rope_type == "yarn"
    with client.completions("The king", max_tokens=8, temperature=0, stream=True) as stream:
        text = "".join(chunk.text for chunk in stream)
    try:
        client.completions("The king", temperature=-1)
    except BadRequestError as error:
        assert error.param == "temperature"
    assert client.metrics().value("windlass_request_success_total") >= 2

async def complete():
    async with AsyncClient(base_url=url) as client:
        return (await client.completions("The king", max_tokens=8, temperature=0)).text

assert asyncio.run(complete()) == text != ""
"""
    result = run(alone / "python", "-c", code, running.url, folder=tmp_path)
    assert result.returncode == 0, result.stderr


def test_load_tester_works_alone(alone: Path, running: RealServer, tmp_path: Path) -> None:
    program = alone / "windlass-bench"
    load = ["--url", running.url, "--input-len", 16, "--output-len", 4, "--num-prompts", 40, "--concurrency", 4]
    for name in ("a", "b"):
        result = run(program, "serve", *load, "--json", f"{name}.json", "--html", f"{name}.html", folder=tmp_path)
        assert result.returncode == 0 and "40 completed, 0 failed" in result.stdout, result.stderr
        assert (tmp_path / f"{name}.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    compared = run(program, "compare", "a.json", "b.json", folder=tmp_path)
    assert compared.returncode == 0 and "B is" in compared.stdout, compared.stderr
    assert run(program, "report", "a.json", "b.json", "--html", "both.html", folder=tmp_path).returncode == 0
    wrong = run(program, "serve", "--url", running.url, "--num-prompt", 3, folder=tmp_path)
    assert wrong.returncode == 2 and wrong.stderr.count("\n") == 1 and "--num-prompts" in wrong.stderr
