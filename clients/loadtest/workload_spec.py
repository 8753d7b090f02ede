"""What a workload is made of: lengths, what prompts share, turns, scalings. Draws nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from windlass.clients.loadtest.errors import LoadTestError
from windlass.clients.loadtest.finite import fits_json
from windlass.clients.loadtest.lengths import Lengths
from windlass.clients.loadtest.scalings import WeightedScaling
from windlass.clients.loadtest.trace import TraceEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadSpec:
    """What to ask.

    input_len, output_len: tokens of a prompt (of one turn's own message in a chat) and of an answer. chat: use the chat
    endpoint. prefix_groups, prefix_len: every prompt begins with one of so many texts of so many tokens.
    documents, document_len, document_offset: every prompt holds `documents_per_prompt` of so many documents, each of a length
    of its own, in an order of its own, after `document_offset` fresh tokens and before `input_len` fresh ones. Documents that
    no longer fit the server are left out, but for the first. turns, think_s: messages of one conversation, and the seconds
    between an answer and the next message. ladder: lengths from 1,024 tokens, doubling, to the server's limit, in turn.
    scalings: rotary scalings that requests draw from. trace: recorded requests instead of drawn lengths.
    disconnect_share, disconnect_after: the share of clients that go away after so many chunks.
    temperature: None to leave it to the server. ignore_eos: ask for answers of exactly `output_len` tokens;
    None where the server is known to take the field.
    extra_body: further fields of every request, which win over ours; null takes a field out.
    """

    input_len: Lengths = field(default_factory=lambda: Lengths.fixed(128))
    output_len: Lengths = field(default_factory=lambda: Lengths.fixed(64))
    chat: bool = False
    prefix_groups: int = 0
    prefix_len: int = 0
    documents: int = 0
    document_len: Lengths = field(default_factory=lambda: Lengths.fixed(0))
    documents_per_prompt: Lengths = field(default_factory=lambda: Lengths.fixed(1))
    document_offset: Lengths = field(default_factory=lambda: Lengths.fixed(0))
    turns: int = 1
    think_s: float = 0.0
    ladder: bool = False
    scalings: Sequence[WeightedScaling] = ()
    trace: Sequence[TraceEntry] = ()
    disconnect_share: float = 0.0
    disconnect_after: int = 1
    temperature: float | None = 0.0
    ignore_eos: bool | None = None
    include_usage: bool = True
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if bool(self.prefix_groups) != bool(self.prefix_len):
            raise LoadTestError("shared prefixes want both a number of groups and a length: give both, or neither")
        if bool(self.documents) != bool(self.document_len.least):
            raise LoadTestError("documents want both a number and a length: give both, or neither")
        if self.documents_per_prompt != Lengths.fixed(1) and self.documents < self.documents_per_prompt.least:
            raise LoadTestError(
                f"prompts of {self.documents_per_prompt} documents want as many to choose from: there are {self.documents}"
            )
        if not 0 <= self.disconnect_share <= 1:
            raise LoadTestError(
                f"the share of clients that go away lies between 0 and 1, got {self.disconnect_share:g}"
            )
        if self.trace and (self.ladder or self.prefix_groups or self.documents or self.turns > 1):
            raise LoadTestError("a trace brings its own lengths: leave prefixes, documents, turns and the ladder out")
        if self.ladder and (self.prefix_groups or self.documents or self.turns > 1):
            raise LoadTestError("the ladder sets the lengths itself: leave prefixes, documents and turns out")
        if not fits_json(self.temperature):
            raise LoadTestError(f"the temperature must be a number, got {self.temperature:g}")
        if not fits_json(self.extra_body):
            raise LoadTestError("the further fields of requests (--extra-body) hold NaN or infinity, which no JSON has")
        least = {"prefix_groups": 0, "prefix_len": 0, "documents": 0, "turns": 1, "think_s": 0}
        least |= {"disconnect_after": 1}
        for name, bound in least.items():
            if not (getattr(self, name) >= bound and math.isfinite(getattr(self, name))):
                raise LoadTestError(f"{name.replace('_', ' ')} must be at least {bound}, got {getattr(self, name):g}")
