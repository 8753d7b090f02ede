"""Disk cache of quantized weights, which saves quantizing the checkpoint at every start.

Checks that a cache file matches what quantizing would produce now, and leaves complete files only. A cache never stops a start:
an unusable file is a notice and is rewritten, an unwritable folder is a notice. The file is a safetensors file of the decoder's
tensors. Its name holds the quantization and, in a user's folder, the model; its metadata hold a fingerprint of everything the
bytes depend on, so a newer checkpoint or program overwrites the older file.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from windlass import kernels
from windlass._version import __version__
from windlass.engine.errors import LoadError, reason_of
from windlass.engine.interface.config import EngineConfig
from windlass.engine.model.decoder import Decoder
from windlass.engine.model.loading.checkpoint import checkpoint_files
from windlass.engine.model.loading.safetensors_header import FileHeader
from windlass.engine.model.loading.tensor_reader import read_checked_header, read_tensors, tensor_entry, write_tensors
from windlass.engine.model.loading.weights import Progress
from windlass.engine.model.tensor_parallel import ModelShard
from windlass.kernels import BlockWeight, PanelWeight, StackedWeight, Weight

NEXT_TO_MODEL = "beside"
FOLDER = "windlass-cache"  # not the model's directory, where other programs load every safetensors file they find
_KIND = "windlass quantized weights"
_PART = ".part"
_ABANDONED_SECONDS = 3600.0  # an unfinished file older than this has no writer any more


class WeightCache:
    """The cache file of one decoder. notices: one line each, for the user who started the server.

    where: a folder, or `NEXT_TO_MODEL` for one in the model's directory. quantization: `compute.quantization`. decoder: filled
    or not. shard: the rank shard that it holds; None: the whole model.
    """

    def __init__(
        self, where: str, directory: Path, quantization: str, decoder: Decoder, shard: ModelShard | None = None
    ) -> None:
        dtypes = (str(dtype).removeprefix("torch.") for dtype in (decoder.dtype, decoder.weight_dtype))
        self._directory = directory
        of_rank = () if shard is None else (f"{shard.rank + 1}of{shard.ranks}",)
        self._storage = "-".join((quantization, *dtypes, *of_rank))
        self._plan = {name: [[p.rows, p.storage] for p in parts] for name, parts in decoder.plan.items()}
        self.path = _cache_path(where, directory, self._storage)
        self._fingerprint = self._describe()
        self.notices: list[str] = []

    def load(self, decoder: Decoder, progress: Progress | None = None) -> bool:
        """Fill the decoder from the file. False, with a notice, if the file cannot be used."""
        tensors = decoder_tensors(decoder)
        try:
            header = read_checked_header(self.path)
            fault = self._fault(header.metadata) or _misfit(header, tensors) or self._read(tensors, progress)
        except FileNotFoundError:
            return False
        except (SafetensorError, OSError, LoadError) as error:
            reason = reason_of(error).removeprefix(f"cannot read {self.path}: ")
            reason = reason.removesuffix(": download or copy the file again")
            fault = f"it cannot be read ({reason})"
        if fault is not None:
            self.notices.append(
                f"`loading.weight_cache`: {self.path} is not used: {fault}: the weights are quantized again"
            )
            return False
        self.notices.append(f"quantized weights read from {self.path}")
        return True

    def store(self, decoder: Decoder, progress: Progress | None = None) -> None:
        """Write the file, atomically: other processes may write or read it. A failure is a notice."""
        if not self._is_current():
            self.notices.append("`loading.weight_cache`: the checkpoint changed while it was read: nothing is cached")
            return
        tensors = decoder_tensors(decoder)
        total = sum(tensor.nbytes for tensor in tensors.values())
        # Every writer has its own file, which replaces the cache file when it is complete. Readers keep the file they opened.
        part = self.path.with_name(f".{self.path.name}.{secrets.token_hex(8)}{_PART}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._remove_abandoned()
            with part.open("xb", buffering=0) as file:
                for done in write_tensors(file, tensors, {"kind": _KIND, "fingerprint": self._fingerprint}):
                    if progress:
                        progress("writing the weight cache", done, total)
                os.fsync(file.fileno())
            part.replace(self.path)
        except OSError as error:
            self.notices.append(
                f"`loading.weight_cache`: {self.path} cannot be written ({reason_of(error)}): every start quantizes the weights "
                "until there is a writable folder with enough space"
            )
        else:
            self.notices.append(f"quantized weights stored in {self.path} ({total / 1e6:.0f} MB) for the next start")
        finally:
            with contextlib.suppress(OSError):
                part.unlink()

    def _is_current(self) -> bool:
        try:
            return self._describe() == self._fingerprint
        except LoadError:
            return False

    def _describe(self) -> str:
        """Everything that the bytes of the file depend on, as text. Raises LoadError."""
        try:
            files = {file.name: _identity(file) for file in checkpoint_files(self._directory)}
            config = (self._directory / "config.json").read_bytes()
        except OSError as error:
            raise LoadError(
                f"cannot read {error.filename}: {error.strerror}: download or copy the file again"
            ) from None
        described = {
            "version": __version__,
            "layout": kernels.LAYOUT_VERSION,
            "made_into": self._storage,
            "plan": hashlib.sha256(json.dumps(self._plan, sort_keys=True).encode()).hexdigest(),
            "config": hashlib.sha256(config).hexdigest(),
            "files": files,
        }
        return json.dumps(described, sort_keys=True)

    def _fault(self, metadata: Mapping[str, str]) -> str | None:
        """Why a file with this metadata cannot be used; None if it can."""
        if metadata.get("kind") != _KIND:
            return "it is not a weight cache of this program"
        try:
            found, wanted = json.loads(metadata.get("fingerprint", "")), json.loads(self._fingerprint)
            differing = sorted(name for name in wanted | found if found.get(name) != wanted.get(name))
        except (ValueError, TypeError, AttributeError):
            return "its metadata is damaged"
        reasons = {
            "version": "another version of this program wrote it",
            "layout": "quantized weights have another layout now",
            "plan": "the weights are quantized in another way now",
            "config": "config.json has changed since",
            "files": "the checkpoint has changed since",
        }
        return reasons.get(differing[0], "it was made for other weights") if differing else None

    def _read(self, tensors: dict[str, Tensor], progress: Progress | None) -> str | None:
        """Fill the tensors. Returns a fault: the checkpoint was checked when the file was written, so numbers that are not finite
        (in scales, norms, an embedding) were damaged since."""
        total, done = sum(tensor.nbytes for tensor in tensors.values()), 0
        for part in read_tensors(self.path, lambda name, dtype, shape: tensors[name]):
            assert part.tensor is tensors[part.name]
            if not part.finite:
                return f"its tensor {part.name!r} contains numbers that are NaN or infinite"
            done += part.tensor.nbytes
            if progress:
                progress("reading quantized weights", done, total)
        return None

    def _remove_abandoned(self) -> None:
        """Remove unfinished files of writers that were killed."""
        for part in self.path.parent.glob(f".{glob.escape(self.path.name)}.*{_PART}"):
            with contextlib.suppress(OSError):
                if time.time() - part.stat().st_mtime > _ABANDONED_SECONDS:
                    part.unlink()


def no_effect_notice(config: EngineConfig, option: str) -> tuple[str, ...]:
    """A notice that the option has no effect, if it is set."""
    if config.loading.weight_cache is None:
        return ()
    return (
        f"`loading.weight_cache` has no effect with {option}: only weights that a CPU quantizes from files are cached",
    )


def decoder_tensors(decoder: Decoder) -> dict[str, Tensor]:
    """Every tensor of a decoder's weights by name; a weight in blocks or parts has several."""
    return {name: t for weight_name, weight in decoder.weights().items() for name, t in _tensors(weight_name, weight)}


