"""What is measured, by name: the parts of a run that every contestant is asked for."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Kind = Literal["decode", "prefill", "depth", "startup"]
GROUPS: tuple[Kind, ...] = ("decode", "prefill", "depth", "startup")


@dataclass(frozen=True, slots=True)
class Measure:
    """One figure. Throughputs are tokens per second of all streams together; higher is better.

    decode: `streams` sequences with prompts of `prompt` tokens, `steps` tokens each, timed once all of them decode.
    prefill: one prompt of `prompt` tokens, up to its first token. depth: decode beside `prompt` cached tokens.
    startup: no throughput but seconds from the command until requests are taken, and the peak of resident memory.
    """

    name: str
    kind: Kind
    prompt: int = 32
    streams: int = 1
    steps: int = 16

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def measures_of(kind: Kind, depths: tuple[int, ...], pace: int = 1) -> list[Measure]:
    """The measures of one group. pace: of the model's shape."""
    if kind == "decode":
        return [
            Measure("decode, 1 stream", "decode", streams=1, steps=24 * pace),
            Measure("decode, 8 streams", "decode", streams=8, steps=12 * pace),
        ]
    if kind == "prefill":
        return [Measure(f"prefill {n:,}", "prefill", prompt=n, steps=1) for n in (512, 4096)]
    if kind == "depth":
        return [Measure(f"decode at {n:,}", "depth", prompt=n, steps=8 * pace) for n in depths]
    return [Measure("startup", "startup")]
