"""Speculative decoding proposers: a draft model, or the model's own MTP head.

Both propose greedily for all streams of a step at once. Their KV cache uses the target model's block tables (`Proposer`): block
copies, swapped blocks and re-rotations of a plan are applied to it too, under the proposer's frequencies. What a proposer
computes, or lacks, changes how many proposals are accepted and never which tokens are produced: a cached prefix block may lack
the last few draft keys.

Draft model: prompts run through both models; a stream that does not draft is caught up before it drafts again. Recurrent states
of a draft model cannot go back, so it lags by less than a block.

MTP head: its input is the model's hidden state of a token joined with the embedding of the next token; its key for a token is
in the slot of that token. For further tokens it uses its own output, and those keys are recomputed from the model's states after
acceptance. Hidden states not yet consumed are stored, at most one block per stream. The key of a block's last token depends on
the token after the block, which may differ for a later prompt with the same prefix.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Generic, TypeVar

import torch
from torch import Tensor

from windlass.engine.cache.cache_operations import KeyRerotation, SwappedPages
from windlass.engine.cache.kv_cache import KVCache
from windlass.engine.execution.device_batch import GREEDY
from windlass.engine.execution.input_batch import InputBatch
from windlass.engine.execution.recorded_steps import StepOutputs
from windlass.engine.execution.step_runner import StepRunner
from windlass.engine.interface.config import MAX_DRAFT_TOKENS
from windlass.engine.model.decoder import Decoder
from windlass.engine.model.forward_batch import ForwardBatch
from windlass.engine.rotary.rope_scaling import DraftRotaryMapper
from windlass.engine.rotary.rotary_tables import RotaryTables
from windlass.engine.scheduling.async_scheduling import MAX_PASSES
from windlass.engine.scheduling.scheduler_output import ScheduledSequence, SchedulerOutput, Snapshot
from windlass.kernels import is_out_of_memory, to_device

_MAX_CACHED_SPECS = 256

Progress = TypeVar("Progress")


def draft_chunk(item: ScheduledSequence, start: int, end: int, draft: tuple[int, ...] = ()) -> ScheduledSequence:
    """Tokens start .. end - 1 of the item's sequence, the last of which are `draft`."""
    return ScheduledSequence(item.seq_id, start, end - start, item.num_known_tokens, draft=draft)


def _last_rows(counts: Iterable[int]) -> list[int]:
    """The last row of each of several chunks that follow each other."""
    return [end - 1 for end in accumulate(counts)]


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A draft model or an MTP layer. tables: as many rows as the target model's, written only by the proposer."""

    decoder: Decoder
    cache: KVCache
    tables: RotaryTables
    rotations: DraftRotaryMapper


