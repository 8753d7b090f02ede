"""Chooses a model among the GGUF files of a directory or a repository: by its quantization, its name, or as the only one.

Responsible for names only; it opens no file and asks no network. Parts of a split file are one model; files that hold no
language model (`mmproj*`, importance matrices) are none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from windlass.engine.errors import LoadError
from windlass.engine.model.gguf.split_files import model_stem, part_names, part_number

_NO_MODEL = re.compile(r"mmproj|imatrix", re.IGNORECASE)
_MOST_NAMED = 24  # files in a message
_QUANTIZATION = re.compile(r"(?:^|[-._])((?:UD-)?(?:I?Q\d\w*|TQ\d_\d|BF16|F16|F32|MXFP4\w*))$", re.IGNORECASE)


def model_files(names: Iterable[str]) -> dict[str, str]:
    """The models among these files: the first file of each, by its name without ending and number of a part."""
    first: dict[str, str] = {}
    for name in sorted(names):
        file = PurePosixPath(name)
        if file.suffix.lower() == ".gguf" and not _NO_MODEL.search(file.name):
            first.setdefault(str(file.with_name(model_stem(file.name))), name)
    return first


def choose_file(names: Iterable[str], wanted: str | None, place: str, repo: str | None = None) -> str:
    """The name of the only model, or of the one that `wanted` means: a quantization, or a file.

    place: what holds the files, in words. repo: the hub id, where they are a repository's. Raises LoadError that lists them.
    """
    models = model_files(names)
    if not models:
        raise LoadError(f"{place} holds no GGUF file of a language model: choose another")
    found = list(models)
    if wanted is not None:
        found = [stem for stem in models if _means(wanted, stem, models[stem])]
        # What is called so is meant before what only ends so: Q8_0 before UD-Q8_0.
        spoken = _spoken(found)
        found = [stem for stem, name in zip(found, spoken, strict=True) if name.lower() == wanted.lower()] or found
    if len(found) == 1:
        return models[found[0]]
    stems = found or list(models)
    spoken = [models[stem] for stem in stems] if repo is None else _spoken(stems)
    more = f" and {len(spoken) - _MOST_NAMED} more" if len(spoken) > _MOST_NAMED else ""
    there = ", ".join(spoken[:_MOST_NAMED]) + more
    example = f"{place}/{spoken[0]}" if repo is None else f"{repo}:{spoken[0]}"
    if not found:
        raise LoadError(f"{place} has no GGUF file {wanted}: there are {there}")
    which = "" if wanted is None else f" {wanted}"
    raise LoadError(f"{place} holds several GGUF files{which} ({there}): name one, such as {example}")


def spoken_models(names: Iterable[str]) -> dict[str, str]:
    """The first file of each model among these, by what a person writes behind a repository's colon."""
    models = model_files(names)
    return dict(zip(_spoken(list(models)), models.values(), strict=True))


def gguf_names(directory: Path) -> list[str]:
    """The GGUF files of a directory and those below it, relative to it."""
    return [file.relative_to(directory).as_posix() for file in directory.rglob("*") if file.suffix.lower() == ".gguf"]


def all_parts(name: str) -> list[str]:
    """Every file of the model that this one belongs to."""
    file = PurePosixPath(name)
    return [str(file.with_name(part)) for part in part_names(file.name)]


def _means(wanted: str, stem: str, name: str) -> bool:
    """Whether a person who says `wanted` means this model. Letter case is no matter."""
    wanted, stem, name = wanted.lower(), stem.lower(), name.lower()
    if wanted.endswith(".gguf"):
        return wanted in (name, PurePosixPath(name).name, f"{stem}.gguf") or (
            part_number(wanted) is not None and model_stem(PurePosixPath(wanted).name) == PurePosixPath(stem).name
        )
    return stem == wanted or (stem.endswith(wanted) and not stem[: -len(wanted)][-1:].isalnum())


def _spoken(stems: list[str]) -> list[str]:
    """How a person names each: by its quantization where that is enough, else by the file."""
    short = [found[1] if (found := _QUANTIZATION.search(stem)) else f"{stem}.gguf" for stem in stems]
    return short if len(set(short)) == len(short) else [f"{stem}.gguf" for stem in stems]
