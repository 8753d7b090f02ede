"""Finds a model's directory: a path, a hub id in the local cache, a download, or the bundled model.

Responsible for paths only; it loads no model. The cache is found by its layout, so huggingface_hub is needed only to
download, and imported only then.
"""

from __future__ import annotations

import contextlib
import importlib.resources
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from windlass.engine.errors import LoadError
from windlass.engine.model.loading.formats import describe_foreign
from windlass.server.startup.catalogue.known import KNOWN, KnownModel

DOWNLOAD_PATTERNS = (
    "*.json",
    "*.safetensors",
    "*.jinja",
    "tokenizer*",
    "*.model",
    "*.tiktoken",
    "vocab.txt",
    "merges.txt",
)
_REPO_ID = re.compile(r"[A-Za-z0-9][\w.\-]*(?:/[A-Za-z0-9][\w.\-]*)?")
_REVISION = re.compile(r"[\w][\w.\-/]*")
_REACH_SECONDS = 5.0
_TRUE = frozenset({"1", "true", "yes", "on"})


def resolve_model(name: str | None) -> Path:
    """The directory with the model's files.

    name: a directory; a name of the catalogue, such as `smollm2`, which is pulled where it is not here; a hub id such as
    `Qwen/Qwen3-0.6B`, optionally `id@revision`; None for the bundled model.
    An existing directory wins over a name. A cached model is used as it is, without asking the network.
    Raises LoadError, one line that says what was tried.
    """
    if name is None:
        return bundled_model()
    directory = Path(name).expanduser()
    if directory.is_dir():
        if not (directory / "config.json").is_file():
            foreign = describe_foreign(directory.resolve())
            raise LoadError(foreign or f"{directory} holds no config.json: give the directory of a Hugging Face model")
        return directory.resolve()
    if directory.exists():
        foreign = describe_foreign(directory)
        raise LoadError(
            foreign or f"{directory} is a file: give the directory that holds config.json and the safetensors files"
        )
    if name in KNOWN:
        return known_model(KNOWN[name])
    repo, _, revision = name.partition("@")
    revision = revision or "main"
    if not _REPO_ID.fullmatch(repo) or not _REVISION.fullmatch(revision) or ".." in name or "--" in repo:
        raise LoadError(
            f"no directory {name!r}, and that is no hub id: give a model directory or an id such as Qwen/Qwen3-0.6B"
        )
    cached = find_cached(repo, revision)
    if cached is not None:
        return cached
    for snapshot in _snapshots(repo, revision):
        if not any(snapshot.glob("model*.safetensors")) and (foreign := describe_foreign(snapshot)):
            raise LoadError(foreign)
    return _download(repo, revision)


def known_model(model: KnownModel) -> Path:
    """The directory of a model of the catalogue, pulled where it is not here. Raises LoadError, PullError among them."""
    if model.file is None:
        return bundled_model()
    from windlass.server.startup.catalogue.pull import pull

    return resolve_model(str(pull(model)))


def bundled_model() -> Path:
    """The demo model inside the installed package."""
    resource = importlib.resources.files("windlass").joinpath("models", "demo")
    if isinstance(resource, Path) and (resource / "config.json").is_file():
        return resource.resolve()
    raise LoadError(
        "this installation has no bundled model (windlass/models/demo): name a model, for example Qwen/Qwen3-0.6B"
    )


def cache_directory(environ: Mapping[str, str] | None = None) -> Path:
    """Where huggingface_hub keeps models: HF_HUB_CACHE, else HF_HOME/hub, else ~/.cache/huggingface/hub."""
    env = os.environ if environ is None else environ
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if env.get(variable):
            return Path(os.path.expandvars(env[variable])).expanduser()
    home = env.get("HF_HOME") or str(Path(env.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    return Path(os.path.expandvars(home)).expanduser() / "hub"


def find_cached(repo: str, revision: str = "main") -> Path | None:
    """The cached snapshot of a hub id, None when missing or incomplete. revision: a ref or a commit."""
    return next(filter(_is_complete, _snapshots(repo, revision)), None)


def cached_repositories() -> Iterator[tuple[str, Path]]:
    """Every repository whose main revision lies whole in the local cache: its id and the snapshot."""
    for storage in sorted(cache_directory().glob("models--*")):
        repo = storage.name.removeprefix("models--").replace("--", "/")
        if (snapshot := find_cached(repo)) is not None:
            yield repo, snapshot


def _snapshots(repo: str, revision: str) -> Iterator[Path]:
    """Where a revision may lie in the cache."""
    storage = cache_directory() / ("models--" + repo.replace("/", "--"))
    candidates = [revision]
    with contextlib.suppress(OSError, ValueError):
        candidates.insert(0, (storage / "refs" / revision).read_text(encoding="utf-8").strip())
    for commit in candidates:
        if re.fullmatch(r"[\w.\-]+", commit) and commit not in (".", ".."):
            yield storage / "snapshots" / commit


def _is_complete(snapshot: Path) -> bool:
    """Whether a snapshot can be loaded. An interrupted download leaves files out; is_file follows links into blobs."""
    if not (snapshot / "config.json").is_file():
        return False
    index = snapshot / "model.safetensors.index.json"
    if index.is_file():
        shards = set(re.findall(r'"([^"/\\]+\.safetensors)"', index.read_text(encoding="utf-8", errors="replace")))
        return all((snapshot / shard).is_file() for shard in shards)
    return any(file.is_file() for file in snapshot.glob("*.safetensors"))


def _download(repo: str, revision: str) -> Path:
    label = repo if revision == "main" else f"{repo}@{revision}"
    tried = f"no directory {label!r}, and {cache_directory()} does not hold it"
    if any(os.environ.get(name, "").lower() in _TRUE for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")):
        raise LoadError(f"{tried}; downloads are off (HF_HUB_OFFLINE): unset it or give a model directory")
    try:
        import huggingface_hub
    except ImportError as error:
        raise LoadError(
            f"{tried}; to download it run `.venv/bin/pip install -c constraints.txt -e '.[hub]'` in Windlass's folder, or "
            "give a model directory"
        ) from error
    import httpx  # here, late: most models are on disk, and the engine is started only once this module is imported

    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    try:  # huggingface_hub retries for minutes where there is no network at all
        httpx.head(endpoint, timeout=_REACH_SECONDS)
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
        raise LoadError(
            f"{tried}; {endpoint} cannot be reached ({_one_line(error)}): give a model directory"
        ) from error
    try:
        path = huggingface_hub.snapshot_download(repo, revision=revision, allow_patterns=list(DOWNLOAD_PATTERNS))
    except Exception as error:  # the library raises its own, its HTTP client's and the operating system's errors
        raise LoadError(f"{tried}; the download failed: {_reason(error, label)}") from error
    snapshot = Path(path)
    if not (snapshot / "config.json").is_file():
        if foreign := describe_foreign(snapshot):
            raise LoadError(foreign)
        raise LoadError(f"{label} on {endpoint} holds no config.json: it is no Hugging Face model, choose another")
    return snapshot


def _reason(error: Exception, label: str) -> str:
    name = type(error).__name__
    if name == "GatedRepoError":
        return f"{label} is gated, accept its terms on the hub and set HF_TOKEN"
    if name == "RepositoryNotFoundError":
        return f"the hub has no model {label}, check the name (a private one needs HF_TOKEN)"
    if name == "RevisionNotFoundError":
        return f"{label} has no such revision"
    return f"{name}: {_one_line(error)}"


def _one_line(error: BaseException) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:200]
