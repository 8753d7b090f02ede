"""Adapters as plain data: low-rank changes of a model's weights that requests choose by name. Knows no tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """An adapter to load. adapter_id: of this load alone, never used again: what the cache holds under it is its own.

    path: a directory as PEFT writes it. required: an engine does not start without it.
    """

    adapter_id: int
    name: str
    path: str
    required: bool = True


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """A loaded adapter. rank: the largest of its matrices. targets: kinds of layers it changes, such as "q_proj".

    digest: of all that it adds to the model. num_bytes: of memory.
    """

    adapter_id: int
    name: str
    path: str
    rank: int
    targets: tuple[str, ...]
    num_bytes: int
    digest: str
