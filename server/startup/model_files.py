"""Model lookup: from a name to a directory, a GGUF file, a hub snapshot or the bundled model."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import importlib.resources
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from windlass.engine.errors import LoadError, did_you_mean
from windlass.engine.model.gguf.split_files import model_stem, part_names, part_number
from windlass.engine.model.loading.checkpoint import describe_other_format
from windlass.server.config.engine_options import EngineOptions
from windlass.server.startup.default_model import pull_default_model
from windlass.server.startup.derived_files import derive_gguf_directory, is_gguf, source_stem
from windlass.server.startup.model_catalog import KNOWN, KnownModel, may_be_file_of, pull

DOWNLOAD_PATTERNS = tuple("*.json *.safetensors *.jinja tokenizer* *.model *.tiktoken vocab.txt merges.txt".split())

_REPO_ID = re.compile(r"[A-Za-z0-9][\w.\-]*(?:/[A-Za-z0-9][\w.\-]*)?")
_REVISION = re.compile(r"[\w][\w.\-/]*")  # and names of GGUF files
_PART = re.compile(r"(.+)-\d+-of-(\d+)\.safetensors")
_CONNECT_SECONDS = 5.0
_DIGEST = "sha256"  # file in the directory derived from a GGUF file
_TRUE = frozenset({"1", "true", "yes", "on"})
_NOT_A_MODEL = re.compile(r"mmproj|imatrix", re.IGNORECASE)
_MAX_LISTED = 24  # files in an error message
_QUANTIZATION = re.compile(r"(?:^|[-._])((?:UD-)?(?:I?Q\d\w*|TQ\d_\d|BF16|F16|F32|MXFP4\w*))$", re.IGNORECASE)


def choose_model(given: str | None) -> tuple[str, Path]:
    """The model's name in the API, and its directory. Raises LoadError.

    given: see `resolve_model`. None: the default model (see `pull_default_model`).
    """
    if given is None:
        model = pull_default_model()
        return model.name, known_model(model)
    path = resolve_model(given)
    return _name_of(given, path), path


def known_sampling(given: str | None, name: str, directory: Path) -> Mapping[str, float]:
    """Sampling that the authors of a known model recommend. given, name: the argument and the result of `choose_model`.

    A file that is given by its path is recognized by its content. directory: the one derived from it, which stores the digest.
    """
    here = None if given is None else Path(given).expanduser()
    if here is None or not here.exists():  # a folder wins over a name
        return KNOWN[name].sampling if name in KNOWN else {}
    with contextlib.suppress(OSError):
        for model in KNOWN.values():
            if model.file is not None and may_be_file_of(model, here):
                return model.sampling if _digest(here, directory / _DIGEST) == model.file.sha256 else {}
    return {}


def _digest(path: Path, stored: Path) -> str:
    """SHA-256 of a file, from the file `stored` if that exists: hashing takes more than a second per gigabyte."""
    with contextlib.suppress(OSError):
        return stored.read_text(encoding="ascii")
    with path.open("rb") as source:
        digest = hashlib.file_digest(source, "sha256").hexdigest()
    with contextlib.suppress(OSError):
        stored.write_text(digest, encoding="ascii")
    return digest


def with_draft_model(options: EngineOptions) -> EngineOptions:
    """The options with the name of the draft model, if any, replaced by its directory. Raises LoadError."""
    if options.speculative_model is None:
        return options
    try:
        return replace(options, speculative_model=str(resolve_model(options.speculative_model)))
    except LoadError as error:
        raise LoadError(f"`speculative_model`: {error}") from None


def _name_of(given: str, path: Path) -> str:
    """The name in the API: a hub id or a known name as given, since its directory is named by a hash; else the name of the
    directory or of the GGUF file."""
    local = Path(given).expanduser()
    if not local.exists():
        return given
    return source_stem(path) or path.name


# ---- hub ids and directories --------------------------------------------------------------------------------------------
def resolve_model(name: str | None) -> Path:
    """The directory of a model's files; for a GGUF file, the directory derived from it.

    name: a directory; a GGUF file, or a directory that holds one; a name of the catalogue, such as `smollm2`, which is
    downloaded if necessary; a hub id such as `Qwen/Qwen3-0.6B`, optionally `id@revision`, for a GGUF file of it `id:Q4_K_M` or
    `id:file.gguf`; None for the bundled model. An existing path wins over a name. A cached model is used without network
    access. Raises LoadError, one line that lists what was tried.
    """
    if name is None:
        return bundled_model()
    path = Path(name).expanduser()
    if path.is_dir():
        return _in_directory(path, name)
    if path.exists():
        if is_gguf(path):
            return derive_gguf_directory(path)
        foreign = describe_other_format(path)
        raise LoadError(
            foreign or f"{path} is a file: give the directory that holds config.json and the safetensors files"
        )
    if name in KNOWN:
        return known_model(KNOWN[name])
    parsed = _parse_hub_id(name)
    if parsed is None:
        raise LoadError(
            f"{name!r} is neither a file or directory nor a hub id: give a model directory, a GGUF file or an id such as "
            "Qwen/Qwen3-0.6B"
        )
    repo, revision, wanted = parsed
    if wanted is not None:
        return derive_gguf_directory(_cached_gguf(repo, revision, wanted) or _download_gguf(repo, revision, wanted))
    cached = find_cached(repo, revision)
    if cached is not None:
        return cached
    for snapshot in _snapshots(repo, revision):
        if any(snapshot.glob("model*.safetensors")):
            continue
        if model_files(names := gguf_names(snapshot)):
            return derive_gguf_directory(snapshot / choose_file(names, None, repo, repo))
        if foreign := describe_other_format(snapshot):
            raise LoadError(foreign)
    return _download(repo, revision)


def described_model(name: str | None) -> Path | None:
    """The directory with the config.json of a hub id whose weights are not cached; None for every other name.

    It is downloaded without the weights. Raises LoadError like `resolve_model`.
    """
    if name is None or Path(name).expanduser().exists() or name in KNOWN:
        return None
    parsed = _parse_hub_id(name)
    if parsed is None or parsed[2] is not None or find_cached(*parsed[:2]) is not None:
        return None
    repo, revision, _ = parsed
    for snapshot in _snapshots(repo, revision):
        if (snapshot / "config.json").is_file():
            return snapshot
        if gguf_names(snapshot):
            return None
    with _hub(repo, revision) as hub:
        snapshot = hub.snapshot(["*.json"])
    return snapshot if (snapshot / "config.json").is_file() else None


def _parse_hub_id(name: str) -> tuple[str, str, str | None] | None:
    """Repository, revision and GGUF file or quantization of `id@revision:file`; None for anything else."""
    repo, colon, wanted = name.partition(":")
    repo, _, revision = repo.partition("@")
    revision = revision or "main"
    valid = _REPO_ID.fullmatch(repo) and _REVISION.fullmatch(revision) and (not colon or _REVISION.fullmatch(wanted))
    if not valid or ".." in name or "--" in repo:
        return None
    return repo, revision, wanted if colon else None


def _in_directory(directory: Path, name: str) -> Path:
    """The model in a directory: its safetensors, else its only GGUF file. name: as the operator wrote it."""
    directory = directory.resolve()
    names = [] if any(directory.glob("*.safetensors")) else [name for name in gguf_names(directory) if "/" not in name]
    if model_files(names):
        return derive_gguf_directory(directory / choose_file(names, None, str(directory)))
    if not (directory / "config.json").is_file():
        foreign = describe_other_format(directory)
        hides = f" (the folder hides the known model {name}: start from another)" if name in KNOWN else ""
        raise LoadError(
            foreign
            or f"{directory} contains no config.json: give the directory of a Hugging Face model, or a GGUF file{hides}"
        )
    return directory


def known_model(model: KnownModel) -> Path:
    """The directory of a model of the catalogue, downloaded if necessary. Raises LoadError, for example PullError."""
    if model.file is None:
        return bundled_model()
    return resolve_model(str(pull(model)))


def bundled_model() -> Path:
    """The demo model inside the installed package."""
    resource = importlib.resources.files("windlass").joinpath("models", "demo")
    if isinstance(resource, Path) and (resource / "config.json").is_file():
        return resource.resolve()
    raise LoadError(
        "this installation has no bundled model (windlass/models/demo): name a model, for example Qwen/Qwen3-0.6B"
    )


def cache_directory() -> Path:
    """The cache of huggingface_hub: HF_HUB_CACHE, else HF_HOME/hub, else ~/.cache/huggingface/hub."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(variable):
            return Path(os.path.expandvars(os.environ[variable])).expanduser()
    home = os.environ.get("HF_HOME") or str(Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    return Path(os.path.expandvars(home)).expanduser() / "hub"


def find_cached(repo: str, revision: str = "main") -> Path | None:
    """The cached snapshot of a hub id, None when missing or incomplete. revision: a ref or a commit."""
    return next(filter(_is_complete, _snapshots(repo, revision)), None)


def cached_repositories() -> Iterator[tuple[str, Path]]:
    """Every repository whose main revision is completely cached: its id and the snapshot."""
    for repo in _repositories():
        if (snapshot := find_cached(repo)) is not None:
            yield repo, snapshot


def cached_ggufs() -> Iterator[tuple[str, list[Path]]]:
    """Every GGUF model that is completely cached: its name for `resolve_model`, and its files."""
    for repo in _repositories():
        for snapshot in _snapshots(repo, "main"):
            names = {name for name in gguf_names(snapshot) if (snapshot / name).is_file()}
            for short_names, name in models_by_short_name(names).items():
                if names.issuperset(parts := all_parts(name)):
                    yield f"{repo}:{short_names}", [snapshot / part for part in parts]


def _repositories() -> list[str]:
    return [
        path.name.removeprefix("models--").replace("--", "/") for path in sorted(cache_directory().glob("models--*"))
    ]


def _snapshots(repo: str, revision: str) -> Iterator[Path]:
    """Possible directories of a revision in the cache."""
    storage = cache_directory() / ("models--" + repo.replace("/", "--"))
    candidates = [revision]
    with contextlib.suppress(OSError, ValueError):
        candidates.insert(0, (storage / "refs" / revision).read_text(encoding="utf-8").strip())
    for commit in candidates:
        if re.fullmatch(r"[\w.\-]+", commit) and commit not in (".", ".."):
            yield storage / "snapshots" / commit


def _is_complete(snapshot: Path) -> bool:
    """Whether a snapshot is complete: an interrupted download lacks files. is_file follows links into blobs."""
    if not (snapshot / "config.json").is_file():
        return False
    index = snapshot / "model.safetensors.index.json"
    if index.is_file():
        shards = set(re.findall(r'"([^"/\\]+\.safetensors)"', index.read_text(encoding="utf-8", errors="replace")))
        return all((snapshot / shard).is_file() for shard in shards)
    if (snapshot / "model.safetensors").is_file():
        return True
    names = [file.name for file in snapshot.glob("*.safetensors") if file.is_file()]
    # A download that was killed early has no index yet: the file names contain the number of parts.
    parts = Counter(match.groups() for match in map(_PART.fullmatch, names) if match)
    return bool(names) and all(found >= int(count) for (_, count), found in parts.items())


def _cached_gguf(repo: str, revision: str, wanted: str) -> Path | None:
    """A GGUF file in the cache with all its parts; None if the hub must be asked."""
    for snapshot in _snapshots(repo, revision):
        names = [name for name in gguf_names(snapshot) if (snapshot / name).is_file()]
        with contextlib.suppress(LoadError):
            name = choose_file(names, wanted, repo, repo)
            if set(all_parts(name)) <= set(names):
                return snapshot / name
    return None


def _download(repo: str, revision: str) -> Path:
    """The directory of a repository: its safetensors, else its one GGUF file."""
    with _hub(repo, revision) as hub:
        snapshot = hub.snapshot(DOWNLOAD_PATTERNS)
        ggufs = [] if any(snapshot.glob("*.safetensors")) else [name for name in hub.names() if name.endswith(".gguf")]
    if model_files(ggufs):
        return derive_gguf_directory(_download_gguf(repo, revision, None))
    if not (snapshot / "config.json").is_file():
        if foreign := describe_other_format(snapshot):
            raise LoadError(foreign)
        raise LoadError(
            f"{hub.label} on {_endpoint()} has no config.json, so it is not a Hugging Face model: choose another"
        )
    return snapshot


def _download_gguf(repo: str, revision: str, wanted: str | None) -> Path:
    """The GGUF file that `wanted` means, downloaded with all its parts and nothing else of the repository."""
    with _hub(repo, revision) as hub:
        names = hub.names()
        name = choose_file(names, wanted, hub.label, hub.label)
        parts = all_parts(name)
        if missing := sorted(set(parts) - set(names)):
            raise LoadError(f"{hub.label} has no {missing[0]}, a part of {name}: choose another of its files")
        return hub.snapshot([glob.escape(part) for part in parts]) / name


@dataclass(frozen=True, slots=True)
class _HubRepository:
    """A revision of a repository on the hub. label: its id, with the revision unless that is main."""

    library: Any
    repo: str
    revision: str
    label: str

    def names(self) -> list[str]:
        found: list[str] = self.library.list_repo_files(self.repo, revision=self.revision)
        return found

    def snapshot(self, patterns: Sequence[str]) -> Path:
        """The cached snapshot, after downloading the files that match."""
        return Path(self.library.snapshot_download(self.repo, revision=self.revision, allow_patterns=list(patterns)))


@contextlib.contextmanager
def _hub(repo: str, revision: str) -> Iterator[_HubRepository]:
    """A repository to download from, once the hub is known to respond. Errors in the block become LoadError."""
    label = repo if revision == "main" else f"{repo}@{revision}"
    attempt = f"no directory {label!r}{did_you_mean(label, KNOWN)}, and it is not in {cache_directory()}"
    if any(os.environ.get(name, "").lower() in _TRUE for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")):
        raise LoadError(f"{attempt}; downloads are off (HF_HUB_OFFLINE): unset it or give a model directory")
    try:
        import huggingface_hub
    except ImportError as error:
        raise LoadError(
            f"{attempt}; to download it run `.venv/bin/pip install -c constraints.txt -e '.[hub]'` in Windlass's folder, or "
            "give a model directory"
        ) from error
    import httpx  # imported late: most models are on disk, and the engine starts only after this module is imported

    endpoint = _endpoint()
    try:  # without a network, huggingface_hub retries for minutes
        httpx.head(endpoint, timeout=_CONNECT_SECONDS)
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
        raise LoadError(
            f"{attempt}; {endpoint} cannot be reached ({_one_line(error)}): give a model directory"
        ) from error
    try:
        yield _HubRepository(huggingface_hub, repo, revision, label)
    except LoadError:
        raise
    except Exception as error:  # errors of the library, of its HTTP client and of the operating system
        raise LoadError(f"{attempt}; the download failed: {_reason(error, label)}") from error


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"


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


# ---- GGUF files --------------------------------------------------------------------------------------------------------
def model_files(names: Iterable[str]) -> dict[str, str]:
    """The models among these files: the first file of each, by its name without suffix and part number."""
    first: dict[str, str] = {}
    for name in sorted(names):
        file = PurePosixPath(name)
        if file.suffix.lower() == ".gguf" and not _NOT_A_MODEL.search(file.name):
            first.setdefault(str(file.with_name(model_stem(file.name))), name)
    return first


def choose_file(names: Iterable[str], wanted: str | None, place: str, repo: str | None = None) -> str:
    """The file of the only model, or of the one that `wanted`, a quantization or a file name, means.

    place: the directory or repository, for messages. repo: the hub id if it is a repository. Raises LoadError that lists the
    files.
    """
    models = model_files(names)
    if not models:
        raise LoadError(f"{place} contains no GGUF file of a language model: choose another")
    found = list(models)
    if wanted is not None:
        found = [stem for stem in models if _matches(wanted, stem, models[stem])]
        # An exact name wins over a suffix: Q8_0 over UD-Q8_0.
        short_names = _short_names(found)
        found = [stem for stem, name in zip(found, short_names, strict=True) if name.lower() == wanted.lower()] or found
    if len(found) == 1:
        return models[found[0]]
    stems = found or list(models)
    short_names = [models[stem] for stem in stems] if repo is None else _short_names(stems)
    more = f" and {len(short_names) - _MAX_LISTED} more" if len(short_names) > _MAX_LISTED else ""
    listed = ", ".join(short_names[:_MAX_LISTED]) + more
    example = f"{place}/{short_names[0]}" if repo is None else f"{repo}:{short_names[0]}"
    if not found:
        raise LoadError(f"{place} has no GGUF file {wanted}: choose one of {listed}")
    which = "" if wanted is None else f" {wanted}"
    raise LoadError(f"{place} contains several GGUF files{which} ({listed}): name one, such as {example}")


def models_by_short_name(names: Iterable[str]) -> dict[str, str]:
    """The first file of each model among these, by the name that is written after a repository's colon."""
    models = model_files(names)
    return dict(zip(_short_names(list(models)), models.values(), strict=True))


def gguf_names(directory: Path) -> list[str]:
    """The GGUF files in a directory and its subdirectories, relative to it."""
    return [file.relative_to(directory).as_posix() for file in directory.rglob("*") if file.suffix.lower() == ".gguf"]


def all_parts(name: str) -> list[str]:
    """Every file of the model that a file belongs to."""
    file = PurePosixPath(name)
    return [str(file.with_name(part)) for part in part_names(file.name)]


def _matches(wanted: str, stem: str, name: str) -> bool:
    """Whether `wanted` means this model. Case is ignored."""
    wanted, stem, name = wanted.lower(), stem.lower(), name.lower()
    if wanted.endswith(".gguf"):
        return wanted in (name, PurePosixPath(name).name, f"{stem}.gguf") or (
            part_number(wanted) is not None and model_stem(PurePosixPath(wanted).name) == PurePosixPath(stem).name
        )
    return stem == wanted or (stem.endswith(wanted) and not stem[: -len(wanted)][-1:].isalnum())


def _short_names(stems: list[str]) -> list[str]:
    """Short names of models: the quantizations if those are distinct, else the file names."""
    short = [found[1] if (found := _QUANTIZATION.search(stem)) else f"{stem}.gguf" for stem in stems]
    return short if len(set(short)) == len(short) else [f"{stem}.gguf" for stem in stems]
