"""The paged key and value tensors of one layer, as kernels see them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from windlass.kernels.layouts import int8 as int8_layout
from windlass.kernels.layouts import int8_rows


@dataclass(frozen=True, slots=True)
class KVPages:
    """Pages of one layer. Keys are stored rotated at their absolute position, at unit scale.

    Floats: key [num_blocks, P, Hkv, D], value [num_blocks, P, Hkv, Dv]; same dtype and device, contiguous. int8 pages
    hold codes in -127 .. 127 in the order of `int8_layout`; key_scale and value_scale, [num_blocks, Hkv, P] float32, say
    what one step of a code is worth. int8 pages without values (Dv is 0: latent attention) hold rows as `int8_rows` has them,
    with key_scale [num_blocks, P, Hkv, groups]. Token t of block b is slot b * P + t either way.
    """

    key: Tensor
    value: Tensor
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None

    @classmethod
    def of_codes(cls, keys: Tensor, key_scale: Tensor, values: Tensor, value_scale: Tensor) -> KVPages:
        """int8 pages that hold these rows: keys [num_blocks, P, Hkv, D], values [num_blocks, P, Hkv, Dv], int8, and
        their scales [num_blocks, P, Hkv] float32. Raises ValueError for a P that is no multiple of 16."""
        return cls(
            int8_layout.pack_keys(keys),
            int8_layout.pack_values(values),
            key_scale.transpose(1, 2).contiguous(),
            value_scale.transpose(1, 2).contiguous(),
        )

    @property
    def in_panels(self) -> bool:
        """Whether these are codes in the order of `int8_layout`."""
        return self.key.dim() == 6

    @property
    def has_rows_of_codes(self) -> bool:
        """Whether these are codes as `int8_rows` has them."""
        return self.key_scale is not None and not self.in_panels

    @property
    def block_size(self) -> int:
        return self.key_scale.shape[2] if self.key_scale is not None and self.in_panels else self.key.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.key.shape[1] if self.in_panels else self.key.shape[2]

    @property
    def num_slots(self) -> int:
        return self.key.shape[0] * self.block_size

    @property
    def with_keys_as_values(self) -> KVPages:
        """Pages that hold no values (Dv is 0), as attention reads them whose values are the keys themselves."""
        return KVPages(self.key, self.key, self.key_scale, self.key_scale)

    @property
    def value_dim(self) -> int:
        return self.value.shape[3]

    @property
    def scales(self) -> dict[str, Tensor | None]:
        """The scales, by the names under which the compiled kernels take them."""
        return {"key_scales": self.key_scale, "value_scales": self.value_scale}

    def keys_of(self, blocks: Tensor, dim: int) -> Tensor:
        """Keys of some blocks, float32 [N, P, Hkv, dim]. blocks: [N], not negative. dim: D, which codes do not tell."""
        pages = self.key.index_select(0, blocks)
        if self.key_scale is None:
            return pages.to(torch.float32)
        if not self.in_panels:
            return int8_rows.widened(pages, self.key_scale.index_select(0, blocks))
        return _widened(int8_layout.key_rows(pages)[..., :dim], self.key_scale, blocks)

    def values_of(self, blocks: Tensor) -> Tensor:
        """Values of some blocks, float32 [N, P, Hkv, Dv]. blocks: [N], not negative."""
        pages = self.value.index_select(0, blocks)
        if self.value_scale is None:
            return pages.to(torch.float32)
        if not self.in_panels:
            return int8_rows.widened(pages, self.value_scale.index_select(0, blocks))
        return _widened(int8_layout.value_rows(pages), self.value_scale, blocks)


def page_tensor_shapes(
    num_blocks: int, block_size: int, kv_heads: int, dim: int, value_dim: int, dtype: torch.dtype
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and types of the tensors of `KVPages`, in their order. value_dim 0: of pages that hold no values.

    Raises ValueError for int8 pages with values whose block size is no multiple of 16.
    """
    size = num_blocks, block_size, kv_heads
    rows: list[tuple[tuple[int, ...], torch.dtype]] = [((*size, dim), dtype), ((*size, value_dim), dtype)]
    if dtype != torch.int8:
        return rows
    if not value_dim:
        return [*rows, *(((*size, int8_rows.num_groups(d)), torch.float32) for d in (dim, 0))]
    scales = (num_blocks, kv_heads, block_size), torch.float32
    return [
        (int8_layout.key_shape(*size, dim), dtype),
        (int8_layout.value_shape(*size, value_dim), dtype),
        scales,
        scales,
    ]


def _widened(rows: Tensor, scale: Tensor, blocks: Tensor) -> Tensor:
    return rows.to(torch.float32) * scale.index_select(0, blocks).transpose(1, 2)[..., None]
