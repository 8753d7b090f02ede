"""Kernels: a model's tensor operations on the device at hand.

`select_backend` returns a `Backend`. `torch.reference` is the oracle of every operation. Nothing here knows requests or models.
The engine uses the names that are imported here.
"""

from __future__ import annotations

from windlass.kernels.attention_call import AttentionCall, KeyRanges, PrefillTotals, blocks_per_split
from windlass.kernels.backend import Activations, Backend, Routed, Routing, StatePages, StateRows, Storage, Weight
from windlass.kernels.backend_selector import (
    device_refusal,
    has_native_bf16,
    ranks_refusal,
    reads_16bit_weights,
    select_backend,
)
from windlass.kernels.device_memory import (
    Copies,
    CopyStream,
    DeviceEvent,
    DeviceMemory,
    SharedWeights,
    is_out_of_memory,
    to_device,
)
from windlass.kernels.layouts.kv_pages import KVPages, page_tensor_shapes
from windlass.kernels.layouts.low_rank_weights import (
    AdapterSlots,
    LowRankPart,
    LowRankTable,
    LowRankTarget,
    LowRankUpdate,
)
from windlass.kernels.layouts.weight_layouts import (
    FORMS,
    LAYOUT_VERSION,
    BlockForm,
    BlockRows,
    BlockWeight,
    ExpertWeights,
    PanelRows,
    PanelWeight,
    StackedWeight,
)
from windlass.kernels.rank_group import RankEndedError, RankGroup, shared_memory_bytes
from windlass.kernels.step_recording import (
    BufferFiller,
    Graphs,
    MultiStepInputs,
    PersistentBuffers,
    Recorder,
    Recording,
)
from windlass.kernels.token_sampling import (
    Filters,
    LogitsChanges,
    Penalties,
    SamplingRow,
    SamplingStatus,
    SamplingTensors,
    encode_filters,
)
