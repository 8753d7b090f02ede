"""Finding models: directories, the Hugging Face cache as huggingface_hub itself sees it, and failures in one line."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import httpx
import huggingface_hub
import pytest
from helpers.eventually import in_time
from huggingface_hub.errors import GatedRepoError

from windlass.engine.errors import LoadError
from windlass.server.startup import model_files

COMMIT = "0123456789abcdef0123456789abcdef01234567"
VARIABLES = (
    "HF_HOME",
    "HF_HUB_CACHE",
    "HUGGINGFACE_HUB_CACHE",
    "XDG_CACHE_HOME",
    "HF_HUB_OFFLINE",
    "TRANSFORMERS_OFFLINE",
)


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.chdir(tmp_path)
    return tmp_path


def cache_model(
    cache: Path, repo: str, *, ref: str = "main", files: tuple[str, ...] = ("config.json", "model.safetensors")
) -> Path:
    storage = cache / ("models--" + repo.replace("/", "--"))
    snapshot = storage / "snapshots" / COMMIT
    (storage / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (storage / "refs" / ref).parent.mkdir(parents=True, exist_ok=True)
    (storage / "refs" / ref).write_text(COMMIT)
    for number, name in enumerate(files):
        blob = storage / "blobs" / f"{number:040x}"
        blob.write_text("{}")
        (snapshot / name).symlink_to(blob)
    return snapshot


def one_line(name: str | None) -> str:
    with pytest.raises(LoadError) as caught:
        model_files.resolve_model(name)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_directories(home):
    model = home / "model"
    model.mkdir()
    assert "no config.json" in one_line(str(model))
    (model / "config.json").write_text("{}")
    assert model_files.resolve_model(str(model)) == model
    assert model_files.resolve_model("model") == model
    assert "is a file" in one_line(str(model / "config.json"))


def test_a_directory_wins_over_a_hub_id(home):
    cache_model(home / "hf" / "hub", "org/name")
    local = home / "org" / "name"
    local.mkdir(parents=True)
    (local / "config.json").write_text("{}")
    assert model_files.resolve_model("org/name") == local


@pytest.mark.parametrize(
    ("variable", "where"),
    [("HF_HOME", "hub"), ("HF_HUB_CACHE", "."), ("HUGGINGFACE_HUB_CACHE", "."), ("XDG_CACHE_HOME", "huggingface/hub")],
)
def test_cache_locations(home, monkeypatch, variable, where):
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv("HOME", str(home / "nobody"))
    monkeypatch.setenv(variable, str(home / "place"))
    snapshot = cache_model(home / "place" / where, "org/name")
    assert model_files.resolve_model("org/name") == snapshot


def test_cache_agrees_with_huggingface_hub(home):
    cache = home / "hf" / "hub"
    snapshot = cache_model(cache, "org/name", ref="refs/pr/7")
    for revision in ("refs/pr/7", COMMIT):
        theirs = huggingface_hub.snapshot_download(
            "org/name", revision=revision, cache_dir=cache, local_files_only=True
        )
        assert model_files.resolve_model(f"org/name@{revision}") == Path(theirs) == snapshot
    assert "org/name@other" in one_line("org/name@other")
    single = cache_model(cache, "gpt2")
    assert model_files.resolve_model("gpt2") == single


def test_an_interrupted_download_is_not_used(home):
    cache = home / "hf" / "hub"
    cache_model(cache, "org/weightless", files=("config.json",))
    assert model_files.find_cached("org/weightless") is None
    snapshot = cache_model(
        cache, "org/sharded", files=("config.json", "a-1.safetensors", "model.safetensors.index.json")
    )
    index = snapshot / "model.safetensors.index.json"
    index.unlink()
    index.write_text('{"weight_map": {"x": "a-1.safetensors", "y": "a-2.safetensors"}}')
    assert model_files.find_cached("org/sharded") is None
    (snapshot / "a-2.safetensors").write_text("")
    assert model_files.find_cached("org/sharded") == snapshot


def test_a_download_killed_before_its_index_came_is_not_used(home):
    parts = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    snapshot = cache_model(home / "hf" / "hub", "org/killed", files=("config.json", *parts[:2]))
    assert model_files.find_cached("org/killed") is None and not list(model_files.cached_repositories())
    (snapshot / parts[2]).write_text("")
    assert model_files.find_cached("org/killed") == snapshot
    (snapshot / parts[0]).unlink()
    (snapshot / "model.safetensors").write_text("")  # whole by itself: the parts are not read
    assert model_files.find_cached("org/killed") == snapshot


@pytest.mark.parametrize(
    "name",
    [
        "../secret",
        "/does/not/exist",
        "a/b/c",
        "org/../x",
        "",
        "org/name@../../x",
        "-x",
        "a b",
        "x\n",
        "a/b:",
        "a/b:../x",
        "a:b:c",
    ],
)
def test_neither_path_nor_id(home, name):
    message = one_line(name)
    assert "nor a hub id" in message or "no config.json" in message


def test_offline_fails_quickly_and_lists_what_was_tried(home, monkeypatch):
    def seconds() -> float:
        begin = time.monotonic()
        message = one_line("org/name")
        took = time.monotonic() - begin
        assert "org/name" in message and str(home / "hf" / "hub") in message and "cannot be reached" in message
        return took

    in_time(seconds, 3)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE" in one_line("org/name")


def test_without_huggingface_hub(home, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert ".venv/bin/pip install -c constraints.txt -e '.[hub]'" in one_line("org/name")
    snapshot = cache_model(home / "hf" / "hub", "org/name")
    assert model_files.resolve_model("org/name") == snapshot


def test_download(home, monkeypatch):
    monkeypatch.setattr(httpx, "head", lambda *args, **options: None)
    target = home / "snapshot"
    target.mkdir()
    asked = {}

    def download(repo, **options):
        asked.update(options, repo=repo)
        return str(target)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda repo, revision: ["config.json", "README.md"])
    assert "no config.json" in one_line("org/name")
    (target / "config.json").write_text("{}")
    assert model_files.resolve_model("org/name@v2") == target
    assert asked["repo"] == "org/name" and asked["revision"] == "v2"
    assert not any(
        pattern.endswith((".bin", ".pth", ".py", "*")) and pattern != "tokenizer*"
        for pattern in asked["allow_patterns"]
    )


def test_config_without_weights(home, monkeypatch):
    """For the size of a model, only JSON files are downloaded, once."""
    monkeypatch.setattr(httpx, "head", lambda *args, **options: None)
    asked = []

    def download(repo, **options):
        asked.append(options)
        return str(cache_model(home / "hf" / "hub", repo, files=("config.json",)))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    snapshot = model_files.described_model("org/name")
    assert snapshot is not None and (snapshot / "config.json").is_file()
    assert model_files.described_model("org/name") == snapshot
    assert asked == [{"revision": "main", "allow_patterns": ["*.json"]}]
    cache_model(home / "hf" / "hub", "org/whole")
    for name in (None, "org/whole", "smollm2", "org/name:Q4_K_M", str(home)):
        assert model_files.described_model(name) is None, name


@pytest.fixture
def derived(monkeypatch) -> list[Path]:
    """The requested GGUF files, without reading them."""
    asked: list[Path] = []

    def derive(path: Path) -> Path:
        asked.append(path)
        return path.parent

    monkeypatch.setattr(model_files, "derive_gguf_directory", derive)
    return asked


REPO = (
    "README.md",
    "name-Q4_0.gguf",
    "name-Q4_K_M.gguf",
    "name-IQ4_XS.gguf",
    "name-BF16.gguf",
    "mmproj-F16.gguf",
    "Q8_0/name-Q8_0-00001-of-00002.gguf",
    "Q8_0/name-Q8_0-00002-of-00002.gguf",
)


def fill(snapshot: Path, *files: str) -> None:
    for name in files:
        (snapshot / name).parent.mkdir(exist_ok=True)
        (snapshot / name).touch()


@pytest.mark.parametrize(
    ("wanted", "file"),
    [
        ("Q4_K_M", "name-Q4_K_M.gguf"),
        ("q4_k_m", "name-Q4_K_M.gguf"),
        ("bf16", "name-BF16.gguf"),
        ("name-Q4_0.gguf", "name-Q4_0.gguf"),
        ("Q8_0", "Q8_0/name-Q8_0-00001-of-00002.gguf"),
        ("name-q8_0-00002-of-00002.gguf", "Q8_0/name-Q8_0-00001-of-00002.gguf"),
        ("Q8_0/name-Q8_0-00001-of-00002.gguf", "Q8_0/name-Q8_0-00001-of-00002.gguf"),
    ],
)
def test_a_gguf_of_a_cached_repository(home, derived, wanted, file):
    snapshot = cache_model(home / "hf" / "hub", "org/name", files=())
    fill(snapshot, *REPO)
    for name in (f"org/name:{wanted}", f"org/name@{COMMIT}:{wanted}"):
        model_files.resolve_model(name)
    assert derived == [snapshot / file] * 2


def test_a_cached_repository_with_several_ggufs(home, derived):
    snapshot = cache_model(home / "hf" / "hub", "org/name", files=("config.json",))
    fill(snapshot, "name-Q4_0.gguf")
    model_files.resolve_model("org/name")
    assert derived == [snapshot / "name-Q4_0.gguf"]
    fill(snapshot, *REPO)
    assert one_line("org/name") == (
        "org/name contains several GGUF files (Q8_0, BF16, IQ4_XS, Q4_0, Q4_K_M): name one, such as org/name:Q8_0"
    )


def test_a_misspelled_or_hidden_known_name(home, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "no directory 'smollm22' (did you mean 'smollm2'?)" in one_line("smollm22")
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)
    assert "the folder hides the known model demo" in one_line("demo")


@pytest.mark.parametrize(("cached", "wanted"), [(REPO, "Q6_K"), (REPO[:-1], "Q8_0"), ((), "Q4_0")])
def test_incomplete_cached_ggufs_are_downloaded(home, derived, cached, wanted):
    fill(cache_model(home / "hf" / "hub", "org/name", files=()), *cached)
    assert "cannot be reached" in one_line(f"org/name:{wanted}") and not derived


def test_download_of_a_gguf(home, derived, monkeypatch):
    """That file with its parts, and nothing else."""
    monkeypatch.setattr(httpx, "head", lambda *args, **options: None)
    asked = []

    def download(repo, **options):
        asked.append((repo, options["revision"], options["allow_patterns"]))
        return str(home / "snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda repo, revision: list(REPO))
    model_files.resolve_model("org/name@v2:q4_k_m")
    model_files.resolve_model("org/name:Q8_0")
    assert asked == [("org/name", "v2", ["name-Q4_K_M.gguf"]), ("org/name", "main", list(REPO[-2:]))]
    assert derived == [home / "snapshot" / "name-Q4_K_M.gguf", home / "snapshot" / REPO[-2]]
    assert "org/name has no GGUF file Q6_K: choose one of Q8_0, BF16, IQ4_XS, Q4_0, Q4_K_M" in one_line("org/name:Q6_K")
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda repo, revision: list(REPO[:-1]))
    assert "no Q8_0/name-Q8_0-00002-of-00002.gguf, a part of" in one_line("org/name:Q8_0")
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda repo, revision: ["a-Q4_0.gguf", "b-Q4_0.gguf"])
    assert "several GGUF files Q4_0 (a-Q4_0.gguf, b-Q4_0.gguf): name one, such as org/name:a-Q" in one_line(
        "org/name:Q4_0"
    )
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda repo, revision: ["model.safetensors"])
    assert "contains no GGUF file" in one_line("org/name:Q4_0")


def test_download_of_a_repository_of_ggufs(home, derived, monkeypatch):
    monkeypatch.setattr(httpx, "head", lambda *args, **options: None)
    (home / "snapshot").mkdir()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, **options: str(home / "snapshot"))
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda repo, revision: list(REPO))
    assert "name one, such as org/name:Q8_0" in one_line("org/name")
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda repo, revision: ["only-Q4_0.gguf", "mmproj.gguf"])
    model_files.resolve_model("org/name")
    assert derived == [home / "snapshot" / "only-Q4_0.gguf"]


@pytest.mark.parametrize(("error", "says"), [(OSError("disk\nfull"), "disk full"), (GatedRepoError, "HF_TOKEN")])
def test_a_failing_download(home, monkeypatch, error, says):
    monkeypatch.setattr(httpx, "head", lambda *args, **options: None)

    def download(repo, **options):
        raise GatedRepoError.__new__(GatedRepoError) if error is GatedRepoError else error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert says in one_line("org/name")


def test_bundled_model(home, monkeypatch):
    package = home / "windlass"
    demo = package / "models" / "demo"
    demo.mkdir(parents=True)
    monkeypatch.setattr(model_files.importlib.resources, "files", lambda name: {"windlass": package}[name])
    assert "no bundled model" in one_line(None)
    (demo / "config.json").write_text("{}")
    assert model_files.resolve_model(None) == demo


def test_bundled_model_is_in_the_installed_package():
    try:
        found = model_files.bundled_model()
    except LoadError as error:
        assert "windlass/models/demo" in str(error)
    else:
        assert (found / "config.json").is_file() and found.name == "demo"


def test_import_needs_neither_torch_nor_huggingface_hub():
    code = (
        "import sys\nimport windlass.server.startup.model_files, windlass.server.text.tokenizer\n"
        "import windlass.server.text.detokenizer, windlass.server.text.chat_template\n"
        "print([m for m in ('torch', 'transformers', 'huggingface_hub') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"
