"""Acceptance of proposed tokens.

A proposed token is accepted if the token sampled at the row before it, exactly as without a proposal (same logits, penalties,
filters, seed and position), is that token. The output is therefore the one without speculation at any temperature, and for a
deterministic proposal no rule accepts more: the probability is the token's own, as in rejection sampling (arXiv 2211.17192).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from windlass.engine.sampling.logits_processor import uses_penalties
from windlass.engine.sampling.sample_slot import SampleSlot
from windlass.engine.sampling.sampler import SampledToken, Sampler
from windlass.engine.scheduling.scheduler_output import StepResult
from windlass.kernels import to_device


class SamplingRequest(NamedTuple):
    """What is to be drawn from the rows of one sequence.

    row: that of the last known token, from which a token is drawn for each slot. draft: proposed tokens, whose rows follow;
    where there are any, there is one slot.
    """

    row: int
    slots: tuple[SampleSlot, ...]
    draft: tuple[int, ...] = ()


def sample_and_accept(
    sampler: Sampler, logits: Tensor, wanted: Sequence[SamplingRequest], maxima: tuple[Tensor, Tensor] | None = None
) -> list[StepResult]:
    """What each sequence has drawn: a token per sample, or the proposed ones that are accepted and the model's own after them.

    logits: [R, V]. maxima: their `Backend.row_maxima`, if known.
    """
    if not any(item.draft for item in wanted):
        slots = [(item.row, slot) for item in wanted for slot in item.slots]
        drawn_once = sampler.sample(logits, slots, maxima)
        return [_result(slot, (one,)) for (_, slot), one in zip(slots, drawn_once, strict=True)]
    slots = []
    for item in wanted:
        slots += [(item.row, slot) for slot in item.slots]
        if not _depends_on_history(item):
            slots += [(item.row + i, item.slots[0].after(item.draft[:i])) for i in range(1, len(item.draft) + 1)]
    drawn = iter(sampler.sample(logits, slots, maxima))
    results, slow = [], []
    for item in wanted:
        found = [next(drawn) for _ in item.slots]
        if not item.draft:
            results += [_result(slot, [one]) for slot, one in zip(item.slots, found, strict=True)]
        elif _depends_on_history(item):
            slow.append((item, found))
        else:
            found += [next(drawn) for _ in item.draft]
            results.append(_result(item.slots[0], _accepted(item, found)))
    while going := [entry for entry in slow if _matches_draft(*entry)]:
        rows = to_device(torch.tensor([item.row + len(found) for item, found in going]), logits.device)
        slots = [(at, item.slots[0].after(item.draft[: len(found)])) for at, (item, found) in enumerate(going)]
        for (_, found), one in zip(going, sampler.sample(logits[rows], slots), strict=True):
            found.append(one)
    return results + [_result(item.slots[0], _accepted(item, found)) for item, found in slow]


def _depends_on_history(item: SamplingRequest) -> bool:
    """Whether the sampler counts the tokens before each row, so that a row may be drawn only once those are accepted."""
    return bool(item.draft) and uses_penalties(item.slots[0].sampling)


def _matches_draft(item: SamplingRequest, found: Sequence[SampledToken]) -> bool:
    """Whether the last draw came to the token that was proposed there."""
    return (
        len(found) <= len(item.draft) and found[-1].error is None and found[-1].token_id == item.draft[len(found) - 1]
    )


def _accepted(item: SamplingRequest, found: Sequence[SampledToken]) -> list[SampledToken]:
    """The draws that count: each one up to the first that differs from what was proposed there, that one included."""
    count = 1
    while count < len(found) and _matches_draft(item, found[:count]):
        count += 1
    # What fails after accepted tokens fails again in the next step, when those are out.
    return list(found[: count - 1 if count > 1 and found[count - 1].error is not None else count])


def _result(slot: SampleSlot, drawn: Sequence[SampledToken]) -> StepResult:
    error = drawn[0].error
    logprobs = tuple([one.logprobs for one in drawn if one.logprobs is not None]) or None
    token_ids = () if error else tuple([one.token_id for one in drawn])
    return StepResult(slot.seq_id, token_ids, logprobs, None, error)
