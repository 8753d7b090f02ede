"""Draws of tokens: what its programs are told of each draw, and what comes back, in one wait for the device.

Typical-p and the exclusion of top choices are drawn in plain torch, to the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from windlass.kernels.draws import LogitsChanges, SamplingRow, SamplingStatus, SamplingTensors, encode_filters
from windlass.kernels.layouts.pinned import to_device
from windlass.kernels.torch.drawer import TorchSampler, TorchSamplingRow
from windlass.kernels.triton.launch import launch, power_of_two, strided
from windlass.kernels.triton.programs import drawing as programs
from windlass.kernels.triton.programs import logits as of_logits

_BLOCK, _LIST = 8192, 512  # columns that are changed at once, and tokens of a list, by one program for each row
_PART = 4096  # columns of which a program finds the largest
_SAMPLE_BLOCK = 2048  # columns that a draw reads at once
# Programs for a row, and for all rows: so many find room at once, and little time where they have nothing to do.
_MOST_PARTS, _PROGRAMS = 64, 512
_RADIX_PASSES = 0, 3, 5  # that narrow what is kept: for no filter, for top-k or top-p, for both
_EXACT: dict[str, Any] = {"enable_fp_fusion": False, "num_warps": 8}


def row_maxima(logits: Tensor) -> tuple[Tensor, Tensor]:
    """See `Backend.row_maxima`."""
    logits = strided(logits)
    rows, columns = logits.shape
    parts = max(1, -(-columns // _PART))
    part_places = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    part_largest = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    operands = logits, logits.stride(0), columns, part_places, part_largest, parts
    launch(
        of_logits.partial_maxima_kernel, (rows, parts), logits, *operands, PART=_PART, BLOCK=min(2048, _block(columns))
    )
    places = torch.empty(rows, dtype=torch.int64, device=logits.device)
    largest = torch.empty(rows, dtype=torch.float32, device=logits.device)
    block = min(256, power_of_two(parts))
    launch(
        of_logits.row_maxima_kernel,
        (rows,),
        logits,
        part_places,
        part_largest,
        parts,
        places,
        largest,
        BLOCK=block,
        num_warps=1,
    )
    return places, largest


def log_sums(rows: Tensor) -> Tensor:
    """log(sum(exp(x))) of rows [N, V] float32, as [N, 1]; a row's bits follow from that row alone."""
    rows = strided(rows)
    found = torch.empty(rows.shape[0], 1, dtype=torch.float32, device=rows.device)
    operands = rows, rows.stride(0), rows.shape[1], found
    launch(of_logits.log_sums_kernel, (rows.shape[0],), rows, *operands, BLOCK=min(2048, _block(rows.shape[1])))
    return found


class TritonSampler(TorchSampler):
    """See `TokenSampler`."""

    def sample(self, logits: Tensor, draws: Sequence[SamplingRow]) -> None:
        own = cast(Sequence[TorchSamplingRow], draws)
        apart = [one for one in own if _needs_torch(one)]
        here = [one for one in own if not _needs_torch(one)]
        if apart:
            super().sample(logits, apart)
        if here:
            _draw(strided(logits), here)


def _needs_torch(sample: TorchSamplingRow) -> bool:
    return sample.filters.temperature > 0 and (sample.filters.typical_p < 1 or sample.filters.exclude_from < 1)


def _draw(logits: Tensor, draws: Sequence[TorchSamplingRow]) -> None:
    device, columns = logits.device, logits.shape[1]
    altered = [(one, one.changes) for one in draws if one.changes is not None]
    places = iter(range(len(altered)))
    whole = np.array([[one.row, -1 if one.changes is None else next(places)] for one in draws], dtype=np.int64)
    kinds = np.array([encode_filters(one.filters, columns) for one in draws], dtype=np.float64).T
    limits = np.ascontiguousarray(kinds[1:3].astype(np.int32))
    shares = np.array([kinds[3], [one.uniform for one in draws]], dtype=np.float64)
    own_rows, changed_rows = _to(device, np.ascontiguousarray(whole.T))
    magnitude, top_k = _to(device, limits)
    top_p, uniform = _to(device, shares)
    tensors = SamplingTensors(_to(device, kinds[0].astype(np.float32)), magnitude, top_k, top_p, uniform)
    filters = int((((kinds[2] > 0) * 1 + (kinds[3] < 1)) * (kinds[0] > 0)).max())
    rows = _RowsToSample(logits, row_maxima(logits), own_rows)
    changed = rows._replace(of_draw=changed_rows)
    if altered:
        made = _changed_rows(logits, altered)
        changed = _RowsToSample(made, row_maxima(made), changed_rows)
    found = _launch(rows, changed, tensors, _RADIX_PASSES[filters])
    for one, token, status in zip(draws, *found.tolist(), strict=True):
        one.set_result(token, SamplingStatus(status))


def sample_rows(logits: Tensor, maxima: tuple[Tensor, Tensor], draws: SamplingTensors) -> tuple[Tensor, Tensor]:
    """See `Graphs.sample_rows`."""
    tokens, statuses = _launch(_RowsToSample(strided(logits), maxima, None), None, draws, _RADIX_PASSES[-1])
    return tokens, statuses


