"""`RopeScaling`: the `rope_scaling` object of a request, checked field by field before anything is sent."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self, TypedDict, Unpack

_YARN = (
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
)

_LONGROPE = (
    "short_factor",
    "long_factor",
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "short_mscale",
    "long_mscale",
)

DUAL_CHUNK = (
    "chunk_size",
    "local_size",
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "log_n",
    "length_scores",
)

FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "ntk": ("factor",),
    "dynamic": ("factor", "alpha"),
    "yarn": _YARN,
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": _LONGROPE,
    "proportional": ("factor",),
    "learned": (),
    "dual_chunk": DUAL_CHUNK,
    "self_extend": ("group_size", "window", "original_max_position_embeddings", "log_n"),
    "rerope": ("window", "factor", "original_max_position_embeddings", "log_n"),
    "log_n": ("original_max_position_embeddings",),
}

ALIASES = {"su": "longrope", "mrope": "default"}

REQUIRED = {
    "linear": ("factor",),
    "ntk": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}

GROUPS = ("full_attention", "sliding_attention")

_MAX_LIST = 4096


def check_together(kind: str, values: Mapping[str, Any], param: str) -> None:
    """Refuse values that are fine alone but not together."""
    if kind == "dynamic":
        if "factor" not in values and "alpha" not in values:
            raise ValueError(f"{param}.factor is missing: 'dynamic' needs it, or alpha for a fixed stretch")
        if "alpha" in values and values.get("factor", 1.0) != 1.0:
            raise ValueError(f"{param}.factor would be ignored beside alpha: leave one of them out")
    elif kind == "yarn":
        if "factor" not in values and "original_max_position_embeddings" not in values:
            raise ValueError(f"{param}.factor is missing: 'yarn' needs it, or original_max_position_embeddings")
        if values.get("beta_fast", 32.0) < values.get("beta_slow", 1.0):
            raise ValueError(f"{param}.beta_fast should not be below beta_slow (they default to 32 and 1)")
    elif kind == "dual_chunk":
        if values.get("factor", 1.0) < 1:
            raise ValueError(f"{param}.factor should be at least 1")
        for name in ("attention_factor", "beta_fast", "beta_slow"):
            if name in values and "factor" not in values:
                raise ValueError(f"{param}.{name} would be ignored without factor: give both or neither")
        if values.get("beta_fast", 32.0) < values.get("beta_slow", 1.0):
            raise ValueError(f"{param}.beta_fast should not be below beta_slow (they default to 32 and 1)")
        if values.get("local_size", 1) >= values.get("chunk_size", math.inf):
            raise ValueError(f"{param}.local_size should be smaller than chunk_size")
    elif kind == "rerope":
        if values.get("factor", 1.0) < 1:
            raise ValueError(f"{param}.factor should be at least 1")
    elif kind == "llama3":
        if values["high_freq_factor"] < values["low_freq_factor"]:
            raise ValueError(f"{param}.high_freq_factor should not be below low_freq_factor")
    elif kind == "longrope":
        if len(values["short_factor"]) != len(values["long_factor"]):
            raise ValueError(f"{param}.long_factor should hold as many numbers as short_factor")
        if ("short_mscale" in values) != ("long_mscale" in values):
            missing = "long_mscale" if "short_mscale" in values else "short_mscale"
            raise ValueError(f"{param}.{missing} is missing: give short_mscale and long_mscale together")
        if "short_mscale" in values and "attention_factor" in values:
            raise ValueError(f"{param}.attention_factor would be ignored beside short_mscale and long_mscale")


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{where} should be a number, not {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{where} should be a finite number")
    return number


def _above(least: float, *, allowed: bool = False) -> Callable[[Any, str], float]:
    def read(value: Any, where: str) -> float:
        number = _number(value, where)
        if number < least or (number == least and not allowed):
            raise ValueError(f"{where} should be {'at least' if allowed else 'above'} {least:g}, got {number:g}")
        return number

    return read


def _length(value: Any, where: str) -> int:
    number = _number(value, where)
    if number != int(number) or not 2 <= number < 2**53:
        raise ValueError(f"{where} should be a whole number of tokens, at least 2, got {number:g}")
    return int(number)


def _tokens(value: Any, where: str) -> int:
    number = _number(value, where)
    if number != int(number) or not 1 <= number < 2**53:
        raise ValueError(f"{where} should be a whole number of tokens, at least 1, got {number:g}")
    return int(number)


def _group(value: Any, where: str) -> int:
    number = _number(value, where)
    if number != int(number) or not 2 <= number < 2**31:
        raise ValueError(f"{where} should be a whole number, at least 2, got {number:g}")
    return int(number)


def _flag(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{where} should be True or False, not {type(value).__name__}")
    return value


def _items(value: Any, where: str) -> list[Any]:
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise ValueError(f"{where} should be a list of numbers, not {type(value).__name__}")
    items = list(value)
    if not 1 <= len(items) <= _MAX_LIST:
        raise ValueError(f"{where} should hold 1 to {_MAX_LIST} numbers, got {len(items)}")
    return items


def _positives(value: Any, where: str) -> list[float]:
    return [_positive(item, f"{where}[{index}]") for index, item in enumerate(_items(value, where))]


def _sections(value: Any, where: str) -> list[int]:
    counts = [_number(item, f"{where}[{index}]") for index, item in enumerate(_items(value, where))]
    if any(count != int(count) or count < 0 for count in counts):
        raise ValueError(f"{where} should hold whole numbers of pairs, none below 0")
    return [int(count) for count in counts]


_positive, _not_negative = _above(0), _above(0, allowed=True)

READERS: dict[str, Callable[[Any, str], Any]] = {
    "rope_theta": _above(1),
    "factor": _positive,
    "alpha": _positive,
    "original_max_position_embeddings": _length,
    "attention_factor": _positive,
    "beta_fast": _positive,
    "beta_slow": _positive,
    "mscale": _not_negative,
    "mscale_all_dim": _not_negative,
    "truncate": _flag,
    "chunk_size": _length,
    "local_size": _tokens,
    "window": _tokens,
    "group_size": _group,
    "log_n": _flag,
    "length_scores": _flag,
    "low_freq_factor": _positive,
    "high_freq_factor": _positive,
    "short_factor": _positives,
    "long_factor": _positives,
    "short_mscale": _positive,
    "long_mscale": _positive,
    "mrope_section": _sections,
    "mrope_interleaved": _flag,
}


class SectionFields(TypedDict, total=False):
    """Fields of every kind: how models that also see images share the rotated pairs among their three positions."""

    mrope_section: Iterable[int] | None
    mrope_interleaved: bool | None


class CommonFields(SectionFields, total=False):
    """Fields of every kind with a base. rope_theta: the base, above 1; the model's own where it is not given."""

    rope_theta: float | None


