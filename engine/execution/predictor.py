"""Lets a model's own prediction layer propose tokens: greedily, one after the other, for all streams of a step at once.

The layer is given the model's hidden state of a token, joined with the token after it, and predicts the one after that. So its
keys for a token stand in the slot of that token, under the model's block tables (`draft_pages`), and are computed once the next
token is known. For a further token it is given what it has made itself, in place of the model's state; those keys are computed
again when the model has accepted the tokens, from its own states.

States of the model are there in the step that computes them alone. So the layer computes the tokens of prompts behind each step
of theirs. Of streams it keeps the states of the tokens that it has not computed, a block's at most, until they are asked for.

Whatever it computes, has not computed or found no memory for, changes how many proposals are accepted and never which tokens
come. The key of a block's last token depends on the token behind the block, which may be another one for a later prompt that
begins like this.
"""

from __future__ import annotations

import contextlib
from collections import abc
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from windlass.engine.api.config import MAX_DRAFT_TOKENS
from windlass.engine.execution.draft_pages import DraftCache, DraftModel, draft_chunk
from windlass.engine.execution.replay import DecodeReplay
from windlass.engine.execution.sequences import InputBatch
from windlass.engine.model.batch import ForwardBatch
from windlass.engine.scheduling.plan import ScheduledSequence, SchedulerOutput
from windlass.kernels import is_out_of_memory, to_device


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
