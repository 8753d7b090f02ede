"""What every rank of a model does of a step: it follows the plan, and computes the logits that the plan asks for.

Where there are several ranks, all of them do this with the same plans, each with its own heads and weights, and whatever they do
together they do in the same order: which logits are formed is said by the plan alone. Draws are made by the first rank, see
`windlass.engine.execution.runner`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from windlass.engine.cache.persist.pages import BlockPages
from windlass.engine.cache.storage import KVStorage
from windlass.engine.execution.batch import BatchBuilder
from windlass.engine.execution.decode_graphs import DecodeGraphs
from windlass.engine.execution.key_rotator import KeyRotator
from windlass.engine.execution.replay import DecodeReplay, StepTensors
from windlass.engine.execution.sequences import LiveSequences
from windlass.engine.model.adapters.adapter import LoadedAdapters
from windlass.engine.model.decoder import Decoder
from windlass.engine.rotary.tables import RotaryTables
from windlass.engine.sampling.sampler import takes_largest
from windlass.engine.scheduling.chunk_cuts import NO_CUTS, ChunkCuts
from windlass.engine.scheduling.plan import ScheduledSequence, SchedulerOutput, Snapshot
from windlass.kernels import sent

# Rows of logits formed at once for prompt log-probabilities: bounds memory at vocabulary * rows * 4 bytes.
_PROMPT_LOGPROB_ROWS = 256


class RankRunner:
    """One model, or a rank's part of one, on one device. `positions_computed` counts the tokens that passed through it.

    persisted: where blocks that plans save go to, and those that they load come from. unturned: the sequences whose keys the last
    plan turns and the device had no memory to.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KVStorage,
        tables: RotaryTables,
        block_size: int,
        adapters: LoadedAdapters | None = None,
        persisted: BlockPages | None = None,
    ) -> None:
        self.decoder, self.cache, self.tables = decoder, cache, tables
        groups = len(decoder.spec.kv_groups)
        has_states = decoder.spec.state_group is not None
        self.sequences = LiveSequences(groups, has_states=has_states)
        self.batches = BatchBuilder(
            self.sequences,
            tables,
            num_groups=groups,
            block_size=block_size,
            windows=decoder.spec.attention_windows,
            anchored=decoder.spec.scores_by_absolute_position,
            backend=decoder.backend,
            has_states=has_states,
            cuts=NO_CUTS if decoder.spec.sees_whole_texts else ChunkCuts(decoder.backend.fewest_alike, block_size),
            adapters=adapters,
        )
        self._adapters, self._persisted = adapters, persisted
        self._is_part = decoder.spec.vocabulary is not None
        self.replay = DecodeReplay(decoder, cache)
        self.graphs: DecodeGraphs | None = None
        self._block_size = block_size
        self._rotator = KeyRotator(decoder.spec, cache, block_size, decoder.backend)
        self.unturned: frozenset[int] = frozenset()
        self.positions_computed = 0

    def make_graphs(self, most_rows: int, most_blocks: int) -> None:
        """Let decode steps be captured, where the device has graphs and the model draws tokens: see `DecodeGraphs.capture`."""
        decoder = self.decoder
        if self._is_part or not decoder.spec.generates:
            return
        graphs = decoder.backend.make_graphs()
        if graphs is None:
            return
        self.graphs = DecodeGraphs(
            decoder,
            self.cache,
            self.tables,
            self.batches,
            graphs,
            most_rows=most_rows,
            most_blocks=most_blocks,
            block_size=self._block_size,
            adapters=self._adapters,
        )

    def join(self) -> None:
        """What the device is asked for from now on comes behind the steps that it was asked for."""
        if self.graphs is not None:
            self.graphs.join()

    @torch.inference_mode()
    def take_part(self, plan: SchedulerOutput) -> None:
        """Do this rank's part of what `Runner.execute` does on the first one."""
        self._follow(plan)
        self._check_turned()
        if not plan.sequences:
            return
        hidden, made = self._forward(plan)
        if rows := [row for _, of_item in self._drawn_rows(plan) for row in of_item]:
            self._logits_of(rows, hidden, made)
        for item, rows_of_prompt in self._prompt_rows(plan, hidden):
            for _ in self._prompt_logits(item, rows_of_prompt):
                pass
        self._answer_logits(plan, hidden)

    @torch.inference_mode()
    def follow(self, plan: SchedulerOutput) -> None:
        """Take in what a plan changes, in its books and in the cache, and compute nothing."""
        self._follow(plan)
        self._check_turned()

    def _follow(self, plan: SchedulerOutput) -> None:
        self.sequences.apply(plan)
        for row in plan.rotary_rows:
            self.tables.write(row.row, row.specs)
        # Blocks that are saved or parked may be taken for what is loaded. That may be evicted again by the same plan, for a
        # sequence that comes back, or be what is copied.
        if self._persisted is not None and plan.saved:
            self._persisted.save(plan.saved)
        self._park(plan)
        if self._persisted is not None and plan.loaded:
            self._persisted.put(plan.loaded)
        for parked in plan.unparked:
            self.cache.unpark(parked)
        for seq_id in plan.forgotten:
            self.cache.forget_parked(seq_id)
        if plan.ahead and plan.copies and self.graphs is not None:
            self.graphs.follow(lambda: self.cache.copy_blocks(plan.copies))
        else:
            self.cache.copy_blocks(plan.copies)
        self.unturned = self._rotator.apply_all((*plan.set_aside, *plan.rerotations))

    def _check_turned(self) -> None:
        """Raises what torch raises without memory, where there was none to turn keys; all else that a plan changes is done."""
        if self.unturned:
            raise torch.OutOfMemoryError("no memory is left to turn the keys of one block")

    def _park(self, plan: SchedulerOutput) -> None:
        for parked in plan.parked:
            self.cache.park(parked)

    def restore(self, snapshot: Snapshot) -> None:
        """Forget every sequence and start from a snapshot; the cache is taken to hold what it names."""
        self.sequences.restore(snapshot)
        for row in snapshot.rotary_rows:
            self.tables.write(row.row, row.specs)

    def _forward(self, plan: SchedulerOutput, *, whole: bool = False) -> tuple[Tensor, StepTensors | None]:
        """Hidden states [T, hidden] of every row, and what else is known of every row already.

        whole: all of them are wanted; else those that a plan of prompts asks nothing of may be zeros.
        """
        if self.graphs is not None and (replayed := self.graphs.run(plan.sequences)) is not None:
            self.positions_computed += replayed.hidden.shape[0]
            return replayed.hidden, replayed
        batch = self.batches.build(plan.sequences)
        if self.decoder.spec.token_types > 1 and self.sequences.pooled:
            batch = replace(batch, token_types=self._token_types(plan))
        if self.decoder.first_reader is not None and not whole and batch.versions is None:
            batch.only_ends = self._asks_for_ends(plan)
        live = self.sequences.by_id
        maxima = all(takes_largest(live[item.seq_id].slot) for item in plan.sequences)
        made = self.replay.run(batch, maxima=maxima) if self.decoder.spec.generates else None
        hidden = self.decoder.forward(batch, self.cache) if made is None else made.hidden
        if made is None and self._is_part and batch.input_ids.shape == batch.seq_lens.shape:
            # A rank that repeats such a step forms the logits of every row: so do those that do not.
            made = StepTensors(hidden, self.decoder.logits(hidden), None)
        self.positions_computed += hidden.shape[0]
        return hidden, made

    def _asks_for_ends(self, plan: SchedulerOutput) -> bool:
        """Whether a step of prompts is asked for nothing but what is drawn behind each."""
        if self.sequences.pooled or plan.num_tokens == len(plan.sequences):
            return False
        return all(not item.draft and item.prompt_logprobs is None for item in plan.sequences)

    def _token_types(self, plan: SchedulerOutput) -> Tensor:
        """Which text of a pair each token belongs to, [T] int64."""
        types = []
        for item in plan.sequences:
            rule = self.sequences.pooled.get(item.seq_id)
            second = None if rule is None else rule.second_from
            tokens = range(item.start, item.start + item.num_tokens)
            types += [int(second is not None and index >= second) for index in tokens]
        return sent(torch.tensor(types), self.decoder.device)

    def _drawn_rows(self, plan: SchedulerOutput) -> Iterator[tuple[ScheduledSequence, range]]:
        """The sequences that tokens are drawn for, and the rows of the step that they are drawn from."""
        end = 0
        for item in plan.sequences:
            end += item.num_tokens
            if item.samples:
                yield item, range(end - 1 - len(item.draft), end)

    def _logits_of(self, rows: list[int], hidden: Tensor, made: StepTensors | None) -> Tensor:
        """Logits [R, V] of these rows."""
        if made is not None and len(rows) == len(made.logits):
            return made.logits
        chosen = hidden if made is None else made.logits
        if len(rows) < chosen.shape[0]:
            chosen = chosen[sent(torch.tensor(rows), chosen.device)]
        return self.decoder.logits(chosen) if made is None else chosen

    def _prompt_rows(self, plan: SchedulerOutput, hidden: Tensor) -> Iterator[tuple[ScheduledSequence, Tensor]]:
        """The sequences whose prompts' log-probabilities are asked for, and their rows of the step."""
        first = 0
        for item in plan.sequences:
            if item.prompt_logprobs is not None:
                yield item, hidden[first : first + item.num_tokens]
            first += item.num_tokens

    def _answer_logits(self, plan: SchedulerOutput, hidden: Tensor) -> dict[int, Tensor]:
        """By sequence id: the logits [V] behind prompts that end in this step and whose answers are compared."""
        rows: dict[int, int] = {}
        end = 0
        for item in plan.sequences:
            end += item.num_tokens
            rule = self.sequences.pooled.get(item.seq_id)
            if rule is not None and rule.answers and item.start + item.num_tokens == item.num_known_tokens:
                rows[item.seq_id] = end - 1
        if not rows:
            return {}
        chosen = hidden[sent(torch.tensor(list(rows.values())), hidden.device)]
        return dict(zip(rows, self.decoder.logits(chosen), strict=True))

    def _prompt_logits(self, item: ScheduledSequence, hidden: Tensor) -> Iterator[tuple[Sequence[int], Tensor]]:
        """The next tokens of a chunk of a prompt, some at a time, and the logits [R, V] that predict them."""
        # Row i of the chunk predicts the token at index start + i + 1, if that is still the prompt's.
        slot = self.sequences.by_id[item.seq_id].slot
        targets = slot.token_ids[item.start + 1 : min(item.start + item.num_tokens + 1, slot.num_prompt_tokens)]
        for begin in range(0, len(targets), _PROMPT_LOGPROB_ROWS):
            part = targets[begin : begin + _PROMPT_LOGPROB_ROWS]
            yield part, self.decoder.logits(hidden[begin : begin + len(part)])
