"""The methods of the synchronous client for people who look on: curves, cache, attention. No rule lives here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from windlass.clients import _calls as calls
from windlass.clients._calls import Call
from windlass.clients.looking_types import AttentionMap, CachePages
from windlass.clients.rotary_types import RotaryCurves

T = TypeVar("T")


class LookingMethods:
    """What `Client` has to look on with."""

    def curves(
        self,
        rope_scaling: Mapping[str, Any] | str | None = None,
        *,
        positions: Sequence[int] = (),
        distances: Sequence[int] = (),
        length: int | None = None,
        group: str | None = None,
    ) -> RotaryCurves:
        """Cosines and sines at `positions` and curves by distance, under a scaling."""
        fixed = {"rope_scaling": rope_scaling, "positions": list(positions), "distances": list(distances)}
        return self._run(calls.curves({**fixed, "length": length, "group": group}))

    def cache(self) -> CachePages:
        """The pages of the cache and who holds them."""
        return self._run(calls.cache())

    def attention(
        self, prompt: str, layer: int = 0, head: int = 0, *, rope_scaling: Mapping[str, Any] | str | None = None
    ) -> AttentionMap:
        """What a head attends to in a short text. Raises AuthenticationError where the server does not show it."""
        fixed = {"prompt": prompt, "layer": layer, "head": head, "rope_scaling": rope_scaling}
        return self._run(calls.attention(fixed))

    def _run(self, call: Call[T]) -> T:
        raise NotImplementedError
