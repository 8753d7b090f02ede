"""The paged key and value tensors of one layer, as kernels see them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SCALE_BYTES = 4  # of the float32 scale beside every int8 head


@dataclass(frozen=True, slots=True)
class KVPages:
    """Pages of one layer. Keys are stored rotated at their absolute position, at unit scale.

    key: [num_blocks, P, Hkv, D]; value: [num_blocks, P, Hkv, Dv]; same dtype and device, contiguous. int8 pages hold
    codes in -127 .. 127; key_scale and value_scale, [num_blocks, P, Hkv] float32, say what one step of a code is worth.
    """

    key: Tensor
    value: Tensor
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None

    @property
    def block_size(self) -> int:
        return self.key.shape[1]

    @property
    def scales(self) -> dict[str, Tensor | None]:
        """The scales, by the names under which the compiled kernels take them."""
        return {"key_scales": self.key_scale, "value_scales": self.value_scale}

    def keys_of(self, blocks: Tensor) -> Tensor:
        """Keys of some blocks, float32 [N, P, Hkv, D]. blocks: [N], not negative."""
        return _widened(self.key, self.key_scale, blocks)

    def values_of(self, blocks: Tensor) -> Tensor:
        """Values of some blocks, float32 [N, P, Hkv, Dv]. blocks: [N], not negative."""
        return _widened(self.value, self.value_scale, blocks)


def _widened(pages: Tensor, scale: Tensor | None, blocks: Tensor) -> Tensor:
    wide = pages.index_select(0, blocks).to(torch.float32)
    return wide if scale is None else wide * scale.index_select(0, blocks)[..., None]
