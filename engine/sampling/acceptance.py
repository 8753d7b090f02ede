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
    """The tokens to sample for one sequence.

    row: row of its last known token; a token is sampled from it for each slot. draft: proposed tokens, whose rows follow.
    If there are any, there is one slot.
    """

    row: int
    slots: tuple[SampleSlot, ...]
    draft: tuple[int, ...] = ()


def sample_and_accept(
    sampler: Sampler, logits: Tensor, requests: Sequence[SamplingRequest], maxima: tuple[Tensor, Tensor] | None = None
) -> list[StepResult]:
    """Sample a token per slot, or the accepted proposed tokens of a sequence and the one after them.

    logits: [R, V]. maxima: their `Backend.row_maxima`, if known.
    """
    if not any(item.draft for item in requests):
        slots = [(item.row, slot) for item in requests for slot in item.slots]
        tokens = sampler.sample(logits, slots, maxima)
        return [_result(slot, (token,)) for (_, slot), token in zip(slots, tokens, strict=True)]
    slots = []
    for item in requests:
        slots += [(item.row, slot) for slot in item.slots]
        if not _depends_on_history(item):
            slots += [(item.row + i, item.slots[0].after(item.draft[:i])) for i in range(1, len(item.draft) + 1)]
    sampled = iter(sampler.sample(logits, slots, maxima))
    results, unfinished = [], []
    for item in requests:
        found = [next(sampled) for _ in item.slots]
        if not item.draft:
            results += [_result(slot, [token]) for slot, token in zip(item.slots, found, strict=True)]
        elif _depends_on_history(item):
            unfinished.append((item, found))
        else:
            found += [next(sampled) for _ in item.draft]
            results.append(_result(item.slots[0], _accepted(item, found)))
    while matching := [entry for entry in unfinished if _matches_draft(*entry)]:
        rows = to_device(torch.tensor([item.row + len(found) for item, found in matching]), logits.device)
        slots = [(row, item.slots[0].after(item.draft[: len(found)])) for row, (item, found) in enumerate(matching)]
        for (_, found), token in zip(matching, sampler.sample(logits[rows], slots), strict=True):
            found.append(token)
    return results + [_result(item.slots[0], _accepted(item, found)) for item, found in unfinished]


def _depends_on_history(item: SamplingRequest) -> bool:
    """Whether the sampler counts the tokens before each row, so that a row can be sampled only after those are accepted."""
    return bool(item.draft) and uses_penalties(item.slots[0].sampling)


def _matches_draft(item: SamplingRequest, found: Sequence[SampledToken]) -> bool:
    """Whether the last sampled token equals the proposed one."""
    return (
        len(found) <= len(item.draft) and found[-1].error is None and found[-1].token_id == item.draft[len(found) - 1]
    )


def _accepted(item: SamplingRequest, found: Sequence[SampledToken]) -> list[SampledToken]:
    """The sampled tokens up to and including the first that differs from the proposed one."""
    count = 1
    while count < len(found) and _matches_draft(item, found[:count]):
        count += 1
    # An error after accepted tokens is dropped: it occurs again in the next step, after these are returned.
    return list(found[: count - 1 if count > 1 and found[count - 1].error is not None else count])


def _result(slot: SampleSlot, tokens: Sequence[SampledToken]) -> StepResult:
    error = tokens[0].error
    logprobs = tuple([token.logprobs for token in tokens if token.logprobs is not None]) or None
    token_ids = () if error else tuple([token.token_id for token in tokens])
    return StepResult(slot.seq_id, token_ids, logprobs, None, error)
