"""Kernels: the operations of a model on tensors, for the device at hand.

`bind` gives a `Backend`, whose every operation has a plain torch form in `torch.reference` (the oracle). Nothing here knows
of requests or models.
"""

from windlass.kernels.attention_call import AttentionCall, KeyRanges, Prompts, blocks_of_cut
from windlass.kernels.backend import Activations, Backend, Storage, Weight
from windlass.kernels.binding import bind, device_refusal, multiplies_narrow_rows, ranks_refusal, reads_narrow_weights
from windlass.kernels.draws import (
    Draw,
    Drawer,
    DrawStatus,
    Filters,
    LogitsChanges,
    Penalties,
    RowDraws,
    filter_numbers,
)
from windlass.kernels.layouts.blocks import LAYOUT_VERSION, BlockRows, BlockWeight
from windlass.kernels.layouts.experts import ExpertWeights
from windlass.kernels.layouts.forms import FORMS, BlockForm
from windlass.kernels.layouts.low_rank import ChangedMatrix, LowRank, LowRankPart, LowRankTable, RowSlots
from windlass.kernels.layouts.pages import KVPages, plane_shapes
from windlass.kernels.layouts.panels import PanelRows, PanelWeight
from windlass.kernels.layouts.pinned import sent
from windlass.kernels.layouts.ranks import MOST_RANKS, RankEndedError, Ranks, memory_bytes
from windlass.kernels.layouts.stacked import StackedWeight
from windlass.kernels.memory.copies import Copies, CopyQueue
from windlass.kernels.memory.device import DeviceMemory, is_out_of_memory
from windlass.kernels.memory.marks import Mark
from windlass.kernels.memory.weights import SharedWeights
from windlass.kernels.operations.recurrence import StatePages, StateRows
from windlass.kernels.operations.routing import Routed, Routing
from windlass.kernels.recorder import Graphs, Recorder, Recording
from windlass.kernels.step_rows import RowsAhead, RowsFiller, StepRows

__all__ = [
    "FORMS",
    "LAYOUT_VERSION",
    "MOST_RANKS",
    "Activations",
    "AttentionCall",
    "Backend",
    "BlockForm",
    "BlockRows",
    "BlockWeight",
    "ChangedMatrix",
    "Copies",
    "CopyQueue",
    "DeviceMemory",
    "Draw",
    "DrawStatus",
    "Drawer",
    "ExpertWeights",
    "Filters",
    "Graphs",
    "KVPages",
    "KeyRanges",
    "LogitsChanges",
    "LowRank",
    "LowRankPart",
    "LowRankTable",
    "Mark",
    "PanelRows",
    "PanelWeight",
    "Penalties",
    "Prompts",
    "RankEndedError",
    "Ranks",
    "Recorder",
    "Recording",
    "Routed",
    "Routing",
    "RowDraws",
    "RowSlots",
    "RowsAhead",
    "RowsFiller",
    "SharedWeights",
    "StackedWeight",
    "StatePages",
    "StateRows",
    "StepRows",
    "Storage",
    "Weight",
    "bind",
    "blocks_of_cut",
    "device_refusal",
    "filter_numbers",
    "is_out_of_memory",
    "memory_bytes",
    "multiplies_narrow_rows",
    "plane_shapes",
    "ranks_refusal",
    "reads_narrow_weights",
    "sent",
]
