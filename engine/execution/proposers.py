"""Speculative decoding proposers: a draft model, or the model's own MTP head.

Both propose greedily for all streams of a step at once. Their KV cache uses the target model's block tables (`DraftCache`): block copies, parked blocks and re-rotations of a plan are applied to it too, under the proposer's frequencies. What a proposer computes, or lacks, changes how many proposals are accepted and never which tokens are produced: a cached prefix block may lack the last few draft keys.

Draft model: prompts run through both models; a stream that does not draft is caught up before it drafts again. Recurrent states of a draft model cannot go back, so it lags by less than a block.
MTP head: input is the model's hidden state of a token joined with the embedding of the next token; its key for a token is in the slot of that token. For further tokens it uses its own output, and those keys are recomputed from the model's states after acceptance. Hidden states not yet consumed are stored, at most one block per stream. The key of a block's last token depends on the token after the block, which may differ for a later prompt with the same prefix.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict, abc
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch
from torch import Tensor

from windlass.engine.cache.cache_operations import KeyRerotation, SwappedPages
from windlass.engine.cache.kv_cache import KVCache
from windlass.engine.execution.batch_builder import ForwardBatchBuilder
from windlass.engine.execution.cuda_graphs import DecodeGraphs
from windlass.engine.execution.device_batch import GREEDY
from windlass.engine.execution.input_batch import InputBatch
from windlass.engine.execution.key_rotator import KeyRotator
from windlass.engine.execution.recorded_steps import DecodeReplay
from windlass.engine.interface.config import MAX_DRAFT_TOKENS
from windlass.engine.model.decoder import Decoder
from windlass.engine.model.forward_batch import ForwardBatch
from windlass.engine.rotary.rope_scaling import DraftRotaryMapper, RotarySpec
from windlass.engine.rotary.rotary_tables import RotaryTables
from windlass.engine.scheduling.async_scheduling import MAX_PASSES
from windlass.engine.scheduling.scheduler_output import ScheduledSequence, SchedulerOutput
from windlass.kernels import is_out_of_memory, to_device

_MAX_CACHED_SPECS = 256

Known = TypeVar("Known")


def draft_chunk(item: ScheduledSequence, start: int, end: int, draft: tuple[int, ...] = ()) -> ScheduledSequence:
    """Tokens start .. end - 1 of the item's sequence, the last of which are `draft`."""
    return ScheduledSequence(item.seq_id, start, end - start, item.num_known_tokens, draft=draft)


@dataclass(frozen=True, slots=True)
class DraftModel:
    """What drafts, a model or a model's prediction layer. tables: as many rows as the model's, written by its drafter alone."""

    decoder: Decoder
    cache: KVCache
    tables: RotaryTables
    rotations: DraftRotaryMapper

    def batches(self, sequences: InputBatch, block_size: int) -> ForwardBatchBuilder:
        """Makes its batches, of one KV group. sequences: those of the model it drafts for."""
        spec = self.decoder.spec
        return ForwardBatchBuilder(
            sequences,
            self.tables,
            num_groups=1,
            block_size=block_size,
            windows=spec.attention_windows,
            absolute_scores=spec.scores_by_absolute_position,
            backend=self.decoder.backend,
            has_states=spec.state_group is not None,
        )


