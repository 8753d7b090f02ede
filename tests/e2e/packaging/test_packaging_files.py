"""Dockerfile, docker-compose.yml, .dockerignore and requirements.lock."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]
TOOLS = Path(sys.executable).parent
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")


def run_tool(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    if not (TOOLS / name).exists():
        pytest.skip("needs the extra e2e: pip install -e '.[e2e]'")
    return subprocess.run([TOOLS / name, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def test_hadolint_accepts_the_dockerfile():
    result = run_tool("hadolint", "--no-color", "Dockerfile")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("schema", "file"),
    [("compose-spec", "docker-compose.yml"), ("github-workflows", ".github/workflows/ci.yml")],
)
def test_configuration_files_follow_their_schemas(schema, file):
    result = run_tool("check-jsonschema", "--builtin-schema", f"vendor.{schema}", file)
    assert result.returncode == 0, result.stdout + result.stderr


def test_extras_of_tests_are_separate():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    dev, e2e = ({Requirement(text).name for text in extras[name]} for name in ("dev", "e2e"))
    assert {"pytest", "ruff", "mypy", "import-linter"} <= dev
    assert {"playwright", "schemathesis", "kubernetes-validate", "promql-parser"} <= e2e and not dev & e2e


def copied_instructions() -> list[list[str]]:
    """Sources and, last, target of every COPY from the build context."""
    return [line.split() for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE)]


def copied_paths() -> list[str]:
    return [source for *sources, _ in copied_instructions() for source in sources]


def test_copied_files_exist_and_are_in_the_build_context():
    copied = copied_paths()
    assert "models/demo" in copied and "constraints.txt" in copied
    for path in copied:
        assert (ROOT / path).exists(), path
        assert not ignored(path), f"{path} is ignored"
    assert ignored("tests/conftest.py") and ignored(".env") and ignored("kernels/cpu/_windlass_cpu.so")


def ignored(path: str) -> bool:
    """Whether .dockerignore excludes a file: its last pattern that matches the file or a folder above it decides."""
    excluded = False
    parents = [path, *map(str, Path(path).parents)]
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            pattern = line.removeprefix("!").removeprefix("**/")
            names = [Path(parent).name for parent in parents] if "**/" in line else parents
            if any(fnmatch.fnmatchcase(name, pattern) for name in names):
                excluded = not line.startswith("!")
    return excluded


@pytest.fixture(scope="module")
def image_sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder /source of the build stage: the files that COPY instructions copy from a clone."""
    folder = tmp_path_factory.mktemp("source")
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    files = [name for name in listed.stdout.splitlines() if (ROOT / name).exists() and not ignored(name)]
    for *sources, target in copied_instructions():
        for source in sources:
            for name in files:
                if Path(name).is_relative_to(source):
                    # COPY takes the content of a folder, and a file under its own name into a folder.
                    file = Path(target, Path(name).relative_to(source) if (ROOT / source).is_dir() else Path(name).name)
                    (folder / file).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(ROOT / name, folder / file, follow_symlinks=False)
    return folder


def test_image_has_every_file_of_the_packages(image_sources):
    def files(root: Path) -> set[str]:
        package = root / "src" / "windlass"
        found = (Path(folder, name) for folder, _, names in os.walk(package, followlinks=True) for name in names)
        paths = {str(path.relative_to(package)) for path in found if path.is_file()}
        return {path for path in paths if "__pycache__" not in path and ".egg-info" not in path and path[-3:] != ".so"}

    assert files(image_sources) == files(ROOT) and len(files(ROOT)) > 300


