"""Model runner: executes one SchedulerOutput.

It applies a plan's changes (block copies, swapped blocks, re-rotations), runs one forward pass, samples and pools. It never
decides what runs. `RankRunner` is the part that every rank executes: it computes the logits of the rows that the plan names, in
the same order on all ranks. `ModelRunner` is the first rank, which also samples. `MultiStepState` passes the tokens of one pass
to the next (multi-step decoding).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from windlass.engine.cache.host_tier import BlockTransfer
from windlass.engine.cache.kv_cache import KVCache
from windlass.engine.errors import OUT_OF_MEMORY, DeviceMemoryError, EngineError
from windlass.engine.execution.cuda_graphs import StepFuture
from windlass.engine.execution.device_batch import PendingTokens, RowSampling
from windlass.engine.execution.input_batch import InputBatch
from windlass.engine.execution.pooler import Pooler
from windlass.engine.execution.proposers import DraftModel, DraftModelProposer, MTPProposer
from windlass.engine.execution.recorded_steps import StepOutputs
from windlass.engine.execution.step_runner import StepRunner
from windlass.engine.interface.outputs import PooledRows, TokenLogprobs
from windlass.engine.model.decoder import Decoder
from windlass.engine.model.lora import LoadedAdapters
from windlass.engine.rotary.rotary_tables import RotaryTables
from windlass.engine.sampling.acceptance import SamplingRequest, sample_and_accept
from windlass.engine.sampling.sample_slot import SampleSlot
from windlass.engine.sampling.sampler import Sampler, filters_of, is_greedy, token_logprobs, uniform, uses_filters_only
from windlass.engine.scheduling.chunked_prefill import NO_BOUNDARIES, ChunkBoundaries
from windlass.engine.scheduling.scheduler_output import ScheduledSequence, SchedulerOutput, Snapshot, StepResult
from windlass.kernels import RankEndedError, encode_filters, is_out_of_memory, to_device

# Rows of logits computed at once for prompt log-probabilities: limits memory to vocabulary * rows * 4 bytes.
_PROMPT_LOGPROB_ROWS = 256


class RankRunner(StepRunner):
    """Runs a model, or one rank's part of it, on one device.

    persisted: saves and loads the blocks that plans name. failed_rerotations: the sequences whose keys the last plan could not
    re-rotate for lack of memory.
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
        spec = decoder.spec
        input_batch = InputBatch(len(spec.kv_groups), has_states=spec.state_group is not None)
        boundaries = NO_BOUNDARIES
        if not spec.is_bidirectional:
            boundaries = ChunkBoundaries(decoder.backend.uniform_prefill_min_tokens, block_size)
        super().__init__(decoder, cache, tables, input_batch, block_size, boundaries, adapters)
        self._persisted = persisted
        self._is_shard = spec.vocabulary is not None
        self.failed_rerotations: frozenset[int] = frozenset()

    def join(self) -> None:
        """Order device work submitted from now on after all steps submitted so far."""
        if self.graphs is not None:
            self.graphs.join()

    @torch.inference_mode()
    def execute_rank(self, plan: SchedulerOutput) -> None:
        """Execute this rank's part of `ModelRunner.execute`."""
        self.apply(plan)
        if not plan.sequences:
            return
        hidden, outputs = self._forward(plan)
        if rows := [row for _, of_item in _sampled_rows(plan) for row in of_item]:
            self._row_logits(rows, hidden, outputs)
        for item, of_item in _rows_of_items(plan):
            for _ in self._prompt_logits(item, of_item, hidden):
                pass
        self._answer_logits(plan, hidden)

    @torch.inference_mode()
    def apply(self, plan: SchedulerOutput) -> None:
        """Apply the changes of a plan to the input batch and the cache, and compute nothing."""
        self._apply(plan)
        self._check_rerotations()

    @torch.inference_mode()
    def hidden_states(self, plan: SchedulerOutput) -> Tensor:
        """Execute a plan without sampling: the normed hidden states [T, hidden] of its rows, valid until the next step."""
        self.apply(plan)
        return self._forward(plan, all_rows=True)[0]

    def _apply(self, plan: SchedulerOutput) -> None:
        self.input_batch.apply(plan)
        for row in plan.rotary_rows:
            self.tables.write(row.row, row.specs)
        # Loading may overwrite blocks that are saved or swapped out. Loaded blocks may be evicted by the same plan for a sequence
        # that is swapped in, or be copied.
        if self._persisted is not None and plan.saved:
            self._persisted.save(plan.saved)
        self._swap_out(plan)
        if self._persisted is not None and plan.loaded:
            self._persisted.put(plan.loaded)
        for swapped_out in plan.swapped_in:
            self.cache.swap_in(swapped_out)
        for seq_id in plan.discarded:
            self.cache.discard_swapped(seq_id)
        if plan.num_inflight_passes and plan.copies and self.graphs is not None:
            self.graphs.enqueue(lambda: self.cache.copy_blocks(plan.copies))
        else:
            self.cache.copy_blocks(plan.copies)
        self.failed_rerotations = self._rotator.apply_all((*plan.original_copies, *plan.rerotations))

    def _check_rerotations(self) -> None:
        """Raise torch's out-of-memory error if keys could not be re-rotated; all other changes of the plan are applied."""
        if self.failed_rerotations:
            raise torch.OutOfMemoryError("no memory is left to re-rotate the keys of one block")

    def _swap_out(self, plan: SchedulerOutput) -> None:
        for swapped_out in plan.swapped_out:
            self.cache.swap_out(swapped_out)

    def restore(self, snapshot: Snapshot) -> None:
        """Replace all sequences with those of a snapshot. The cache must hold the blocks that it names."""
        self.input_batch.restore(snapshot)
        for row in snapshot.rotary_rows:
            self.tables.write(row.row, row.specs)

    def _forward(self, plan: SchedulerOutput, *, all_rows: bool = False) -> tuple[Tensor, StepOutputs | None]:
        """Hidden states [T, hidden] of every row, and the step's outputs if a captured or recorded step computed them.

        all_rows: whether all rows are needed; otherwise rows of prompts for which nothing is requested may be zeros.
        """
        outputs = self._run_captured(plan.sequences)
        if outputs is not None:
            return outputs.hidden, outputs
        batch = self.batches.build(plan.sequences)
        if self.decoder.spec.token_types > 1 and self.input_batch.pooled:
            batch = replace(batch, token_types=self._token_types(plan))
        if self.decoder.first_kv_sharing_layer is not None and not all_rows and batch.query_copies is None:
            batch.only_last_tokens = self._needs_only_last_tokens(plan)
        live = self.input_batch.by_id
        maxima = all(is_greedy(live[item.seq_id].slot) for item in plan.sequences)
        hidden, outputs = self._run_batch(batch, maxima=maxima)
        if outputs is None and self._is_shard and batch.input_ids.shape == batch.seq_lens.shape:
            # A rank that replays such a step computes the logits of every row, so the others must too.
            outputs = StepOutputs(hidden, self.decoder.logits(hidden), None)
        return hidden, outputs

    def _needs_only_last_tokens(self, plan: SchedulerOutput) -> bool:
        """Whether a step with prompts needs only the hidden state of each chunk's last token."""
        if self.input_batch.pooled or plan.num_tokens == len(plan.sequences):
            return False
        return all(not item.draft and item.prompt_logprobs is None for item in plan.sequences)

    def _token_types(self, plan: SchedulerOutput) -> Tensor:
        """For each token the text of the pair that it belongs to, 0 or 1, int64 [T]."""
        types = []
        for item in plan.sequences:
            rule = self.input_batch.pooled.get(item.seq_id)
            second = None if rule is None else rule.second_from
            tokens = range(item.start, item.start + item.num_tokens)
            types += [int(second is not None and index >= second) for index in tokens]
        return to_device(torch.tensor(types), self.decoder.device)

    def _answer_logits(self, plan: SchedulerOutput, hidden: Tensor) -> dict[int, Tensor]:
        """By sequence id, the logits [V] after prompts that end in this step and whose pooling compares answers."""
        rows: dict[int, int] = {}
        for item, of_item in _rows_of_items(plan):
            rule = self.input_batch.pooled.get(item.seq_id)
            if rule is not None and rule.answers and item.start + item.num_tokens == item.num_known_tokens:
                rows[item.seq_id] = of_item[-1]
        if not rows:
            return {}
        chosen = hidden[to_device(torch.tensor(list(rows.values())), hidden.device)]
        return dict(zip(rows, self.decoder.logits(chosen), strict=True))

    def _prompt_logits(
        self, item: ScheduledSequence, rows: range, hidden: Tensor
    ) -> Iterator[tuple[Sequence[int], Tensor]]:
        """In parts, the next tokens of a prompt's chunk if their log-probabilities are requested, and logits [R, V] for them."""
        if item.prompt_logprobs is None:
            return
        # Row i of the chunk predicts the token at index start + i + 1, if that is part of the prompt.
        slot = self.input_batch.by_id[item.seq_id].slot
        targets = slot.token_ids[item.start + 1 : min(item.start + item.num_tokens + 1, slot.num_prompt_tokens)]
        for begin in range(0, len(targets), _PROMPT_LOGPROB_ROWS):
            part = targets[begin : begin + _PROMPT_LOGPROB_ROWS]
            first = rows.start + begin
            yield part, self.decoder.logits(hidden[first : first + len(part)])


