"""Teacher-forced scores of one text under a rotary plan: what a model thinks of every token, by any policy.

Responsible for evidence, not for serving: it drives the decoder directly, one sequence at a time, without scheduler,
prefix cache or sampler, so that what a policy does can be seen alone. It never reads files other than through `loader`.

Row i stands for position i: it has read i + 1 tokens and predicts token i + 1. Under every policy row i runs under the
frequencies the plan gives to a context of i + 1 tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from windlass.engine.api.config import ComputeConfig, EngineConfig
from windlass.engine.cache.storage import KVStorage
from windlass.engine.errors import RequestError
from windlass.engine.model.batch import ForwardBatch
from windlass.engine.model.decoder import Decoder
from windlass.engine.model.loading.loader import load_model
from windlass.engine.model.loading.weights import Progress
from windlass.engine.rotary.policy import RopeUpdate, RotaryPlan, RotaryPlanner
from windlass.engine.rotary.scaling import RopeScaling, RotarySpec
from windlass.engine.rotary.tables import RotaryTables, rerotation_angles

_BLOCK = 16

Specs = tuple[RotarySpec, ...]


class Scorer:
    """One loaded model and the policies.

    chunk: most tokens in one forward pass and most rows of logits at once, so memory does not grow with the text beyond
    its keys and values.
    """

    def __init__(self, decoder: Decoder, cache_dtype: torch.dtype, *, chunk: int = 512) -> None:
        self.decoder, self._cache_dtype, self._chunk = decoder, cache_dtype, chunk

    @classmethod
    def load(
        cls, directory: Path, *, device: str = "auto", dtype: str = "auto", progress: Progress | None = None
    ) -> Scorer:
        """Load a Hugging Face directory as the server would; raises LoadError with one line."""
        model = load_model(
            EngineConfig(model=str(directory), compute=ComputeConfig(device=device, dtype=dtype)), progress
        )
        return cls(model.decoder, model.cache_dtype)

    @property
    def trained_len(self) -> int:
        return self.decoder.spec.trained_len

    def plan(
        self,
        longest: int,
        scaling: RopeScaling | None = None,
        rope_update: RopeUpdate | None = None,
        *,
        exact: bool = False,
    ) -> RotaryPlan:
        """The plan of a text of at most `longest` tokens; scaling None is the model's own. Raises RequestError."""
        return RotaryPlanner(self.decoder.spec.rotary_groups).plan(longest, scaling, rope_update, exact=exact)

    def logprobs(self, token_ids: Sequence[int], plan: RotaryPlan, *, rows: Sequence[int] | None = None) -> Tensor:
        """Log-probability (nats, float32 on the CPU) of token i + 1 at each row i; rows None: all but the last.

        Raises RequestError for a token the model does not have, or a row without a next token.
        """
        rows = range(len(token_ids) - 1) if rows is None else sorted(set(rows))
        if rows and rows[-1] >= len(token_ids) - 1:
            raise RequestError(f"row {rows[-1]} has no next token among {len(token_ids)}", "rows")
        found: list[Tensor] = []
        with torch.inference_mode():
            for chosen, hidden in self._rows(token_ids, plan, rows, prompt=1):
                logits = self.decoder.logits(hidden)  # [R, V]
                target = torch.tensor([token_ids[i + 1] for i in chosen], device=logits.device)
                found.append((logits.gather(1, target[:, None])[:, 0] - logits.logsumexp(dim=1)).cpu())
        return torch.cat(found) if found else torch.empty(0)

    def logits(self, token_ids: Sequence[int], plan: RotaryPlan, *, prompt: int = 1) -> Tensor:
        """Logits of every row, float32 [T, V] on the CPU: for short texts.

        prompt: tokens that are given at once, so that all of them run under the frequencies of that many.
        """
        with torch.inference_mode():
            rows = self._rows(token_ids, plan, range(len(token_ids)), prompt=prompt)
            return torch.cat([self.decoder.logits(hidden).cpu() for _, hidden in rows])

    def _rows(
        self, token_ids: Sequence[int], plan: RotaryPlan, rows: Sequence[int], *, prompt: int
    ) -> Iterator[tuple[list[int], Tensor]]:
        """(rows, their hidden states) for ascending rows, in pieces of at most `chunk`."""
        ids = torch.tensor(list(token_ids), dtype=torch.int64)
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.decoder.spec.vocab_size:
            raise RequestError(f"token ids must lie between 0 and {self.decoder.spec.vocab_size - 1}", "token_ids")
        if rows:
            sequence = _ScoredSequence(self.decoder, self._cache_dtype, ids[: rows[-1] + 1], self._chunk)
            stages = _stages(plan, rows[-1] + 1, prompt)
            walk = sequence.rotate(stages) if plan.policy == "rotate" else sequence.recompute(stages, rows)
            wanted = set(rows)
            for first, hidden in walk:
                chosen = [i for i in range(first, first + hidden.shape[0]) if i in wanted]
                if chosen:
                    yield chosen, hidden[[i - first for i in chosen]]


