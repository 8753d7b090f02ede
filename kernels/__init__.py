"""Kernels: the operations of a model on tensors, for the device at hand.

`select_backend` gives a `Backend`, whose every operation has a plain torch form in `torch.reference` (the oracle). Nothing here knows
of requests or models.
"""

from windlass.kernels.attention_call import AttentionCall, KeyRanges, PrefillTotals, blocks_per_split
from windlass.kernels.backend import Activations, Backend, Storage, Weight
from windlass.kernels.binding import device_refusal, has_native_bf16, ranks_refusal, reads_16bit_weights, select_backend
from windlass.kernels.draws import (
    Filters,
    LogitsChanges,
    Penalties,
    SamplingRow,
    SamplingStatus,
    SamplingTensors,
    TokenSampler,
    encode_filters,
)
from windlass.kernels.layouts.blocks import LAYOUT_VERSION, BlockRows, BlockWeight
from windlass.kernels.layouts.experts import ExpertWeights
from windlass.kernels.layouts.forms import FORMS, BlockForm
from windlass.kernels.layouts.low_rank import AdapterSlots, LowRankPart, LowRankTable, LowRankTarget, LowRankUpdate
from windlass.kernels.layouts.pages import KVPages, page_tensor_shapes
from windlass.kernels.layouts.panels import PanelRows, PanelWeight
from windlass.kernels.layouts.pinned import to_device
from windlass.kernels.layouts.ranks import MOST_RANKS, RankEndedError, RankGroup, shared_memory_bytes
from windlass.kernels.layouts.stacked import StackedWeight
from windlass.kernels.memory.copies import Copies, CopyStream
from windlass.kernels.memory.device import DeviceMemory, is_out_of_memory
from windlass.kernels.memory.marks import DeviceEvent
from windlass.kernels.memory.weights import SharedWeights
from windlass.kernels.operations.recurrence import StatePages, StateRows
from windlass.kernels.operations.routing import Routed, Routing
from windlass.kernels.recorder import Graphs, Recorder, Recording
from windlass.kernels.step_rows import BufferFiller, MultiStepInputs, PersistentBuffers

__all__ = [
    "FORMS",
    "LAYOUT_VERSION",
    "MOST_RANKS",
    "Activations",
    "AdapterSlots",
    "AttentionCall",
    "Backend",
    "BlockForm",
    "BlockRows",
    "BlockWeight",
    "BufferFiller",
    "Copies",
    "CopyStream",
    "DeviceEvent",
    "DeviceMemory",
    "ExpertWeights",
    "Filters",
    "Graphs",
    "KVPages",
    "KeyRanges",
    "LogitsChanges",
    "LowRankPart",
    "LowRankTable",
    "LowRankTarget",
    "LowRankUpdate",
    "MultiStepInputs",
    "PanelRows",
    "PanelWeight",
    "Penalties",
    "PersistentBuffers",
    "PrefillTotals",
    "RankEndedError",
    "RankGroup",
    "Recorder",
    "Recording",
    "Routed",
    "Routing",
    "SamplingRow",
    "SamplingStatus",
    "SamplingTensors",
    "SharedWeights",
    "StackedWeight",
    "StatePages",
    "StateRows",
    "Storage",
    "TokenSampler",
    "Weight",
    "blocks_per_split",
    "device_refusal",
    "encode_filters",
    "has_native_bf16",
    "is_out_of_memory",
    "page_tensor_shapes",
    "ranks_refusal",
    "reads_16bit_weights",
    "select_backend",
    "shared_memory_bytes",
    "to_device",
]