def _tensors(name: str, weight: Weight) -> Iterator[tuple[str, Tensor]]:
    if isinstance(weight, StackedWeight):
        for index, part in enumerate(weight.parts):
            yield from _tensors(f"{name}.{index}", part)
    elif isinstance(weight, BlockWeight):
        for part_name, tensor in weight.tensors().items():
            yield f"{name}.{part_name}", tensor
    else:
        yield name, weight.data if isinstance(weight, PanelWeight) else weight


def _cache_path(where: str, directory: Path, storage: str) -> Path:
    if where == NEXT_TO_MODEL:
        return directory / FOLDER / f"{storage}.safetensors"
    model = directory.resolve()
    return Path(where) / f"{model.name}-{hashlib.sha256(os.fsencode(model)).hexdigest()[:8]}-{storage}.safetensors"


def _identity(file: Path) -> list[object]:
    """Size, time and header of a checkpoint file: identifies it without reading gigabytes."""
    stat = file.stat()
    if file.suffix != ".safetensors":
        return [stat.st_size, stat.st_mtime_ns]
    with file.open("rb") as opened:
        length = opened.read(8)
        header = opened.read(min(int.from_bytes(length, "little"), stat.st_size))
    return [stat.st_size, stat.st_mtime_ns, hashlib.sha256(length + header).hexdigest()]


def _misfit(header: FileHeader, tensors: dict[str, Tensor]) -> str | None:
    layout = {entry.name: (entry.dtype, entry.shape) for entry in map(tensor_entry, header.tensors.values())}
    wanted = {name: (tensor.dtype, list(tensor.shape)) for name, tensor in tensors.items()}
    return None if layout == wanted else "its tensors are not those of this model"
