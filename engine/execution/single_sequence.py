"""Forward passes of one sequence outside the scheduler.

The model runner executes scheduler outputs that this module writes, without scheduler, prefix cache or sampling. Row i is
position i: its context is i + 1 tokens, it predicts token i + 1, and it uses the rotary plan's frequencies for that context
length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from windlass.engine.cache.cache_operations import BlockCopy, KeyRerotation, TableChange, TableChanges
from windlass.engine.cache.kv_cache import KVCache
from windlass.engine.errors import RequestError
from windlass.engine.execution.model_runner import RankRunner
from windlass.engine.interface.context import ContextRule
from windlass.engine.interface.request import SamplingParams
from windlass.engine.model.decoder import Decoder
from windlass.engine.rotary.rope_scaling import RopeScaling, RotarySpec
from windlass.engine.rotary.rotary_policy import RopeUpdate, RotaryPlan, RotaryPlanner
from windlass.engine.rotary.rotary_tables import RotaryTables
from windlass.engine.scheduling.scheduler_output import NewSequence, RotaryRow, ScheduledSequence, SchedulerOutput

_BLOCK = 16

Specs = tuple[RotarySpec, ...]

Stage = tuple[int, int, Specs]  # first row, end row, specs of these rows


class SingleSequenceRunner:
    """Forward passes of one text at a time by a loaded model, under a rotary plan.

    chunk: maximum number of tokens per forward pass, and of rows returned at once, so that only keys and values grow with the
    text.
    """

    def __init__(self, decoder: Decoder, cache_dtype: torch.dtype, *, chunk: int = 512) -> None:
        self.decoder, self.cache_dtype, self.chunk = decoder, cache_dtype, chunk

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
        """Rotary plan of a text of at most `longest` tokens; scaling None is the model's own. Raises RequestError."""
        return RotaryPlanner(self.decoder.spec.rotary_groups).plan(longest, scaling, rope_update, exact=exact)

    def hidden(self, token_ids: Sequence[int], plan: RotaryPlan) -> Tensor:
        """Final hidden states of every row, [T, hidden] on the CPU: the input of `decoder.logits`."""
        with torch.inference_mode():
            rows = self.rows(token_ids, plan, range(len(token_ids)), prompt=1)
            return torch.cat([hidden.cpu() for _, hidden in rows])

    def rows(
        self,
        token_ids: Sequence[int],
        plan: RotaryPlan,
        rows: Sequence[int],
        *,
        prompt: int,
        context: ContextRule | None = None,
        computed: Callable[[int], None] | None = None,
    ) -> Iterator[tuple[list[int], Tensor]]:
        """Yield (rows, their hidden states) for ascending rows, at most `chunk` rows at a time."""
        self.check_tokens(token_ids, context)
        if rows:
            rotates = plan.policy == "rotate"
            needed = tuple(token_ids[: rows[-1] + 1])
            stages = list(plan_stages(plan, len(needed), prompt))
            second_keys = any(spec.distances.has_second_keys for _, _, specs in stages for spec in specs)
            text = SequencePasses(self, needed, context, computed, originals=rotates, second_keys=second_keys)
            passes = text.rotate(stages) if rotates else text.recompute(stages, rows)
            wanted = set(rows)
            for first, hidden in passes:
                chosen = [i for i in range(first, first + hidden.shape[0]) if i in wanted]
                if chosen:
                    yield chosen, hidden[[i - first for i in chosen]]

    def check_tokens(self, token_ids: Sequence[int], context: ContextRule | None) -> None:
        """Raise RequestError for a token id outside the vocabulary, or an empty window."""
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self.decoder.spec.vocab_size:
            raise RequestError(f"token ids must lie between 0 and {self.decoder.spec.vocab_size - 1}", "token_ids")
        window = None if context is None else context.attention_window
        if context is not None and window is not None and (window < 1 or context.attention_sinks < 0):
            raise RequestError("attention_window must be at least 1, attention_sinks at least 0", "attention_window")


def plan_stages(plan: RotaryPlan, length: int, prompt: int) -> Iterator[Stage]:
    """Stages from row 0 to `length`, in order and without gaps. prompt: tokens that are given at once."""
    first, context = 0, prompt
    while first < length:
        stage = plan.stage(context)
        end = length if stage.last_length is None else min(stage.last_length, length)
        yield first, end, stage.specs
        first, context = end, end + 1