def test_image_has_all_files_that_a_build_reads(image_sources):
    """pip builds both distributions in it: the server's at its root, the client's in clients/."""
    for folder in (image_sources, image_sources / "clients"):
        printed = subprocess.run(
            [sys.executable, "-P", "setup.py", "--quiet", "--name", "--license"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert printed.returncode == 0, printed.stderr
        project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        assert project["name"] in printed.stdout
        wanted = [*project["license-files"], *([project["readme"]] if "readme" in project else [])]
        assert all((folder / name).is_file() for name in wanted), wanted


def test_kernels_for_all_processors_are_compiled_before_the_sources_are_copied(image_sources):
    """An image runs on another processor than that of its build, and a change of other files compiles nothing again."""
    build = DOCKERFILE.split("\nFROM ")[1]
    compiling = build.index("\nRUN python kernels/cpu/build.py\n") + 1
    assert "\nENV WINDLASS_ISAS=all\n" in build[:compiling]
    before = re.findall(r"^COPY (.+)$", build[:compiling], re.MULTILINE)
    assert before == [
        "constraints.txt ./",
        "kernels/cpu/build.py kernels/cpu/",
        "kernels/cpu/src kernels/cpu/src",
    ]
    assert build.index("\nCOPY server server\n") > compiling
    # The installation compiles again unless it finds the sources unchanged and all sets in the library.
    kernels = runpy.run_path(str(image_sources / "kernels" / "cpu" / "build.py"))
    assert kernels["fingerprint"]() == runpy.run_path(str(ROOT / "kernels" / "cpu" / "build.py"))["fingerprint"]() != ""


def torch_install(device: str) -> subprocess.CompletedProcess[str]:
    """Run the instruction that installs torch, with a `pip` that prints its arguments."""
    found = re.findall(r"^RUN (case (?:\\\n|[^\n])+)$", DOCKERFILE, re.MULTILINE)
    assert len(found) == 1
    script = f'pip() {{ echo pip "$@"; }}\n{found[0]}'
    indexes = dict(re.findall(r"^ARG (\w+_INDEX_URL)=(.+)$", DOCKERFILE, re.MULTILINE))
    return subprocess.run(
        ["sh", "-c", script], env={"DEVICE": device, **indexes}, capture_output=True, text=True, check=False
    )


def test_torch_is_pinned_and_installed_from_the_index_of_its_device():
    common = "pip install --no-cache-dir --constraint constraints.txt"
    cpu = "--index-url https://download.pytorch.org/whl/cpu --extra-index-url https://pypi.org/simple"
    assert torch_install("cpu").stdout == f"{common} {cpu} torch\n"
    # pip's own index is PIP_INDEX_URL, whose wheels of torch for Linux are the CUDA ones.
    assert torch_install("cuda").stdout == f"{common} torch\n"
    assert "\nARG PIP_INDEX_URL=https://pypi.org/simple\n" in DOCKERFILE
    wrong = torch_install("gpu")
    assert wrong.returncode == 1 and wrong.stderr == "error: DEVICE must be cpu or cuda, got 'gpu'\n"
    assert (
        DOCKERFILE.count("pip install")
        == DOCKERFILE.count("pip install --no-cache-dir --constraint constraints.txt")
        == 2
    )
    assert re.search(r"^torch==\d+\.\d+\.\d+$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)


def test_build_argument_selects_torch_and_the_device():
    before, build, final = DOCKERFILE.split("\nFROM ")
    assert re.findall(r"^ARG .+$", before, re.MULTILINE) == ["ARG DEVICE=cpu"]
    # An argument from before the first stage must be declared again in each stage.
    assert build.index("\nARG DEVICE\n") < build.index("RUN case")
    assert "\nARG DEVICE\n" in final and "WINDLASS_DEVICE=$DEVICE " in final


def test_image_runs_unprivileged_and_the_server_receives_signals():
    final_stage = DOCKERFILE.split("\nFROM ")[-1]
    assert re.findall(r"^USER (.+)$", final_stage, re.MULTILINE) == ["10001"]
    assert json.loads(re.search(r"^ENTRYPOINT (.+)$", final_stage, re.MULTILINE)[1]) == ["windlass"]
    assert "WINDLASS_HOST=0.0.0.0" in final_stage


@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False)])
def test_health_check_reports_the_status_of_the_server(status, healthy):
    command = json.loads(re.search(r"^HEALTHCHECK (?:.|\\\n)+?CMD (\[.+\])$", DOCKERFILE, re.MULTILINE)[1])
    assert command[:2] == ["python", "-c"]
    requested = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            requested.append(self.path)
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *arguments):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        environment = {"WINDLASS_PORT": str(server.server_port)}
        result = subprocess.run([sys.executable, *command[1:]], env=environment, capture_output=True, check=False)
        server.shutdown()
        thread.join()
    assert requested == ["/health"]
    assert (result.returncode == 0) is healthy


def services() -> dict[str, dict]:
    return yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"]


@pytest.mark.parametrize("name", ["windlass", "windlass-cuda", "loadtest"])
def test_services_have_few_privileges_and_bounded_resources(name):
    service = services()[name]
    assert service["read_only"] is True and service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]  # and Docker's own seccomp profile
    assert service["pids_limit"] > 0 and any(mount.startswith("/tmp:") for mount in service["tmpfs"])
    # Written files are on a volume.
    written = re.findall(r"(?:HF_HOME|WINDLASS_CACHE|TRITON_CACHE_DIR)=(\S+)", DOCKERFILE)
    mounted = [volume.split(":")[1] for volume in services()["windlass"]["volumes"]]
    assert len(written) == 3 and all(any(path.startswith(place) for place in mounted) for path in written)
    if name != "loadtest":
        assert service["ulimits"]["core"] == 0 and "mem_limit" in service and "cpus" in service


def locked() -> dict[str, tuple[str, list[str]]]:
    """Versions and hashes of requirements.lock, by name."""
    text = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    found = {}
    for entry in re.sub(r"\\\n\s+", " ", text).splitlines():
        if entry and not entry.startswith("#"):
            name, version, rest = re.match(r"([\w.-]+)==([^ ;]+)(.*)", entry).groups()
            found[canonicalize_name(name)] = version, re.findall(r"--hash=sha256:([0-9a-f]{64})", rest)
    return found


def test_lock_has_one_version_of_every_requirement_with_hashes():
    maker = runpy.run_path(str(ROOT / "deploy" / "make_lock.py"))
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    found = locked()
    assert len(found) > 40 and all(hashes for _, hashes in found.values())
    for text in maker["wanted"]():
        wanted = Requirement(text)
        version, _ = found[canonicalize_name(wanted.name)]
        assert wanted.specifier.contains(version), text
    assert {name: found[name][0] for name in pins} == pins
    assert not {"windlass-llm", "windlass-client"} & set(found)


def test_wheels_are_built_for_every_supported_python_and_use_the_libgomp_of_torch():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wheels, supported = settings["tool"]["cibuildwheel"], SpecifierSet(settings["project"]["requires-python"])
    built = {re.fullmatch(r"cp3(\d+)-manylinux_\*", name)[1] for name in wheels["build"]}
    assert built == {str(minor) for minor in range(8, 20) if f"3.{minor}.5" in supported}
    assert wheels["linux"]["archs"] == ["x86_64", "aarch64"]
    assert "--exclude libgomp.so.1" in wheels["linux"]["repair-wheel-command"]
