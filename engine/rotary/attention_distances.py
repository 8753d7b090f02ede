"""Distance-based attention: dual chunk attention, Self-Extend, ReRoPE and log-n scores.

Rules for the distance between query and key, and for the scale of scores. Imports no torch. Symbols: s tokens of a
chunk, c one more than the greatest distance, L the trained length, i position of a query, j of a key, // floor division.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from windlass.engine.rotary import frequencies
from windlass.engine.rotary.scaling_fields import invalid

MIN_CHUNK_TOKENS = 16  # each chunk of a prompt is a separate row in a step
DEFAULT_GROUP_SIZE = 4  # tokens that share one position in Self-Extend


@dataclass(frozen=True, slots=True)
class Distances:
    """A rule of distances and scores. By default the distance is i - j and scores are unchanged.

    chunk, most: dual chunk attention (arXiv 2402.17463), s = chunk, c = most: a key in the query's own chunk is at
    distance i - j, one in the preceding chunk at min(i mod s + s, c - 1) - j mod s, older ones at c - 1 - j mod s. Keys
    are rotated at j mod s.
    near, group, slope: keys closer than w = near tokens are at i - j. Others are at (i // G + w - w // G) - j // G with
    G = group (Self-Extend, arXiv 2401.01325), and without a group at w + (i - j - w) * slope (ReRoPE: slope 0; leaky
    ReRoPE: 1 / G; kexue.fm/archives/9708). Keys are stored in a second copy for these distances.
    log_base: L; scores of the query at i are multiplied by max(1, ln(i + 1) / ln L) (arXiv 2202.12172).
    score_factor: factor of all scores.
    """

    chunk: int | None = None
    most: int = 0
    log_base: int | None = None
    score_factor: float = 1.0
    near: int | None = None
    group: int | None = None
    slope: float = 0.0

    @property
    def is_plain(self) -> bool:
        """Whether the rule changes nothing."""
        return self == PLAIN_DISTANCES

    @property
    def changes_distances(self) -> bool:
        """Whether the rule changes distances; otherwise it changes scores at most."""
        return self.chunk is not None or self.near is not None

    @property
    def has_second_keys(self) -> bool:
        """Whether a second key copy is stored."""
        return self.near is not None

    def described(self) -> dict[str, int]:
        """The values in use, as in API responses: under the names of the scaling's fields where these exist."""
        fields: dict[str, int] = {}
        if self.near is not None:
            fields["window"] = self.near
        if self.group is not None:
            fields["group_size"] = self.group
        if self.chunk is not None:
            fields |= {"chunk_size": self.most, "local_size": self.most - self.chunk}
        if self.log_base is not None:
            fields["log_n_length"] = self.log_base
        return fields


PLAIN_DISTANCES = Distances()


def resolve_distances(rope_type: str, given: Mapping[str, Any], trained: int, length: int, param: str) -> Distances:
    """The rule of a scaling. given: its fields. trained: L. length: the longest that the request can become, in tokens.

    Raises RequestError naming the field if a window or chunk does not fit the trained length.
    """
    match rope_type:
        case "log_n":
            return Distances(log_base=trained)
        case "dual_chunk":
            return _dual_chunk(given, trained, length, param)
        case "self_extend" | "rerope":
            return _two_range_distances(rope_type, given, trained, param)
    return PLAIN_DISTANCES


def _two_range_distances(rope_type: str, given: Mapping[str, Any], trained: int, param: str) -> Distances:
    grouped = rope_type == "self_extend"
    near = int(given.get("window") or max(trained // (4 if grouped else 2), 1))
    if near > trained:
        raise invalid(
            f"{param}.window",
            f"{near} is beyond the {trained} tokens that this model was trained for: use at most that",
        )
    log_base = trained if given.get("log_n") else None
    if grouped:
        return Distances(near=near, group=int(given.get("group_size", DEFAULT_GROUP_SIZE)), log_base=log_base)
    return Distances(near=near, slope=1 / given["factor"] if "factor" in given else 0.0, log_base=log_base)


def _dual_chunk(given: Mapping[str, Any], trained: int, length: int, param: str) -> Distances:
    longest = math.floor(trained * given.get("factor", 1.0))
    most = int(given.get("chunk_size") or max(longest * 3 // 4, 2))
    local = int(given.get("local_size") or max(min(longest // 8, most - 1), 1))
    if most > longest:
        raise invalid(
            f"{param}.chunk_size",
            f"{most} is beyond the {longest} tokens that distances may reach on this model: use at most "
            "that, or a factor",
        )
    if most - local < MIN_CHUNK_TOKENS:
        raise invalid(
            f"{param}.local_size",
            f"{local} leaves {most - local} of chunk_size {most} to a chunk, at least {MIN_CHUNK_TOKENS} are "
            "needed: use a smaller local_size or a larger chunk_size",
        )
    factor = 1.0
    if given.get("length_scores") and length > trained:
        # On a grid, so that requests of similar lengths share cached keys.
        factor = 0.1 * math.log(frequencies.grid_ratio(trained, length)) + 1.0
    return Distances(most - local, most, trained if given.get("log_n") else None, factor)
