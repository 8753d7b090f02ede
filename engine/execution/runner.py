"""Executes one SchedulerOutput: copies, re-rotations, one forward pass, and the draws.

It follows the plans and never decides what runs.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from windlass.engine.api.request import TokenLogprobs
from windlass.engine.cache.persist.pages import PersistedPages
from windlass.engine.cache.storage import KVStorage
from windlass.engine.errors import EngineError
from windlass.engine.execution.batch import BatchBuilder
from windlass.engine.execution.drafter import Drafter, DraftModel
from windlass.engine.execution.key_rotator import KeyRotator
from windlass.engine.execution.pooler import Pooler
from windlass.engine.execution.replay import DecodeReplay, StepTensors
from windlass.engine.execution.sequences import LiveSequences
from windlass.engine.model.adapters.adapter import LoadedAdapters
from windlass.engine.model.decoder import Decoder
from windlass.engine.rotary.tables import RotaryTables
from windlass.engine.sampling.accept import Draws, draw_tokens
from windlass.engine.sampling.sampler import Sampler, takes_largest, token_logprobs
from windlass.engine.scheduling.plan import ScheduledSequence, SchedulerOutput, Snapshot, StepResult

# Rows of logits formed at once for prompt log-probabilities: bounds memory at vocabulary * rows * 4 bytes.
_PROMPT_LOGPROB_ROWS = 256


class Runner:
    """One model on one device. `positions_computed` counts the tokens that passed through it, for tests and metrics.

    draft: the model that proposes tokens where a plan asks for it, if there is one. persisted: where blocks that plans load
    come from.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KVStorage,
        tables: RotaryTables,
        sampler: Sampler,
        block_size: int,
        draft: DraftModel | None = None,
        adapters: LoadedAdapters | None = None,
        persisted: PersistedPages | None = None,
    ) -> None:
        self.decoder, self.cache, self.tables, self.sampler = decoder, cache, tables, sampler
        groups = len(decoder.spec.kv_groups)
        self.sequences = LiveSequences(groups)
        self.batches = BatchBuilder(
            self.sequences,
            tables,
            num_groups=groups,
            block_size=block_size,
            windows=decoder.spec.attention_windows,
            anchored=decoder.spec.scores_by_absolute_position,
            backend=decoder.backend,
            adapters=adapters,
        )
        self._persisted = persisted
        self.replay = DecodeReplay(decoder, cache)
        self._rotator = KeyRotator(decoder.spec, cache, block_size, decoder.backend)
        vocab_size = decoder.spec.vocab_size
        self.drafter = None if draft is None else Drafter(draft, self.sequences, vocab_size, block_size)
        self._pooler = Pooler(decoder)
        self.positions_computed = 0

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput) -> list[StepResult]:
        """Carry out a plan and draw what it asks for. Raises MissedPlanError unless it follows the last one."""
        self._follow(plan)
        if not plan.sequences:
            return []
        if self.drafter is not None:
            plan = self.drafter.propose(plan)
        self._prepare(plan)
        hidden, made = self._forward(plan)
        results = {result.seq_id: result for result in self._sample(plan, hidden, made)}
        for seq_id, logprobs in self._prompt_logprobs(plan, hidden):
            result = results.get(seq_id, StepResult(seq_id))
            if isinstance(logprobs, EngineError):
                results[seq_id] = replace(result, error=logprobs)
            else:
                results[seq_id] = replace(result, prompt_logprobs=logprobs)
        if self.sequences.pooled:
            results |= self._pooled(plan, hidden)
        return list(results.values())

    @torch.inference_mode()
    def compute(self, plan: SchedulerOutput) -> Tensor:
        """Carry out a plan without drawing: the normed hidden states [T, hidden] of its rows, until the next step."""
        self._follow(plan)
        return self._forward(plan)[0]

    @torch.inference_mode()
    def follow(self, plan: SchedulerOutput) -> None:
        """Take in what a plan changes, in its books and in the cache, and compute nothing."""
        self._follow(plan)

    def _follow(self, plan: SchedulerOutput) -> None:
        self.sequences.apply(plan)
        for seq_id in plan.removed:
            self.sampler.forget(seq_id)
            self._pooler.forget(seq_id)
        for row in plan.rotary_rows:
            self.tables.write(row.row, row.specs)
        for parked in plan.parked:
            self.cache.park(parked)
        for parked in plan.unparked:
            self.cache.unpark(parked)
        for seq_id in plan.forgotten:
            self.cache.forget_parked(seq_id)
        if self._persisted is not None:
            for loaded in plan.loaded:
                self._persisted.put(loaded)
        self.cache.copy_blocks(plan.copies)
        for rerotations in (plan.set_aside, plan.rerotations):
            for rerotation in rerotations:
                self._rotator.apply(rerotation)
        if self.drafter is not None:
            self.drafter.follow(plan)

    def restore(self, snapshot: Snapshot) -> None:
        """Forget every sequence and start from a snapshot; the cache is taken to hold what it names."""
        for seq_id in self.sequences:
            self.sampler.forget(seq_id)
            self._pooler.forget(seq_id)
        self.sequences.restore(snapshot)
        for row in snapshot.rotary_rows:
            self.tables.write(row.row, row.specs)
        if self.drafter is not None:
            self.drafter.restore((row.row, row.specs) for row in snapshot.rotary_rows)

    def _forward(self, plan: SchedulerOutput) -> tuple[Tensor, StepTensors | None]:
        """Hidden states [T, hidden] of every row, and what else is known of every row already."""
        batch = self.batches.build(plan.sequences)
        if self.decoder.spec.token_types > 1 and self.sequences.pooled:
            batch = replace(batch, token_types=self._token_types(plan))
        live = self.sequences.by_id
        maxima = all(takes_largest(live[item.seq_id].slot) for item in plan.sequences)
        made = self.replay.run(batch, maxima=maxima) if self.decoder.spec.generates else None
        hidden = self.decoder.forward(batch, self.cache) if made is None else made.hidden
        self.positions_computed += hidden.shape[0]
        return hidden, made

    def _token_types(self, plan: SchedulerOutput) -> Tensor:
        """Which text of a pair each token belongs to, [T] int64."""
        types = []
        for item in plan.sequences:
            rule = self.sequences.pooled.get(item.seq_id)
            second = None if rule is None else rule.second_from
            tokens = range(item.start, item.start + item.num_tokens)
            types += [int(second is not None and index >= second) for index in tokens]
        return torch.tensor(types, device=self.decoder.device)

    def _prepare(self, plan: SchedulerOutput) -> None:
        """Tell the sampler what it will be asked for, so that it can work while the model does."""
        live = self.sequences.by_id
        slots = []
        for item in plan.sequences:
            own = [live[seq_id].slot for seq_id in item.samples]
            slots += own + [own[0].after(item.draft[:i]) for i in range(1, len(item.draft) + 1)]
        self.sampler.prepare(slots)

    def _sample(self, plan: SchedulerOutput, hidden: Tensor, made: StepTensors | None) -> list[StepResult]:
        """made: what is known of every row already."""
        rows: list[int] = []
        wanted: list[Draws] = []
        end, live = 0, self.sequences.by_id
        for item in plan.sequences:
            end += item.num_tokens
            if item.samples:
                slots = tuple([live[seq_id].slot for seq_id in item.samples])
                wanted.append(Draws(len(rows), slots, item.draft))
                rows += range(end - 1 - len(item.draft), end)
        if not wanted:
            return []
        if made is not None and len(rows) == len(made.logits):
            return draw_tokens(self.sampler, made.logits, wanted, made.maxima)
        chosen = hidden if made is None else made.logits
        if len(rows) < chosen.shape[0]:
            chosen = chosen[torch.tensor(rows, device=chosen.device)]
        logits = self.decoder.logits(chosen) if made is None else chosen  # [R, V]
        return draw_tokens(self.sampler, logits, wanted)

    def _pooled(self, plan: SchedulerOutput, hidden: Tensor) -> dict[int, StepResult]:
        """By sequence id: of every prompt that is pooled and ends in this step, and of those that cannot be."""
        results: dict[int, StepResult] = {}
        end = 0
        for item in plan.sequences:
            end += item.num_tokens
            rule = self.sequences.pooled.get(item.seq_id)
            if rule is not None:
                rows = hidden[end - item.num_tokens : end]
                try:
                    pooled = self._pooler.take(item.seq_id, rule, rows, item.start, item.num_known_tokens)
                except EngineError as error:
                    results[item.seq_id] = StepResult(item.seq_id, error=error)
                    continue
                if pooled is not None:
                    results[item.seq_id] = StepResult(item.seq_id, pooled=pooled)
        return results

    def _prompt_logprobs(
        self, plan: SchedulerOutput, hidden: Tensor
    ) -> list[tuple[int, tuple[TokenLogprobs, ...] | EngineError]]:
        """By sequence id; the error, which is that request's alone, where its logits are not finite."""
        results: list[tuple[int, tuple[TokenLogprobs, ...] | EngineError]] = []
        first_row = 0
        for item in plan.sequences:
            if item.prompt_logprobs is not None:
                rows = hidden[first_row : first_row + item.num_tokens]
                try:
                    results.append((item.seq_id, self._chunk_logprobs(item, rows, item.prompt_logprobs)))
                except EngineError as error:
                    results.append((item.seq_id, error))
            first_row += item.num_tokens
        return results

    def _chunk_logprobs(self, item: ScheduledSequence, hidden: Tensor, k: int) -> tuple[TokenLogprobs, ...]:
        # Row i of the chunk predicts the token at index start + i + 1, if that is still the prompt's.
        slot = self.sequences.by_id[item.seq_id].slot
        targets = slot.token_ids[item.start + 1 : min(item.start + item.num_tokens + 1, slot.num_prompt_tokens)]
        found: list[TokenLogprobs] = []
        for begin in range(0, len(targets), _PROMPT_LOGPROB_ROWS):
            part = targets[begin : begin + _PROMPT_LOGPROB_ROWS]
            logits = self.decoder.logits(hidden[begin : begin + len(part)])
            found += token_logprobs(self.decoder.backend, logits, torch.tensor(part), k)
        return tuple(found)