class Proposer(StepRunner, ABC, Generic[Progress]):
    """A draft model or MTP layer, with its KV cache.

    input_batch: that of the target model, updated by its owner. progress: by sequence, what the proposer has computed; swapped
    out and removed with the sequence.
    """

    def __init__(self, model: DraftModel, input_batch: InputBatch, block_size: int) -> None:
        super().__init__(model.decoder, model.cache, model.tables, input_batch, block_size)
        self._specs_of = lru_cache(_MAX_CACHED_SPECS)(model.rotations)
        self.progress: dict[int, Progress] = {}
        self._swapped_out: dict[int, Progress] = {}
        # By sequence: its last re-rotations, in the order of slots, until the tokens that they missed are computed.
        self._rerotated: dict[int, list[KeyRerotation]] = {}

    @abstractmethod
    def propose(self, plan: SchedulerOutput) -> SchedulerOutput:
        """The plan with the proposals that it requests."""

    @abstractmethod
    def observe(self, plan: SchedulerOutput, hidden: Tensor) -> None:
        """Use the target model's states of a plan's tokens. hidden: [T, hidden], normed, which the next step may overwrite."""

    def swap_out(self, plan: SchedulerOutput) -> None:
        """Swap out the sequences of a plan. Must precede loading, which may overwrite their blocks here too."""
        for swapped_out in plan.swapped_out:
            self.cache.swap_out(self._draft_pages(swapped_out))
            if swapped_out.seq_id in self.progress:
                self._swapped_out[swapped_out.seq_id] = self.progress[swapped_out.seq_id]
            self._rerotated.pop(swapped_out.seq_id, None)

    def apply(self, plan: SchedulerOutput) -> None:
        """Apply the other changes of a plan, after the input batch has applied it and its blocks are loaded."""
        for seq_id in plan.removed:
            self.progress.pop(seq_id, None)
            self._rerotated.pop(seq_id, None)
        for row in plan.rotary_rows:
            self.tables.write(row.row, self._specs_of(row.specs))
        for swapped_out in plan.swapped_in:
            self.cache.swap_in(self._draft_pages(swapped_out))
            if swapped_out.seq_id in self._swapped_out:
                self.progress[swapped_out.seq_id] = self._swapped_out.pop(swapped_out.seq_id)
        for seq_id in plan.discarded:
            self.cache.discard_swapped(seq_id)
            self._swapped_out.pop(seq_id, None)
        self.cache.copy_blocks([copy for copy in plan.copies if copy.group <= self._has_states])
        rerotations = [self._for_draft_model(rerotation) for rerotation in plan.rerotations]
        # Sequences for which there is no memory get worse proposals.
        self._rotator.apply_all((*map(self._for_draft_model, plan.original_copies), *rerotations))
        for rerotation in rerotations:
            if rerotation.seq_id is not None:
                earlier = self._rerotated.setdefault(rerotation.seq_id, [])
                if earlier and rerotation.start <= earlier[-1].start:  # the next re-rotation of the same keys
                    earlier.clear()
                earlier.append(rerotation)

    def restore(self, snapshot: Snapshot) -> None:
        """Start from a snapshot of the scheduler."""
        self.progress.clear()
        self._rerotated.clear()
        for row in snapshot.rotary_rows:
            self.tables.write(row.row, self._specs_of(row.specs))

    def run_start(self, seq_id: int) -> int:
        """The first token of the last run of slots: tokens before it were dropped or belong to a reused passage."""
        layout = self.input_batch.by_id[seq_id].layout
        return layout.runs[-1].first_slot - layout.slot_offset

    def fill_originals(self, item: ScheduledSequence, first: int) -> None:
        """Store the original keys of tokens first .. item.start - 1, computed since the keys were re-rotated."""
        rerotations = self._rerotated.pop(item.seq_id, [])
        if not self.input_batch.by_id[item.seq_id].layout.is_plain:
            return  # slots have moved since
        spans = [(max(first, each.start), min(item.start, each.end), each) for each in rerotations]
        self._rotator.apply_all(
            rerotation.part(start, end, self.block_size).inverse() for start, end, rerotation in spans if start < end
        )

    def _draft_pages(self, swapped_out: SwappedPages) -> SwappedPages:
        """Without the state group if only the target model has recurrent states."""
        return replace(swapped_out, blocks=swapped_out.blocks[: 1 + self._has_states])

    def _for_draft_model(self, rerotation: KeyRerotation) -> KeyRerotation:
        """The same re-rotation under the proposer's frequencies."""
        old, new = self._specs_of(rerotation.from_specs), self._specs_of(rerotation.to_specs)
        return replace(rerotation, from_specs=old, to_specs=new)


# -- draft model -----------------------------------------------------------------------------------------------------

# Tokens that are caught up row by row, as a recorded or captured step; more are a chunk.
_MAX_CATCH_UP_ROWS = 2


