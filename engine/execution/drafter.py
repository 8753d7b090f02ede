"""Lets a draft model propose tokens: greedily, one after the other, for all streams of a step at once.

It has a decoder and pages of its own, under the block tables of the model it drafts for (`draft_pages`), and prompts pass through
both. Streams that do not draft leave it behind; before they draft again it computes what it has missed.

Where it carries states they stand in the blocks of the model's, behind the same tokens. It cannot go back to what it has missed
there: so it is behind a stream for a part of a block at most, and where a block of tokens ends it has computed all of them.

Whatever it computes, or has not computed, changes how many proposals are accepted and never which tokens come: a block that
went into the prefix cache may lack the last few of its keys.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from windlass.engine.execution.decode_graphs import DecodeGraphs
from windlass.engine.execution.device_rows import GREEDY
from windlass.engine.execution.draft_pages import DraftCache, DraftModel, draft_chunk
from windlass.engine.execution.replay import DecodeReplay
from windlass.engine.execution.sequences import InputBatch
from windlass.engine.scheduling.bursts import MAX_PASSES
from windlass.engine.scheduling.plan import ScheduledSequence, SchedulerOutput
from windlass.kernels import to_device

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
