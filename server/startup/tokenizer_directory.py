"""Makes the directory that stands for a model without tokenizer.json: links to its files, and a tokenizer.json beside them.

What is in that file is the business of `server.text.vocabularies`. A later start finds it made.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from windlass.clients.terminal.lines import say
from windlass.engine.errors import LoadError
from windlass.server.startup.derived import Derivation, write_files
from windlass.server.text.tokenizer_file import TOKENIZER, find_tokenizer

_CONFIG = "tokenizer_config.json"
_DERIVATION = Derivation(folder="tokenizers", index="derived.json", files=(TOKENIZER, _CONFIG), made_by=1)


def with_tokenizer(directory: Path) -> Path:
    """The directory itself where it has a tokenizer.json, else one made from it. Raises LoadError, one line."""
    directory = directory.absolute()
    vocabulary = find_tokenizer(directory)
    if vocabulary.name == TOKENIZER:
        return directory
    sources = [vocabulary, *sorted(path for path in directory.iterdir() if path != vocabulary and path.exists())]
    return _DERIVATION.directory(directory.name, sources, str(directory), lambda made: _fill(made, sources))


def _fill(directory: Path, sources: Sequence[Path]) -> None:
    from windlass.server.text.vocabularies.conversion import tokenizer_files  # here: it imports tokenizers

    made = tokenizer_files(sources[0])
    for notice in made.notices:
        say(f"notice: {notice}")
    index = json.dumps({"files": _DERIVATION.described(sources, str(sources[0].parent))})
    write_files(directory, {TOKENIZER: made.tokenizer, _CONFIG: made.config, _DERIVATION.index: index})
    try:
        for source in sources:
            if source.name != _CONFIG:
                (directory / source.name).symlink_to(source)
    except OSError as error:
        raise LoadError(f"cannot write to {directory} ({error.strerror or error}): free some space there") from None