class DraftModelProposer(Proposer[tuple[int, int]]):
    """Proposes tokens by a smaller model. vocab_size: of the target model.

    Progress: the number of tokens whose keys are computed, and of those that the target model had computed, accepted or not,
    after the last step.
    """

    def __init__(self, model: DraftModel, input_batch: InputBatch, vocab_size: int, block_size: int) -> None:
        super().__init__(model, input_batch, block_size)
        self._vocab_size = min(vocab_size, self._vocab_size)  # token ids that both models have

    def prepare_graphs(self, max_rows: int, max_blocks: int) -> None:
        if not self._has_states:
            super().prepare_graphs(max_rows, max_blocks)

    def propose(self, plan: SchedulerOutput) -> SchedulerOutput:
        """The plan with the proposals that it requests. The draft model also computes the tokens of the other chunks."""
        chunks, drafting, caught_up = [], [], []
        for item in plan.sequences:
            valid = self._num_valid(item)
            end = item.start + item.num_tokens
            if item.num_drafted:
                drafting.append((item, min(valid, item.start)))
                caught_up.append((item, valid))
                self.progress[item.seq_id] = end - (not self._must_update_state(item)), end
                continue
            slot = self.input_batch.by_id[item.seq_id].slot
            known = end - len(item.draft)
            is_stream = item.start >= slot.num_prompt_tokens and known == item.start + 1
            if is_stream and not self._must_update_state(item):  # caught up when it drafts again
                self.progress[item.seq_id] = valid, end
                continue
            until = end if self._has_states else known
            chunks.append(draft_chunk(item, valid, until, item.draft if self._has_states else ()))
            caught_up.append((item, valid))
            self.progress[item.seq_id] = until, end
        if chunks:
            self._run(chunks)
        drafts = self._draft(drafting) if drafting else {}
        for item, valid in caught_up:
            self.fill_originals(item, valid)
        return _with_drafts(plan, drafts)

    def observe(self, plan: SchedulerOutput, hidden: Tensor) -> None:
        """Ignored: a draft model needs no hidden states."""

    def _must_update_state(self, item: ScheduledSequence) -> bool:
        """Whether a state after this step, or after one of its tokens, may be stored and so must be computed now."""
        end = item.start + item.num_tokens + self.input_batch.by_id[item.seq_id].layout.slot_offset
        return self._has_states and (bool(item.draft) or end % self.block_size == 0)

    def _num_valid(self, item: ScheduledSequence) -> int:
        """The number of leading tokens whose keys are computed, as those of cached and of new sequences are taken to be."""
        valid, end = self.progress.get(item.seq_id, (item.start, item.start))
        return item.start if item.start > end else max(self.run_start(item.seq_id), min(valid, item.start))

    def _draft(self, drafting: list[tuple[ScheduledSequence, int]]) -> dict[int, list[int]]:
        """The requested number of proposals for each sequence. drafting: items and their numbers of valid keys."""
        drafts: dict[int, list[int]] = {item.seq_id: [] for item, _ in drafting}
        lagging = [
            draft_chunk(item, valid, item.start)
            for item, valid in drafting
            if item.start + 1 - valid > _MAX_CATCH_UP_ROWS
        ]
        if lagging:
            self._run(lagging)
        rows = []
        for item, valid in drafting:
            first = valid if item.start + 1 - valid <= _MAX_CATCH_UP_ROWS else item.start
            token_ids = self.input_batch.by_id[item.seq_id].token_ids
            rows.append(draft_chunk(item, first, item.start + 1, tuple(token_ids[first + 1 : item.start + 1])))
        wanted, step = [item for item, _ in drafting], 0
        while wanted:
            for item, tokens in zip(wanted, self._next_tokens(wanted, rows, step), strict=True):
                drafts[item.seq_id] += tokens
            step = len(drafts[wanted[0].seq_id])
            wanted = [item for item in wanted if item.num_drafted > step]
            rows = [
                draft_chunk(item, item.start + step, item.start + step + 1, (drafts[item.seq_id][-1],))
                for item in wanted
            ]
        last_tokens = []
        for item, _ in drafting:
            if self._must_update_state(item):
                end = item.start + item.num_tokens
                last_tokens.append(draft_chunk(item, end - 1, end, (drafts[item.seq_id][-1],)))
        if last_tokens:
            self._run(last_tokens)
        return drafts

    def _next_tokens(
        self, wanted: list[ScheduledSequence], rows: list[ScheduledSequence], step: int
    ) -> list[list[int]]:
        """Equally many tokens for each sequence: one, or several if the device runs several passes. rows: their last tokens."""
        num_passes = min(MAX_PASSES, min(item.num_drafted for item in wanted) - step)  # limited by the allocated blocks
        if self.graphs is not None and num_passes > 1 and all(item.num_tokens == 1 for item in rows):
            pending = self.graphs.submit(rows, num_passes, [GREEDY] * len(rows))
            if pending is not None:
                self.positions_computed += num_passes * len(rows)
                ids, _ = pending.wait()
                return [[max(token, 0) for token in of_one] for of_one in ids.T.tolist()]
        return [[token] for token in self._greedy(rows)]

    def _greedy(self, items: list[ScheduledSequence]) -> list[int]:
        """The most likely token after each item's last one."""
        logits = self._row_logits(_last_rows(item.num_tokens for item in items), *self._run(items))
        return logits[:, : self._vocab_size].argmax(dim=1).tolist()

    def _run(self, items: list[ScheduledSequence]) -> tuple[Tensor, StepOutputs | None]:
        """See `_run_batch`; a captured step may compute the outputs, too."""
        outputs = self._run_captured(items)
        if outputs is not None:
            return outputs.hidden, outputs
        batch = self.batches.build(items)
        batch.input_ids.clamp_(max=self.decoder.spec.vocab_size - 1)
        return self._run_batch(batch)


