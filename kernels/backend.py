"""What a device offers: every operation that the engine needs, bound once when a model is loaded.

Responsible for the contract: shapes, types, what may be overwritten, and what comes back. A backend is bound for a device,
a compute dtype, a way of storing weights and, if asked, for bits that depend on nobody else; what it cannot do in the
quickest way was found out then, and it can tell. It knows tensors; it knows nothing of requests or models, and whoever
calls it knows nothing of what lies behind it.

Layout glossary: T tokens of one step, B sequences, H heads, D head dimension, P block size; a *slot* is
`block * P + offset` in the flattened pages of one KV group.

Under `deterministic` the bits of a row depend on that row's own sequence only: never on the rows beside it, on how its
sequence was cut into chunks, or on where its blocks lie. Embedding, angles, rotation and draws always have the property.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from windlass.kernels.attention_call import AttentionCall, LatentExpansion
from windlass.kernels.draws import TokenSampler, TopLogprobs
from windlass.kernels.layouts.blocks import BlockRows, BlockWeight
from windlass.kernels.layouts.experts import ExpertWeights
from windlass.kernels.layouts.forms import BlockForm
from windlass.kernels.layouts.huge_pages import advise_huge_pages
from windlass.kernels.layouts.low_rank import AdapterSlots, LowRankTable, LowRankTarget
from windlass.kernels.layouts.pages import KVPages
from windlass.kernels.layouts.panels import PanelRows, PanelWeight
from windlass.kernels.layouts.ranks import RankGroup
from windlass.kernels.layouts.stacked import Part, StackedWeight
from windlass.kernels.memory.copies import Copies, copies_of
from windlass.kernels.memory.device import device_memory_of
from windlass.kernels.memory.weights import SharedWeights, WeightMemory
from windlass.kernels.operations.pointwise import Pointwise
from windlass.kernels.operations.recurrence import Recurrences
from windlass.kernels.operations.routing import Routed, Routing
from windlass.kernels.recorder import RepeatsSteps
from windlass.kernels.step_rows import BufferFiller, PersistentBuffers

Activations: TypeAlias = Literal["int8", "float32"]
Storage: TypeAlias = torch.dtype | BlockForm  # how a matrix is stored
Weight: TypeAlias = Tensor | PanelWeight | BlockWeight | StackedWeight


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """What a backend is bound for.

    dtype: activations. weight_dtype: matrices that are not in blocks, biases aside. activations: what rows become where they
    meet blocks: int8 with a scale per group, or float32 as they are, with the blocks widened (slow; nothing is rounded).
    bf16_prefill: whether attention of prompts over pages of 16 bits may round what it multiplies to bfloat16.
    shared: where weights lie that other processes use too. ranks: who else holds a part of the model, None: nobody.
    """

    device: torch.device
    dtype: torch.dtype = torch.float32
    weight_dtype: torch.dtype = torch.float32
    deterministic: bool = False
    activations: Activations = "int8"
    bf16_prefill: bool = False
    shared: SharedWeights | None = field(default=None, compare=False)
    ranks: RankGroup | None = field(default=None, compare=False)


class Backend(RepeatsSteps, Recurrences, Pointwise):
    """See the module. The weights it hands out are uninitialised, and live as long as somebody holds them."""

    def __init__(self, options: BackendOptions) -> None:
        self.options = options
        self.device, self.dtype, self.weight_dtype = options.device, options.dtype, options.weight_dtype
        self.deterministic, self.device_memory = options.deterministic, device_memory_of(options.device)
        self._memory = WeightMemory(options.device, options.shared)
        self.workspace_bytes = 0  # that an operation may take in some step and not in the largest
        self.uniform_prefill_min_tokens = (
            0  # new tokens of a sequence from which attention treats all alike, but not fewer; 0: any
        )

    @abstractmethod
    def explain(self) -> str:
        """One line on which kernels run, and why no quicker ones."""

    @property
    def is_fallback(self) -> bool:
        """Whether this kind of device has quicker kernels, which were refused: `explain` says why."""
        return False

    # Memory

    @property
    def reads_host_memory(self) -> bool:
        """Whether operands may lie in memory that Python writes to through numpy, so that a step's can be filled in place."""
        return self.device.type == "cpu"

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory for a weight of any other kind than those below. Raises what torch raises when there is none."""
        return self._memory.empty(shape, dtype)

    def matrix(self, rows: int, columns: int, storage: Storage) -> Part:
        """A weight that is only multiplied by."""
        if isinstance(storage, BlockForm):
            return BlockWeight.empty(rows, columns, storage, self.empty)
        return self._plain_matrix(rows, columns, storage)

    def table(self, rows: int, columns: int, storage: Storage) -> Tensor | BlockWeight:
        """A weight that rows are only gathered from."""
        if isinstance(storage, BlockForm):
            return BlockWeight.empty(rows, columns, storage, self.empty)
        return self.empty((rows, columns), storage)

    def tied_embedding(self, rows: int, columns: int, storage: Storage) -> Tensor | BlockWeight:
        """A weight that rows are gathered from and that is multiplied by."""
        return self.table(rows, columns, storage)

    def stack(self, parts: Sequence[Part]) -> StackedWeight:
        """Weights that `matrix` made as one, the rows of each under those before. Raises ValueError where they do not fit."""
        return StackedWeight(tuple(parts))

    def pages(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory for cached keys and values. It is reserved, not touched: on a CPU, what is not used costs nothing."""
        made = torch.empty(shape, dtype=dtype, device=self.device)
        advise_huge_pages(made)
        return made

    def make_copies(self) -> Copies | None:
        """What takes cached keys and values to the host's memory and back; None where they lie there."""
        return copies_of(self.device)

    def _plain_matrix(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor | PanelWeight:
        return self.empty((rows, columns), dtype)

    @abstractmethod
    def pack(self, target: PanelRows | BlockRows, source: Tensor) -> None:
        """Put source [rows, columns], float32 or narrower on the CPU, into rows of a weight that `matrix` made.

        Quantizing gives the same bytes everywhere. Raises ValueError for blocks of a form that nothing is quantized into.
        """

    @abstractmethod
    def repack(self, target: BlockRows, source: Tensor) -> None:
        """Put source, uint8 [rows, bytes of a row] as GGUF has blocks of the target's form, into rows of a weight.

        Nothing is rounded: what `dequantize` gives afterwards is what GGUF says that the blocks mean.
        """

    # Products, norms, activations

    @abstractmethod
    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """x @ weight.T + bias. x: [T, K], weight: [N, K] in x's dtype or a narrower one, bias: [N]. Returns [T, N] in x's dtype.

        Sums are float32 on a CPU whatever the storage. A weight in blocks meets x rounded to 8 bits, with a scale for each
        group: the sums of a group are integers and what follows has one order, so a row's bits depend on that row alone,
        deterministic or not. With float32 activations nothing is rounded; the blocks are widened.
        """

    def logits(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """`linear` for what has to be float32."""
        return self.linear(x, weight, bias).float()

    def low_rank_table(self, slots: int, matrix: LowRankTarget) -> LowRankTable:
        """A table for low-rank changes of a matrix, all slots without one."""
        return LowRankTable(slots)

    @abstractmethod
    def add_low_rank(self, out: Tensor, x: Tensor, table: LowRankTable, rows: AdapterSlots) -> None:
        """Add to each row of `out` [T, N], in place, what the row's change makes of its row of x [T, K].

        out and x are of the compute dtype, changes of that or a narrower one; `low_rank_table` of this backend made the table.
        Rows without a change stay as they are. Raises IndexError for a slot that is none; where a device would have to be
        waited for, the row is NaN instead.
        """

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last dim (1910.07467), in float32.

        x: [T, D] or [T, H, D]. weight: [D] float32. Returns x's shape and dtype, contiguous.
        """

    @abstractmethod
    def add_rms_norm(self, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add x to `residual` in place, rounded to its dtype, and return the sum's `rms_norm`. Both [T, D], of one dtype."""

    @abstractmethod
    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias over the last dim (1607.06450), in float32.

        x: [T, D] or [T, H, D]. weight, bias: [D] float32. Returns x's shape and dtype, contiguous.
        """

    @abstractmethod
    def rms_norm_in_place(self, x: Tensor, weight: Tensor, eps: float) -> None:
        """`rms_norm` of x [T, D], any row stride, written over it."""

    @abstractmethod
    def add(self, residual: Tensor, x: Tensor) -> None:
        """Add x to `residual` in place, rounded to its dtype. Both [T, D], of one dtype."""

    @abstractmethod
    def scaled(self, x: Tensor, factor: float) -> Tensor:
        """x times factor, [T, N] float32."""

    def gated_linear(self, x: Tensor, weight: Weight, bias: Tensor | None, activation: str) -> Tensor:
        """`gated_activation` of linear(x, weight, bias), whose result may be left unrounded in between. Returns [T, N / 2]."""
        return self.gated_activation(self.linear(x, weight, bias), activation)

    # Ranks

    @abstractmethod
    def sum_over_ranks(self, x: Tensor) -> None:
        """x [T, N], contiguous, becomes the sum of what all ranks have there, in float32, rounded once; where deterministic, in
        their order.

        All of them call it, with tensors of one shape; so it is of all that the ranks do together. Nothing happens where there
        is one rank. Raises RankEndedError.
        """

    @abstractmethod
    def gather_columns(self, part: Tensor) -> Tensor:
        """Float32 [R, V] on the first rank, of each rank's columns [R, own]; on the others the part. Raises RankEndedError."""

    # Experts

    def experts(self, weights: Sequence[Weight], biases: Sequence[Tensor] | None = None) -> ExpertWeights:
        """Weights that this backend made, [N, K] of each expert, as one; biases: [N] of each. Raises ValueError."""
        return ExpertWeights(weights, biases)

    @abstractmethod
    def route(
        self, logits: Tensor, routing: Routing, bias: Tensor | None = None, scales: Tensor | None = None
    ) -> Routed:
        """The experts of each token; see `Routing`. logits: [T, E] float32. bias: [E] float32, added for the choice.
        scales: [E] float32, what a weight of the expert is multiplied by last of all."""

    @abstractmethod
    def linear_of_experts(self, x: Tensor, experts: ExpertWeights, chosen: Tensor) -> Tensor:
        """`linear` of each token with each of its experts, [T * k, N] in x's dtype. chosen: int64 [T, k], experts that there are.
        x: [T, K], a row of which meets all k experts, or [T * k, K], row t * k + j of which meets expert chosen[t, j]. Only
        weights of chosen experts are read."""

    @abstractmethod
    def sum_of_experts(self, x: Tensor, weights: Tensor) -> Tensor:
        """The sum over j of x[t * k + j] * weights[t, j], [T, N] in x's dtype; summed in float32 and in this order.
        x: [T * k, N]. weights: float32 [T, k]."""

    def feed_forward_of_experts(
        self, x: Tensor, gate_up: ExpertWeights, down: ExpertWeights, routed: Routed, activation: str
    ) -> Tensor:
        """The sum, by a token's weights, of what its experts make of it: `gated_activation` between two products. x: [T, K].
        Returns [T, N] in x's dtype. What lies between the products may be left unrounded before it is activated."""
        y = self.gated_activation(self.linear_of_experts(x, gate_up, routed.chosen), activation)
        return self.sum_of_experts(self.linear_of_experts(y, down, routed.chosen), routed.weights)

    @abstractmethod
    def embed(self, table: Tensor | BlockWeight, ids: Tensor, scale: float = 1.0) -> Tensor:
        """table[ids] in the compute dtype times the scale rounded to it. table: [N, D], ids: [T] int64.
        Returns [T, D], memory of its own."""

    @abstractmethod
    def log1p(self, counts: Tensor) -> Tensor:
        """ln(1 + n) of int64 counts [T], float32."""

    # Rotation and attention

    @abstractmethod
    def rotary_angles(self, inv_freq: Tensor, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of inv_freq[:, rows] * positions, formed and reduced in float64.

        inv_freq: [G, R, d/2] float64. rows, positions: [T] int64, positions exact to 2^53. Returns two float32 [G, T, d/2],
        right to rounding at any position; an element's bits depend on its frequency and position only.
        """

    @abstractmethod
    def buffer_filler(
        self, rows: PersistentBuffers, inv_freq: Tensor, q_scale: Tensor, score_scale: Tensor, block_size: int
    ) -> BufferFiller:
        """What fills in these rows, again and again, where `reads_host_memory`.

        inv_freq: [G, R, d/2] float64, q_scale: [G, R], score_scale: [R] float32, whose memory stays while what they
        hold may change.
        """

    @abstractmethod
    def rotate_and_append(
        self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, q_scale: Tensor, pages: KVPages, slots: Tensor
    ) -> None:
        """Rotate q in place, and write k rotated and v as it is to the pages; half-split pairs, float32 arithmetic.

        q: [T, Hq, Dq], scaled by q_scale on its rotary dims. k: [T, Hkv, D], v: [T, Hkv, Dv], unchanged; the three share a
        dtype. cos, sin: [T, d/2] float32, d <= D and Dq. q_scale: [T] float32. slots: [T] int64, distinct; negative ones
        write nothing. int8 pages take what `reference.quantize` makes of the result. k and v without heads write nothing.
        """

    @abstractmethod
    def rerotate_cached_keys(
        self, pages: KVPages, sources: Tensor, targets: Tensor, cos: Tensor, sin: Tensor, *, values: bool = True
    ) -> None:
        """Rotate cached keys by one more rotation each, from source to target slots, and take their values along if asked.

        sources, targets: [N] int64 slots; an entry may name one slot twice, to rotate in place, but no slot may be the
        source of one entry and the target of another. cos, sin: [N, d/2] float32 of the angle at the target minus that at
        the source. A key is rounded to the cache's dtype once; values, and keys that no pair rotates, are copied bit by bit.
        Raises IndexError for a slot outside the pages (nothing is written then).
        """

    @abstractmethod
    def rotate_queries(self, q: Tensor, rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """q as it is, and under it versions of some of its rows, each rotated by one more angle; see `AttentionCall`.

        q: [T, Hq, D] rotated, any row and head strides. rows: [M] int64, M > 0. cos, sin: [M, d/2] float32, d <= D; of width 0
        for plain copies. Returns [T + M, Hq, D] in q's dtype, contiguous: row T + m is q[rows[m]], the half-split pairs of its
        first d dims rotated in float32 by the m-th angle. Raises ValueError, and IndexError for a row that q lacks.
        """

    @abstractmethod
    def paged_attention(self, q: Tensor, pages: KVPages, call: AttentionCall) -> Tensor:
        """Attention of each sequence's new tokens over its cached keys, in float32.

        q: [T, Hq, D] rotated, or [N, Hq, D] with ranges. Returns [T, Hq, Dv] in q's dtype. Only keys and values that some
        query sees are read. Raises ValueError where q and the call disagree, and IndexError for a block or a row of q that is
        none. On a device that would have to be waited for, NaN comes instead of an IndexError; so it does from `rotate_queries`.
        """

    # Latent attention (arXiv 2405.04434), H heads with R rotated, N plain, V value and C latent dims

    def latent_expansion(self, pages: KVPages) -> LatentExpansion | None:
        """How keys and values of heads may be made of these pages' latent vectors; None where that is never done."""
        return None

    @abstractmethod
    def latent_queries(self, q: Tensor, up: Tensor, rotary_dim: int) -> Tensor:
        """Queries as they meet latent vectors: the plain dims of each head times what makes its keys of such a vector.

        q: [T, H, R + N]. up: [H, N + V, C] in q's dtype or a narrower one, of each head what makes its keys, then what makes
        its values. Returns [T, H, R + C] in q's dtype, contiguous: the first R dims as they are, then q[:, h, R:] @ up[h, :N].
        """

    @abstractmethod
    def latent_values(self, attended: Tensor, up: Tensor, value_dim: int) -> Tensor:
        """What heads saw, made of the latent vectors that attention weighed: up[h, N:] @ attended[:, h]. up: as above.
        attended: [T, H, C], any row and head strides. value_dim: V. Returns [T, H * V] in attended's dtype."""

    # Drawing

    @abstractmethod
    def row_maxima(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The first index of each row's largest value, int64 [R], and that value, float32 [R]; a NaN counts as the largest.
        logits: [R, V] float32."""

    @abstractmethod
    def token_sampler(self, vocab_size: int) -> TokenSampler:
        """What draws tokens from rows of so many logits."""

    @abstractmethod
    def token_logprobs(self, logits: Tensor, rows: Tensor, targets: Tensor, k: int) -> TopLogprobs:
        """What rows of logits [R, V] float32 say of a token each. rows, targets: [N] int64, on the host. k: 0 .. V."""
