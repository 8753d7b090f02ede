"""Backend contract: every operation that the engine needs of a device.

States shapes, dtypes, what may be overwritten, and what is returned. A backend is bound once, when a model is loaded, for a
device, a compute dtype, a weight storage and, if requested, determinism.

Symbols: T tokens of one step, B sequences, H heads, D head dimension, P block size. A *slot* is `block * P + offset` in the
flattened pages of one KV group. In recurrent layers: S sequences of a step, N blocks, C channels.

Under `deterministic` the bits of a row depend on its own sequence only: not on other rows, on how the sequence was cut into
chunks, or on where its blocks are stored. Embedding, angles, rotation and sampling always have this property.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from windlass.kernels.attention_call import AttentionCall, LatentExpansion
from windlass.kernels.device_memory import (
    Copies,
    SharedWeights,
    WeightMemory,
    advise_huge_pages,
    copies_of,
    device_memory_of,
)
from windlass.kernels.layouts.kv_pages import KVPages
from windlass.kernels.layouts.low_rank_weights import AdapterSlots, LowRankTable, LowRankTarget
from windlass.kernels.layouts.weight_layouts import (
    BlockForm,
    BlockRows,
    BlockWeight,
    ExpertWeights,
    PanelRows,
    PanelWeight,
    Part,
    StackedWeight,
)
from windlass.kernels.rank_group import RankGroup
from windlass.kernels.step_recording import BufferFiller, Graphs, PersistentBuffers, Recorder
from windlass.kernels.token_sampling import TokenSampler, TopLogprobs

RouterScores: TypeAlias = Literal["softmax", "sigmoid", "sparsemixer"]

GroupScore: TypeAlias = Literal["largest", "two largest"]


@dataclass(frozen=True, slots=True)
class Routing:
    """Which experts each token goes to, and with what weights.

    Scores are made of the logits: `softmax` over all experts, or `sigmoid`, each for itself. A bias of each expert, where
    there is one, is added for the choice alone (2408.15664). With groups, only the best top_groups of them are chosen from: a
    group counts for its largest score (DeepSeek V2, 2405.04434) or its two largest together (DeepSeek V3, 2412.19437). Of
    equal scores the first wins. A weight is its expert's score, divided by the sum of those chosen and sum_eps where
    `normalized` (by least_sum where that is more), and multiplied by scale.

    `sparsemixer` (2409.12136, for top_k 2) chooses one expert after the other; the weight of each is its softmax among those
    that are left and whose logits come within 2 * jitter of it, relative to their size.
    """

    top_k: int
    scores: RouterScores = "softmax"
    normalized: bool = True
    scale: float = 1.0
    least_sum: float = 0.0
    sum_eps: float = 0.0
    groups: int = 1
    top_groups: int = 1
    group_score: GroupScore = "two largest"
    jitter: float = 0.0


class Routed(NamedTuple):
    """chosen: int64 [T, top_k], the experts of each token, the best first. weights: float32 [T, top_k]."""

    chosen: Tensor
    weights: Tensor


class StateRows(NamedTuple):
    """Whose states the tokens of a step change: tokens starts[s] .. starts[s + 1] - 1 that of sequence s, one after the other.

    A sequence that has as many tokens in all as in this step begins with a state of zeros, whatever its block holds. kept: where
    the state after each token is left besides, as it would be left in the sequence's own block if that token were its last; -1:
    nowhere. So whoever is not sure of all of the tokens can go back to any of them. None: of no token. On devices that capture
    steps a block of -1 says that tokens are none, and rows of zeros come of them.
    """

    blocks: Tensor  # [S] int64, distinct where they are not -1
    starts: Tensor  # [S + 1] int64
    lengths: Tensor  # [S] int64, tokens in all once this step is over
    snapshots: Tensor | None = None  # [T] int64, distinct where they are not -1, and none of `blocks`


@dataclass(frozen=True, slots=True)
class StatePages:
    """The states of one layer."""

    window: Tensor  # [N, W - 1, C] float32, the last inputs of a convolution of width W, the oldest first
    memory: Tensor  # [N, Hv, Dk, Dv] float32


class Recurrences(ABC):
    """Operations over the tokens of each sequence in turn. A row's bits depend on its own sequence alone, and not on how that was
    cut into steps."""

    @abstractmethod
    def short_convolution(
        self,
        x: Tensor,
        weight: Tensor,
        window: Tensor,
        rows: StateRows,
        activation: Literal["silu"] | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """The causal convolution of each channel with its own weights, and the activation of it, if there is one.

        x: [T, C], any row stride. weight: [C, W] float32, the last of a row for the token itself. window: as in `StatePages`,
        changed in place. bias: [C] float32, what sums begin with. Returns [T, C] in x's dtype, contiguous; sums are float32.
        """

    @abstractmethod
    def gated_delta_rule(
        self,
        qkv: Tensor,
        decay: Tensor,
        strength: Tensor,
        rate: Tensor,
        bias: Tensor,
        memory: Tensor,
        rows: StateRows,
        *,
        tiled_heads: bool = False,
    ) -> Tensor:
        """What queries read of a memory that each token first lets fade and then corrects (2412.06464), in float32.

        With q and k of length 1 (1e-6 added to the sum of squares), q times Dk^-1/2, and for each of the Hv heads
        g = exp(-rate softplus(decay + bias)) and b = sigmoid(strength): M = g M; M = M + k (b (v - M^T k))^T; out = M^T q.

        qkv: [T, 2 Hk Dk + Hv Dv], of each token the queries, keys and values, any row stride; head h of the Hv meets query and
        key h // (Hv / Hk), or h mod Hk if these serve in turns. decay, strength: [T, Hv] in qkv's dtype, any row stride. rate,
        bias: [Hv] float32. memory: as in `StatePages`, changed in place. Returns [T, Hv Dv] in qkv's dtype, contiguous.
        """

    @abstractmethod
    def state_space(
        self,
        mixed: Tensor,
        step: Tensor,
        rate: Tensor,
        bias: Tensor,
        skip: Tensor,
        memory: Tensor,
        rows: StateRows,
        *,
        limits: tuple[float, float] = (0.0, math.inf),
    ) -> Tensor:
        """What queries read of a memory that each token lets fade and adds to (Mamba 2, 2405.21060), in float32.

        For each of the Hv heads d = softplus(step + bias), kept within limits; M = exp(-rate d) M; M = M + k (d v)^T;
        out = M^T q + skip v.

        mixed: [T, Hv Dv + 2 Hk Dk], of each token the values, keys (B) and queries (C), any row stride; head h of the Hv meets
        key and query h // (Hv / Hk). step: [T, Hv] in mixed's dtype, any row stride. rate, bias, skip: [Hv] float32. memory: as
        in `StatePages` (here Dk is Mamba's d_state, Dv its head dim), changed in place. Returns [T, Hv Dv] in mixed's dtype,
        contiguous.
        """


class Pointwise(ABC):
    """See the module."""

    @abstractmethod
    def gated_activation(self, gate_up: Tensor, activation: str) -> Tensor:
        """activation(gate) * up of [T, 2F] holding (gate, up). Returns [T, F]. activation: "silu", "gelu_tanh", "gelu" (by the
        error function) or "relu2" (the square of what is positive)."""

    @abstractmethod
    def activation(self, x: Tensor, activation: str) -> Tensor:
        """activation(x) of [T, F], one of those that `gated_activation` has."""

    @abstractmethod
    def xielu(self, x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
        """xIELU (2411.13010) of [T, F]: with a = softplus(alpha_p) and c = beta + softplus(alpha_n), a x^2 + beta x where x is
        positive, and c (e^min(x, eps) - 1 - x) + beta x elsewhere. The four are float32 [1]; eps is a little below 0."""

    @abstractmethod
    def clamped_glu(self, gate_up: Tensor, alpha: float, limit: float) -> Tensor:
        """gate * sigmoid(alpha * gate) * (up + 1) of [T, 2F] holding (gate, up), both limited to `limit`, up from below too.
        Returns [T, F]."""

    @abstractmethod
    def gate_by_sigmoid(self, x: Tensor, gate: Tensor) -> None:
        """x times sigmoid(gate), in place. x: [T, N]. gate: [T, N], or [T, 1] for a whole row; of x's dtype or float32."""

    @abstractmethod
    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """cap * tanh(x / cap) of [T, N] float32."""

    @abstractmethod
    def clip(self, x: Tensor, limit: float) -> None:
        """Bring every number of x [T, N] into -limit … limit, in place."""

    @abstractmethod
    def multiply(self, x: Tensor, by: Tensor) -> None:
        """x times `by`, in place, in float32. x: [T, N]. by: [T, N] of x's dtype, or one factor, [1] float32; any row strides."""

    @abstractmethod
    def scale_rows(self, x: Tensor, factors: Tensor) -> None:
        """x times the factor of its row, in place. x: [T, N]. factors: [T] float32, contiguous."""

    @abstractmethod
    def scale_columns(self, x: Tensor, first: Tensor, second: Tensor) -> None:
        """x times both factors of its column, in place. x: [T, N]. first, second: [N] float32, contiguous."""


class RepeatsSteps(ABC):
    """What a backend offers to make steps again: recorded calls, or graphs, or neither."""

    @property
    @abstractmethod
    def recording_refusal(self) -> str | None:
        """Why nothing can be recorded here, or None where it can."""

    @abstractmethod
    def recorder(self, capacity: int) -> Recorder:
        """A recorder with so many bytes for what recorded work makes; pages of them that nothing ever used cost nothing.

        Raises ValueError with `recording_refusal`.
        """

    def make_graph_runner(self) -> Graphs | None:
        """What captures steps on a device that runs beside its host, with a memory of its own; None: nothing does."""
        return None


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
