"""Bodies and answers of `/v1/cache` and `/v1/attention`."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from windlass.engine.interface.introspection import MAX_ATTENTION_TOKENS
from windlass.server.protocol.base import RopeScalingField, StrictModel


class CacheGroup(StrictModel):
    """The pages of one KV group. Entry i of the lists is a cell: `blocks_per_cell` blocks, the first of them i times as many.

    What `held`, `shared` and `idle` leave of a cell is free, and so is everything behind the first `num_shown` blocks.
    """

    num_blocks: int
    num_shown: int
    blocks_per_cell: int
    window: Annotated[int | None, Field(description="Tokens that its layers see; null: all.")]
    held: Annotated[list[int], Field(description="Blocks of the cell that one request holds.")]
    shared: Annotated[list[int], Field(description="Blocks of the cell that several requests hold.")]
    idle: Annotated[list[int], Field(description="Blocks that nobody holds and an equal prompt may take up again.")]
    owners: Annotated[list[int], Field(description="Index into `sequences` of one that holds a block of it, or -1.")]
    engine: Annotated[int, Field(description="The number of the replica whose cache it is part of.")] = 0
    states: Annotated[
        bool, Field(description="Whether a block is what layers carry of a sequence from token to token, and no pages.")
    ] = False


class CacheSequence(StrictModel):
    """A running sequence: its tokens, those of its prompt, those found in the cache, and what moved in it."""

    num_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_blocks: int
    num_shifts: int
    num_reused_tokens: int


class CachePages(StrictModel):
    """The cache as it is now. `counters`: numbers that `/metrics` has too, by names of their own."""

    time: Annotated[float, Field(description="Seconds on a clock that only goes forward, for rates of the counters.")]
    block_size: int
    bytes_per_token: int
    groups: list[CacheGroup]
    sequences: Annotated[list[CacheSequence], Field(description="Those that run, at most 64 of an engine.")]
    counters: dict[str, float]


class AttentionRequest(StrictModel):
    """Either `prompt` or `tokens`: a text of 2 to 256 tokens. `rope_scaling` as a request would give it."""

    model: str | None = None
    prompt: Annotated[str, Field(max_length=16384)] | None = None
    tokens: (
        Annotated[
            list[Any],
            Field(max_length=MAX_ATTENTION_TOKENS, json_schema_extra={"items": {"type": "integer", "minimum": 0}}),
        ]
        | None
    ) = None
    layer: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    head: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    rope_scaling: RopeScalingField = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.prompt is None) == (self.tokens is None):
            raise PydanticCustomError("source", "give either prompt or tokens")
        return self


class AttentionMap(StrictModel):
    """What one head attends to. Row i of `weights` and `scores` has the tokens 0 to i; null: a token it cannot see."""

    model: str
    layer: int
    head: int
    num_layers: int
    num_heads: int
    tokens: list[int]
    fingerprint: Annotated[str, Field(description="Of the rotation that the text was read under.")]
    weights: Annotated[list[list[float]], Field(description="After the softmax.")]
    scores: Annotated[
        list[list[float | None]], Field(description="Before the softmax: scaled, and capped where it is.")
    ]
    weight_by_distance: Annotated[
        list[float], Field(description="Mean weight of the tokens so many places back, over rows that have one.")
    ]
    score_by_distance: Annotated[
        list[float | None], Field(description="Mean score of the tokens so many places back; null: none is seen.")
    ]
