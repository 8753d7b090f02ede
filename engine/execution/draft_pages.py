"""The pages of what drafts beside a model, under the model's block tables: they follow what plans do to blocks.

A block holds the keys and values of the same tokens in both, so what the scheduler says of blocks (copies, parked pages,
re-rotations) is done to these pages too, under the frequencies of what drafts. Where a token was missing when cached keys were
re-rotated, its original is filled in from what is computed later, rotated back.
"""

from __future__ import annotations

from collections import OrderedDict, abc
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from windlass.engine.cache.changes import KeyRerotation, SwappedPages
from windlass.engine.cache.storage import KVCache
from windlass.engine.execution.batch import ForwardBatchBuilder
from windlass.engine.execution.key_rotator import KeyRotator
from windlass.engine.execution.sequences import InputBatch
from windlass.engine.model.decoder import Decoder
from windlass.engine.rotary.scaling import RotarySpec
from windlass.engine.rotary.tables import RotaryTables
from windlass.engine.rotary.transfer import DraftRotaryMapper
from windlass.engine.scheduling.plan import ScheduledSequence, SchedulerOutput

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
