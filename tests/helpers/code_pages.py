"""int8 pages with given contents."""

from __future__ import annotations

import torch
from torch import Tensor

from windlass.kernels import KVPages, page_tensor_shapes
from windlass.kernels.layouts import kv_pages


def pages_of_codes(keys: Tensor, key_scale: Tensor, values: Tensor, value_scale: Tensor) -> KVPages:
    """keys: int8 [num_blocks, P, Hkv, D]. values: int8 [num_blocks, P, Hkv, Dv]. Their scales: float32 [num_blocks, P, Hkv]."""
    shapes = page_tensor_shapes(*keys.shape, values.shape[3], torch.int8)
    pages = KVPages(*(torch.zeros(shape, dtype=dtype) for shape, dtype in shapes))
    assert pages.key_scale is not None and pages.value_scale is not None
    slots = torch.arange(pages.num_slots)
    kv_pages.put_keys(pages.key, slots, keys.flatten(0, 1))
    kv_pages.put_values(pages.value, slots, values.flatten(0, 1))
    kv_pages.put_scales(pages.key_scale, slots, key_scale.flatten(0, 1))
    kv_pages.put_scales(pages.value_scale, slots, value_scale.flatten(0, 1))
    return pages
