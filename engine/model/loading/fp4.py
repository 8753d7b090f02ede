"""Numbers of MXFP4 as codes of `q5_0`: which holds them as they are.

MXFP4 (OCP Microscaling Formats 1.0) has 4-bit floats ±0, ½, 1, 1½, 2, 3, 4 and 6 in blocks of 32, each block with an exponent
e, which multiplies its numbers by 2^(e - 127). Twice the floats are whole numbers up to 12, which codes of 5 bits hold, and half
of 2^(e - 127) is a float16 number down to e = 104. Blocks below that, whose largest number is under 2^-20, are rounded to
multiples of 2^-24.

Responsible for these numbers alone; in which order files hold them is known where they are read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from windlass.engine.errors import LoadError

BLOCK = 32
_OFFSET = 16  # the code of zero in that form
_TWICE = (0, 1, 2, 3, 4, 6, 8, 12)  # the floats times two, by their lower three bits; the fourth is the sign
_CODES = torch.tensor([_OFFSET + n for n in _TWICE] + [_OFFSET - n for n in _TWICE], dtype=torch.uint8)
_LEAST, _MOST = 104, 143  # exponents whose half is a float16 number
_BIAS = 128  # 127, and one for the half


def codes_of_fp4(floats: Tensor) -> Tensor:
    """The codes of 4-bit floats, 0 to 15 each. uint8, any shape."""
    return torch.index_select(_CODES, 0, floats.flatten().int()).view(floats.shape)


def scales_of_fp4(codes: Tensor, exponents: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Codes and scales as `q5_0` has them: uint8 [..., groups, 32] and float16 [..., groups].

    codes: those of the floats [..., groups, 32]. exponents: uint8 [..., groups]. name: of the tensor, for the error.
    Raises LoadError for exponents that no weights have: numbers beyond a million, or NaN.
    """
    zeros = (codes == _OFFSET).all(dim=-1)
    if bool((exponents > _MOST).logical_and(~zeros | (exponents == 255)).any()):
        raise LoadError(
            f"tensor {name!r} holds numbers that are NaN or far beyond those of weights: the checkpoint is damaged: download "
            "or copy it again, or take another"
        )
    powers = exponents.int()
    if bool((powers < _LEAST).any()):
        shrunk = torch.ldexp(codes.float() - _OFFSET, (powers - _LEAST).clamp(max=0)[..., None])
        codes = (shrunk.round() + _OFFSET).to(torch.uint8)
    exact = powers.clamp(_LEAST, _MOST) - _BIAS
    scales = torch.ldexp(torch.ones(exact.shape), exact)
    return codes, scales.to(torch.float16)
