"""The paged key and value tensors of one layer, as kernels see them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class KVPages:
    """Pages of one layer. Keys are stored rotated at their absolute position, at unit scale.

    key: [num_blocks, P, Hkv, D]; value: [num_blocks, P, Hkv, Dv]; same dtype and device, contiguous.
    """

    key: Tensor
    value: Tensor

    @property
    def block_size(self) -> int:
        return self.key.shape[1]
