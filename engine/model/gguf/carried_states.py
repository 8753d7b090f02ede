"""Which layers of a GGUF model attend, where the others carry a state: those that have heads of keys. It opens no file."""

from __future__ import annotations

from windlass.engine.errors import LoadError
from windlass.engine.model.gguf.fields import ArchitectureKeys
from windlass.engine.rotary.scaling import FULL_ATTENTION

_KV_HEADS = "attention.head_count_kv"


def attending(keys: ArchitectureKeys, count: int) -> ArchitectureKeys:
    """The keys of a model all of whose layers attend."""
    heads = keys.raw(_KV_HEADS)
    if not isinstance(heads, list):
        return keys
    if len(heads) != count:
        raise LoadError(f"{keys.key(_KV_HEADS)} has {len(heads)} entries for {count} layers: get another conversion")
    return keys.replaced({_KV_HEADS: [one for one in heads if one != 0] or None})


def kinds(keys: ArchitectureKeys, count: int, other: str) -> list[str]:
    """What `layer_types` says of each layer. other: what those are called that carry a state."""
    heads = keys.raw(_KV_HEADS)
    found = [other if one == 0 else FULL_ATTENTION for one in heads] if isinstance(heads, list) else None
    return found or [FULL_ATTENTION] * count
