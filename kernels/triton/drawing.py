"""Draws of tokens: what its programs are told of each draw, and what comes back, in one wait for the device.

Typical-p and the exclusion of top choices are drawn in plain torch, to the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from windlass.kernels.draws import Draw, DrawStatus, LogitsChanges, RowDraws, filter_numbers
from windlass.kernels.layouts.pinned import sent
from windlass.kernels.torch.drawer import TorchDraw, TorchDrawer
from windlass.kernels.triton.launch import launch, power_of_two, strided
from windlass.kernels.triton.programs import drawing as programs
from windlass.kernels.triton.programs import logits as of_logits

# A row is drawn from by one program, a block after the other: of many numbers at once, as each takes as long as the memory takes.
_BLOCK, _LIST = 8192, 512  # _LIST: of changed tokens at once
_PART = 4096  # columns of which a program finds the largest
_MOST, _FEW = 8192, 1024  # tokens near the largest that a draw lists, and of that list at once
_WARPS = 16
_EXACT: dict[str, Any] = {"enable_fp_fusion": False, "num_warps": _WARPS}


def row_maxima(logits: Tensor) -> tuple[Tensor, Tensor]:
    """See `Backend.row_maxima`."""
    logits = strided(logits)
    rows, columns = logits.shape
    parts = max(1, -(-columns // _PART))
    part_places = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    part_largest = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    operands = logits, logits.stride(0), columns, part_places, part_largest, parts
    launch(of_logits.maxima_of_parts, (rows, parts), logits, *operands, PART=_PART, BLOCK=min(2048, _block(columns)))
    places = torch.empty(rows, dtype=torch.int64, device=logits.device)
    largest = torch.empty(rows, dtype=torch.float32, device=logits.device)
    block = min(256, power_of_two(parts))
    launch(
        of_logits.row_maxima,
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
    launch(of_logits.log_sums, (rows.shape[0],), rows, *operands, BLOCK=min(2048, _block(rows.shape[1])))
    return found


class TritonDrawer(TorchDrawer):
    """See `Drawer`."""

    def draw(self, logits: Tensor, draws: Sequence[Draw]) -> None:
        own = cast(Sequence[TorchDraw], draws)
        apart = [one for one in own if _needs_torch(one)]
        here = [one for one in own if not _needs_torch(one)]
        if apart:
            super().draw(logits, apart)
        if here:
            _draw(strided(logits), here)


def _needs_torch(draw: TorchDraw) -> bool:
    return draw.filters.temperature > 0 and (draw.filters.typical_p < 1 or draw.filters.exclude_from < 1)


def _draw(logits: Tensor, draws: Sequence[TorchDraw]) -> None:
    device, columns = logits.device, logits.shape[1]
    maxima = row_maxima(logits)
    altered = [(one, one.changes) for one in draws if one.changes is not None]
    changed = _changed_rows(logits, [(one, changes) for one, changes in altered]) if altered else logits
    places = iter(range(len(altered)))
    whole = np.array([[one.row, -1 if one.changes is None else next(places)] for one in draws], dtype=np.int64)
    kinds = np.array([filter_numbers(one.filters, columns) for one in draws], dtype=np.float64).T
    limits = np.ascontiguousarray(kinds[1:3].astype(np.int32))
    shares = np.array([kinds[3], [one.uniform for one in draws]], dtype=np.float64)
    rows, changed_rows = _to(device, np.ascontiguousarray(whole.T))
    magnitude, top_k = _to(device, limits)
    top_p, uniform = _to(device, shares)
    told = RowDraws(_to(device, kinds[0].astype(np.float32)), magnitude, top_k, top_p, uniform)
    found = _launch(logits, rows, changed, changed_rows, maxima, told)
    for one, token, status in zip(draws, *found.tolist(), strict=True):
        one.settle(token, DrawStatus(status))


def draw_rows(logits: Tensor, maxima: tuple[Tensor, Tensor], draws: RowDraws) -> tuple[Tensor, Tensor]:
    """See `Graphs.draw_rows`."""
    logits = strided(logits)
    rows = torch.arange(logits.shape[0], device=logits.device)
    tokens, statuses = _launch(logits, rows, logits, torch.full_like(rows, -1), maxima, draws)
    return tokens, statuses


def _launch(
    logits: Tensor,
    rows: Tensor,
    changed: Tensor,
    changed_rows: Tensor,
    maxima: tuple[Tensor, Tensor],
    draws: RowDraws,
) -> Tensor:
    """Tokens and statuses [2, draws]. changed_rows: of each draw its row of `changed`, below 0 for none."""
    columns = logits.shape[1]
    found = torch.empty(2, rows.shape[0], dtype=torch.int64, device=logits.device)
    launch(
        programs.draw_tokens,
        (rows.shape[0],),
        logits,
        logits,
        logits.stride(0),
        columns,
        rows,
        changed,
        changed_rows,
        *maxima,
        *draws,
        found[0],
        found[1],
        torch.empty(rows.shape[0], _MOST, dtype=torch.float32, device=logits.device),
        torch.empty(rows.shape[0], _MOST, dtype=torch.int32, device=logits.device),
        BLOCK=_block(columns),
        FEW=_FEW,
        MOST=_MOST,
        **_EXACT,
    )
    return found


def _changed_rows(logits: Tensor, altered: Sequence[tuple[TorchDraw, LogitsChanges]]) -> Tensor:
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
        of_logits.change_rows,
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
        **_EXACT,
    )
    return out


def _to(device: torch.device, numbers: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Tensor:
    return sent(torch.from_numpy(numbers), device)


def _block(columns: int) -> int:
    return min(_BLOCK, power_of_two(columns))
