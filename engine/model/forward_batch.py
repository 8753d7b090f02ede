"""Forward batch: the one argument of a forward pass, a flat batch of tokens of any mix of sequences, phases and rotary specs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from windlass.engine.model.lora import BatchAdapters
from windlass.kernels import PrefillTotals, StateRows


@dataclass(slots=True)
class RotatedQueryCopies:
    """What a step's queries meet in parts of their sequences: R ranges of slots, V turned versions, W kinds of windows.

    anchor_cos, anchor_sin, query_indices: how the queries themselves are turned first, where scores depend on where the
    context begins.
    """

    ends: Tensor  # [B, R] int64, see `AttentionCall`
    rows: Tensor  # [B, R] int64
    unrotated_rows: Tensor  # [B, R] int64, for layers that do not rotate
    reaches: Tensor  # [W, B, R] int64
    gaps: Tensor  # [B, R] int64, what distances are more than the slots between query and key
    sources: Tensor  # [V] int64, the query that each version is of
    cos: Tensor  # [G, V, rotary_dim / 2] float32, of the turns
    sin: Tensor  # [G, V, rotary_dim / 2] float32
    anchor_cos: Tensor | None = None  # [G, T, rotary_dim / 2] float32
    anchor_sin: Tensor | None = None  # [G, T, rotary_dim / 2] float32
    query_indices: Tensor | None = None  # [T] int64, 0 to T - 1
    second_key_slots: Tensor | None = (
        None  # [K, T] int64, where keys are kept a second time, as they seem from far away; -1: not
    )
    second_key_cos: Tensor | None = None  # [G, T, rotary_dim / 2] float32, of those
    second_key_sin: Tensor | None = None  # [G, T, rotary_dim / 2] float32


@dataclass(slots=True)
class ForwardBatch:
    """T tokens of B sequences, G rotary groups, K KV groups. An argument, never a global.

    query_copies: None if every query attends unrotated to all keys within the layers' windows. persistent: the next batch with
    as many rows uses the same tensors, which nothing else overwrites. adapters: None if no row has one. token_types: the text of
    a pair that each token belongs to; None: the first for all. prompts: see `AttentionCall`. only_last_tokens: only the hidden
    state of each sequence's last token is needed; never set together with query_copies. hidden: for an MTP layer, the hidden
    states that are joined with the embeddings of the rows' tokens.
    """

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, absolute
    rotary_ids: Tensor  # [T] int64, rows of the rotary tables
    slots: Tensor  # [K, T] int64, where each token's key and value go
    block_tables: Tensor  # [K, B, max_blocks] int32; -1 where a window group dropped the block
    query_start: Tensor  # [B + 1] int64
    seq_lens: Tensor  # [B] int64, slots taken once this step has been appended
    context_positions: Tensor  # [T] int64, positions as if tokens missing before them had never been
    cos: Tensor  # [G, T, rotary_dim / 2] float32
    sin: Tensor  # [G, T, rotary_dim / 2] float32
    q_scale: Tensor  # [G, T] float32, on the rotary slice of the query
    score_scale: Tensor  # [T] float32, on the whole query; 1 before the model has applied its own
    query_copies: RotatedQueryCopies | None = None
    persistent: bool = False
    adapters: BatchAdapters | None = None
    token_types: Tensor | None = None  # [T] int64
    pre_norm_scale: Tensor | None = (
        None  # [G, T] float32, on queries and keys in front of norms that follow the rotation
    )
    prompts: PrefillTotals | None = None
    per_layer_embeddings: Tensor | None = (
        None  # [T, layers * size], what layers are given of tokens, as it is looked up
    )
    unrotated_score_scale: Tensor | None = None  # [T] float32, that of layers that do not rotate, where it is another
    only_last_tokens: bool = False
    state_rows: StateRows | None = None  # the states that the tokens change; None where no layer carries one
    hidden: Tensor | None = None  # [T, hidden]

    @property
    def ends(self) -> Tensor:
        """The last token of each sequence, [B] int64."""
        return self.query_start[1:] - 1

    def last_tokens_batch(self) -> ForwardBatch:
        """The last token of each sequence, as a batch of single tokens."""
        ends = self.ends

        def some(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[ends]

        return replace(
            self,
            input_ids=self.input_ids[ends],
            positions=self.positions[ends],
            rotary_ids=self.rotary_ids[ends],
            slots=self.slots[:, ends],
            query_start=torch.arange(len(ends) + 1, device=ends.device),
            context_positions=self.context_positions[ends],
            cos=self.cos[:, ends],
            sin=self.sin[:, ends],
            q_scale=self.q_scale[:, ends],
            score_scale=self.score_scale[ends],
            persistent=False,
            adapters=None if self.adapters is None else self.adapters.at(ends),
            token_types=some(self.token_types),
            pre_norm_scale=None if self.pre_norm_scale is None else self.pre_norm_scale[:, ends],
            prompts=None,
            per_layer_embeddings=None,  # layers have been given theirs
            unrotated_score_scale=some(self.unrotated_score_scale),
            only_last_tokens=False,
        )
