"""A model without tensors, whose next token is a pure function of the request's tokens.

The key of a token depends on the token, its position, the frequencies and the adapter. Keys are written to the slots of the paged
cache and read through the block tables, all of them for every token, as attention does. Therefore a block that is shared wrongly,
freed too early or not written changes a token. `answer` computes the expected tokens without blocks or batches.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from helpers.toy_tokenizers import byte_level

from windlass.engine.rotary.rope_scaling import RopeScaling, RotaryBase, RotaryGroup, RotarySpec
from windlass.engine.rotary.rotary_policy import RotaryPlan, RotaryPlanner

VOCAB = byte_level().get_vocab_size()
EOS: int = byte_level().token_to_id("<|eos|>")
LETTERS = tuple(byte_level().token_to_id(letter) for letter in "abcdefghijklmnopqrstuvwxyz")
TEXT = dict(zip(LETTERS, "abcdefghijklmnopqrstuvwxyz", strict=True))
GROUPS = (RotaryGroup("full_attention", RotaryBase(10000.0, 8, 8, 24), RopeScaling()),)
PLANNER = RotaryPlanner(GROUPS)
_PRIME = (1 << 61) - 1


@functools.lru_cache(4096)
def frequencies_of(specs: tuple[RotarySpec, ...]) -> int:
    """Return a number for the frequencies of a step."""
    return zlib.crc32("".join(spec.fingerprint for spec in specs).encode())


def key_of(token: int, position: int, frequencies: int, adapter: int | None) -> int:
    """Return the cached number of a token."""
    mixed = (token + 1) * 0x9E3779B97F4A7C15 + (position + 1) * 0xC2B2AE3D27D4EB4F + frequencies * 0x165667B19E3779F9
    return (mixed ^ (mixed >> 29)) * (3 + 2 * (adapter or 0)) % _PRIME


def draw(keys: int, seed: int, index: int, num_output: int) -> int:
    """Return the token after keys with this sum: a letter, or occasionally the end."""
    mixed = (keys * 0xD6E8FEB86659FD93 + seed * 0xA0761D6478BD642F + index * 0xE7037ED1A0B428DB + num_output) % _PRIME
    mixed = (mixed ^ (mixed >> 31)) * 0x8EBC6AF09C88C6E3 % _PRIME
    return EOS if mixed % 23 == 0 else LETTERS[mixed // 23 % len(LETTERS)]


@dataclass(frozen=True, slots=True)
class Answer:
    """tokens: including the end. text: without the end, up to a stop string. finish: as in the API."""

    tokens: tuple[int, ...]
    text: str
    finish: str


def answer(
    prompt: Sequence[int],
    plan: RotaryPlan,
    *,
    seed: int,
    index: int,
    max_tokens: int,
    adapter: int | None = None,
    stops: Sequence[str] = (),
) -> Answer:
    """Return the expected answer of a sample, computed from its request only."""
    tokens, drawn, text = list(prompt), [], ""
    sums: dict[int, int] = {}  # keys of the prompt and the output so far, by frequencies
    counts: dict[int, int] = {}
    while True:
        frequencies = frequencies_of(plan.stage(len(tokens)).specs)
        done = counts.get(frequencies, 0)
        total = sums.get(frequencies, 0)
        for position in range(done, len(tokens)):
            total += key_of(tokens[position], position, frequencies, adapter)
        sums[frequencies], counts[frequencies] = total, len(tokens)
        token = draw(total, seed, index, len(drawn))
        drawn.append(token)
        tokens.append(token)
        if token == EOS:
            return Answer(tuple(drawn), text, "stop")
        text += TEXT[token]
        for stop in stops:
            if stop in text:
                return Answer(tuple(drawn), text[: text.index(stop)], "stop")
        if len(drawn) == max_tokens:
            return Answer(tuple(drawn), text, "length")


class PagedKeys:
    """The paged cache: one number per slot. As on a device, slots are never cleared."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._size = block_size
        self._slots = [0] * (num_blocks * block_size)

    def copy(self, source: int, target: int) -> None:
        size = self._size
        self._slots[target * size : (target + 1) * size] = self._slots[source * size : (source + 1) * size]

    def write(self, table: Sequence[int], slot: int, key: int) -> None:
        self._slots[table[slot // self._size] * self._size + slot % self._size] = key

    def total(self, table: Sequence[int], end: int) -> int:
        """Return the sum of the first `end` slots of a table."""
        size, slots = self._size, self._slots
        whole, rest = divmod(end, size)
        total = sum(sum(slots[block * size : (block + 1) * size]) for block in table[:whole])
        return total + (sum(slots[table[whole] * size : table[whole] * size + rest]) if rest else 0)