class _RowsToSample(NamedTuple):
    """Rows [R, V] and their `row_maxima`. of_draw: int64, each draw's row, below 0 for none; None for one after the other."""

    logits: Tensor
    maxima: tuple[Tensor, Tensor]
    of_draw: Tensor | None


def _launch(rows: _RowsToSample, changed: _RowsToSample | None, draws: SamplingTensors, turns: int) -> Tensor:
    """Tokens and statuses [2, draws]. turns: of `radix_select_kernel`."""
    logits, device, count = rows.logits, rows.logits.device, draws.uniform.shape[0]
    columns = logits.shape[1]
    found = torch.empty(2, count, dtype=torch.int64, device=device)
    largest = torch.empty(count, dtype=torch.float32, device=device)
    states, masses, part_masses = (
        torch.empty(count, size, dtype=torch.int64, device=device)
        for size in (programs.STATE.value, programs.MASSES.value, _MOST_PARTS)
    )
    counts, tickets = (
        torch.empty(count, size, dtype=torch.int32, device=device)
        for size in (programs.COUNTS.value, programs.TICKETS.value)
    )
    temperature, floor, top_k, top_p, uniform = draws
    sums = counts, masses, tickets
    launch(
        programs.begin_sampling_kernel,
        (count,),
        logits,
        rows.of_draw,
        None if changed is None else changed.of_draw,
        *rows.maxima,
        *(rows if changed is None else changed).maxima,
        temperature,
        floor,
        top_k,
        top_p,
        *found,
        largest,
        states,
        *sums,
        **_EXACT,
    )
    block = min(_SAMPLE_BLOCK, power_of_two(columns))
    blocks, parts = _parts(count, -(-columns // block))
    row = logits, logits.stride(0), columns, logits if changed is None else changed.logits, temperature
    narrow: tuple[Any, ...] = *row, top_k, top_p, largest, states, *sums
    for turn in range(turns):
        launch(programs.radix_select_kernel, (count, parts), logits, *narrow, turn, blocks, BLOCK=block, **_EXACT)
    sample: tuple[Any, ...] = *row, uniform, largest, states, found[0], part_masses, tickets, blocks
    launch(programs.sample_tokens_kernel, (count, parts), logits, *sample, BLOCK=block, PARTS=_MOST_PARTS, **_EXACT)
    return found


def _parts(rows: int, blocks: int) -> tuple[int, int]:
    """Blocks that a program reads, and programs for each row: many for few rows, so that all fit on a device."""
    each = -(-blocks // max(1, min(_MOST_PARTS, _PROGRAMS // rows)))
    return each, -(-blocks // each)


def _changed_rows(logits: Tensor, altered: Sequence[tuple[TorchSamplingRow, LogitsChanges]]) -> Tensor:
    """The rows of draws that change theirs, one for each, changed."""
    device, columns = logits.device, logits.shape[1]
    words = -(-columns // 32)
    masks = np.full((len(altered), words), -1, dtype=np.int32)
    penalties = np.empty((len(altered), 4), dtype=np.float32)
    bounds = np.zeros((len(altered), 6), dtype=np.int64)
    ids: list[Tensor] = []
    numbers: list[Tensor] = []
    end = 0
    for at, (one, changes) in enumerate(altered):
        if changes.mask is not None:
            masks[at] = changes.mask.numpy()
        settings = one.penalties
        own = changes.allowed is not None
        penalties[at] = settings.repetition, settings.frequency, settings.presence, own
        nothing = changes.forbidden[:0]
        lists = (
            (nothing if changes.allowed is None else changes.allowed, None),
            (changes.forbidden, None),
            (changes.biased, changes.bias),
            (changes.counted, changes.in_output),
            (changes.decreased, changes.decrease),
        )
        for place, (tokens, values) in enumerate(lists):
            bounds[at, place] = end
            end += len(tokens)
            if len(tokens):
                ids.append(tokens)
                numbers.append(torch.zeros(len(tokens), device=device) if values is None else values)
        bounds[at, 5] = end
    empty = torch.zeros(1, device=device)
    out = torch.empty(len(altered), columns, dtype=torch.float32, device=device)
    launch(
        of_logits.adjust_logits_kernel,
        (len(altered),),
        logits,
        logits,
        logits.stride(0),
        _to(device, np.array([one.row for one, _ in altered], dtype=np.int64)),
        out,
        columns,
        _to(device, masks),
        words,
        torch.cat(ids) if ids else empty.long(),
        torch.cat(numbers) if numbers else empty,
        _to(device, bounds),
        _to(device, penalties),
        BLOCK=_block(columns),
        LIST=_LIST,
        **_EXACT | {"num_warps": 16},
    )
    return out


def _to(device: torch.device, numbers: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Tensor:
    return to_device(torch.from_numpy(numbers), device)


def _block(columns: int) -> int:
    return min(_BLOCK, power_of_two(columns))
