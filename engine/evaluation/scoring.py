"""Teacher-forced scores of one text under a rotary plan: what a model thinks of every token, by any policy.

Responsible for evidence, not for serving: it runs one text at a time, by plans it writes itself, through the runner that
serves, without scheduler, prefix cache or draws, so that what a policy does can be seen alone. It never reads files other
than through `loader`.

Row i stands for position i: it has read i + 1 tokens and predicts token i + 1. Under every policy row i runs under the
frequencies the plan gives to a context of i + 1 tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from windlass.engine.api.config import CacheConfig, ComputeConfig, EngineConfig
from windlass.engine.api.request import SamplingParams
from windlass.engine.cache.changes import KeyRerotation, TableChange, TableChanges
from windlass.engine.cache.storage import KVStorage
from windlass.engine.errors import LoadError, RequestError
from windlass.engine.execution.runner import Runner
from windlass.engine.model.decoder import Decoder
from windlass.engine.model.loading.loader import load_model
from windlass.engine.model.loading.weights import Progress
from windlass.engine.rotary.policy import RopeUpdate, RotaryPlan, RotaryPlanner
from windlass.engine.rotary.scaling import RopeScaling, RotarySpec
from windlass.engine.rotary.tables import RotaryTables
from windlass.engine.sampling.sampler import Sampler
from windlass.engine.scheduling.plan import NewSequence, RotaryRow, ScheduledSequence, SchedulerOutput

_BLOCK = 16

Specs = tuple[RotarySpec, ...]
Stage = tuple[int, int, Specs]  # first row, end row, what they run under


class Scorer:
    """One loaded model and the policies.

    chunk: most tokens in one forward pass and most rows of logits at once, so memory does not grow with the text beyond
    its keys and values. weights: what tells the weights and their dtype from others. `identity` adds the cache's dtype.
    """

    def __init__(self, decoder: Decoder, cache_dtype: torch.dtype, *, chunk: int = 512, weights: str = "") -> None:
        self.decoder, self._cache_dtype, self._chunk = decoder, cache_dtype, chunk
        self.identity = f"{weights} {cache_dtype}"

    @classmethod
    def load(
        cls,
        directory: Path,
        *,
        device: str = "auto",
        dtype: str = "auto",
        kv_cache_dtype: str = "auto",
        progress: Progress | None = None,
    ) -> Scorer:
        """Load a Hugging Face directory as the server would; raises LoadError with one line."""
        compute, cache = ComputeConfig(device=device, dtype=dtype), CacheConfig(dtype=kv_cache_dtype)
        model = load_model(EngineConfig(model=str(directory), compute=compute, cache=cache), progress)
        if not model.decoder.spec.generates:
            raise LoadError(
                f"{directory} is a {model.decoder.spec.architecture}, which predicts no next token: give a model that generates"
            )
        return cls(model.decoder, model.cache_dtype, weights=f"{model.digest.hex()} {model.decoder.dtype}")

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

    def logprobs(
        self,
        token_ids: Sequence[int],
        plan: RotaryPlan,
        *,
        rows: Sequence[int] | None = None,
        computed: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Log-probability (nats, float32 on the CPU) of token i + 1 at each row i; rows None: all but the last.

        computed: told after each forward pass how many tokens it had; together they come to `work`. Raises RequestError
        for a token the model does not have, or a row without a next token.
        """
        rows = range(len(token_ids) - 1) if rows is None else sorted(set(rows))
        if rows and rows[-1] >= len(token_ids) - 1:
            raise RequestError(f"row {rows[-1]} has no next token among {len(token_ids)}", "rows")
        found: list[Tensor] = []
        with torch.inference_mode():
            for chosen, hidden in self._rows(token_ids, plan, rows, prompt=1, computed=computed):
                logits = self.decoder.logits(hidden)  # [R, V]
                target = torch.tensor([token_ids[i + 1] for i in chosen], device=logits.device)
                found.append((logits.gather(1, target[:, None])[:, 0] - logits.logsumexp(dim=1)).cpu())
        return torch.cat(found) if found else torch.empty(0)

    def most_likely(self, token_ids: Sequence[int], plan: RotaryPlan, *, rows: Sequence[int]) -> list[int]:
        """The most likely next token at each of these ascending rows."""
        found: list[int] = []
        with torch.inference_mode():
            for _, hidden in self._rows(token_ids, plan, rows, prompt=1):
                found += self.decoder.logits(hidden).argmax(dim=1).tolist()
        return found

    def hidden(self, token_ids: Sequence[int], plan: RotaryPlan) -> Tensor:
        """Final hidden states of every row, [T, hidden] on the CPU, from which `decoder.logits` makes logits."""
        with torch.inference_mode():
            rows = self._rows(token_ids, plan, range(len(token_ids)), prompt=1)
            return torch.cat([hidden.cpu() for _, hidden in rows])

    @staticmethod
    def work(plan: RotaryPlan, rows: Sequence[int]) -> int:
        """Tokens that pass through the model until these ascending rows are scored."""
        if not rows or plan.policy != "recompute":
            return rows[-1] + 1 if rows else 0
        total, place = 0, 0
        for _, end, _ in _stages(plan, rows[-1] + 1, prompt=1):
            after = bisect_left(rows, end, place)
            total += rows[after - 1] + 1 if after > place else 0
            place = after
        return total

    def logits(self, token_ids: Sequence[int], plan: RotaryPlan, *, prompt: int = 1) -> Tensor:
        """Logits of every row, float32 [T, V] on the CPU: for short texts.

        prompt: tokens that are given at once, so that all of them run under the frequencies of that many.
        """
        with torch.inference_mode():
            rows = self._rows(token_ids, plan, range(len(token_ids)), prompt=prompt)
            return torch.cat([self.decoder.logits(hidden).cpu() for _, hidden in rows])

    def _rows(
        self,
        token_ids: Sequence[int],
        plan: RotaryPlan,
        rows: Sequence[int],
        *,
        prompt: int,
        computed: Callable[[int], None] | None = None,
    ) -> Iterator[tuple[list[int], Tensor]]:
        """(rows, their hidden states) for ascending rows, in pieces of at most `chunk`."""
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self.decoder.spec.vocab_size:
            raise RequestError(f"token ids must lie between 0 and {self.decoder.spec.vocab_size - 1}", "token_ids")
        if rows:
            rotates = plan.policy == "rotate"
            read = tuple(token_ids[: rows[-1] + 1])
            stages = list(_stages(plan, len(read), prompt))
            far = any(spec.distances.keeps_far_keys for _, _, specs in stages for spec in specs)
            copies = 2 if rotates or far else 1
            text = _ScoredText(self.decoder, self._cache_dtype, read, self._chunk, copies, computed, far=far)
            walk = text.rotate(iter(stages)) if rotates else text.recompute(iter(stages), rows)
            wanted = set(rows)
            for first, hidden in walk:
                chosen = [i for i in range(first, first + hidden.shape[0]) if i in wanted]
                if chosen:
                    yield chosen, hidden[[i - first for i in chosen]]