def _rows_of_items(plan: SchedulerOutput) -> Iterator[tuple[ScheduledSequence, range]]:
    """The scheduled sequences and their rows of the step."""
    end = 0
    for item in plan.sequences:
        end += item.num_tokens
        yield item, range(end - item.num_tokens, end)


def _sampled_rows(plan: SchedulerOutput) -> Iterator[tuple[ScheduledSequence, range]]:
    """The sequences for which tokens are sampled, and the rows from which they are."""
    for item, rows in _rows_of_items(plan):
        if item.samples:
            yield item, rows[-1 - len(item.draft) :]


class MultiStepState:
    """The progress of a plan of several passes, whose changes have been applied.

    next_pass: a plan of one pass, advanced by the tokens sampled so far. These are appended to the sequences of the input batch;
    the next plan determines which of them count.
    """

    def __init__(self, plan: SchedulerOutput, input_batch: InputBatch) -> None:
        self.next_pass = replace(plan, num_passes=1)
        self._passes_left, self._live = plan.num_passes, input_batch.by_id
        self._results: list[list[StepResult]] = [[] for _ in plan.sequences]

    @property
    def has_next(self) -> bool:
        """Whether another pass must run."""
        return self._passes_left > 0

    def add(self, results: Sequence[StepResult]) -> None:
        """Add the results of a pass, in the order of the plan's sequences."""
        self._passes_left -= 1
        for item, sampled, result in zip(self.next_pass.sequences, self._results, results, strict=True):
            if result.error is not None:
                self._passes_left = 0
                if sampled:
                    continue  # it fails again in the next step, after the tokens sampled before are delivered
            elif result.token_ids[0] in self._live[item.seq_id].slot.stop_ids:
                self._passes_left = 0
            sampled.append(result)
        if self._passes_left:
            self._advance(results)

    def results(self) -> list[StepResult]:
        """The results of all passes, one for each sequence."""
        return [sampled[0] if len(sampled) == 1 else _joined(sampled) for sampled in self._results]

    def _advance(self, results: Sequence[StepResult]) -> None:
        items = []
        for item, result in zip(self.next_pass.sequences, results, strict=True):
            self._live[item.seq_id].token_ids.append(result.token_ids[0])
            items.append(item._replace(start=item.start + 1, num_known_tokens=item.num_known_tokens + 1))
        self.next_pass = replace(self.next_pass, sequences=tuple(items))


