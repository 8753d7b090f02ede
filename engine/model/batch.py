"""The one argument of a forward pass: a flat batch of tokens from any mix of sequences, phases and rotary specs."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class ForwardBatch:
    """T tokens of B sequences, G rotary groups, K KV groups. An argument, never a global.

    lasting: the next batch of as many rows stands in the same tensors, which nothing else overwrites.
    """

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, absolute
    rotary_ids: Tensor  # [T] int64, rows of the rotary tables
    slots: Tensor  # [K, T] int64, where each token's key and value go
    block_tables: Tensor  # [K, B, max_blocks] int32; -1 where a window group dropped the block
    query_start: Tensor  # [B + 1] int64
    seq_lens: Tensor  # [B] int64, cached tokens once this step has been appended
    first_position: Tensor  # [B] int64, absolute position of the first cached token
    cos: Tensor  # [G, T, rotary_dim / 2] float32
    sin: Tensor  # [G, T, rotary_dim / 2] float32
    q_scale: Tensor  # [G, T] float32, on the rotary slice of the query
    score_scale: Tensor  # [T] float32, on the whole query; 1 before the model has applied its own
    lasting: bool = False
