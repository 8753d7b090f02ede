"""Options of the commands that start an engine, with named rotary scalings, and the engine configuration that they make."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, cast, get_args

from windlass.engine.errors import LoadError, did_you_mean, reason_of
from windlass.engine.host_resources import split_cores
from windlass.engine.interface.config import MAX_BURST_SECONDS, EngineConfig, Quantization, parse_cache_dtype
from windlass.engine.interface.model_info import AdapterSource
from windlass.engine.rotary.auto_scaling import AUTO, AUTO_NAME, MAX_STEPS, ScalingThreshold
from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.engine.rotary.rotary_policy import ROPE_UPDATES, RopeUpdate
from windlass.engine.rotary.scaling_fields import KNOWN
from windlass.engine.rotary.scaling_text import names_kind, parse_scaling
from windlass.server.config.option import (
    MEMORY,
    SCALING_EXAMPLE,
    SWITCH,
    TOKENS,
    TOKENS_OR_AUTO,
    Kind,
    Panel,
    UnusableValue,
    choice,
    folder,
    integer,
    json_object,
    json_text,
    non_negative_number,
    number_type,
    options,
    options_of,
    read_tokens,
    split,
    text,
    texts,
)

OPTION = "`rope_profile`"
DEFAULT_NAME = "default"  # name of the scaling of requests that set none
EXAMPLE = 'long="yarn 4"'
_PROFILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PREFIX_OF_NAME = re.compile(r"\s*([^\s={}]*)=")

# A word after a short form that begins the next profile: unlike a field, its value is a kind or an object.
_NEXT_PROFILE = re.compile(rf"\s(?=[^\s={{}}]*=\s*(?:\{{|(?:{'|'.join(KNOWN)})(?:\s|$))|\{{)")


def is_profile_name(text: str) -> bool:
    """Whether this may be the name of a profile: 1 to 64 letters, digits, dots, hyphens and underscores."""
    return _PROFILE_NAME.fullmatch(text) is not None


def parse_profiles(values: Sequence[str]) -> dict[str, RopeScaling]:
    """Profiles from any number of `NAME=SCALING` and `{"NAME": SCALING, …}`; a scaling is JSON or a short form.

    Raises LoadError, or RequestError that names one.

    The values are read as one text, because the value of a variable is split at its spaces.
    """
    text = " ".join(values)
    decoder = json.JSONDecoder(object_pairs_hook=_no_duplicates)
    profiles: dict[str, RopeScaling] = {}
    position = len(text) - len(text.lstrip())
    while position < len(text):
        name = None
        if text[position] != "{":
            match = _PREFIX_OF_NAME.match(text, position)
            if match is None:
                raise LoadError(f"{OPTION} must be NAME=SCALING such as {EXAMPLE}, got {_excerpt(text[position:])}")
            name, position = match[1], match.end()
        if name is not None and not text[position:].lstrip().startswith("{"):
            following = _NEXT_PROFILE.search(text, position)
            end = len(text) if following is None else following.start()
            _add(profiles, name, text[position:end])
            position = end + _count_spaces(text, end)
            continue
        try:
            value, position = decoder.raw_decode(text, position + _count_spaces(text, position))
        except (ValueError, RecursionError) as error:
            what = f" {name}" if name else ""
            raise LoadError(f"{OPTION}{what} is not valid JSON ({error}): write {EXAMPLE}") from None
        for key, item in {name: value}.items() if name is not None else value.items():
            _add(profiles, key, item)
        position += _count_spaces(text, position)
    return profiles


def _add(profiles: dict[str, RopeScaling], name: str, value: Any) -> None:
    if not is_profile_name(name):
        raise LoadError(
            f"{OPTION} {_excerpt(name)}: a name has 1 to 64 letters, digits, dots, hyphens and underscores and begins "
            "with a letter or digit"
        )
    if name == AUTO_NAME:
        raise LoadError(f"{OPTION} {name}: the name means the smallest scaling that a length needs: choose another")
    if name in profiles:
        raise LoadError(f"{OPTION} {name} is given twice: remove one")
    param = f"{OPTION} {name}"
    profiles[name] = (
        parse_scaling(value, param=param) if isinstance(value, str) else RopeScaling.from_dict(value, param=param)
    )


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [key for key, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice[:64]!r} is given twice")
    return found


def _count_spaces(text: str, position: int) -> int:
    """The number of spaces at `position`."""
    return len(text) - position - len(text[position:].lstrip())


def _excerpt(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")


NAME_RULE = "1 to 128 letters, digits, dots, hyphens, underscores and slashes, a letter or digit first"
_ADAPTER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")
_NO_SCALING = "none"  # in thresholds: the model's own frequencies
_THRESHOLDS_EXAMPLE = "auto,8192=none,32768=long"


def _read_profiles(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, Mapping):
        return list(map(str, value))
    for scaling in value.values():
        if not isinstance(scaling, Mapping | str):
            raise UnusableValue(
                f"needs a scaling such as 'yarn 4' or {SCALING_EXAMPLE} for each name, got {scaling!r:.80}"
            )
    return [
        json.dumps({name: scaling}) if isinstance(scaling, str) else f"{name}={json_text(scaling, SCALING_EXAMPLE)}"
        for name, scaling in value.items()
    ]


def _read_milliseconds(value: Any) -> float:
    found = float(value)
    if not 0 <= found <= MAX_BURST_SECONDS * 1000:
        raise ValueError
    return found


def _to_seconds(milliseconds: float) -> float:
    return milliseconds / 1000


_WEIGHTS = choice(*get_args(Quantization))


@options
class EngineOptions:
    """Options of every command that starts an engine."""

    device: str = Panel.MODEL.option(
        text(metavar="DEVICE"), default="auto", sets="compute.device", help="Device: cpu, cuda, cuda:1 or auto."
    )
    dtype: str = Panel.MODEL.option(
        number_type(),
        default="auto",
        sets="compute.dtype",
        main=True,
        help="Number type of the computation: auto, float32, bfloat16 or float16.",
    )
    kv_cache_dtype: str = Panel.CONTEXT.option(
        number_type(parse_cache_dtype),
        default="auto",
        sets="cache.dtype",
        help="Number type of cached keys and values: auto, float32, bfloat16, float16, int8 or, on a GPU, fp8.",
    )
    quantization: Quantization = Panel.MODEL.option(
        _WEIGHTS,
        default="none",
        sets="compute.quantization",
        main=True,
        help="Quantize the weights while loading: none, int8 or int4. Saves memory, and time on a CPU, at a small "
        "loss of quality.",
    )
    activations: str = Panel.MODEL.option(
        choice("int8", "float32"),
        default="int8",
        scope="variable",
        sets="compute.activations",
        help="Rounding of activations before multiplication with quantized weights; float32 rounds nothing and is much "
        "slower.",
    )
    weight_cache: str | None = Panel.MODEL.option(
        folder("a folder, or model for one in the model's directory", "beside", aliases={"model": "beside"}),
        sets="loading.weight_cache",
        help="Folder in which quantized weights are stored for the next start; model: a folder in the model's directory. "
        "Default: none.",
    )
    load_format: str = Panel.MODEL.option(
        choice("safetensors", "dummy"),
        default="safetensors",
        scope="variable",
        sets="loading.format",
        help="dummy loads random weights, for speed measurements without a download.",
    )
    max_model_len: int | None = Panel.CONTEXT.option(
        TOKENS_OR_AUTO,
        sets="max_model_len",
        main=True,
        help="Longest prompt and output together, in tokens, such as 8k; may exceed the model's length. Default, and auto: "
        "the model's length, if it fits.",
    )
    shift_context: int | None = Panel.CONTEXT.option(
        TOKENS,
        scope="key",
        sets="context.shift_context",
        reported=True,
        help="Tokens that a sequence under context shift (context-overflow: shift) holds. Default: max-model-len.",
    )
    max_total_tokens: int | None = Panel.CONTEXT.option(
        TOKENS,
        scope="key",
        sets="context.max_total_tokens",
        reported=True,
        help="Prompt and output tokens at which a sequence under context shift ends. Default: unlimited.",
    )
    max_num_batched_tokens: int = Panel.BATCHING.option(
        TOKENS,
        default=2048,
        sets="scheduling.max_num_batched_tokens",
        help="Maximum number of tokens, of prompts and answers together, that are computed in one step.",
    )
    max_num_seqs: int = Panel.BATCHING.option(
        integer(),
        default=64,
        sets="scheduling.max_num_seqs",
        main=True,
        help="Samples of requests that run at once, at most 65,536.",
    )
    max_waiting: int = Panel.BATCHING.option(
        integer(),
        default=1024,
        sets="scheduling.max_waiting",
        help="Requests that may wait; further ones are refused with status 429.",
    )
    kv_cache_memory: int | None = Panel.CONTEXT.option(
        MEMORY,
        sets="cache.memory",
        main=True,
        help="Memory for cached keys and values, such as 4GiB or 500MB. Default: half of the free memory on a CPU, the rest of "
        "--gpu-memory-utilization on a GPU.",
    )
    gpu_memory_utilization: float | None = Panel.CONTEXT.option(
        non_negative_number("a share above 0 and at most 1", "SHARE"),
        sets="cache.device_share",
        help="Share of a GPU's memory that the engine may use, weights and steps included. Excludes --kv-cache-memory. "
        "Default: 0.9.",
    )
    block_size: int = Panel.CONTEXT.option(
        integer(), default=16, scope="key", sets="cache.block_size", help="Tokens per cache block, a multiple of 16."
    )
    prefix_caching: bool = Panel.CONTEXT.option(
        SWITCH,
        default=True,
        sets="cache.prefix_caching",
        help="Reuse cached keys and values for prompts with the same beginning.",
    )
    kv_persist: str | None = Panel.CONTEXT.option(
        folder("a folder"),
        sets="cache.persist",
        help="Folder for cached keys and values, which are then reused after a restart or by another server of this model. "
        "Readers of the folder can recover parts of prompts. Default: none.",
    )
    kv_persist_size: int | None = Panel.CONTEXT.option(
        MEMORY,
        scope="key",
        sets="cache.persist_size",
        help="Limit of the files in the kv-persist folder; the least recently used are deleted. Default: 4GiB.",
    )
    kv_host_memory: int | None = Panel.CONTEXT.option(
        MEMORY, sets="cache.host_memory", help="On a GPU: main memory for blocks that the cache evicts. Default: none."
    )
    rope_scaling: str | None = Panel.ROTARY.option(
        json_object(
            SCALING_EXAMPLE,
            f"a mapping such as {SCALING_EXAMPLE}, a text such as 'yarn 4', the name of a profile, or auto",
        ),
        sets="rotary.scaling",
        main=True,
        help=f"Rotary scaling, such as 'yarn 4' or '{SCALING_EXAMPLE}', the name of a profile, or auto: the smallest scaling "
        f"that the length of a request needs ({_THRESHOLDS_EXAMPLE} sets its thresholds). Default: the model's own.",
    )
    rope_profile: list[str] | None = Panel.ROTARY.option(
        Kind(
            form=f"a mapping of names to scalings such as 'yarn 4' or {SCALING_EXAMPLE}",
            read=_read_profiles,
            metavar="NAME=SCALING",
            parameter=list[str],
        ),
        main=True,
        in_llm=True,
        help="A scaling that requests may use by its name, such as 'long=yarn 4'; repeatable.",
    )
    rope_update: RopeUpdate | None = Panel.ROTARY.option(
        choice(*ROPE_UPDATES),
        sets="rotary.update",
        reported=True,
        help="Policy for cached keys when frequencies that depend on length change: frozen (they never change), recompute "
        "(tokens are computed again) or rotate (keys are rotated again). Default: recompute for longrope, else frozen.",
    )
    lora: list[str] | None = Panel.ADAPTERS.option(
        texts("NAME=DIR"),
        main=True,
        in_llm=True,
        help="A LoRA adapter in PEFT's format, which requests select as their model; repeatable or comma-separated.",
    )
    max_loras: int = Panel.ADAPTERS.option(
        integer(), default=8, sets="adapters.max_loaded", help="Adapters that may be loaded at once, at most 1,024."
    )
    max_lora_rank: int = Panel.ADAPTERS.option(
        integer(), default=64, scope="key", sets="adapters.max_rank", help="Largest rank of an adapter."
    )
    deterministic: bool = Panel.BATCHING.option(
        SWITCH,
        default=False,
        sets="compute.deterministic",
        main=True,
        reported=True,
        help="Greedy requests get the same tokens in any batch. Costs speed.",
    )
    cuda_graphs: bool = Panel.BATCHING.option(
        SWITCH,
        default=True,
        scope="variable",
        sets="compute.cuda_graphs",
        help="On a GPU: capture decode steps at start and replay them. false saves time at start and GPU memory, and "
        "decodes more slowly.",
    )
    speculative_ngram: int = Panel.SPECULATION.option(
        integer(),
        default=0,
        sets="scheduling.speculation.num_tokens",
        reported=True,
        help="Speculative decoding by prompt lookup: propose up to N tokens per step that followed the stream's last tokens "
        "earlier in its text. The output stays the same. 0: off; 4 is a good value, 64 the largest.",
    )
    speculative_model: str | None = Panel.SPECULATION.option(
        text("the name or path of a model", "MODEL"),
        sets="scheduling.speculation.model",
        main=True,
        reported=True,
        help="Speculative decoding by a draft model: a smaller model with the same tokenizer. The output stays the same. "
        "Default: none.",
    )
    speculative_model_quantization: Quantization = Panel.SPECULATION.option(
        _WEIGHTS,
        default="none",
        scope="key",
        sets="scheduling.speculation.quantization",
        help="Quantization of the draft model or the MTP layer: none, int8 or int4.",
    )
    speculative_mtp: bool = Panel.SPECULATION.option(
        SWITCH,
        default=False,
        sets="scheduling.speculation.mtp",
        main=True,
        reported=True,
        help="Speculative decoding by the model's own MTP layer, as in Qwen 3.5 and DeepSeek V3.",
    )
    speculative_tokens: int = Panel.SPECULATION.option(
        integer(),
        default=4,
        sets="scheduling.speculation.draft_tokens",
        help="Tokens that the draft model or the MTP layer proposes per step, at most 16.",
    )
    speculative_adaptive: bool = Panel.SPECULATION.option(
        SWITCH,
        default=True,
        scope="variable",
        sets="scheduling.speculation.adaptive",
        help="Let the draft model or the MTP layer propose fewer tokens, or none, where that saves time.",
    )
    threads: int | None = Panel.BATCHING.option(
        integer(),
        sets="compute.threads",
        main=True,
        help="CPU threads of each rank, at most 1,024. Default: torch's choice.",
    )
    tensor_parallel: int = Panel.BATCHING.option(
        integer(),
        default=1,
        sets="compute.tensor_parallel",
        help="Split the model over N processes, at most 32, each with a part of every layer's heads and weights, on the CPUs "
        "of one machine or with a GPU each.",
    )
    pin_cores: bool = Panel.BATCHING.option(
        SWITCH,
        default=False,
        scope="key",
        sets="compute.cores",
        convert=lambda pinned: split_cores()[0] if pinned else None,
        help="One CPU core for the HTTP server, the others for the engine.",
    )
    target_step_ms: float = Panel.BATCHING.option(
        non_negative_number("finite and not negative", "MS"),
        default=250.0,
        sets="scheduling.target_step_seconds",
        convert=_to_seconds,
        help="Limit in milliseconds of a step that decodes: prompts are cut into chunks; 0: no limit.",
    )
    burst_ms: float = Panel.BATCHING.option(
        Kind(
            form=f"a number of milliseconds between 0 and {MAX_BURST_SECONDS * 1000:g}",
            read=_read_milliseconds,
            metavar="MS",
        ),
        default=20.0,
        scope="variable",
        sets="scheduling.burst_seconds",
        convert=_to_seconds,
        help="Longest multi-step decoding in milliseconds; 0: send each token immediately.",
    )

    def _scaling_parts(self) -> tuple[str | None, list[str]]:
        """The scaling of `rope_scaling` and its thresholds; "8192=none,32768=long" has thresholds only."""
        given = self.rope_scaling
        if given is None or given.lstrip().startswith(("{", "[")) or not {",", "="} & set(given):
            return given, []
        parts = split([given])
        if not parts or "=" not in parts[0] or names_kind(parts[0]):
            # A list in the short form has commas too.
            return (given, []) if "[" in given else (parts[0] if parts else "", parts[1:])
        return None, parts

    def parse_rope_scaling(self) -> RopeScaling | None:
        """The scaling of a profile's name, "auto", the short form or JSON.

        Raises LoadError, or RequestError that names the field at fault.
        """
        given, _ = self._scaling_parts()
        if given is None:
            return None
        if given == AUTO_NAME:
            return AUTO
        profiles = self.profiles()
        if given in profiles:
            return profiles[given]
        if self.is_profile_reference():
            raise LoadError(
                f"`rope_scaling={given}`: no `rope_profile` has this name: write '{SCALING_EXAMPLE}' or declare the profile"
            )
        return parse_scaling(given, param="`rope_scaling`")

    def is_profile_reference(self) -> bool:
        """Whether `rope_scaling` is a name rather than a scaling."""
        given, _ = self._scaling_parts()
        return given is not None and is_profile_name(given) and not names_kind(given)

    def profiles(self) -> dict[str, RopeScaling]:
        """The declared profiles. Raises LoadError, or RequestError that names the field at fault."""
        return parse_profiles(self.rope_profile or [])

    def scaling_thresholds(self) -> tuple[ScalingThreshold, ...]:
        """The thresholds of `auto` that the operator set; empty for the model's own. Raises LoadError."""
        (_, parts), profiles = self._scaling_parts(), self.profiles()
        if len(parts) > MAX_STEPS:
            raise LoadError(f"`rope_scaling` has {len(parts)} thresholds: give at most {MAX_STEPS}")
        return tuple(_parse_threshold(part, profiles) for part in parts)

    def adapters(self) -> tuple[AdapterSource, ...]:
        """The adapters to load, numbered from 1. Raises LoadError."""
        found: dict[str, AdapterSource] = {}
        for value in split(self.lora):
            name, equals, path = value.partition("=")
            if not equals or not path:
                raise LoadError(f"`lora` must be NAME=DIR such as poet=adapters/poet, got {value[:80]!r}")
            if not is_adapter_name(name):
                raise LoadError(f"`lora` {name[:80]!r}: a name has {NAME_RULE}")
            if name in found:
                raise LoadError(f"`lora` {name} is given twice: remove one")
            try:
                directory = Path(path).expanduser().absolute()
                is_directory = directory.is_dir()
            except (OSError, RuntimeError, ValueError) as error:
                raise LoadError(
                    f"`lora` {name}: {path} cannot be used ({reason_of(error)}): give a directory"
                ) from None
            if not is_directory:
                raise LoadError(f"`lora` {name}: {path} is not a directory: give one with PEFT's files")
            found[name] = AdapterSource(len(found) + 1, name, str(directory))
        return tuple(found.values())

    def to_config(self, model: Path) -> EngineConfig:
        """The engine's configuration. Raises LoadError, or RequestError that names the field at fault."""
        self.profiles()
        values: dict[str, Any] = {}
        for each in options_of(self).values():
            if each.sets is not None:
                value = getattr(self, each.name)
                values[each.sets] = value if each.convert is None else each.convert(value)
        values |= {
            "model": str(model),
            "rotary.scaling": self.parse_rope_scaling(),
            "rotary.ladder": self.scaling_thresholds(),
            "adapters.sources": self.adapters(),
        }
        return cast(EngineConfig, replace_fields(EngineConfig(model=""), values))


