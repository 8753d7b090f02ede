"""Kernels: one public function per operation, on tensors only.

Every operation has a plain torch form in `reference` (the oracle) and may have faster backends that must match it;
`dispatch` picks one per call and can say why the others were refused. Nothing here knows of requests or models.

Layout glossary: T tokens of one step, B sequences, H heads, D head dimension, P block size; a *slot* is
`block * P + offset` in the flattened pages of one KV group.
"""

from windlass.kernels.attention_call import AttentionCall
from windlass.kernels.dispatch import (
    add_rms_norm,
    embed_rows,
    explain,
    gated_activation,
    lays_out_panels,
    linear,
    move_cached_keys,
    pack,
    paged_attention,
    reads_narrow_weights,
    rms_norm,
    rotary_angles,
    rotate_and_append,
    soft_cap,
)
from windlass.kernels.layouts.packed import LAYOUT_VERSION, PackedRows, PackedWeight
from windlass.kernels.layouts.pages import KVPages, plane_shapes
from windlass.kernels.layouts.panels import PanelRows, PanelWeight

__all__ = [
    "LAYOUT_VERSION",
    "AttentionCall",
    "KVPages",
    "PackedRows",
    "PackedWeight",
    "PanelRows",
    "PanelWeight",
    "add_rms_norm",
    "embed_rows",
    "explain",
    "gated_activation",
    "lays_out_panels",
    "linear",
    "move_cached_keys",
    "pack",
    "paged_attention",
    "plane_shapes",
    "reads_narrow_weights",
    "rms_norm",
    "rotary_angles",
    "rotate_and_append",
    "soft_cap",
]