def _stages(plan: RotaryPlan, length: int, prompt: int) -> Iterator[Stage]:
    """Those from row 0 to `length`, in order and without gaps."""
    first, context = 0, prompt
    while first < length:
        stage = plan.stage(context)
        end = length if stage.last_length is None else min(stage.last_length, length)
        yield first, end, stage.specs
        first, context = end, end + 1


class _ScoredText:
    """One text as the only sequence of a runner of its own, and its passes: each yields (first row, hidden states [R, hidden]).

    num_copies: how often each key is to be held. far: whether one of them is as keys seem from far away.
    computed: as `Scorer.logprobs` has it.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache_dtype: torch.dtype,
        token_ids: tuple[int, ...],
        chunk: int,
        num_copies: int,
        computed: Callable[[int], None] | None = None,
        *,
        far: bool = False,
    ) -> None:
        self._computed = computed
        spec, self._chunk, self._num_tokens = decoder.spec, chunk, len(token_ids)
        self._groups = range(len(spec.kv_groups))
        self._num_blocks = -(-len(token_ids) // _BLOCK)
        pools = [num_copies * self._num_blocks] * len(self._groups)
        cache = KVStorage(spec.kv_groups, pools, _BLOCK, cache_dtype, decoder.backend)
        tables = RotaryTables(1, [group.base for group in spec.rotary_groups], decoder.backend)
        self._runner = Runner(decoder, cache, tables, Sampler(spec.vocab_size, decoder.backend), _BLOCK)
        table = TableChange(appended=tuple(range(self._num_blocks)))
        far_table = TableChange(appended=tuple(range(self._num_blocks, 2 * self._num_blocks)))
        sequence = NewSequence(
            seq_id=0,
            index=0,
            sampling=SamplingParams(),
            seed=0,
            num_prompt_tokens=len(token_ids),
            stop_ids=(),
            token_ids=token_ids,
            tables=TableChanges(True, (table,) * len(self._groups) + ((far_table,) * len(self._groups) if far else ())),
            rotary_id=0,
        )
        self._runner.follow(SchedulerOutput(self._next_step, new=(sequence,)))

    @property
    def _next_step(self) -> int:
        return self._runner.sequences.step + 1

    def recompute(self, stages: Iterator[Stage], rows: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
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

    def rotate(self, stages: Iterator[Stage]) -> Iterator[tuple[int, Tensor]]:
        """One pass; at each change of frequencies every cached key is re-rotated to the new ones.

        The keys as computed are kept in a second half of the cache, and every re-rotation starts from those.
        """
        passed: list[Stage] = []
        for first, end, specs in stages:
            last = passed[-1:]
            change = SchedulerOutput(
                self._next_step,
                set_aside=tuple(
                    self._rerotation(group, stage, stage[2], aside=True) for group in self._groups for stage in last
                ),
                rerotations=tuple(self._rerotation(group, stage, specs) for group in self._groups for stage in passed),
            )
            self._runner.follow(change)
            yield from self._forward(first, end, specs)
            passed.append((first, end, specs))

    def _rerotation(self, group: int, stage: Stage, specs: Specs, *, aside: bool = False) -> KeyRerotation:
        """Of the keys of a stage, from the second half of the cache to the first; aside: the other way round."""
        first, end, origin = stage
        live = range(first // _BLOCK, -(-end // _BLOCK))
        originals = range(live.start + self._num_blocks, live.stop + self._num_blocks)
        sources, targets = (live, originals) if aside else (originals, live)
        return KeyRerotation(group, first, end, tuple(sources), tuple(targets), first, origin, specs)

    def _forward(self, first: int, end: int, specs: Specs) -> Iterator[tuple[int, Tensor]]:
        """Run rows first .. end - 1 under `specs`, the rows before them being cached."""
        for start, stop in pairwise([*range(first, end, self._chunk), end]):
            plan = SchedulerOutput(
                self._next_step,
                rotary_rows=(RotaryRow(0, specs),),
                sequences=(ScheduledSequence(0, start, stop - start, self._num_tokens),),
            )
            hidden = self._runner.compute(plan)
            if self._computed is not None:
                self._computed(stop - start)
            yield start, hidden