class SequencePasses:
    """One text as the only sequence of its own model runner. Passes yield (first row, hidden states [R, hidden]).

    context: attention window and sinks, None for full attention. computed: called after each forward pass with its number of
    tokens. originals, second_keys: each key is stored twice, for `rotate` or as the second key copy of distance-based attention.
    capacity: tokens for which there are pages, None for those of the text.
    """

    def __init__(
        self,
        runner: SingleSequenceRunner,
        token_ids: tuple[int, ...],
        context: ContextRule | None,
        computed: Callable[[int], None] | None,
        *,
        originals: bool = False,
        second_keys: bool = False,
        capacity: int | None = None,
    ) -> None:
        decoder, self._chunk, self._computed = runner.decoder, runner.chunk, computed
        spec, self._token_ids, self._num_tokens = decoder.spec, token_ids, len(token_ids)
        self._context, self._has_second_keys = context or ContextRule(), second_keys
        self._groups = range(len(spec.kv_groups))
        self._num_blocks = -(-(capacity or len(token_ids)) // _BLOCK)
        self._has_states = spec.state_group is not None
        pools = [(1 + (originals or second_keys)) * self._num_blocks] * len(self._groups)
        dtype, states = runner.cache_dtype, spec.state_group
        cache = KVCache(spec.kv_groups, pools, _BLOCK, dtype, decoder.backend, states, num_states=2)
        tables = RotaryTables(1, [group.base for group in spec.rotary_groups], decoder.backend)
        self._runner = RankRunner(decoder, cache, tables, _BLOCK)
        self._runner.apply(SchedulerOutput(self._next_step, new=(self._sequence(token_ids),)))

    def _sequence(self, token_ids: tuple[int, ...], state: int = 0) -> NewSequence:
        """The sequence, which owns all pages. state: the block of the recurrent state that it modifies, if any."""
        groups, states = len(self._groups), (TableChange(appended=(state,)),) * self._has_states
        table = TableChange(appended=tuple(range(self._num_blocks)))
        second_table = TableChange(appended=tuple(range(self._num_blocks, 2 * self._num_blocks)))
        return NewSequence(
            seq_id=0,
            index=0,
            sampling=SamplingParams(),
            seed=0,
            num_prompt_tokens=len(token_ids),
            stop_ids=(),
            token_ids=token_ids,
            tables=TableChanges(
                True, (table,) * groups + states + ((second_table,) * groups + states if self._has_second_keys else ())
            ),
            rotary_id=0,
            window=self._context.attention_window,
            sinks=self._context.attention_sinks,
        )

    def prefill(self, num_tokens: int, specs: Specs) -> None:
        """Compute the text before endings. Their passes begin with its last token, which recurrent states must not contain."""
        last = num_tokens - 1 - self._has_states
        for _ in self.recompute([(0, num_tokens, specs)], [last] if last >= 0 else []):
            pass

    def read_ending(self, ending: tuple[int, ...], specs: Specs) -> Iterator[Tensor]:
        """Hidden states [R, hidden] of the rows that predict an ending of the prefilled text. Overwrites the previous
        ending."""
        token_ids = self._token_ids + ending
        self._num_tokens = len(token_ids)
        copies = (BlockCopy(len(self._groups), 0, 1),) * self._has_states
        new = self._sequence(token_ids, state=int(self._has_states))
        self._runner.apply(SchedulerOutput(self._next_step, removed=(0,), new=(new,), copies=copies))
        for _, hidden in self._forward(len(self._token_ids) - 1, len(token_ids) - 1, specs):
            yield hidden

    @property
    def _next_step(self) -> int:
        return self._runner.input_batch.step + 1

    def recompute(self, stages: Iterable[Stage], rows: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """One pass per stage, from row 0 to its last requested row; yields only rows of that stage.

        A plan that never changes has one stage, so this implements `frozen` too.
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

    def rotate(self, stages: Iterable[Stage]) -> Iterator[tuple[int, Tensor]]:
        """One pass; at each change of frequencies every cached key is re-rotated.

        The second half of the cache retains the originals, from which every re-rotation starts.
        """
        passed: list[Stage] = []
        for first, end, specs in stages:
            previous = passed[-1:]
            change = SchedulerOutput(
                self._next_step,
                original_copies=tuple(
                    self._rerotation(group, stage, stage[2], to_originals=True)
                    for group in self._groups
                    for stage in previous
                ),
                rerotations=tuple(self._rerotation(group, stage, specs) for group in self._groups for stage in passed),
            )
            self._runner.apply(change)
            yield from self._forward(first, end, specs)
            passed.append((first, end, specs))

    def _rerotation(self, group: int, stage: Stage, specs: Specs, *, to_originals: bool = False) -> KeyRerotation:
        """Re-rotate the keys of a stage from the second half of the cache to the first; to_originals: the reverse."""
        first, end, origin = stage
        live = range(first // _BLOCK, -(-end // _BLOCK))
        originals = range(live.start + self._num_blocks, live.stop + self._num_blocks)
        sources, targets = (live, originals) if to_originals else (originals, live)
        return KeyRerotation(
            group=group,
            start=first,
            end=end,
            sources=tuple(sources),
            targets=tuple(targets),
            first_position=first,
            from_specs=origin,
            to_specs=specs,
        )

    def _forward(self, first: int, end: int, specs: Specs) -> Iterator[tuple[int, Tensor]]:
        """Run rows first .. end - 1 under `specs`; earlier rows are cached."""
        for start, stop in pairwise([*range(first, end, self._chunk), end]):
            plan = SchedulerOutput(
                self._next_step,
                rotary_rows=(RotaryRow(0, specs),),
                sequences=(ScheduledSequence(0, start, stop - start, self._num_tokens),),
            )
            hidden = self._runner.hidden_states(plan)
            if self._computed is not None:
                self._computed(stop - start)
            yield start, hidden
