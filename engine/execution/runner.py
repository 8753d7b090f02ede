"""Executes one SchedulerOutput: copies, re-rotations, one forward pass, and the draws.

It follows the plans and never decides what runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from windlass.engine.api.request import TokenLogprobs
from windlass.engine.cache.persist.pages import BlockTransfer
from windlass.engine.cache.storage import KVCache
from windlass.engine.errors import OUT_OF_MEMORY, DeviceMemoryError, EngineError
from windlass.engine.execution.burst import MultiStepState
from windlass.engine.execution.device_passes import DeviceStepLauncher, StepFuture
from windlass.engine.execution.draft_pages import DraftModel
from windlass.engine.execution.drafter import DraftModelProposer
from windlass.engine.execution.pooler import Pooler
from windlass.engine.execution.predictor import MTPProposer
from windlass.engine.execution.rank_runner import RankRunner
from windlass.engine.execution.replay import StepOutputs
from windlass.engine.model.adapters.adapter import LoadedAdapters
from windlass.engine.model.decoder import Decoder
from windlass.engine.rotary.tables import RotaryTables
from windlass.engine.sampling.accept import SamplingRequest, sample_and_accept
from windlass.engine.sampling.sampler import Sampler, is_greedy, token_logprobs
from windlass.engine.scheduling.plan import ScheduledSequence, SchedulerOutput, Snapshot, StepResult
from windlass.kernels import RankEndedError, is_out_of_memory


@dataclass(frozen=True, slots=True)
class ExecutePlan:
    """For the other ranks: compute this plan with the first one."""

    plan: SchedulerOutput


@dataclass(frozen=True, slots=True)
class ApplyPlan:
    """For the other ranks: take in what a plan changes."""

    plan: SchedulerOutput


RankCommand: TypeAlias = ExecutePlan | ApplyPlan | Snapshot


class ModelRunner(RankRunner):
    """The first rank of a model, or its only one: it draws tokens too, and pools.

    draft: the model that proposes tokens where a plan asks for it, or the model's prediction layer. persisted: where blocks that
    plans save go to, and those that they load come from. tell: has the other ranks do their part, where there are any; it returns
    at once.
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
        vocab_size = decoder.spec.vocab_size
        self.proposer: DraftModelProposer | MTPProposer | None = None
        if draft is not None and draft.decoder.spec.mtp_input is not None:
            self.proposer = MTPProposer(draft, self.sequences, block_size)
        elif draft is not None:
            self.proposer = DraftModelProposer(draft, self.sequences, vocab_size, block_size)
        self._pooler = Pooler(decoder)
        self._send_command = send_command
        self._launcher = DeviceStepLauncher(self.sequences, vocab_size)
        self._applied_step: int | None = None  # the step whose computing has begun

    def execute(self, plan: SchedulerOutput) -> list[StepResult]:
        """Carry out a plan and draw what it asks for. Raises MissedPlanError unless it follows the last one."""
        return self.start(plan).results()

    @torch.inference_mode()
    def start(self, plan: SchedulerOutput) -> StepFuture:
        """Begin to carry out a plan; whoever holds what is returned asks it for the results.

        What a plan changes once has been done by then: books, rotary rows, pages. Its tokens have been computed and drawn
        too, unless a device does that by itself: then it may still be at it (`in_flight`), and a plan that is `ahead` can be
        begun behind it. Such a plan takes a device like that; every other one waits until the device is done with the last.
        Raises MissedPlanError unless the plan follows the last one, RankEndedError, and what a step raises: after which
        `can_retry` says whether the rest of it may be tried again.
        """
        self._applied_step = None
        if self._send_command is not None and self.proposer is None:
            self._send_command(ExecutePlan(plan))
        if not plan.ahead:
            self.join()
        self._apply(plan)
        self._applied_step = plan.step
        self._check_rerotations()
        in_flight = (
            None if self.graphs is None or self.proposer is not None else self._launcher.start(plan, self.graphs)
        )
        if in_flight is None:
            results = self._compute_and_sample(plan)
            self._check_ranks()
            return StepFuture(results)
        self.positions_computed += plan.num_tokens
        return in_flight

    def _check_ranks(self) -> None:
        """RankEndedError where a rank is gone: a device goes on with whatever numbers it has, and nobody may see them."""
        ranks = self.decoder.backend.options.ranks
        if ranks is not None and ranks.fault is not None:
            raise RankEndedError(ranks.fault)

    def can_retry(self, plan: SchedulerOutput) -> bool:
        """Whether a failed `start` of this plan had done all that is done once, and other ranks are not in the middle of it."""
        return self._applied_step == plan.step and self._send_command is None

    @property
    def has_changed_states(self) -> bool:
        """Whether layers may have changed states in a step that failed, which would change them again if it were repeated."""
        return self.decoder.spec.state_group is not None and not self.failed_rerotations

    @torch.inference_mode()
    def retry(self, plan: SchedulerOutput) -> list[StepResult]:
        """`execute` what is left of a plan that `can_retry` and is not `ahead`: some of its sequences, all as they were planned.

        The keys and values that were written before it failed are written again, to the same slots.
        """
        self.failed_rerotations = (
            frozenset()
        )  # those whose keys they are have no part in it, and its layers do change states
        for item in plan.sequences:
            del self.sequences.by_id[item.seq_id].token_ids[item.num_known_tokens :]  # what its first passes drew
            for seq_id in item.samples:
                self.sampler.forget(seq_id)  # its counts may be half done, and follow from the tokens
        return self._compute_and_sample(plan)

    def _compute_and_sample(self, plan: SchedulerOutput) -> list[StepResult]:
        if self.proposer is not None:
            plan = self.proposer.propose(plan) if plan.sequences else plan
            if self._send_command is not None:  # with what is proposed
                self._send_command(ExecutePlan(plan))
        if not plan.sequences:
            return []
        if plan.num_passes > 1:
            return self._run_multi_step(plan)
        self._prepare(plan)
        hidden, outputs = self._forward(plan)
        results = {result.seq_id: result for result in self._sample(plan, hidden, outputs)}
        for seq_id, logprobs in self._prompt_logprobs(plan, hidden):
            result = results.get(seq_id, StepResult(seq_id))
            if isinstance(logprobs, EngineError):
                results[seq_id] = replace(result, error=logprobs)
            else:
                results[seq_id] = replace(result, prompt_logprobs=logprobs)
        if self.sequences.pooled:
            results |= self._pool(plan, hidden)
        if isinstance(self.proposer, MTPProposer):
            self.proposer.observe(plan, hidden)
        return list(results.values())

    def _run_multi_step(self, plan: SchedulerOutput) -> list[StepResult]:
        """All passes of a plan; no more of them once any sequence has ended or failed."""
        sampled = self._greedy_multi_step(plan)
        if sampled is not None and len(sampled):
            self.positions_computed += sampled.size
            of_each = zip(plan.sequences, sampled.T.tolist(), strict=True)
            return [StepResult(item.seq_id, tuple(token_ids)) for item, token_ids in of_each]
        burst = MultiStepState(plan, self.sequences)
        while burst.has_next:
            self._prepare(burst.next_pass)
            hidden, outputs = self._forward(burst.next_pass)
            burst.add(self._sample(burst.next_pass, hidden, outputs))
        return burst.results()

    def _greedy_multi_step(self, plan: SchedulerOutput) -> NDArray[np.int64] | None:
        """The ids [P, B] that the passes of a plan draw, where each draws the largest logit and the kernels go on by themselves.

        None, or of no pass, where they do not: then nothing has been drawn.
        """
        slots = [self.sequences.by_id[item.seq_id].slot for item in plan.sequences]
        if not all(is_greedy(slot) and slot.sampling.logprobs is None for slot in slots):
            return None
        batch = self.batches.build(plan.sequences)
        ahead = self.batches.ahead(batch, plan.num_passes)
        if ahead is None:
            return None
        return self.replay.draw_passes(batch, ahead, plan.num_passes, [slot.stop_ids for slot in slots])

    @torch.inference_mode()
    def hidden_states(self, plan: SchedulerOutput) -> Tensor:
        """Carry out a plan without drawing: the normed hidden states [T, hidden] of its rows, until the next step."""
        self._apply(plan)
        self._check_rerotations()
        return self._forward(plan, all_rows=True)[0]

    def apply(self, plan: SchedulerOutput) -> None:
        """See `RankRunner.apply`."""
        if self._send_command is not None:
            self._send_command(ApplyPlan(plan))
        super().apply(plan)

    def _apply(self, plan: SchedulerOutput) -> None:
        super()._apply(plan)
        for seq_id in plan.removed:
            self.sampler.forget(seq_id)
            self._pooler.forget(seq_id)
        if self.proposer is not None:
            self.proposer.pages.apply(plan)

    def _park(self, plan: SchedulerOutput) -> None:
        super()._park(plan)
        if self.proposer is not None:
            self.proposer.pages.swap_out(plan)

    def restore(self, snapshot: Snapshot) -> None:
        """See `RankRunner.restore`."""
        if self._send_command is not None:
            self._send_command(snapshot)
        for seq_id in self.sequences:
            self.sampler.forget(seq_id)
            self._pooler.forget(seq_id)
        super().restore(snapshot)
        if self.proposer is not None:
            self.proposer.pages.restore((row.row, row.specs) for row in snapshot.rotary_rows)

    def _prepare(self, plan: SchedulerOutput) -> None:
        """Tell the sampler what it will be asked for, so that it can work while the model does."""
        live = self.sequences.by_id
        slots = []
        for item in plan.sequences:
            own = [live[seq_id].slot for seq_id in item.samples]
            slots += own + [own[0].after(item.draft[:i]) for i in range(1, len(item.draft) + 1)]
        self.sampler.prepare(slots)

    def _sample(self, plan: SchedulerOutput, hidden: Tensor, outputs: StepOutputs | None) -> list[StepResult]:
        """made: what is known of every row already."""
        rows: list[int] = []
        wanted: list[SamplingRequest] = []
        live = self.sequences.by_id
        for item, of_item in self._sampled_rows(plan):
            wanted.append(SamplingRequest(len(rows), tuple([live[seq_id].slot for seq_id in item.samples]), item.draft))
            rows += of_item
        if not wanted:
            return []
        maxima = outputs.maxima if outputs is not None and len(rows) == len(outputs.logits) else None
        return sample_and_accept(self.sampler, self._row_logits(rows, hidden, outputs), wanted, maxima)

    def _pool(self, plan: SchedulerOutput, hidden: Tensor) -> dict[int, StepResult]:
        """By sequence id: of every prompt that is pooled and ends in this step, and of those that cannot be."""
        results: dict[int, StepResult] = {}
        answers = self._answer_logits(plan, hidden)
        end = 0
        for item in plan.sequences:
            end += item.num_tokens
            rule = self.sequences.pooled.get(item.seq_id)
            if rule is not None:
                rows = hidden[end - item.num_tokens : end]
                try:
                    known = item.num_known_tokens
                    pooled = self._pooler.add(item.seq_id, rule, rows, item.start, known, answers.get(item.seq_id))
                except EngineError as error:
                    results[item.seq_id] = StepResult(item.seq_id, error=error)
                    continue
                except (
                    RuntimeError
                ) as error:  # what was kept of the others' chunks is changed: none of it is done again
                    if not is_out_of_memory(error):
                        raise
                    results[item.seq_id] = StepResult(item.seq_id, error=DeviceMemoryError(OUT_OF_MEMORY))
                    continue
                if pooled is not None:
                    results[item.seq_id] = StepResult(item.seq_id, pooled=pooled)
        return results

    def _prompt_logprobs(
        self, plan: SchedulerOutput, hidden: Tensor
    ) -> list[tuple[int, tuple[TokenLogprobs, ...] | EngineError]]:
        """By sequence id; the error, which is that request's alone, where its logits are not finite."""
        results: list[tuple[int, tuple[TokenLogprobs, ...] | EngineError]] = []
        for item, rows in self._prompt_rows(plan, hidden):
            assert item.prompt_logprobs is not None
            results.append((item.seq_id, self._chunk_logprobs(item, rows, item.prompt_logprobs)))
        return results

    def _chunk_logprobs(
        self, item: ScheduledSequence, hidden: Tensor, k: int
    ) -> tuple[TokenLogprobs, ...] | EngineError:
        found: list[TokenLogprobs] = []
        failed: EngineError | None = None
        for part, logits in self._prompt_logits(item, hidden):  # to the end: other ranks form all of them, too
            try:
                found += token_logprobs(self.decoder.backend, logits, torch.tensor(part), k)
            except EngineError as error:
                failed = failed or error
        return failed or tuple(found)
