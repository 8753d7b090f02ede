"""Measures by name, which every contestant performs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Kind = Literal["decode", "prefill", "depth", "startup"]
MOST_STREAMS = 64  # at once, of any contestant
GROUPS: tuple[Kind, ...] = ("decode", "prefill", "depth", "startup")


@dataclass(frozen=True, slots=True)
class Measure:
    """One figure. Throughputs are tokens per second of all streams together; higher is better.

    decode: `streams` sequences with prompts of `prompt` tokens, `steps` tokens each, timed once all of them decode.
    prefill: one prompt of `prompt` tokens, up to its first token. depth: decode with `prompt` cached tokens.
    startup: no throughput but seconds from the command until requests are taken, and the peak of resident memory.
    """

    name: str
    kind: Kind
    prompt: int = 32
    streams: int = 1
    steps: int = 16

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def measures_of(kind: Kind, depths: tuple[int, ...], pace: int = 1, streams: tuple[int, ...] = (1, 8)) -> list[Measure]:
    """The measures of one group. pace: of the model's shape. streams: how many decode at once."""
    if kind == "decode":
        names = ("decode, 1 stream" if count == 1 else f"decode, {count} streams" for count in streams)
        return [
            Measure(name, "decode", streams=count, steps=(24 if count == 1 else 12) * pace)
            for name, count in zip(names, streams, strict=True)
        ]
    if kind == "prefill":
        return [Measure(f"prefill {n:,}", "prefill", prompt=n, steps=1) for n in (512, 4096)]
    if kind == "depth":
        return [Measure(f"decode at {n:,}", "depth", prompt=n, steps=8 * pace) for n in depths]
    return [Measure("startup", "startup")]