# -- MTP head --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _PendingStates:
    """The target model's hidden states [N, hidden] of tokens first .. first + N - 1, whose MTP keys are not computed."""

    first: int
    states: Tensor

    def up_to(self, end: int) -> _PendingStates:
        """Those of tokens before `end`."""
        return replace(self, states=self.states[: max(0, end - self.first)])

    def from_token(self, first: int) -> _PendingStates:
        """Those of tokens from `first` on."""
        dropped = max(0, first - self.first)
        return _PendingStates(self.first + dropped, self.states[dropped:])


class MTPProposer(Proposer[_PendingStates]):
    """Proposes tokens by an MTP layer. Progress: hidden states that it has not consumed."""

    _caught_up: frozenset[int] = frozenset()  # sequences that lacked no keys when the step started

    def propose(self, plan: SchedulerOutput) -> SchedulerOutput:
        """The plan with the proposals that it requests, without any for streams whose hidden states are unknown."""
        drafting, full = [], []
        for item in plan.sequences:
            pending = self._pending_of(item, self.progress.get(item.seq_id))
            if pending is None:
                continue
            if item.num_drafted:
                drafting.append((item, pending))
            elif len(pending.states) >= self.block_size:
                full.append((item, pending))
        drafts, done = dict[int, list[int]](), list[tuple[ScheduledSequence, _PendingStates]]()
        with _ignore_out_of_memory():
            if full:
                self._run_pending(full)
                done += full
            if drafting:
                drafts = self._draft(drafting)
                done += drafting
        for item, pending in done:
            self.fill_originals(item, pending.first)
        self._caught_up = frozenset(item.seq_id for item, _ in done)
        return _with_drafts(plan, drafts)

    def observe(self, plan: SchedulerOutput, hidden: Tensor) -> None:
        # A sequence whose states find no memory is left without any.
        known = {item.seq_id: self.progress.pop(item.seq_id, None) for item in plan.sequences}
        prompts, end = [], 0
        with _ignore_out_of_memory():
            for item in plan.sequences:
                begin, end = end, end + item.num_tokens
                if item.seq_id in self.input_batch.pooled:
                    continue
                pending = self._append_states(item, known[item.seq_id], hidden[begin:end])
                # The state of the last known token has no next token to be joined with yet.
                ready = min(item.start + item.num_tokens, len(self.input_batch.by_id[item.seq_id].token_ids) - 1)
                if item.num_tokens > 1 + len(item.draft) and ready > pending.first:
                    prompts.append((item, pending.up_to(ready)))
                    pending = pending.from_token(ready)
                pending = replace(pending, states=pending.states.clone())
                for seq_id in (item.seq_id, *item.samples):
                    self.progress[seq_id] = pending
            if prompts:
                self._run_pending(prompts)

    def _pending_of(self, item: ScheduledSequence, pending: _PendingStates | None) -> _PendingStates | None:
        """The part of these states whose tokens precede the item's; None unless it has the states of all missing keys."""
        if pending is None:
            return None
        found = pending.up_to(item.start).from_token(self.run_start(item.seq_id))
        return found if len(found.states) and found.first + len(found.states) == item.start else None

    def _append_states(self, item: ScheduledSequence, known: _PendingStates | None, states: Tensor) -> _PendingStates:
        """The pending states after the step, given its states [N, hidden]. known: those before the step."""
        pending = None if item.seq_id in self._caught_up else self._pending_of(item, known)
        # A full block has been tried and found no memory; a longer wait would need more.
        if pending is None or len(pending.states) >= self.block_size:
            return _PendingStates(item.start, states)
        return replace(pending, states=torch.cat((pending.states, states)))

    def _draft(self, items: list[tuple[ScheduledSequence, _PendingStates]]) -> dict[int, list[int]]:
        """The requested number of proposals for each sequence, by its id."""
        drafts: dict[int, list[int]] = {item.seq_id: [] for item, _ in items}
        hidden, outputs = self._run_pending(items)
        rows = _last_rows(len(pending.states) for _, pending in items)
        wanted, step = [item for item, _ in items], 0
        while True:
            logits = self._row_logits(rows, hidden, outputs)
            for item, token in zip(wanted, logits.argmax(dim=1).tolist(), strict=True):
                drafts[item.seq_id].append(token)
            step += 1
            remaining = [i for i, item in enumerate(wanted) if item.num_drafted > step]
            if not remaining:
                return drafts
            states = hidden[to_device(torch.tensor([rows[i] for i in remaining]), hidden.device)]
            wanted, rows = [wanted[i] for i in remaining], list(range(len(remaining)))
            chunks = [
                draft_chunk(item, item.start + step - 1, item.start + step, (drafts[item.seq_id][-1],))
                for item in wanted
            ]
            hidden, outputs = self._run(self.batches.build(chunks), states)

    def _run_pending(self, items: list[tuple[ScheduledSequence, _PendingStates]]) -> tuple[Tensor, StepOutputs | None]:
        """Run tokens with pending states, each joined with its next token: see `_run`."""
        chunks, token_ids = [], list[int]()
        for item, pending in items:
            known, first = self.input_batch.by_id[item.seq_id].token_ids, pending.first
            end = first + len(pending.states)
            # Few tokens are passed as proposed ones, so that they are single rows and the step can be recorded.
            few = end - first <= 1 + MAX_DRAFT_TOKENS
            chunks.append(draft_chunk(item, first, end, tuple(known[first + 1 : end]) if few else ()))
            token_ids += known[first + 1 : end + 1]
        batch = self.batches.build(chunks)
        batch.input_ids.copy_(to_device(torch.tensor(token_ids), batch.input_ids.device))
        return self._run(batch, torch.cat([pending.states for _, pending in items]))

    def _run(self, batch: ForwardBatch, states: Tensor) -> tuple[Tensor, StepOutputs | None]:
        """See `_run_batch`. states: [T, hidden], joined with the embeddings of the rows' tokens."""
        return self._run_batch(replace(batch, hidden=states))


@contextlib.contextmanager
def _ignore_out_of_memory() -> Iterator[None]:
    """Ignore a lack of memory: proposals are then fewer or worse, and no request fails."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise


def _with_drafts(plan: SchedulerOutput, drafts: Mapping[int, list[int]]) -> SchedulerOutput:
    """The plan with these proposals, by sequence, in place of the numbers of tokens to propose."""
    if not any(item.num_drafted for item in plan.sequences):
        return plan
    filled = []
    for item in plan.sequences:
        if item.num_drafted:
            draft = tuple(drafts.get(item.seq_id, ()))
            num_tokens = item.num_tokens - item.num_drafted + len(draft)
            item = item._replace(num_tokens=num_tokens, draft=draft, num_drafted=0)
        filled.append(item)
    return replace(plan, sequences=tuple(filled))