class DraftCache(Generic[Known]):
    """sequences: those of the model it drafts for, which their owner keeps up to date.

    known: by sequence, what its drafter has to know of what it has computed; it is parked and forgotten with the sequence.
    """

    def __init__(self, model: DraftModel, sequences: InputBatch, block_size: int) -> None:
        decoder = model.decoder
        self._cache, self._tables, self._rotations = model.cache, model.tables, model.rotations
        self._input_batch, self._block_size = sequences, block_size
        self._has_states = decoder.spec.state_group is not None
        self._rotator = KeyRotator(decoder.spec, model.cache, block_size, decoder.backend)
        self._specs: OrderedDict[tuple[RotarySpec, ...], tuple[RotarySpec, ...]] = OrderedDict()
        self.known: dict[int, Known] = {}
        self._swapped_out: dict[int, Known] = {}
        # By sequence: its last re-rotations, in the order of slots, until the tokens that they missed are there.
        self._rerotated: dict[int, list[KeyRerotation]] = {}

    def swap_out(self, plan: SchedulerOutput) -> None:
        """Park what a plan parks: before blocks are loaded, which may go where that lay, in these pages too."""
        for swapped_out in plan.swapped_out:
            self._cache.swap_out(self._draft_pages(swapped_out))
            if swapped_out.seq_id in self.known:
                self._swapped_out[swapped_out.seq_id] = self.known[swapped_out.seq_id]
            self._rerotated.pop(swapped_out.seq_id, None)

    def apply(self, plan: SchedulerOutput) -> None:
        """Do the rest of what a plan does to those of the model. `sequences` has followed it, and loaded blocks are there."""
        for seq_id in plan.removed:
            self.known.pop(seq_id, None)
            self._rerotated.pop(seq_id, None)
        for row in plan.rotary_rows:
            self._tables.write(row.row, self._specs_of(row.specs))
        for swapped_out in plan.swapped_in:
            self._cache.swap_in(self._draft_pages(swapped_out))
            if swapped_out.seq_id in self._swapped_out:
                self.known[swapped_out.seq_id] = self._swapped_out.pop(swapped_out.seq_id)
        for seq_id in plan.discarded:
            self._cache.discard_swapped(seq_id)
            self._swapped_out.pop(seq_id, None)
        self._cache.copy_blocks([copy for copy in plan.copies if copy.group <= self._has_states])
        turned = [self._for_draft_model(rerotation) for rerotation in plan.rerotations]
        self._rotator.apply_all(
            (*map(self._for_draft_model, plan.original_copies), *turned)
        )  # who is left out is proposed for less well
        for own in turned:
            rerotations_of_seq = self._rerotated.setdefault(own.seq_id, []) if own.seq_id is not None else []
            if (
                rerotations_of_seq and own.start <= rerotations_of_seq[-1].start
            ):  # the next re-rotation of the same keys
                rerotations_of_seq.clear()
            rerotations_of_seq.append(own)

    def restore(self, rows: abc.Iterable[tuple[int, tuple[RotarySpec, ...]]]) -> None:
        """Start from a snapshot of the scheduler's. rows: of the rotary tables, with the model's specs."""
        self.known.clear()
        self._rerotated.clear()
        for row, specs in rows:
            self._tables.write(row, self._specs_of(specs))

    def run_start(self, seq_id: int) -> int:
        """The first token of the run that tokens still join: those in front of it were dropped, or came with a passage."""
        layout = self._input_batch.by_id[seq_id].layout
        return layout.runs[-1].first_slot - layout.slot_offset

    def fill_originals(self, item: ScheduledSequence, first: int) -> None:
        """Give tokens first .. item.start - 1, computed just now, the originals that they lacked when keys were re-rotated."""
        rerotations_of_seq = self._rerotated.pop(item.seq_id, [])
        if not self._input_batch.by_id[item.seq_id].layout.is_plain:
            return  # slots have moved since
        spans = [(max(first, turned.start), min(item.start, turned.end), turned) for turned in rerotations_of_seq]
        self._rotator.apply_all(
            turned.reversed(start, end, self._block_size) for start, end, turned in spans if start < end
        )

    def _draft_pages(self, swapped_out: SwappedPages) -> SwappedPages:
        """Without states that the model carries alone, beside its one KV group."""
        return replace(swapped_out, blocks=swapped_out.blocks[: 1 + self._has_states])

    def _for_draft_model(self, rerotation: KeyRerotation) -> KeyRerotation:
        """The same under the frequencies of what drafts."""
        return replace(
            rerotation,
            from_specs=self._specs_of(rerotation.from_specs),
            to_specs=self._specs_of(rerotation.to_specs),
        )

    def _specs_of(self, specs: tuple[RotarySpec, ...]) -> tuple[RotarySpec, ...]:
        found = self._specs.get(specs)
        if found is None:
            found = self._specs[specs] = self._rotations(specs)
            while len(self._specs) > _MAX_CACHED_SPECS:
                self._specs.popitem(last=False)
        return found


# What is caught up row by row, as a step that can be repeated; more goes as a chunk.
_MAX_CATCH_UP_ROWS = 2


