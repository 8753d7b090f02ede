"""Backend contract: every operation that the engine needs of a device.

States shapes, dtypes, what may be overwritten, and what is returned. A backend is made when a model is loaded, for a device, a
compute dtype, a weight storage and, if requested, determinism.

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
    """How experts of a token are chosen from router logits, and their weights.

    Scores are the `softmax` over all experts or the `sigmoid` of each. A bias per expert, if given, is added for the choice
    only (2408.15664). With groups, experts are chosen from the best top_groups of them: a group's score is its largest score
    (DeepSeek V2, 2405.04434) or the sum of its two largest (DeepSeek V3, 2412.19437). Of equal scores the first wins. A
    weight is the expert's score, if `normalized` divided by the sum of the chosen scores plus sum_eps (at least least_sum),
    times scale.

    `sparsemixer` (2409.12136, for top_k 2) chooses one expert after the other. The weight of each is its softmax among the
    remaining experts whose logits are within 2 * jitter of it, relative to their size.
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
    """The experts of each token, best first."""

    chosen: Tensor  # [T, top_k] int64
    weights: Tensor  # [T, top_k] float32


class StateRows(NamedTuple):
    """The recurrent states that the tokens of a step update: tokens starts[s] .. starts[s + 1] - 1 update sequence s, in order.

    A sequence whose total length equals its tokens of this step begins with a state of zeros, whatever its block holds.
    snapshots: the block that receives a copy of the state after each token, -1 for none, so that unverified tokens can be
    undone; None: no copies. On devices that capture steps, a block of -1 marks padding, whose output rows are zeros.
    """

    blocks: Tensor  # [S] int64, distinct except for -1
    starts: Tensor  # [S + 1] int64
    lengths: Tensor  # [S] int64, total tokens after this step
    snapshots: Tensor | None = None  # [T] int64, distinct except for -1, and none of `blocks`


@dataclass(frozen=True, slots=True)
class StatePages:
    """The states of one layer."""

    window: Tensor  # [N, W - 1, C] float32, the last inputs of a convolution of width W, the oldest first
    memory: Tensor  # [N, Hv, Dk, Dv] float32


Activations: TypeAlias = Literal["int8", "float32"]

Storage: TypeAlias = torch.dtype | BlockForm  # how a matrix is stored

Weight: TypeAlias = Tensor | PanelWeight | BlockWeight | StackedWeight


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """Options of a backend.

    dtype: activations. weight_dtype: matrices other than block weights; not biases. activations: how rows are multiplied by
    block weights: rounded to int8 with a scale per group, or as float32 with dequantized blocks (slow, nothing is rounded).
    bf16_prefill: whether prefill attention over 16-bit pages may round operands to bfloat16. shared: memory for weights that
    other processes use too. ranks: the processes that hold the other parts of the model; None: there are no others.
    """

    device: torch.device
    dtype: torch.dtype = torch.float32
    weight_dtype: torch.dtype = torch.float32
    deterministic: bool = False
    activations: Activations = "int8"
    bf16_prefill: bool = False
    shared: SharedWeights | None = field(default=None, compare=False)
    ranks: RankGroup | None = field(default=None, compare=False)