def _joined(sampled: Sequence[StepResult]) -> StepResult:
    token_ids = tuple([result.token_ids[0] for result in sampled])
    logprobs = (
        None if sampled[0].logprobs is None else tuple([entry for one in sampled for entry in one.logprobs or ()])
    )
    return replace(sampled[0], token_ids=token_ids, logprobs=logprobs)


@dataclass(frozen=True, slots=True)
class RankPlan:
    """Command to the other ranks: apply the changes of this plan, and if `compute`, compute it with the first rank."""

    plan: SchedulerOutput
    compute: bool


RankCommand: TypeAlias = RankPlan | Snapshot


class ModelRunner(RankRunner):
    """The first or only rank of a model, which also samples and pools.

    draft: the draft model or MTP layer that proposes tokens when a plan requests it. persisted: see `RankRunner`.
    send_command: sends commands to the other ranks without waiting; None if there are none.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        tables: RotaryTables,
        sampler: Sampler,
        block_size: int,
        draft: DraftModel | None = None,
        adapters: LoadedAdapters | None = None,
        persisted: BlockTransfer | None = None,
        send_command: Callable[[RankCommand], None] | None = None,
    ) -> None:
        super().__init__(decoder, cache, tables, block_size, adapters, persisted)
        self.sampler = sampler
        self.proposer: DraftModelProposer | MTPProposer | None = None
        if draft is not None and draft.decoder.spec.mtp_input is not None:
            self.proposer = MTPProposer(draft, self.input_batch, block_size)
        elif draft is not None:
            self.proposer = DraftModelProposer(draft, self.input_batch, self._vocab_size, block_size)
        self._pooler = Pooler(decoder)
        self._send_command = send_command
        self._applied_step: int | None = None  # the step whose changes have been applied

    def prepare_graphs(self, max_rows: int, max_blocks: int) -> None:
        super().prepare_graphs(max_rows, max_blocks)
        if self.proposer is not None:
            self.proposer.prepare_graphs(max_rows, max_blocks)

    def execute(self, plan: SchedulerOutput) -> list[StepResult]:
        """Execute a plan and wait for its results. Raises the errors of `start`."""
        return self.start(plan).results()

    @torch.inference_mode()
    def start(self, plan: SchedulerOutput) -> StepFuture:
        """Apply the changes of a plan and start its step.

        The returned step is `in_flight` if the device samples by itself; a plan behind in-flight passes can then be started
        before its results are known. Otherwise its tokens have been sampled. A plan behind in-flight passes needs such a device;
        every other plan first waits for the step before it.

        Raises MissedPlanError unless the plan follows the last one, RankEndedError if another rank has ended, and the errors of a
        step, after which `can_retry` reports whether the remaining plan can be retried.
        """
        self._applied_step = None
        if self._send_command is not None and self.proposer is None:
            self._send_command(RankPlan(plan, compute=True))
        if not plan.num_inflight_passes:
            self.join()
        self._apply(plan)
        self._applied_step = plan.step
        self._check_rerotations()
        pending = self._start_on_device(plan)
        if pending is not None:
            self.positions_computed += plan.num_tokens
            return StepFuture(plan, [], pending)
        results = self._compute_and_sample(plan)
        self._check_ranks()
        return StepFuture(plan, results)

    def _start_on_device(self, plan: SchedulerOutput) -> PendingTokens | None:
        """Start the step of a plan whose tokens the device samples; None if it cannot run on the device alone."""
        if self.graphs is None or self.proposer is not None:
            return None
        ahead, live = plan.num_inflight_passes, self.input_batch.by_id
        slots = [live[item.seq_id].slot for item in plan.sequences]
        if not ahead and not (slots and all(map(_is_sampled_on_device, plan.sequences, slots))):
            return None
        rows = [_row_sampling(slot, ahead, plan.num_passes, self._vocab_size) for slot in slots]
        return self.graphs.submit(plan.sequences, plan.num_passes, rows, ahead=ahead > 0)

    def _check_ranks(self) -> None:
        """Raise RankEndedError if a rank has ended: the device then continues with wrong numbers, which must not be used."""
        ranks = self.decoder.backend.options.ranks
        if ranks is not None and ranks.fault is not None:
            raise RankEndedError(ranks.fault)

    def can_retry(self, plan: SchedulerOutput) -> bool:
        """Whether a failed `start` had applied all changes of this plan, and no other ranks are executing it."""
        return self._applied_step == plan.step and self._send_command is None

    @property
    def has_changed_states(self) -> bool:
        """Whether a failed step may have changed recurrent states, which a retry would change again."""
        return self._has_states and not self.failed_rerotations

    @torch.inference_mode()
    def retry(self, plan: SchedulerOutput) -> list[StepResult]:
        """Execute some sequences, unchanged, of a plan that `can_retry` and is not behind in-flight passes.

        Keys and values written before the failure are written again, to the same slots.
        """
        self.failed_rerotations = frozenset()  # the plan does not contain these sequences any more
        for item in plan.sequences:
            del self.input_batch.by_id[item.seq_id].token_ids[item.num_known_tokens :]  # sampled by its first passes
            for seq_id in item.samples:
                self.sampler.forget(seq_id)  # its counts may be incomplete, and are derived from the tokens
        return self._compute_and_sample(plan)

    def _compute_and_sample(self, plan: SchedulerOutput) -> list[StepResult]:
        if self.proposer is not None:
            plan = self.proposer.propose(plan) if plan.sequences else plan
            if self._send_command is not None:  # now that the proposed tokens are known
                self._send_command(RankPlan(plan, compute=True))
        if not plan.sequences:
            return []
        if plan.num_passes > 1:
            return self._run_multi_step(plan)
        self._prepare(plan)
        hidden, outputs = self._forward(plan)
        results = {result.seq_id: result for result in self._sample(plan, hidden, outputs)}
        for item, rows in _rows_of_items(plan):
            if item.prompt_logprobs is not None:
                result = results.get(item.seq_id, StepResult(item.seq_id))
                results[item.seq_id] = self._add_prompt_logprobs(result, item, rows, hidden)
        if self.input_batch.pooled:
            results |= self._pool(plan, hidden)
        if self.proposer is not None:
            self.proposer.observe(plan, hidden)
        return list(results.values())

    def _run_multi_step(self, plan: SchedulerOutput) -> list[StepResult]:
        """Run the passes of a plan until a sequence ends or fails."""
        sampled = self._greedy_multi_step(plan)
        if sampled is not None and len(sampled):
            self.positions_computed += sampled.size
            of_each = zip(plan.sequences, sampled.T.tolist(), strict=True)
            return [StepResult(item.seq_id, tuple(token_ids)) for item, token_ids in of_each]
        state = MultiStepState(plan, self.input_batch)
        while state.has_next:
            self._prepare(state.next_pass)
            hidden, outputs = self._forward(state.next_pass)
            state.add(self._sample(state.next_pass, hidden, outputs))
        return state.results()

    def _greedy_multi_step(self, plan: SchedulerOutput) -> NDArray[np.int64] | None:
        """The ids [P, B] of the passes of a plan, if all sequences are greedy and the kernels can run several passes.

        None or no passes otherwise, with nothing sampled.
        """
        slots = [self.input_batch.by_id[item.seq_id].slot for item in plan.sequences]
        if not all(is_greedy(slot) and slot.sampling.logprobs is None for slot in slots):
            return None
        batch = self.batches.build(plan.sequences)
        inputs = self.batches.multi_step_inputs(batch, plan.num_passes)
        if inputs is None:
            return None
        return self.replay.run_decode_steps(batch, inputs, plan.num_passes, [slot.stop_ids for slot in slots])

    def apply(self, plan: SchedulerOutput) -> None:
        if self._send_command is not None:
            self._send_command(RankPlan(plan, compute=False))
        super().apply(plan)

    def _apply(self, plan: SchedulerOutput) -> None:
        super()._apply(plan)
        for seq_id in plan.removed:
            self.sampler.forget(seq_id)
            self._pooler.forget(seq_id)
        if self.proposer is not None:
            self.proposer.apply(plan)

    def _swap_out(self, plan: SchedulerOutput) -> None:
        super()._swap_out(plan)
        if self.proposer is not None:
            self.proposer.swap_out(plan)

    def restore(self, snapshot: Snapshot) -> None:
        if self._send_command is not None:
            self._send_command(snapshot)
        for seq_id in self.input_batch:
            self.sampler.forget(seq_id)
            self._pooler.forget(seq_id)
        super().restore(snapshot)
        if self.proposer is not None:
            self.proposer.restore(snapshot)

    def _prepare(self, plan: SchedulerOutput) -> None:
        """Announce the coming samples, so that the sampler can prepare them while the model computes."""
        live = self.input_batch.by_id
        slots = []
        for item in plan.sequences:
            own = [live[seq_id].slot for seq_id in item.samples]
            slots += own + [own[0].after(item.draft[:i]) for i in range(1, len(item.draft) + 1)]
        self.sampler.prepare(slots)

    def _sample(self, plan: SchedulerOutput, hidden: Tensor, outputs: StepOutputs | None) -> list[StepResult]:
        rows: list[int] = []
        wanted: list[SamplingRequest] = []
        live = self.input_batch.by_id
        for item, of_item in _sampled_rows(plan):
            wanted.append(SamplingRequest(len(rows), tuple([live[seq_id].slot for seq_id in item.samples]), item.draft))
            rows += of_item
        if not wanted:
            return []
        maxima = outputs.maxima if outputs is not None and len(rows) == len(outputs.logits) else None
        return sample_and_accept(self.sampler, self._row_logits(rows, hidden, outputs), wanted, maxima)

    def _pool(self, plan: SchedulerOutput, hidden: Tensor) -> dict[int, StepResult]:
        """By sequence id, the results of pooled prompts that end in this step or cannot be pooled."""
        results: dict[int, StepResult] = {}
        answers = self._answer_logits(plan, hidden)
        for item, rows in _rows_of_items(plan):
            rule = self.input_batch.pooled.get(item.seq_id)
            if rule is None:
                continue
            own = hidden[rows.start : rows.stop]
            pooled: PooledRows | None = None
            error: EngineError | None = None
            try:
                pooled = self._pooler.add(
                    item.seq_id, rule, own, item.start, item.num_known_tokens, answers.get(item.seq_id)
                )
            except EngineError as failure:
                error = failure
            except RuntimeError as failure:  # earlier partial results are changed already, so the step is not retried
                if not is_out_of_memory(failure):
                    raise
                error = DeviceMemoryError(OUT_OF_MEMORY)
            if pooled is not None or error is not None:
                results[item.seq_id] = StepResult(item.seq_id, pooled=pooled, error=error)
        return results

    def _add_prompt_logprobs(
        self, result: StepResult, item: ScheduledSequence, rows: range, hidden: Tensor
    ) -> StepResult:
        """The result with the prompt log-probabilities of a chunk, or with an error if its logits are not finite."""
        assert item.prompt_logprobs is not None
        found: list[TokenLogprobs] = []
        error: EngineError | None = None
        for part, logits in self._prompt_logits(item, rows, hidden):  # all of them, as the other ranks compute all
            try:
                found += token_logprobs(self.decoder.backend, logits, torch.tensor(part), item.prompt_logprobs)
            except EngineError as failure:
                error = error or failure
        return replace(result, prompt_logprobs=tuple(found)) if error is None else replace(result, error=error)


def _is_sampled_on_device(item: ScheduledSequence, slot: SampleSlot) -> bool:
    """Whether an item is one token of a stream, after which the device can sample the next one by itself."""
    alone = item.num_tokens == 1 and item.samples == (item.seq_id,) and item.prompt_logprobs is None
    return alone and uses_filters_only(slot)


def _row_sampling(slot: SampleSlot, ahead: int, num_passes: int, vocab_size: int) -> RowSampling:
    """The sampling of a row in the passes behind `ahead` in-flight ones."""
    num_sampled = len(slot.token_ids) - slot.num_prompt_tokens + ahead
    uniforms: list[float] = []
    if slot.sampling.temperature > 0:
        uniforms = [uniform(slot.seed, slot.index, num_sampled + i) for i in range(num_passes)]
    return RowSampling(encode_filters(filters_of(slot.sampling, vocab_size), vocab_size), uniforms)