class RopeScaling(dict[str, Any]):
    """A `rope_scaling` object. It is a dict, so everything that writes JSON takes it, `extra_body` of `openai` included.

    One builder per kind; docs/rotary.md says what the fields do; the string "auto" in its place has the server choose by
    length. None leaves a field out, and the server fills it in from the model. `in_groups` nests one object per group of
    layers. Numbers may be numpy's. Each raises ValueError, naming the field, for a value that no model could run under.
    `RopeScaling(obj)` takes an object as it is, unchecked; `from_dict` checks it.
    """

    @classmethod
    def default(cls, **common: Unpack[CommonFields]) -> Self:
        """No scaling: the frequencies the model was built with, under another base if `rope_theta` is given."""
        return cls._build("default", {}, common)

    @classmethod
    def linear(cls, factor: float, **common: Unpack[CommonFields]) -> Self:
        """Position interpolation: every frequency divided by `factor`."""
        return cls._build("linear", {"factor": factor}, common)

    @classmethod
    def ntk(cls, factor: float, **common: Unpack[CommonFields]) -> Self:
        """A larger base, so that the slowest pair slows down by `factor` and fast pairs hardly change."""
        return cls._build("ntk", {"factor": factor}, common)

    @classmethod
    def dynamic(
        cls, factor: float | None = None, *, alpha: float | None = None, **common: Unpack[CommonFields]
    ) -> Self:
        """Like `ntk`, stretched as the request's length asks for; `alpha` in place of `factor` fixes the stretch."""
        return cls._build("dynamic", {"factor": factor, "alpha": alpha}, common)

    @classmethod
    def yarn(
        cls,
        factor: float | None = None,
        *,
        original_max_position_embeddings: int | None = None,
        attention_factor: float | None = None,
        beta_fast: float | None = None,
        beta_slow: float | None = None,
        mscale: float | None = None,
        mscale_all_dim: float | None = None,
        truncate: bool | None = None,
        **common: Unpack[CommonFields],
    ) -> Self:
        """YaRN: fast pairs stay, slow ones are divided by `factor`, those between are blended, attention is sharpened.

        Needs factor or original_max_position_embeddings (tokens); the other then follows from the model's own length.
        """
        given = {
            "factor": factor,
            "original_max_position_embeddings": original_max_position_embeddings,
            "attention_factor": attention_factor,
            "beta_fast": beta_fast,
            "beta_slow": beta_slow,
            "mscale": mscale,
            "mscale_all_dim": mscale_all_dim,
            "truncate": truncate,
        }
        return cls._build("yarn", given, common)

    @classmethod
    def llama3(
        cls,
        factor: float,
        *,
        low_freq_factor: float,
        high_freq_factor: float,
        original_max_position_embeddings: int | None = None,
        **common: Unpack[CommonFields],
    ) -> Self:
        """Llama 3.1's: by how many turns a pair makes within the original length (tokens; default the model's own)."""
        given = {
            "factor": factor,
            "low_freq_factor": low_freq_factor,
            "high_freq_factor": high_freq_factor,
            "original_max_position_embeddings": original_max_position_embeddings,
        }
        return cls._build("llama3", given, common)

    @classmethod
    def longrope(
        cls,
        short_factor: Iterable[float],
        long_factor: Iterable[float],
        *,
        factor: float | None = None,
        original_max_position_embeddings: int | None = None,
        attention_factor: float | None = None,
        short_mscale: float | None = None,
        long_mscale: float | None = None,
        **common: Unpack[CommonFields],
    ) -> Self:
        """A divisor per rotated pair: one list up to the original length (tokens), another for longer requests."""
        given = {
            "short_factor": short_factor,
            "long_factor": long_factor,
            "factor": factor,
            "original_max_position_embeddings": original_max_position_embeddings,
            "attention_factor": attention_factor,
            "short_mscale": short_mscale,
            "long_mscale": long_mscale,
        }
        return cls._build("longrope", given, common)

    @classmethod
    def proportional(cls, factor: float | None = None, **common: Unpack[CommonFields]) -> Self:
        """Gemma 4's partial rotation, its frequencies divided by `factor`."""
        return cls._build("proportional", {"factor": factor}, common)

    @classmethod
    def dual_chunk(
        cls,
        *,
        chunk_size: int | None = None,
        local_size: int | None = None,
        factor: float | None = None,
        original_max_position_embeddings: int | None = None,
        attention_factor: float | None = None,
        beta_fast: float | None = None,
        beta_slow: float | None = None,
        log_n: bool | None = None,
        length_scores: bool | None = None,
        **common: Unpack[CommonFields],
    ) -> Self:
        """Dual chunk attention: no key seems further away than chunk_size - 1 tokens, and the last local_size are in order.

        Both default to shares of the trained length. factor: YaRN within. log_n: scores grow with the logarithm of the position.
        length_scores: they grow with the request's length, as Qwen2.5-1M does it.
        """
        given = {
            "chunk_size": chunk_size,
            "local_size": local_size,
            "factor": factor,
            "original_max_position_embeddings": original_max_position_embeddings,
            "attention_factor": attention_factor,
            "beta_fast": beta_fast,
            "beta_slow": beta_slow,
            "log_n": log_n,
            "length_scores": length_scores,
        }
        return cls._build("dual_chunk", given, common)

    @classmethod
    def self_extend(
        cls,
        *,
        group_size: int | None = None,
        window: int | None = None,
        original_max_position_embeddings: int | None = None,
        log_n: bool | None = None,
        **common: Unpack[CommonFields],
    ) -> Self:
        """Self-Extend: keys nearer than `window` tokens are in order, those behind count in groups of `group_size` tokens.

        window defaults to a quarter of the trained length, group_size to 4. Keys are kept twice. log_n: as of `dual_chunk`.
        """
        given = {
            "group_size": group_size,
            "window": window,
            "original_max_position_embeddings": original_max_position_embeddings,
            "log_n": log_n,
        }
        return cls._build("self_extend", given, common)

    @classmethod
    def rerope(
        cls,
        *,
        window: int | None = None,
        factor: float | None = None,
        original_max_position_embeddings: int | None = None,
        log_n: bool | None = None,
        **common: Unpack[CommonFields],
    ) -> Self:
        """ReRoPE: no key seems further away than `window` tokens (default: half the trained length).

        factor: the leaky form, in which distances beyond the window grow, but as many times as slowly. Keys are kept twice.
        log_n: as of `dual_chunk`.
        """
        given = {
            "window": window,
            "factor": factor,
            "original_max_position_embeddings": original_max_position_embeddings,
            "log_n": log_n,
        }
        return cls._build("rerope", given, common)

    @classmethod
    def log_n(cls, original_max_position_embeddings: int | None = None, **common: Unpack[CommonFields]) -> Self:
        """Scores grow with the logarithm of the position, from the given length (default: the trained one) on."""
        given = {"original_max_position_embeddings": original_max_position_embeddings}
        return cls._build("log_n", given, common)

    @classmethod
    def learned(cls, **sections: Unpack[SectionFields]) -> Self:
        """Frequencies that were trained with the weights, for models that have them."""
        return cls._build("learned", {}, sections)

    @classmethod
    def mrope(cls, section: Iterable[int], *, interleaved: bool | None = None, rope_theta: float | None = None) -> Self:
        """No scaling, with three-part positions; `section` counts the pairs that follow each. On text all are equal.

        Other kinds take the same as `mrope_section` and `mrope_interleaved`.
        """
        return cls.default(rope_theta=rope_theta, mrope_section=section, mrope_interleaved=interleaved)

    @classmethod
    def in_groups(
        cls,
        *,
        full_attention: Mapping[str, Any] | None = None,
        sliding_attention: Mapping[str, Any] | None = None,
    ) -> Self:
        """One flat scaling per group of layers; a group that is left out keeps its own.

        For models whose layers rotate in two ways (Gemma 3); `GET /v1/rotary` lists a model's groups.
        """
        return cls.from_dict({"full_attention": full_attention, "sliding_attention": sliding_attention})

    @classmethod
    def from_dict(cls, obj: Mapping[str, Any], *, param: str = "rope_scaling") -> Self:
        """Check an object in the names of config.json, old or new, flat or by groups, and bring it into the server's form.

        Raises ValueError naming the field as `param`.field.
        """
        if not isinstance(obj, Mapping):
            raise ValueError(f"{param} should be an object such as {{'rope_type': 'yarn', 'factor': 4}}")
        if any(name in obj for name in GROUPS):
            return cls._nested(obj, param)
        kinds = {_kind(obj[key]) for key in ("rope_type", "type") if obj.get(key) is not None}
        kind = kinds.pop() if len(kinds) == 1 else None
        if kind is None:
            raise ValueError(f"{param}.rope_type should be one of {', '.join((*FIELDS, *ALIASES))}")
        return cls._build(kind, {k: v for k, v in obj.items() if k not in ("rope_type", "type")}, {}, param)

    @classmethod
    def _nested(cls, obj: Mapping[str, Any], param: str) -> Self:
        for name in obj:
            if name not in GROUPS:
                raise ValueError(f"{param}.{name} stands beside groups: put it inside {' or '.join(GROUPS)}")
        groups = {
            name: cls.from_dict(obj[name], param=f"{param}.{name}") for name in GROUPS if obj.get(name) is not None
        }
        for name, group in groups.items():
            if "rope_type" not in group:
                raise ValueError(f"{param}.{name} should be flat, without groups inside")
        if not groups:
            raise ValueError(f"{param}: give a scaling for {' or '.join(GROUPS)}")
        return cls(groups)

    @classmethod
    def _build(
        cls, kind: str, given: Mapping[str, Any], common: Mapping[str, Any], param: str = "rope_scaling"
    ) -> Self:
        """The checked object, its fields in the server's order."""
        given = {**given, **common}
        base = () if kind == "learned" else ("rope_theta",)
        known = (*base, *FIELDS[kind], "mrope_section", "mrope_interleaved")
        for name in given:
            if name not in known:
                raise ValueError(f"{param}.{name} is not a field of {kind!r}, which takes {', '.join(known)}")
        values = {name: READERS[name](given[name], f"{param}.{name}") for name in known if given.get(name) is not None}
        for name in REQUIRED.get(kind, ()):
            if name not in values:
                raise ValueError(f"{param}.{name} is missing: {kind!r} needs it")
        check_together(kind, values, param)
        return cls({"rope_type": kind, **values})


def _kind(given: Any) -> str | None:
    """The name the server uses, None for an unknown kind."""
    name = ALIASES.get(given, given) if isinstance(given, str) else None
    return name if name in FIELDS else None
