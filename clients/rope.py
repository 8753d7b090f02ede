"""`RopeScaling`: builders of the `rope_scaling` object of a request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Self, TypedDict, Unpack

from windlass.clients._parse import to_json_value


class SectionFields(TypedDict, total=False):
    """Fields of every kind: the division of the rotated pairs among the three positions of a multimodal model."""

    mrope_section: Iterable[int] | None
    mrope_interleaved: bool | None


class CommonFields(SectionFields, total=False):
    """Fields of every kind with a base. rope_theta: the base, above 1 (default: the model's own)."""

    rope_theta: float | None


class LengthFields(CommonFields, total=False):
    """Fields of kinds that depend on the original length, in tokens (default: the model's own)."""

    original_max_position_embeddings: int | None


class InterpolationFields(LengthFields, total=False):
    """Fields of YaRN's interpolation: the factor of cosines and sines, and the turns within the original length."""

    attention_factor: float | None
    beta_fast: float | None
    beta_slow: float | None


class YarnFields(InterpolationFields, total=False):
    mscale: float | None
    mscale_all_dim: float | None
    truncate: bool | None


class LongRopeFields(LengthFields, total=False):
    factor: float | None
    attention_factor: float | None
    short_mscale: float | None
    long_mscale: float | None


class DualChunkFields(InterpolationFields, total=False):
    chunk_size: int | None
    local_size: int | None
    factor: float | None
    log_n: bool | None
    length_scores: bool | None


class WindowFields(LengthFields, total=False):
    """Fields of kinds whose distances are exact within a window of tokens. log_n: see `RopeScaling.dual_chunk`."""

    window: int | None
    log_n: bool | None


class RopeScaling(dict[str, Any]):
    """A `rope_scaling` object. It is a dict, so JSON encoders and `extra_body` of `openai` accept it.

    There is one builder per kind; docs/reference/rotary-scaling.md describes the fields. A field that is None is left out, and
    the server derives it from the model. Numbers and lists may be numpy's. The server validates the values: BadRequestError
    names the field.
    """

    @classmethod
    def default(cls, **common: Unpack[CommonFields]) -> Self:
        """No scaling: the model's own frequencies, or those of another base if `rope_theta` is given."""
        return cls._build("default", **common)

    @classmethod
    def linear(cls, factor: float, **common: Unpack[CommonFields]) -> Self:
        """Position interpolation: all frequencies are divided by `factor`."""
        return cls._build("linear", factor=factor, **common)

    @classmethod
    def ntk(cls, factor: float, **common: Unpack[CommonFields]) -> Self:
        """NTK-aware scaling: a larger base, so that the slowest pair is divided by `factor` and fast pairs hardly change."""
        return cls._build("ntk", factor=factor, **common)

    @classmethod
    def dynamic(
        cls, factor: float | None = None, *, alpha: float | None = None, **common: Unpack[CommonFields]
    ) -> Self:
        """Dynamic NTK: like `ntk`, with a base that depends on the request's length; `alpha` instead of `factor` fixes it."""
        return cls._build("dynamic", factor=factor, alpha=alpha, **common)

    @classmethod
    def yarn(cls, factor: float | None = None, **fields: Unpack[YarnFields]) -> Self:
        """YaRN: fast pairs keep their frequency, slow ones are divided by `factor`, those between are interpolated.

        Give factor or original_max_position_embeddings (tokens); the other one follows from the model's own length.
        """
        return cls._build("yarn", factor=factor, **fields)

    @classmethod
    def llama3(
        cls, factor: float, *, low_freq_factor: float, high_freq_factor: float, **fields: Unpack[LengthFields]
    ) -> Self:
        """Llama 3.1's scaling, by the number of turns of a pair within the original length (tokens; default: the model's)."""
        own = {"low_freq_factor": low_freq_factor, "high_freq_factor": high_freq_factor}
        return cls._build("llama3", factor=factor, **own, **fields)

    @classmethod
    def longrope(
        cls, short_factor: Iterable[float], long_factor: Iterable[float], **fields: Unpack[LongRopeFields]
    ) -> Self:
        """LongRoPE: one divisor per rotated pair; one list up to the original length (tokens), one for longer requests."""
        return cls._build("longrope", short_factor=short_factor, long_factor=long_factor, **fields)

    @classmethod
    def proportional(cls, factor: float | None = None, **common: Unpack[CommonFields]) -> Self:
        """Gemma 4's partial rotation, with frequencies divided by `factor`."""
        return cls._build("proportional", factor=factor, **common)

    @classmethod
    def dual_chunk(cls, **fields: Unpack[DualChunkFields]) -> Self:
        """Dual chunk attention: distances are at most chunk_size - 1 tokens; those of the last local_size tokens are exact.

        Both default to fractions of the trained length. factor: YaRN inside the chunks. log_n: scale attention scores with the
        logarithm of the position. length_scores: scale them with the request's length, as Qwen2.5-1M does.
        """
        return cls._build("dual_chunk", **fields)

    @classmethod
    def self_extend(cls, *, group_size: int | None = None, **fields: Unpack[WindowFields]) -> Self:
        """Self-Extend: distances below `window` tokens are exact, longer ones are counted in groups of `group_size` tokens.

        window defaults to a quarter of the trained length, group_size to 4. Keys are stored twice. log_n: see `dual_chunk`.
        """
        return cls._build("self_extend", group_size=group_size, **fields)

    @classmethod
    def rerope(cls, *, factor: float | None = None, **fields: Unpack[WindowFields]) -> Self:
        """ReRoPE: distances are at most `window` tokens (default: half the trained length).

        factor: Leaky ReRoPE, in which distances beyond the window are divided by `factor`. Keys are stored twice.
        log_n: see `dual_chunk`.
        """
        return cls._build("rerope", factor=factor, **fields)

    @classmethod
    def log_n(cls, original_max_position_embeddings: int | None = None, **common: Unpack[CommonFields]) -> Self:
        """Attention scores scaled with the logarithm of the position beyond the given length (default: the trained one)."""
        return cls._build("log_n", original_max_position_embeddings=original_max_position_embeddings, **common)

    @classmethod
    def learned(cls, **sections: Unpack[SectionFields]) -> Self:
        """Frequencies that were trained with the weights, for models that have them."""
        return cls._build("learned", **sections)

    @classmethod
    def mrope(cls, section: Iterable[int], *, interleaved: bool | None = None, rope_theta: float | None = None) -> Self:
        """No scaling, with three-part positions; `section` has the number of pairs of each. On text the three are equal.

        The other builders accept the same fields as `mrope_section` and `mrope_interleaved`.
        """
        return cls.default(rope_theta=rope_theta, mrope_section=section, mrope_interleaved=interleaved)

    @classmethod
    def in_groups(
        cls, *, full_attention: Mapping[str, Any] | None = None, sliding_attention: Mapping[str, Any] | None = None
    ) -> Self:
        """One flat scaling per rotary group; a group that is left out keeps its own.

        For models with two rotary groups (Gemma 3); `GET /v1/rotary` lists a model's groups.
        """
        return cls.from_dict({"full_attention": full_attention, "sliding_attention": sliding_attention})

    @classmethod
    def from_dict(cls, obj: Mapping[str, Any]) -> Self:
        """Copy an object such as the `rope_scaling` of a config.json, in old or new names, flat or by rotary group."""
        return cls({name: to_json_value(value) for name, value in obj.items() if value is not None})

    @classmethod
    def _build(cls, rope_type: str, **fields: Any) -> Self:
        return cls.from_dict({"rope_type": rope_type, **fields})