class Backend(ABC):
    """See the module. Weights that it allocates are uninitialised; they live as long as there is a reference to them."""

    def __init__(self, options: BackendOptions) -> None:
        self.options = options
        self.device, self.dtype, self.weight_dtype = options.device, options.dtype, options.weight_dtype
        self.deterministic, self.device_memory = options.deterministic, device_memory_of(options.device)
        self._memory = WeightMemory(options.device, options.shared)
        # Memory that some operation may take in a step smaller than the largest.
        self.workspace_bytes = 0
        # Sequences with at least this many new tokens use one attention arithmetic, shorter ones another; 0: all use the same.
        self.uniform_prefill_min_tokens = 0

    @abstractmethod
    def explain(self) -> str:
        """One line: the kernels in use, and why faster ones are not."""

    @property
    def is_fallback(self) -> bool:
        """Whether faster kernels exist for this kind of device but cannot be used: `explain` gives the reason."""
        return False

    # -- memory --

    @property
    def reads_host_memory(self) -> bool:
        """Whether operands may be in memory that Python writes to through numpy, so that a step's inputs are filled in
        place."""
        return self.device.type == "cpu"

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory for a weight of any other kind than those below. Raises what torch raises when there is none."""
        return self._memory.empty(shape, dtype)

    def matrix(self, rows: int, columns: int, storage: Storage) -> Part:
        """A weight for products only."""
        if isinstance(storage, BlockForm):
            return BlockWeight.empty(rows, columns, storage, self.empty)
        return self._plain_matrix(rows, columns, storage)

    def table(self, rows: int, columns: int, storage: Storage) -> Tensor | BlockWeight:
        """A weight for row lookups only."""
        if isinstance(storage, BlockForm):
            return BlockWeight.empty(rows, columns, storage, self.empty)
        return self.empty((rows, columns), storage)

    def tied_embedding(self, rows: int, columns: int, storage: Storage) -> Tensor | BlockWeight:
        """A weight for row lookups and products."""
        return self.table(rows, columns, storage)

    def stack(self, parts: Sequence[Part]) -> StackedWeight:
        """Weights of `matrix` as one, with the rows of each after those before. Raises ValueError if they do not fit."""
        return StackedWeight(tuple(parts))

    def pages(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory for cached keys and values. It is reserved, not touched: on a CPU, unused pages cost nothing."""
        made = torch.empty(shape, dtype=dtype, device=self.device)
        advise_huge_pages(made)
        return made

    def make_copies(self) -> Copies | None:
        """Copies between pages and host memory; None if the pages are in host memory."""
        return copies_of(self.device)

    def _plain_matrix(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor | PanelWeight:
        return self.empty((rows, columns), dtype)

    @abstractmethod
    def pack(self, target: PanelRows | BlockRows, source: Tensor) -> None:
        """Store source [rows, columns], float32 or narrower on the CPU, in rows of a weight of `matrix`.

        Quantizing gives the same bytes on every backend. Raises ValueError for a block form without a quantizer.
        """

    @abstractmethod
    def repack(self, target: BlockRows, source: Tensor) -> None:
        """Store source, uint8 [rows, bytes of a row] in GGUF blocks of the target's form, in rows of a weight.

        Nothing is rounded: `dequantize` then gives the values that GGUF defines for the blocks.
        """

    # -- products and norms --

    @abstractmethod
    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """x @ weight.T + bias. x: [T, K], weight: [N, K] in x's dtype or a narrower one, bias: [N]. Returns [T, N] in x's
        dtype.

        Sums are float32 on a CPU whatever the storage. For a block weight, x is rounded to 8 bits with a scale for each group.
        The sums of a group are integers and the rest has a fixed order, so a row's bits depend on that row alone, deterministic
        or not. With float32 activations nothing is rounded; the blocks are dequantized.
        """

    def logits(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """`linear` with a float32 result."""
        return self.linear(x, weight, bias).float()

    def low_rank_table(self, slots: int, matrix: LowRankTarget) -> LowRankTable:
        """A table for low-rank updates of a matrix, with all slots empty."""
        return LowRankTable(slots)

    @abstractmethod
    def add_low_rank(self, out: Tensor, x: Tensor, table: LowRankTable, rows: AdapterSlots) -> None:
        """Add to each row of `out` [T, N], in place, the row's low-rank update of its row of x [T, K].

        out and x are of the compute dtype, updates of that or a narrower one; the table is from `low_rank_table`. Rows
        without an update stay unchanged. Raises IndexError for a slot out of range; a device that the host would have to wait
        for makes the row NaN instead.
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
        """`rms_norm` of x [T, D], any row stride, in place."""

    @abstractmethod
    def add(self, residual: Tensor, x: Tensor) -> None:
        """Add x to `residual` in place, rounded to its dtype. Both [T, D], of one dtype."""

    @abstractmethod
    def scaled(self, x: Tensor, factor: float) -> Tensor:
        """x times factor, [T, N] float32."""

    def gated_linear(self, x: Tensor, weight: Weight, bias: Tensor | None, activation: str) -> Tensor:
        """`gated_activation` of linear(x, weight, bias), whose result may stay unrounded in between. Returns [T, N / 2]."""
        return self.gated_activation(self.linear(x, weight, bias), activation)

    # -- elementwise operations --

    @abstractmethod
    def gated_activation(self, gate_up: Tensor, activation: str) -> Tensor:
        """activation(gate) * up of [T, 2F] holding (gate, up). Returns [T, F]. activation: "silu", "gelu_tanh", "gelu" (by the
        error function) or "relu2" (the square of the positive part)."""

    @abstractmethod
    def activation(self, x: Tensor, activation: str) -> Tensor:
        """activation(x) of [T, F], with the activations of `gated_activation`."""

    @abstractmethod
    def xielu(self, x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: Tensor, eps: Tensor) -> Tensor:
        """xIELU (2411.13010) of [T, F]: with a = softplus(alpha_p) and c = beta + softplus(alpha_n), a x^2 + beta x where x is
        positive, and c (e^min(x, eps) - 1 - x) + beta x elsewhere. The four are float32 [1]; eps is a little below 0."""

    @abstractmethod
    def clamped_glu(self, gate_up: Tensor, alpha: float, limit: float) -> Tensor:
        """gate * sigmoid(alpha * gate) * (up + 1) of [T, 2F] holding (gate, up). gate is at most `limit`; up is clamped to
        -limit .. limit. Returns [T, F]."""

    @abstractmethod
    def gate_by_sigmoid(self, x: Tensor, gate: Tensor) -> None:
        """x times sigmoid(gate), in place. x: [T, N]. gate: [T, N], or [T, 1] for entire rows; of x's dtype or float32."""

    @abstractmethod
    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """cap * tanh(x / cap) of [T, N] float32."""

    @abstractmethod
    def clip(self, x: Tensor, limit: float) -> None:
        """Clamp x [T, N] to -limit .. limit, in place."""

    @abstractmethod
    def multiply(self, x: Tensor, by: Tensor) -> None:
        """x times `by`, in place, in float32. x: [T, N]. by: [T, N] of x's dtype, or one factor, [1] float32; any row
        strides."""

    @abstractmethod
    def scale_rows(self, x: Tensor, factors: Tensor) -> None:
        """Each row of x [T, N] times its factor, in place. factors: [T] float32, contiguous."""

    @abstractmethod
    def scale_columns(self, x: Tensor, first: Tensor, second: Tensor) -> None:
        """Each column of x [T, N] times both of its factors, in place. first, second: [N] float32, contiguous."""

    @abstractmethod
    def log1p(self, counts: Tensor) -> Tensor:
        """ln(1 + n) of int64 counts [T], float32."""

    # -- collectives --

    @abstractmethod
    def all_reduce(self, x: Tensor) -> None:
        """Replace x [T, N], contiguous, by its sum over all ranks, in float32, rounded once; if deterministic, in rank order.

        All ranks make the same collective calls in the same order, with tensors of one shape. No-op for a single rank. Raises
        RankEndedError.
        """

    @abstractmethod
    def gather_columns(self, part: Tensor) -> Tensor:
        """The columns [R, own] of all ranks as float32 [R, V] on the first rank; the other ranks get `part` back. Raises
        RankEndedError."""

    # -- experts --

    def experts(self, weights: Sequence[Weight], biases: Sequence[Tensor] | None = None) -> ExpertWeights:
        """Weights of this backend, [N, K] of each expert, as one; biases: [N] of each. Raises ValueError."""
        return ExpertWeights(weights, biases)

    @abstractmethod
    def route(
        self, logits: Tensor, routing: Routing, bias: Tensor | None = None, scales: Tensor | None = None
    ) -> Routed:
        """The experts of each token; see `Routing`. logits: [T, E] float32. bias: [E] float32, added for the choice.
        scales: [E] float32, multiplied into an expert's weights at the end."""

    @abstractmethod
    def linear_of_experts(self, x: Tensor, experts: ExpertWeights, chosen: Tensor) -> Tensor:
        """`linear` of each token with each of its experts, [T * k, N] in x's dtype. chosen: int64 [T, k] experts in range.
        x: [T, K], each row for all k experts, or [T * k, K], row t * k + j for expert chosen[t, j]. Only weights of chosen
        experts are read."""

    @abstractmethod
    def sum_of_experts(self, x: Tensor, weights: Tensor) -> Tensor:
        """The sum over j of x[t * k + j] * weights[t, j], [T, N] in x's dtype; summed in float32 and in this order.
        x: [T * k, N]. weights: float32 [T, k]."""

    def feed_forward_of_experts(
        self, x: Tensor, gate_up: ExpertWeights, down: ExpertWeights, routed: Routed, activation: str
    ) -> Tensor:
        """The weighted sum of each token's experts: two products with `gated_activation` in between. x: [T, K]. Returns [T,
        N] in x's dtype. The input of the activation may stay unrounded."""
        y = self.gated_activation(self.linear_of_experts(x, gate_up, routed.chosen), activation)
        return self.sum_of_experts(self.linear_of_experts(y, down, routed.chosen), routed.weights)

    # -- embedding, rotation and attention --

    @abstractmethod
    def embed(self, table: Tensor | BlockWeight, ids: Tensor, scale: float = 1.0) -> Tensor:
        """table[ids] in the compute dtype times the scale rounded to it. table: [N, D], ids: [T] int64. Returns new memory
        [T, D]."""

    @abstractmethod
    def rotary_angles(self, inv_freq: Tensor, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of inv_freq[:, rows] * positions, formed and reduced in float64.

        inv_freq: [G, R, d/2] float64. rows, positions: [T] int64, positions exact to 2^53. Returns two float32 [G, T, d/2],
        correct to rounding at any position; an element's bits depend on its frequency and position only.
        """

    @abstractmethod
    def buffer_filler(
        self, rows: PersistentBuffers, inv_freq: Tensor, q_scale: Tensor, score_scale: Tensor, block_size: int
    ) -> BufferFiller:
        """A function that fills these buffers at each step, if `reads_host_memory`.

        inv_freq: [G, R, d/2] float64, q_scale: [G, R], score_scale: [R] float32. Their contents may change, their memory must
        not.
        """

    @abstractmethod
    def rotate_and_append(
        self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, q_scale: Tensor, pages: KVPages, slots: Tensor
    ) -> None:
        """Rotate q in place, and write rotated k and unchanged v to the pages; half-split pairs, float32 arithmetic.

        q: [T, Hq, Dq], scaled by q_scale on its rotary dims. k: [T, Hkv, D], v: [T, Hkv, Dv], not modified; the three have one
        dtype. cos, sin: [T, d/2] float32, d <= D and Dq. q_scale: [T] float32. slots: [T] int64, distinct; negative ones
        write nothing. int8 pages store `reference.quantize` of the result. k and v without heads write nothing.
        """

    @abstractmethod
    def rerotate_cached_keys(
        self, pages: KVPages, sources: Tensor, targets: Tensor, cos: Tensor, sin: Tensor, *, values: bool = True
    ) -> None:
        """Rotate cached keys by one further angle each, from source to target slots, and copy their values if `values`.

        sources, targets: [N] int64 slots; an entry may name one slot twice, to rotate in place, but no slot may be the
        source of one entry and the target of another. cos, sin: [N, d/2] float32 of the angle at the target minus that at
        the source. A key is rounded to the cache's dtype once; values, and keys without rotary dims, are copied bit by bit.
        Raises IndexError for a slot outside the pages (nothing is written then).
        """

    @abstractmethod
    def rotate_queries(self, q: Tensor, rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """q followed by copies of some of its rows, each rotated by one further angle; see `AttentionCall`.

        q: [T, Hq, D] rotated, any row and head strides. rows: [M] int64, M > 0. cos, sin: [M, d/2] float32, d <= D; of width 0
        for plain copies. Returns [T + M, Hq, D] in q's dtype, contiguous: row T + m is q[rows[m]], the half-split pairs of its
        first d dims rotated in float32 by the m-th angle. Raises ValueError, and IndexError for a row that q lacks.
        """

    @abstractmethod
    def paged_attention(self, q: Tensor, pages: KVPages, call: AttentionCall) -> Tensor:
        """Attention of each sequence's new tokens over its cached keys, in float32.

        q: [T, Hq, D] rotated, or [N, Hq, D] with ranges. Returns [T, Hq, Dv] in q's dtype. Only visible keys and values are
        read. Raises ValueError if q and the call disagree, and IndexError for a block or a row of q out of range. A device
        that the host would have to wait for gives NaN instead of an IndexError, here and in `rotate_queries`.
        """

    # -- latent attention (2405.04434): H heads with R rotated, N plain, V value and C latent dims --

    def latent_expansion(self, pages: KVPages) -> LatentExpansion | None:
        """The costs of expanding latent vectors of these pages to keys and values; None if that is never done."""
        return None

    @abstractmethod
    def latent_queries(self, q: Tensor, up: Tensor, rotary_dim: int) -> Tensor:
        """Queries for latent vectors: the plain dims of each head times its key matrix.

        q: [T, H, R + N]. up: [H, N + V, C] in q's dtype or a narrower one, per head the key matrix, then the value matrix of a
        latent vector. Returns [T, H, R + C] in q's dtype, contiguous: the first R dims unchanged, then q[:, h, R:] @ up[h, :N].
        """

    @abstractmethod
    def latent_values(self, attended: Tensor, up: Tensor, value_dim: int) -> Tensor:
        """Values of heads from attended latent vectors: up[h, N:] @ attended[:, h]. up: as in `latent_queries`.
        attended: [T, H, C], any row and head strides. value_dim: V. Returns [T, H * V] in attended's dtype."""

    # -- recurrent layers: a row's bits depend on its own sequence alone, not on how that was cut into steps --

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
        """Causal convolution of each channel with its own weights, and an optional activation.

        x: [T, C], any row stride. weight: [C, W] float32, the last of a row for the token itself. window: as in `StatePages`,
        updated in place. bias: [C] float32, the start of sums. Returns [T, C] in x's dtype, contiguous; sums are float32.
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
        """Queries over a memory that each token first decays and then corrects (2412.06464), in float32.

        With q and k of length 1 (1e-6 added to the sum of squares), q times Dk^-1/2, and for each of the Hv heads
        g = exp(-rate softplus(decay + bias)) and b = sigmoid(strength): M = g M; M = M + k (b (v - M^T k))^T; out = M^T q.

        qkv: [T, 2 Hk Dk + Hv Dv], per token the queries, keys and values, any row stride; head h of the Hv uses query and
        key h // (Hv / Hk), or h mod Hk if `tiled_heads`. decay, strength: [T, Hv] in qkv's dtype, any row stride. rate,
        bias: [Hv] float32. memory: as in `StatePages`, updated in place. Returns [T, Hv Dv] in qkv's dtype, contiguous.
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
        """Queries over a memory that each token decays and adds to (Mamba 2, 2405.21060), in float32.

        For each of the Hv heads d = softplus(step + bias), clamped to limits; M = exp(-rate d) M; M = M + k (d v)^T;
        out = M^T q + skip v.

        mixed: [T, Hv Dv + 2 Hk Dk], per token the values, keys (B) and queries (C), any row stride; head h of the Hv uses
        key and query h // (Hv / Hk). step: [T, Hv] in mixed's dtype, any row stride. rate, bias, skip: [Hv] float32. memory: as
        in `StatePages` (here Dk is Mamba's d_state, Dv its head dim), updated in place. Returns [T, Hv Dv] in mixed's dtype,
        contiguous.
        """

    # -- sampling --

    @abstractmethod
    def row_maxima(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The first index of each row's largest value, int64 [R], and that value, float32 [R]; a NaN counts as the largest.
        logits: [R, V] float32."""

    @abstractmethod
    def token_sampler(self, vocab_size: int) -> TokenSampler:
        """A sampler for rows of `vocab_size` logits."""

    @abstractmethod
    def token_logprobs(self, logits: Tensor, rows: Tensor, targets: Tensor, k: int) -> TopLogprobs:
        """Log-probabilities of one token per entry and of the k most likely tokens of its row. logits: [R, V] float32. rows,
        targets: [N] int64, on the host. k: 0 .. V."""

    # -- repeated steps: recorded calls, or graphs, or neither --

    @property
    @abstractmethod
    def recording_refusal(self) -> str | None:
        """Why steps cannot be recorded, or None."""

    @abstractmethod
    def recorder(self, capacity: int) -> Recorder:
        """A recorder with `capacity` bytes for tensors of recorded work; unused pages cost nothing.

        Raises ValueError with `recording_refusal`.
        """

    def make_graph_runner(self) -> Graphs | None:
        """A graph runner with its own memory, for a device that runs asynchronously to its host; None otherwise."""
        return None