class DraftModelProposer:
    """sequences: those of the model it drafts for, which their owner keeps up to date. vocab_size: of that model.

    positions_computed: tokens that passed through the draft model.
    """

    def __init__(self, model: DraftModel, sequences: InputBatch, vocab_size: int, block_size: int) -> None:
        decoder = model.decoder
        self._decoder, self._cache, self._tables = decoder, model.cache, model.tables
        self._input_batch, self._block_size = sequences, block_size
        self._has_states = decoder.spec.state_group is not None
        self._vocab_size = min(vocab_size, decoder.spec.vocab_size)  # those that both know
        self._batches = model.batches(sequences, block_size)
        self._replay = DecodeReplay(decoder, model.cache)
        self.graphs: DecodeGraphs | None = None
        # known: tokens whose keys are there, and tokens the model had computed, accepted or not, after the last step.
        self.pages = DraftCache[tuple[int, int]](model, sequences, block_size)
        self.positions_computed = 0

    def make_graph_runner(self, max_rows: int, max_blocks: int) -> None:
        """Let its steps be captured, where the device has graphs: see `DecodeGraphs.capture`."""
        graphs = None if self._has_states else self._decoder.backend.make_graph_runner()
        if graphs is not None:
            self.graphs = DecodeGraphs(
                self._decoder,
                self._cache,
                self._tables,
                self._batches,
                graphs,
                max_rows=max_rows,
                max_blocks=max_blocks,
                block_size=self._block_size,
                num_ids=self._vocab_size,
            )

    def propose(self, plan: SchedulerOutput) -> SchedulerOutput:
        """The plan with the proposals in it that it asks for, the draft model having computed what it computes besides."""
        behind, drafting, caught_up = [], [], []
        for item in plan.sequences:
            valid = self._num_valid(item)
            end = item.start + item.num_tokens
            if item.num_drafted:
                drafting.append((item, min(valid, item.start)))
                caught_up.append((item, valid))
                self.pages.known[item.seq_id] = end - (not self._must_update_state(item)), end
                continue
            slot = self._input_batch.by_id[item.seq_id].slot
            known = end - len(item.draft)
            is_stream = item.start >= slot.num_prompt_tokens and known == item.start + 1
            if is_stream and not self._must_update_state(item):  # one that does not draft now
                self.pages.known[item.seq_id] = valid, end
                continue
            until = end if self._has_states else known
            behind.append(draft_chunk(item, valid, until, item.draft if self._has_states else ()))
            caught_up.append((item, valid))
            self.pages.known[item.seq_id] = until, end
        if behind:
            self._run(behind)
        drafts = self._draft(drafting) if drafting else {}
        for item, valid in caught_up:
            self.pages.fill_originals(item, valid)
        if not drafting:
            return plan
        filled = [
            item._replace(draft=tuple(drafts[item.seq_id]), num_drafted=0) if item.num_drafted else item
            for item in plan.sequences
        ]
        return replace(plan, sequences=tuple(filled))

    def _must_update_state(self, item: ScheduledSequence) -> bool:
        """Whether the state behind a stream's step, or behind one of its tokens, has to be right at once, as it may be kept."""
        end = item.start + item.num_tokens + self._input_batch.by_id[item.seq_id].layout.slot_offset
        return self._has_states and (bool(item.draft) or end % self._block_size == 0)

    def _num_valid(self, item: ScheduledSequence) -> int:
        """Leading tokens whose keys are there. What comes from the cache, or is met for the first time, has been computed."""
        valid, end = self.pages.known.get(item.seq_id, (item.start, item.start))
        return item.start if item.start > end else max(self.pages.run_start(item.seq_id), min(valid, item.start))

    def _draft(self, drafting: list[tuple[ScheduledSequence, int]]) -> dict[int, list[int]]:
        """As many proposals for each sequence as its item asks for. The numbers: tokens whose keys are there."""
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
            token_ids = self._input_batch.by_id[item.seq_id].token_ids
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
        left = [item for item, _ in drafting if self._must_update_state(item)]
        if left:
            ends = [item.start + item.num_tokens for item in left]
            self._run(
                [
                    draft_chunk(item, end - 1, end, (drafts[item.seq_id][-1],))
                    for item, end in zip(left, ends, strict=True)
                ]
            )
        return drafts

    def _next_tokens(
        self, wanted: list[ScheduledSequence], rows: list[ScheduledSequence], step: int
    ) -> list[list[int]]:
        """As many for each of the sequences: one, or several where a device goes on by itself. rows: their last tokens."""
        num_passes = min(MAX_PASSES, min(item.num_drafted for item in wanted) - step)  # there are blocks for no more
        if self.graphs is not None and num_passes > 1 and all(item.num_tokens == 1 for item in rows):
            pending = self.graphs.submit(rows, num_passes, [GREEDY] * len(rows))
            if pending is not None:
                self.positions_computed += num_passes * len(rows)
                ids, _ = pending.wait()
                return [[max(token, 0) for token in of_one] for of_one in ids.T.tolist()]
        return [[token] for token in self._greedy(rows)]

    def _greedy(self, items: list[ScheduledSequence]) -> list[int]:
        """The most likely token after each item's last one."""
        hidden, logits = self._run(items)
        last = torch.tensor([item.num_tokens for item in items]).cumsum(0) - 1
        if logits is None:
            logits = self._decoder.logits(hidden[to_device(last, hidden.device)])
        elif logits.shape[0] > len(items):
            logits = logits[to_device(last, logits.device)]
        return logits[:, : self._vocab_size].argmax(dim=1).tolist()

    def _run(self, items: list[ScheduledSequence]) -> tuple[Tensor, Tensor | None]:
        """Hidden states of every row, and logits of every row where they are known already."""
        if self.graphs is not None and (replayed := self.graphs.run(items)) is not None:
            self.positions_computed += len(replayed.hidden)
            return replayed.hidden, replayed.logits
        batch = self._batches.build(items)
        batch.input_ids.clamp_(max=self._decoder.spec.vocab_size - 1)
        self.positions_computed += batch.input_ids.shape[0]
        outputs = self._replay.run(batch, maxima=False)
        return (
            (self._decoder.forward(batch, self._cache), None) if outputs is None else (outputs.hidden, outputs.logits)
        )


