"""The forms in which blocks of a weight are stored: how many bits a code has, and how codes become numbers.

They are those of GGUF, under its names; weights that are quantized at load take the same ones. A form says nothing of where
the bytes lie: that is `blocks`. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockForm:
    """Codes of `bits` bits; each `group` of neighbouring elements of a row has a scale, and a minimum where the form has one.

    super_groups 0: scales and minima are float16, and a number is scale * (code - offset), or scale * code + minimum.
    Else they are bytes, which a float16 scale and minimum common to so many groups multiply:
    (super_scale * scale) * (code - offset), or (super_scale * scale) * code - super_minimum * minimum. Scales are signed
    bytes in a form without minima. Every product and sum is rounded to float32. Codes of 8 bits are signed.
    """

    name: str
    bits: int
    group: int
    super_groups: int = 0
    minimum: bool = False
    offset: int = 0

    @property
    def parts(self) -> int:
        """What a group has: a scale, or a scale and a minimum."""
        return 2 if self.minimum else 1

    @property
    def group_bytes(self) -> int:
        """Of the codes of one group of one row."""
        return self.group * self.bits // 8


FORMS = {
    form.name: form
    for form in (
        BlockForm("q4_0", bits=4, group=32, offset=8),
        BlockForm("q4_1", bits=4, group=32, minimum=True),
        BlockForm("q5_0", bits=5, group=32, offset=16),
        BlockForm("q5_1", bits=5, group=32, minimum=True),
        BlockForm("q8_0", bits=8, group=32),
        BlockForm("q4_k", bits=4, group=32, super_groups=8, minimum=True),
        BlockForm("q5_k", bits=5, group=32, super_groups=8, minimum=True),
        BlockForm("q6_k", bits=6, group=16, super_groups=16, offset=32),
    )
}