def _stages(plan: RotaryPlan, length: int, prompt: int) -> Iterator[tuple[int, int, Specs]]:
    """(first row, end row, specs) from row 0 to `length`, in order and without gaps."""
    first, context = 0, prompt
    while first < length:
        stage = plan.stage(context)
        end = length if stage.last_length is None else min(stage.last_length, length)
        yield first, end, stage.specs
        first, context = end, end + 1


class _ScoredSequence:
    """The cache of one sequence and its passes. Each yields (first row, hidden states [R, hidden])."""

    def __init__(self, decoder: Decoder, cache_dtype: torch.dtype, ids: Tensor, chunk: int) -> None:
        spec = decoder.spec
        self._decoder, self._ids, self._chunk = decoder, ids.to(decoder.device), chunk
        self._blocks = -(-len(ids) // _BLOCK)
        self._cache_dtype = cache_dtype
        self._tables = RotaryTables(1, [group.base for group in spec.rotary_groups], decoder.backend)
        self._cache = self._make_cache(self._blocks)

    def _make_cache(self, blocks: int) -> KVStorage:
        groups = self._decoder.spec.kv_groups
        return KVStorage(groups, [blocks] * len(groups), _BLOCK, self._cache_dtype, self._decoder.backend)

    def recompute(self, stages: Iterator[tuple[int, int, Specs]], rows: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """One pass over everything up to the last wanted row of each stage, of which that stage's rows count.

        A plan that never changes has one stage, so this is also `frozen`.
        """
        remaining = list(reversed(rows))
        for first, end, specs in stages:
            last = -1
            while remaining and remaining[-1] < end:
                last = remaining.pop()
            if last < first:
                continue
            for start, hidden in self._forward(0, last + 1, specs):
                if start + hidden.shape[0] > first:
                    skipped = max(0, first - start)
                    yield start + skipped, hidden[skipped:]

    def rotate(self, stages: Iterator[tuple[int, int, Specs]]) -> Iterator[tuple[int, Tensor]]:
        """One pass; at each change of frequencies every cached key is turned to the new ones.

        Keys are kept as they were computed in a second half of the cache, and each turn starts from those.
        """
        self._cache = self._make_cache(2 * self._blocks)
        segments: list[tuple[int, int, Specs]] = []
        for first, end, specs in stages:
            for begin, stop, computed_under in segments:
                self._turn(begin, stop, computed_under, specs, restore=True)
            yield from self._forward(first, end, specs)
            self._turn(first, end, specs, specs, restore=False)
            segments.append((first, end, specs))

    def _turn(self, begin: int, stop: int, origin: Specs, target: Specs, *, restore: bool) -> None:
        """Copy the keys of rows begin .. stop from the kept half to the live one (or back), turned to `target`."""
        backend = self._decoder.backend
        positions = torch.arange(begin, stop, device=backend.device)
        kept = positions + self._blocks * _BLOCK
        sources, targets = (kept, positions) if restore else (positions, kept)
        angles = [
            rerotation_angles(backend, old.inv_freq, new.inv_freq, positions)
            for old, new in zip(origin, target, strict=True)
        ]
        plain = rerotation_angles(backend, (), (), positions)  # no pair rotates: a copy
        for index, layer in enumerate(self._decoder.spec.layers):
            group = layer.mixer.rotary_group
            cos, sin = plain if group is None else angles[group]
            backend.rerotate_cached_keys(self._cache.pages(index), sources, targets, cos, sin)

    def _forward(self, begin: int, end: int, specs: Specs) -> Iterator[tuple[int, Tensor]]:
        """Run rows begin .. end under `specs`, the rows before them being cached."""
        row = self._tables.acquire(specs)
        try:
            for start, stop in pairwise([*range(begin, end, self._chunk), end]):
                yield start, self._decoder.forward(self._batch(start, stop, row), self._cache)
        finally:
            self._tables.release(row)

    def _batch(self, start: int, stop: int, row: int) -> ForwardBatch:
        device, groups = self._decoder.device, len(self._decoder.spec.kv_groups)
        positions = torch.arange(start, stop, device=device)
        rotary_ids = torch.full_like(positions, row)
        rotation = self._tables.cos_sin(rotary_ids, positions)
        blocks = torch.arange(self._blocks, dtype=torch.int32, device=device)
        return ForwardBatch(
            input_ids=self._ids[start:stop],
            positions=positions,
            rotary_ids=rotary_ids,
            slots=positions.expand(groups, -1),
            block_tables=blocks.expand(groups, 1, -1),
            query_start=torch.tensor([0, stop - start], device=device),
            seq_lens=torch.tensor([stop], device=device),
            first_position=torch.tensor([0], device=device),
            cos=rotation.cos,
            sin=rotation.sin,
            q_scale=rotation.q_scale,
            score_scale=torch.ones(stop - start, dtype=torch.float32, device=device),
        )
