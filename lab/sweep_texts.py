"""Texts of a sweep: files read, tokenized and cut into windows."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from windlass.engine.errors import LoadError


@dataclass(frozen=True, slots=True)
class SweptText:
    """One text: file name, length in tokens, SHA-256, and the first token of each window."""

    name: str
    tokens: int
    digest: str
    starts: tuple[int, ...]


def window_starts(tokens: int, needed: int, windows: int, *, max_len: int, text: str) -> tuple[int, ...]:
    """Starts of up to `windows` ranges of `needed` tokens, spread evenly over the text; in a short text they overlap.

    Raises LoadError if not even one fits.
    """
    slack = tokens - needed
    if slack < 0:
        raise LoadError(
            f"--text {text} has {tokens:,} tokens and --max-len {max_len} needs {needed:,}: give a longer text or a "
            "smaller --max-len"
        )
    count = min(windows, slack + 1)
    return tuple(round(i * slack / max(count - 1, 1)) for i in range(count))


class Encoder(Protocol):
    """The part of a tokenizer that studies use."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


@dataclass(frozen=True, slots=True)
class Window:
    """A range of one text: the prefix that the model expects before any text, then the text's tokens from `start` on.

    text: index of the text in the sweep. ids: max_len + 1 tokens, so that every position has a next one.
    """

    text: int
    digest: str
    start: int
    ids: tuple[int, ...]
    num_prefix: int


def find_files(given: Sequence[Path]) -> list[Path]:
    """The given files, and the *.txt and *.py files of given directories in order of their names. Raises LoadError."""
    found: list[Path] = []
    for path in given:
        if not path.is_dir():
            found.append(path)
            continue
        inside = sorted(file for file in path.iterdir() if file.suffix in (".txt", ".py") and file.is_file())
        if not inside:
            raise LoadError(f"--text {path} is a directory without a file that ends in .txt or .py: name the files")
        found += inside
    for place, path in enumerate(found):
        if path.resolve() in {other.resolve() for other in found[:place]}:
            raise LoadError(f"--text {path} is given twice: intervals over texts need distinct ones")
    return found


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise LoadError(f"cannot read --text {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise LoadError(f"--text {path} is not UTF-8 text: convert it, for example with iconv") from None


def make_windows(
    model: Path, files: Sequence[Path], max_len: int, per_text: int, load_tokenizer: Callable[[Path], Encoder]
) -> tuple[tuple[SweptText, ...], list[Window]]:
    """Up to `per_text` windows of each text, spread evenly over it. Raises LoadError if a text is too short for one."""
    contents = [read_text(file) for file in files]
    tokenizer = load_tokenizer(model)
    prefix = tokenizer.encode("")  # such as a BOS token
    needed = max_len + 1 - len(prefix)
    texts, windows = [], []
    for index, (file, content) in enumerate(zip(files, contents, strict=True)):
        ids = tokenizer.encode(content, add_special_tokens=False)
        digest = hashlib.sha256(content.encode()).hexdigest()
        starts = window_starts(len(ids), needed, per_text, max_len=max_len, text=str(file))
        texts.append(SweptText(file.name, len(ids), digest, starts))
        windows += [
            Window(index, digest, start, (*prefix, *ids[start : start + needed]), len(prefix)) for start in starts
        ]
    return tuple(texts), windows
