"""`windlass models` and `windlass pull`: the models with a short name, and those on this machine."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from windlass.clients.terminal import print_status
from windlass.engine.errors import EngineError, LoadError, did_you_mean
from windlass.engine.model.model_spec import ModelSpec
from windlass.server.startup.default_model import DEFAULT_MODELS
from windlass.server.startup.model_catalog import (
    KNOWN,
    KnownModel,
    cache_folder,
    decimal_size,
    is_downloaded,
    model_file,
    pull,
    verify_checksum,
)
from windlass.server.startup.model_files import bundled_model, cache_directory, cached_ggufs, cached_repositories


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedModel:
    """A model that `windlass serve NAME` takes.

    default: whether it is served where no model is named, if this machine permits it. here: whether no download is needed.
    size: bytes on disk, or of the download. memory: estimated bytes of weights and a cache for 8,192 tokens, None if unknown.
    licence: None if unknown. where: the file or directory, None if it is not downloaded.
    """

    name: str
    about: str
    default: bool
    here: bool
    size: int
    memory: int | None
    licence: str | None
    source: str
    where: str | None


def pull_named(name: str) -> None:
    """Download and verify a model of the catalogue. Raises LoadError."""
    model = KNOWN.get(name)
    if model is None:
        raise LoadError(
            f"there is no model {name!r}{did_you_mean(name, list(KNOWN))}: `windlass models` lists the names; a model of the "
            "Hugging Face hub is downloaded by `windlass serve`"
        )
    if model.file is None:
        print_status(f"{name} is part of this installation: {bundled_model()}")
    elif is_downloaded(model):
        verify_checksum(model)
        print_status(f"{name} is already downloaded and complete: {model_file(model)}")
    else:
        pull(model)


def list_models(as_json: bool) -> None:
    """Print the models with a short name and those on this machine."""
    listed = [*(_list_catalog(model) for model in KNOWN.values()), *_list_hub_cache()]
    if as_json:
        print(json.dumps({"models": [asdict(model) for model in listed], "cache": str(cache_folder())}))
        return
    width = max(len(model.name) for model in listed)
    print(f"{'name':{width}}  {'on disk':8}  {'file':>10}  {'memory':>7}  {'licence':10}  description")
    for model in listed:
        here = "yes" if model.here else "no"
        memory = "–" if model.memory is None else f"{model.memory / 1e9:.1f} GB"
        about = f"{model.about} (the default)" if model.default else model.about
        size, licence = decimal_size(model.size), model.licence or "–"
        print(f"{model.name:{width}}  {here:8}  {size:>10}  {memory:>7}  {licence:10}  {about}")
        print(" " * width, f" {model.where or model.source}")
    missing = [model.name for model in listed if not model.here]
    if missing:
        print_status(
            f"`windlass pull {missing[0]}` downloads a model; `windlass serve` and `windlass chat` also download a missing one"
        )


def _list_catalog(model: KnownModel) -> ListedModel:
    here = is_downloaded(model)
    if model.file is None:
        where: Path | None
        try:
            where = bundled_model()
        except LoadError:
            where, here = None, False
        size = _size(where) if where else 0
    else:
        where = model_file(model) if here else None
        size = where.stat().st_size if where else model.file.size
    return ListedModel(
        name=model.name,
        about=model.about,
        default=model is DEFAULT_MODELS[0],
        here=here,
        size=size,
        memory=model.memory,
        licence=model.licence,
        source=model.source,
        where=str(where) if where else None,
    )


def _list_hub_cache() -> list[ListedModel]:
    """Complete models of the Hugging Face cache that the decoder can run."""
    candidates: list[tuple[str, Path, list[Path], Callable[[Sequence[Path]], str]]] = [
        *((name, snapshot, [snapshot], _describe) for name, snapshot in cached_repositories()),
        *((name, files[0], files, _describe_gguf) for name, files in cached_ggufs()),
    ]
    found = []
    for name, where, paths, describe in sorted(candidates, key=lambda place: place[0]):
        try:
            about = describe(paths)
        except (EngineError, OSError, ValueError):  # a model that this server cannot run
            continue
        found.append(
            ListedModel(
                name=name,
                about=about,
                default=False,
                here=True,
                size=sum(map(_size, paths)),
                memory=None,
                licence=None,
                source=f"the Hugging Face cache, {cache_directory()}",
                where=str(where),
            )
        )
    return found


def _describe(directory: Sequence[Path]) -> str:
    """Architecture and context of a model that can be served; raises EngineError for one that cannot."""
    from windlass.engine.interface.config import EngineConfig
    from windlass.engine.model.loading.model_description import describe_model

    return _about(describe_model(EngineConfig(model=str(directory[0]))).spec)


def _describe_gguf(parts: Sequence[Path]) -> str:
    """The same of a GGUF file with its parts."""
    from windlass.engine.model.families.spec_reader import read_spec
    from windlass.engine.model.gguf.gguf_description import describe_gguf

    found = describe_gguf(parts)
    return _about(read_spec(found.config, found.generation))


def _about(spec: ModelSpec) -> str:
    return f"{spec.architecture}, trained for {spec.trained_len:,} tokens"


def _size(place: Path) -> int:
    """Bytes of a file, or of the files in a directory, links followed."""
    if place.is_file():
        return place.stat().st_size
    total = 0
    for folder, _, names in os.walk(place):
        for name in names:
            try:
                total += Path(folder, name).stat().st_size
            except OSError:
                continue
    return total
