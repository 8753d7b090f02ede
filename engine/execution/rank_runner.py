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

from windlass.engine.cache.persist.pages import BlockTransfer
from windlass.engine.cache.storage import KVCache
from windlass.engine.execution.batch import ForwardBatchBuilder
from windlass.engine.execution.decode_graphs import DecodeGraphs
from windlass.engine.execution.key_rotator import KeyRotator
from windlass.engine.execution.replay import DecodeReplay, StepOutputs
from windlass.engine.execution.sequences import InputBatch
from windlass.engine.model.adapters.adapter import LoadedAdapters
from windlass.engine.model.decoder import Decoder
from windlass.engine.rotary.tables import RotaryTables
from windlass.engine.sampling.sampler import is_greedy
from windlass.engine.scheduling.chunk_cuts import NO_BOUNDARIES, ChunkBoundaries
from windlass.engine.scheduling.plan import ScheduledSequence, SchedulerOutput, Snapshot
from windlass.kernels import to_device

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
        cache: KVCache,
        tables: RotaryTables,
        block_size: int,
        adapters: LoadedAdapters | None = None,
        persisted: BlockTransfer | None = None,
    ) -> None:
        self.decoder, self.cache, self.tables = decoder, cache, tables
        groups = len(decoder.spec.kv_groups)
        has_states = decoder.spec.state_group is not None
        self.sequences = InputBatch(groups, has_states=has_states)
        self.batches = ForwardBatchBuilder(
            self.sequences,
            tables,
            num_groups=groups,
            block_size=block_size,
            windows=decoder.spec.attention_windows,
            absolute_scores=decoder.spec.scores_by_absolute_position,
            backend=decoder.backend,
            has_states=has_states,
            chunk_boundaries=NO_BOUNDARIES
            if decoder.spec.is_bidirectional
            else ChunkBoundaries(decoder.backend.uniform_prefill_min_tokens, block_size),
            adapters=adapters,
        )
        self._adapters, self._persisted = adapters, persisted
        self._is_shard = decoder.spec.vocabulary is not None
        self.replay = DecodeReplay(decoder, cache)
        self.graphs: DecodeGraphs | None = None
        self._block_size = block_size
        self._rotator = KeyRotator(decoder.spec, cache, block_size, decoder.backend)
        self.failed_rerotations: frozenset[int] = frozenset()
        self.positions_computed = 0

    def make_graph_runner(self, max_rows: int, max_blocks: int) -> None:
        """Let decode steps be captured, where the device has graphs and the model draws tokens: see `DecodeGraphs.capture`."""
        decoder = self.decoder
        if self._is_shard or not decoder.spec.generates:
            return
        graphs = decoder.backend.make_graph_runner()
        if graphs is None:
            return
        self.graphs = DecodeGraphs(
            decoder,
            self.cache,
            self.tables,
            self.batches,
            graphs,
            max_rows=max_rows,
            max_blocks=max_blocks,
            block_size=self._block_size,
            adapters=self._adapters,
        )

    def join(self) -> None:
        """What the device is asked for from now on comes behind the steps that it was asked for."""
        if self.graphs is not None:
            self.graphs.join()

    @torch.inference_mode()
    def execute_rank(self, plan: SchedulerOutput) -> None:
        """Do this rank's part of what `Runner.execute` does on the first one."""
        self._apply(plan)
        self._check_rerotations()
        if not plan.sequences:
            return
        hidden, outputs = self._forward(plan)
        if rows := [row for _, of_item in self._sampled_rows(plan) for row in of_item]:
            self._row_logits(rows, hidden, outputs)
        for item, rows_of_prompt in self._prompt_rows(plan, hidden):
            for _ in self._prompt_logits(item, rows_of_prompt):
                pass
        self._answer_logits(plan, hidden)

    @torch.inference_mode()
    def apply(self, plan: SchedulerOutput) -> None:
        """Take in what a plan changes, in its books and in the cache, and compute nothing."""
        self._apply(plan)
        self._check_rerotations()

    def _apply(self, plan: SchedulerOutput) -> None:
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
        for swapped_out in plan.swapped_in:
            self.cache.swap_in(swapped_out)
        for seq_id in plan.discarded:
            self.cache.discard_swapped(seq_id)
        if plan.ahead and plan.copies and self.graphs is not None:
            self.graphs.apply(lambda: self.cache.copy_blocks(plan.copies))
        else:
            self.cache.copy_blocks(plan.copies)
        self.failed_rerotations = self._rotator.apply_all((*plan.original_copies, *plan.rerotations))

    def _check_rerotations(self) -> None:
        """Raises what torch raises without memory, where there was none to turn keys; all else that a plan changes is done."""
        if self.failed_rerotations:
            raise torch.OutOfMemoryError("no memory is left to turn the keys of one block")

    def _park(self, plan: SchedulerOutput) -> None:
        for swapped_out in plan.swapped_out:
            self.cache.swap_out(swapped_out)

    def restore(self, snapshot: Snapshot) -> None:
        """Forget every sequence and start from a snapshot; the cache is taken to hold what it names."""
        self.sequences.restore(snapshot)
        for row in snapshot.rotary_rows:
            self.tables.write(row.row, row.specs)

    def _forward(self, plan: SchedulerOutput, *, all_rows: bool = False) -> tuple[Tensor, StepOutputs | None]:
        """Hidden states [T, hidden] of every row, and what else is known of every row already.

        whole: all of them are wanted; else those that a plan of prompts asks nothing of may be zeros.
        """
        if self.graphs is not None and (replayed := self.graphs.run(plan.sequences)) is not None:
            self.positions_computed += replayed.hidden.shape[0]
            return replayed.hidden, replayed
        batch = self.batches.build(plan.sequences)
        if self.decoder.spec.token_types > 1 and self.sequences.pooled:
            batch = replace(batch, token_types=self._token_types(plan))
        if self.decoder.first_kv_sharing_layer is not None and not all_rows and batch.query_copies is None:
            batch.only_last_tokens = self._asks_for_ends(plan)
        live = self.sequences.by_id
        maxima = all(is_greedy(live[item.seq_id].slot) for item in plan.sequences)
        outputs = self.replay.run(batch, maxima=maxima) if self.decoder.spec.generates else None
        hidden = self.decoder.forward(batch, self.cache) if outputs is None else outputs.hidden
        if outputs is None and self._is_shard and batch.input_ids.shape == batch.seq_lens.shape:
            # A rank that repeats such a step forms the logits of every row: so do those that do not.
            outputs = StepOutputs(hidden, self.decoder.logits(hidden), None)
        self.positions_computed += hidden.shape[0]
        return hidden, outputs

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
        return to_device(torch.tensor(types), self.decoder.device)

    def _sampled_rows(self, plan: SchedulerOutput) -> Iterator[tuple[ScheduledSequence, range]]:
        """The sequences that tokens are drawn for, and the rows of the step that they are drawn from."""
        end = 0
        for item in plan.sequences:
            end += item.num_tokens
            if item.samples:
                yield item, range(end - 1 - len(item.draft), end)

    def _row_logits(self, rows: list[int], hidden: Tensor, outputs: StepOutputs | None) -> Tensor:
        """Logits [R, V] of these rows."""
        if outputs is not None and len(rows) == len(outputs.logits):
            return outputs.logits
        chosen = hidden if outputs is None else outputs.logits
        if len(rows) < chosen.shape[0]:
            chosen = chosen[to_device(torch.tensor(rows), chosen.device)]
        return self.decoder.logits(chosen) if outputs is None else chosen

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
        chosen = hidden[to_device(torch.tensor(list(rows.values())), hidden.device)]
        return dict(zip(rows, self.decoder.logits(chosen), strict=True))

    def _prompt_logits(self, item: ScheduledSequence, hidden: Tensor) -> Iterator[tuple[Sequence[int], Tensor]]:
        """The next tokens of a chunk of a prompt, some at a time, and the logits [R, V] that predict them."""
        # Row i of the chunk predicts the token at index start + i + 1, if that is still the prompt's.
        slot = self.sequences.by_id[item.seq_id].slot
        targets = slot.token_ids[item.start + 1 : min(item.start + item.num_tokens + 1, slot.num_prompt_tokens)]
        for begin in range(0, len(targets), _PROMPT_LOGPROB_ROWS):
            part = targets[begin : begin + _PROMPT_LOGPROB_ROWS]
            yield part, self.decoder.logits(hidden[begin : begin + len(part)])