@dataclass(frozen=True, slots=True)
class _PendingStates:
    """The model's hidden states [N, hidden] of tokens first .. first + N - 1, whose keys the layer has not computed."""

    first: int
    states: Tensor

    def up_to(self, end: int) -> _PendingStates:
        """Those of tokens in front of `end`: what comes behind was proposed, and not accepted."""
        return replace(self, states=self.states[: max(0, end - self.first)])

    def behind(self, first: int) -> _PendingStates:
        """Those of tokens from `first` on."""
        dropped = max(0, first - self.first)
        return _PendingStates(self.first + dropped, self.states[dropped:])


class MTPProposer:
    """sequences: those of the model, which their owner keeps up to date.

    graphs: none, as the host gives it its states. positions_computed: tokens that passed through the layer.
    """

    graphs = None

    def __init__(self, model: DraftModel, sequences: InputBatch, block_size: int) -> None:
        decoder = model.decoder
        self._decoder, self._cache = decoder, model.cache
        self._input_batch, self._block_size = sequences, block_size
        self._batches = model.batches(sequences, block_size)
        self._replay = DecodeReplay(decoder, model.cache)
        self.pages = DraftCache[_PendingStates](model, sequences, block_size)
        self._caught_up: frozenset[int] = frozenset()  # sequences that lacked no keys when the step began
        self.positions_computed = 0

    def propose(self, plan: SchedulerOutput) -> SchedulerOutput:
        """The plan with the proposals in it that it asks for; with none for a stream whose states are not known."""
        drafting, behind = [], []
        for item in plan.sequences:
            pending = self._pending_of(item, self.pages.known.get(item.seq_id))
            if pending is None:
                continue
            if item.num_drafted:
                drafting.append((item, pending))
            elif len(pending.states) >= self._block_size:
                behind.append((item, pending))
        drafts, done = dict[int, list[int]](), list[tuple[ScheduledSequence, _PendingStates]]()
        with _ignore_out_of_memory():
            if behind:
                self._run_pending(behind)
                done += behind
            if drafting:
                drafts = self._draft(drafting)
                done += drafting
        for item, pending in done:
            self.pages.fill_originals(item, pending.first)
        self._caught_up = frozenset(item.seq_id for item, _ in done)
        if not any(item.num_drafted for item in plan.sequences):
            return plan
        filled = [
            _with_draft(item, drafts.get(item.seq_id, [])) if item.num_drafted else item for item in plan.sequences
        ]
        return replace(plan, sequences=tuple(filled))

    def observe(self, plan: SchedulerOutput, hidden: Tensor) -> None:
        """Take in what the model made of a plan's tokens. hidden: [T, hidden], normed, which the next step may overwrite."""
        # Whose states find no memory is taken for one of whom nothing is known.
        known = {item.seq_id: self.pages.known.pop(item.seq_id, None) for item in plan.sequences}
        prompts, end = [], 0
        with _ignore_out_of_memory():
            for item in plan.sequences:
                begin, end = end, end + item.num_tokens
                if item.seq_id in self._input_batch.pooled:
                    continue
                pending = self._append_states(item, known[item.seq_id], hidden[begin:end])
                # Behind the last known token there is none yet that its state could be joined with.
                ready = min(item.start + item.num_tokens, len(self._input_batch.by_id[item.seq_id].token_ids) - 1)
                if item.num_tokens > 1 + len(item.draft) and ready > pending.first:
                    prompts.append((item, pending.up_to(ready)))
                    pending = pending.behind(ready)
                pending = replace(pending, states=pending.states.clone())
                for seq_id in (item.seq_id, *item.samples):
                    self.pages.known[seq_id] = pending
            if prompts:
                self._run_pending(prompts)

    def _pending_of(self, item: ScheduledSequence, pending: _PendingStates | None) -> _PendingStates | None:
        """Of those, the states of the tokens in front of the item's whose keys are missing; None where they are not all known."""
        if pending is None:
            return None
        found = pending.up_to(item.start).behind(self.pages.run_start(item.seq_id))
        return found if len(found.states) and found.first + len(found.states) == item.start else None

    def _append_states(self, item: ScheduledSequence, known: _PendingStates | None, states: Tensor) -> _PendingStates:
        """What is missing behind the step, with its states [N, hidden]. known: of the tokens in front of it."""
        pending = None if item.seq_id in self._caught_up else self._pending_of(item, known)
        # A block of them has been tried, and found no memory: to wait for more would take more of it.
        if pending is None or len(pending.states) >= self._block_size:
            return _PendingStates(item.start, states)
        return replace(pending, states=torch.cat((pending.states, states)))

    def _draft(self, items: list[tuple[ScheduledSequence, _PendingStates]]) -> dict[int, list[int]]:
        """As many proposals for each sequence as its item asks for, by its id."""
        drafts: dict[int, list[int]] = {item.seq_id: [] for item, _ in items}
        hidden, logits = self._run_pending(items)
        last = torch.tensor([len(pending.states) for _, pending in items]).cumsum(0) - 1
        wanted, step = [item for item, _ in items], 0
        while wanted:
            rows = to_device(last, hidden.device)
            hidden = hidden[rows]
            logits = self._decoder.logits(hidden) if logits is None else logits[rows]
            for item, token in zip(wanted, logits.argmax(dim=1).tolist(), strict=True):
                drafts[item.seq_id].append(token)
            step += 1
            remaining = [i for i, item in enumerate(wanted) if item.num_drafted > step]
            wanted, last = [wanted[i] for i in remaining], torch.arange(len(remaining))
            if wanted:
                chunks = [
                    draft_chunk(item, item.start + step - 1, item.start + step, (drafts[item.seq_id][-1],))
                    for item in wanted
                ]
                states = hidden[to_device(torch.tensor(remaining), hidden.device)]
                hidden, logits = self._run(self._batches.build(chunks), states)
        return drafts

    def _run_pending(self, items: list[tuple[ScheduledSequence, _PendingStates]]) -> tuple[Tensor, Tensor | None]:
        """Run the tokens that wait, each with the one behind it: see `_run`."""
        chunks, token_ids = [], list[int]()
        for item, pending in items:
            known, first = self._input_batch.by_id[item.seq_id].token_ids, pending.first
            end = first + len(pending.states)
            # Few tokens count as proposed ones, which go as rows of their own, as a step that can be repeated.
            few = end - first <= 1 + MAX_DRAFT_TOKENS
            chunks.append(draft_chunk(item, first, end, tuple(known[first + 1 : end]) if few else ()))
            token_ids += known[first + 1 : end + 1]
        batch = self._batches.build(chunks)
        batch.input_ids.copy_(to_device(torch.tensor(token_ids), batch.input_ids.device))
        return self._run(batch, torch.cat([pending.states for _, pending in items]))

    def _run(self, batch: ForwardBatch, states: Tensor) -> tuple[Tensor, Tensor | None]:
        """Hidden states [T, hidden] of every row, and logits of every row where they are known already. states: [T, hidden], what
        the rows' tokens are joined with."""
        batch = replace(batch, hidden=states)
        self.positions_computed += batch.input_ids.shape[0]
        outputs = self._replay.run(batch, maxima=False)
        return (
            (self._decoder.forward(batch, self._cache), None) if outputs is None else (outputs.hidden, outputs.logits)
        )


@contextlib.contextmanager
def _ignore_out_of_memory() -> abc.Iterator[None]:
    """What finds no memory is left out: proposals are fewer or worse, and no request fails for them."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise


def _with_draft(item: ScheduledSequence, draft: list[int]) -> ScheduledSequence:
    """The item with what is proposed in place of a number of tokens to propose."""
    return item._replace(num_tokens=item.num_tokens - item.num_drafted + len(draft), draft=tuple(draft), num_drafted=0)