def replace_fields(config: Any, values: Mapping[str, Any]) -> Any:
    """The configuration with new values, given by dotted paths such as `cache.memory`."""
    parts: dict[str, dict[str, Any]] = {}
    changes: dict[str, Any] = {}
    for path, value in values.items():
        name, _, rest = path.partition(".")
        if rest:
            parts.setdefault(name, {})[rest] = value
        else:
            changes[name] = value
    changes |= {name: replace_fields(getattr(config, name), inner) for name, inner in parts.items()}
    return replace(config, **changes)


def field_values(config: Any, prefix: str = "") -> dict[str, Any]:
    """Every value of a configuration by its dotted path."""
    found: dict[str, Any] = {}
    for each in fields(config):
        value = getattr(config, each.name)
        if is_dataclass(value) and type(value).__module__ == EngineConfig.__module__:
            found |= field_values(value, f"{prefix}{each.name}.")
        else:
            found[prefix + each.name] = value
    return found


def _parse_threshold(part: str, profiles: Mapping[str, RopeScaling]) -> ScalingThreshold:
    written, equals, name = (piece.strip() for piece in part.partition("="))
    try:
        tokens = read_tokens(written)
    except ValueError:
        tokens = 0
    if not equals or not name or not 1 <= tokens < 10**10:
        raise LoadError(
            f"`rope_scaling` must be a scaling with TOKENS=PROFILE, such as {_THRESHOLDS_EXAMPLE}; got {part[:60]!r}"
        )
    if name in profiles:
        if name == _NO_SCALING:
            raise LoadError(
                f"`rope_scaling` {part}: none means the model without scaling, and is the name of a `rope_profile` too: "
                "rename the profile"
            )
        return ScalingThreshold(tokens, profiles[name], name)
    if name == _NO_SCALING:
        return ScalingThreshold(tokens)
    raise LoadError(
        f"`rope_scaling` {part[:60]}: no `rope_profile` has this name{did_you_mean(name, [*profiles, _NO_SCALING])}; none "
        "means the model without scaling"
    )


def is_adapter_name(name: str) -> bool:
    """Whether an adapter may have this name."""
    return _ADAPTER_NAME.fullmatch(name) is not None
