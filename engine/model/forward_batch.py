"""Forward batch: the one argument of a forward pass, a flat batch of tokens of any mix of sequences, phases and rotary specs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from windlass.engine.model.lora import BatchAdapters
from windlass.kernels import PrefillTotals, StateRows


@dataclass(slots=True)
class RotatedQueryCopies:
    """Rotated copies of a step's queries, and the key ranges that queries and copies attend to.

    R key ranges per sequence, V copies, W distinct windows, G rotary groups. Ranges: see `AttentionCall`.
    """

    ends: Tensor  # [B, R] int64
    rows: Tensor  # [B, R] int64
    unrotated_rows: Tensor  # [B, R] int64, for layers that do not rotate
    reaches: Tensor  # [W, B, R] int64
    gaps: Tensor  # [B, R] int64, distance minus the number of slots between query and key
    sources: Tensor  # [V] int64, the query of each copy
    cos: Tensor  # [G, V, rotary_dim / 2] float32, rotation of the copies
    sin: Tensor  # [G, V, rotary_dim / 2] float32
    # First rotation of the queries, where scores depend on the position at which the context begins.
    anchor_cos: Tensor | None = None  # [G, T, rotary_dim / 2] float32
    anchor_sin: Tensor | None = None  # [G, T, rotary_dim / 2] float32
    query_indices: Tensor | None = None  # [T] int64, 0 to T - 1
    # Second key copies: keys as they appear from a large distance.
    second_key_slots: Tensor | None = None  # [K, T] int64; -1: none
    second_key_cos: Tensor | None = None  # [G, T, rotary_dim / 2] float32
    second_key_sin: Tensor | None = None  # [G, T, rotary_dim / 2] float32


@dataclass(slots=True)
class ForwardBatch:
    """T tokens of B sequences, G rotary groups, K KV groups. An argument, never a global.

    only_last_tokens is never set together with query_copies.
    """

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, absolute
    rotary_ids: Tensor  # [T] int64, rows of the rotary tables
    slots: Tensor  # [K, T] int64, where each token's key and value go
    block_tables: Tensor  # [K, B, max_blocks] int32; -1 where a window group dropped the block
    query_start: Tensor  # [B + 1] int64
    seq_lens: Tensor  # [B] int64, slots in use after this step
    context_positions: Tensor  # [T] int64, positions without the dropped tokens before them
    cos: Tensor  # [G, T, rotary_dim / 2] float32
    sin: Tensor  # [G, T, rotary_dim / 2] float32
    q_scale: Tensor  # [G, T] float32, multiplies the rotated dims of the query
    score_scale: Tensor  # [T] float32, multiplies the query; 1 until the model applies its own scale
    query_copies: RotatedQueryCopies | None = None  # None: queries attend unchanged to all keys in their window
    persistent: bool = False  # the tensors are persistent buffers, which the next batch of this size reuses
    adapters: BatchAdapters | None = None  # None: no row has an adapter
    token_types: Tensor | None = None  # [T] int64, text of a pair that the token belongs to; None: the first
    # [G, T] float32, multiplies queries and keys before norms that follow the rotation
    pre_norm_scale: Tensor | None = None
    prompts: PrefillTotals | None = None  # see `AttentionCall`
    per_layer_embeddings: Tensor | None = None  # [T, layers * size], rows of the table
    unrotated_score_scale: Tensor | None = None  # [T] float32, of layers that do not rotate, if it differs
    only_last_tokens: bool = False  # only the last hidden state of each sequence is needed; requires query_copies None
    state_rows: StateRows | None = None  # recurrent states that the tokens change; None: no layer has one
    hidden: Tensor | None = None  # [T, hidden], second input of an MTP layer

    @property
    def last_tokens(self) -> Tensor:
        """Index of the last token of each sequence, [B] int64."""
        return self.query_start[1:] - 1

    def last_tokens_batch(self) -> ForwardBatch:
        """The batch of the last token of each sequence."""
        last = self.last_tokens

        def some(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[last]

        return replace(
            self,
            input_ids=self.input_ids[last],
            positions=self.positions[last],
            rotary_ids=self.rotary_ids[last],
            slots=self.slots[:, last],
            query_start=torch.arange(len(last) + 1, device=last.device),
            context_positions=self.context_positions[last],
            cos=self.cos[:, last],
            sin=self.sin[:, last],
            q_scale=self.q_scale[:, last],
            score_scale=self.score_scale[last],
            persistent=False,
            adapters=None if self.adapters is None else self.adapters.at(last),
            token_types=some(self.token_types),
            pre_norm_scale=None if self.pre_norm_scale is None else self.pre_norm_scale[:, last],
            prompts=None,
            per_layer_embeddings=None,  # already applied to the input of each layer
            unrotated_score_scale=some(self.unrotated_score_scale),
            only_last_tokens=False,
        )
