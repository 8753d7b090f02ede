"""Options of the commands that start an engine, and the engine configuration that they make."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, get_args

from windlass.engine.errors import LoadError, did_you_mean
from windlass.engine.host_resources import split_cores
from windlass.engine.interface.config import (
    MAX_BURST_SECONDS,
    Activations,
    EngineConfig,
    LoadFormat,
    Quantization,
    parse_cache_dtype,
)
from windlass.engine.interface.model_info import AdapterSource
from windlass.engine.rotary.auto_scaling import AUTO, AUTO_NAME, MAX_STEPS, ScalingThreshold
from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.engine.rotary.rotary_policy import ROPE_UPDATES, RopeUpdate
from windlass.server.config.option_names import flat_names, from_flat
from windlass.server.config.option_parsing import (
    ADAPTERS,
    BATCHING,
    CONTEXT,
    MODEL,
    ROTARY,
    SPECULATION,
    check_choice,
    option,
    read_dtype,
    read_memory,
    split,
    tokens_option,
)
from windlass.server.config.rope_profiles import is_profile_name, parse_profiles

_LOAD_FORMATS: tuple[LoadFormat, ...] = get_args(LoadFormat)

_QUANTIZATIONS: tuple[Quantization, ...] = get_args(Quantization)

_ACTIVATIONS: tuple[Activations, ...] = get_args(Activations)

_ROPE_EXAMPLE = '\'{"rope_type": "yarn", "factor": 4}\''


@dataclass(slots=True, kw_only=True)
class EngineOptions:
    """What a command that starts an engine takes."""

    device: Annotated[str, option("--device", panel=MODEL, help="cpu, cuda, cuda:1 or auto.")] = "auto"
    dtype: Annotated[str, option("--dtype", panel=MODEL, help="auto, float32, bfloat16 or float16.")] = "auto"
    kv_cache_dtype: Annotated[
        str,
        option(
            "--kv-cache-dtype",
            panel=CONTEXT,
            help="auto, float32, bfloat16, float16, int8 or (on a GPU) fp8, of cached keys and values.",
        ),
    ] = "auto"
    quantization: Annotated[
        str,
        option(
            "--quantization",
            panel=MODEL,
            help="Weights of fewer bits, quantized while they load: none, int8 or "
            "int4. Less memory and more speed on a CPU for a small loss of quality.",
        ),
    ] = "none"
    activations: Annotated[
        str,
        option(
            "--activations",
            panel=MODEL,
            help="What meets quantized weights: int8, rounded to 8 bits in groups of "
            "32 with a scale each, or float32, not rounded; much slower, to compare with.",
        ),
    ] = "int8"
    weight_cache: Annotated[
        str | None,
        option(
            "--weight-cache",
            panel=MODEL,
            metavar="DIR",
            help="Keep quantized weights in this folder for the next "
            "start, which then need not quantize them again; beside: in the model's own directory. Default: nowhere.",
        ),
    ] = None
    load_format: Annotated[
        str, option("--load-format", panel=MODEL, help="safetensors, or dummy: random weights, for benchmarks.")
    ] = "safetensors"
    max_model_len: Annotated[
        int | None,
        tokens_option(
            "--max-model-len",
            panel=CONTEXT,
            auto=True,
            help="Longest prompt and output together, in tokens, such as "
            "8192 or 8K. May exceed the model's own length (see --rope-scaling). Default, and auto: the model's "
            "own, if it fits.",
        ),
    ] = None
    shift_context: Annotated[
        int | None,
        tokens_option(
            "--shift-context",
            panel=CONTEXT,
            help="Tokens that a sequence holds which drops its oldest ones "
            "(context_overflow shift). Default: --max-model-len.",
        ),
    ] = None
    max_total_tokens: Annotated[
        int | None,
        tokens_option(
            "--max-total-tokens",
            panel=CONTEXT,
            help="Where such a sequence ends, prompt and answer together. Default: nowhere.",
        ),
    ] = None
    max_num_batched_tokens: Annotated[
        int, tokens_option("--max-num-batched-tokens", panel=BATCHING, help="Token budget of one step.")
    ] = 2048
    max_num_seqs: Annotated[int, option("--max-num-seqs", panel=BATCHING, help="Sequences that run at once.")] = 64
    max_waiting: Annotated[
        int, option("--max-waiting", panel=BATCHING, help="Requests that may wait; more are refused with 429.")
    ] = 1024
    max_waiting_tokens: Annotated[
        int,
        tokens_option(
            "--max-waiting-tokens",
            panel=BATCHING,
            help="Tokens that waiting requests may have together; more are refused with 429.",
        ),
    ] = 8 << 20
    kv_cache_memory: Annotated[
        str | None,
        option("--kv-cache-memory", panel=CONTEXT, metavar="SIZE", help="Memory for cached keys and values: 4GiB."),
    ] = None
    gpu_memory_utilization: Annotated[
        float | None,
        option(
            "--gpu-memory-utilization",
            panel=CONTEXT,
            metavar="SHARE",
            help="On a GPU: what of its memory this engine may "
            "take, weights and steps included; the cache gets what they leave. Default: 0.9.",
        ),
    ] = None
    block_size: Annotated[int, option("--block-size", panel=CONTEXT, help="Tokens per cache block.")] = 16
    prefix_caching: Annotated[
        bool,
        option("--prefix-caching/--no-prefix-caching", panel=CONTEXT, help="Reuse the cache of equal prompt starts."),
    ] = True
    kv_persist: Annotated[
        str | None,
        option(
            "--kv-persist",
            panel=CONTEXT,
            metavar="DIR",
            help="Keep full blocks of cached keys and values in this folder, "
            "so that equal prompt starts are not computed again after a restart, nor by other servers of this model on "
            "the machine. Whoever reads it can recover parts of prompts. Default: nowhere.",
        ),
    ] = None
    kv_persist_size: Annotated[
        str | None,
        option(
            "--kv-persist-size",
            panel=CONTEXT,
            metavar="SIZE",
            help="What all files in it may take together; the longest unused go first. Default: 4GiB.",
        ),
    ] = None
    kv_host_memory: Annotated[
        str | None,
        option(
            "--kv-host-memory",
            panel=CONTEXT,
            metavar="SIZE",
            help="On a GPU: main memory that takes what the cache evicts, "
            "and gives it back when a prompt needs it. Default: none.",
        ),
    ] = None
    rope_scaling: Annotated[
        str | None,
        option(
            "--rope-scaling",
            panel=ROTARY,
            metavar="JSON",
            help='Rotary scaling in Hugging Face\'s names: \'{"rope_type": "yarn", "factor": 4}\'; or the name of '
            "a profile; or auto: the least that each request's length needs.",
        ),
    ] = None
    rope_profile: Annotated[
        list[str] | None,
        option(
            "--rope-profile",
            panel=ROTARY,
            metavar="NAME=JSON",
            help="A scaling that requests may use by its name; repeatable. The variable may hold an object of "
            'several: \'{"long": {"rope_type": "yarn", "factor": 4}}\'.',
        ),
    ] = None
    rope_ladder: Annotated[
        list[str] | None,
        option(
            "--rope-ladder",
            panel=ROTARY,
            metavar="TOKENS=PROFILE",
            help="What rope_scaling auto chooses from: up to "
            "so many tokens of prompt and output that profile, or none; repeatable or comma separated: "
            "8192=none,32768=long. Default: the model's own kind at doubling factors.",
        ),
    ] = None
    rope_update: Annotated[
        str | None,
        option(
            "--rope-update",
            panel=ROTARY,
            help="When frequencies that depend on length change, for requests that "
            "do not say: frozen (never), recompute (with the cache), rotate (cached keys are turned). Default: "
            "recompute for longrope, else frozen.",
        ),
    ] = None
    lora: Annotated[
        list[str] | None,
        option(
            "--lora",
            panel=ADAPTERS,
            metavar="NAME=DIR",
            help="A LoRA adapter in PEFT's files, which requests name as their model; repeatable or comma separated.",
        ),
    ] = None
    max_loras: Annotated[int, option("--max-loras", panel=ADAPTERS, help="Adapters that may be loaded at once.")] = 8
    max_lora_rank: Annotated[int, option("--max-lora-rank", panel=ADAPTERS, help="Largest rank of an adapter.")] = 64
    lora_dtype: Annotated[
        str,
        option(
            "--lora-dtype",
            panel=ADAPTERS,
            help="What adapters are kept as: bfloat16 or float16 halves what a float32 one "
            "takes, rounded; auto rounds nothing that the model would not.",
        ),
    ] = "auto"
    deterministic: Annotated[
        bool,
        option(
            "--deterministic/--no-deterministic",
            panel=BATCHING,
            help="The same greedy tokens whatever else runs "
            "and however prompts are cut. Costs speed, mostly with long prompts and many requests at once.",
        ),
    ] = False
    cuda_graphs: Annotated[
        bool,
        option(
            "--cuda-graphs/--no-cuda-graphs",
            panel=BATCHING,
            help="On a GPU: capture decode steps at the start and repeat "
            "them. Without, a GPU waits for the processor; the start is quicker and takes less of the GPU's memory.",
        ),
    ] = True
    speculative_ngram: Annotated[
        int,
        option(
            "--speculative-ngram",
            panel=SPECULATION,
            metavar="K",
            help="Speculative decoding by prompt lookup: a stream "
            "proposes up to K tokens per step that followed its last tokens before; those the model would have "
            "drawn itself are kept. Answers stay the same. 0: off; 4 is a good value.",
        ),
    ] = 0
    speculative_ngram_min: Annotated[
        int,
        option(
            "--speculative-ngram-min",
            panel=SPECULATION,
            help="So many of a stream's last tokens must have stood before.",
        ),
    ] = 2
    speculative_ngram_max: Annotated[
        int,
        option(
            "--speculative-ngram-max",
            panel=SPECULATION,
            help="Of several such places the one where most tokens agree counts, up to this many.",
        ),
    ] = 4
    speculative_model: Annotated[
        str | None,
        option(
            "--speculative-model",
            panel=SPECULATION,
            metavar="MODEL",
            help="Speculative decoding by a draft model: a smaller "
            "one with the same tokenizer proposes tokens; those the model would have drawn itself are kept. Answers stay "
            "the same. Named as the model is.",
        ),
    ] = None
    speculative_model_quantization: Annotated[
        str,
        option(
            "--speculative-model-quantization",
            panel=SPECULATION,
            help="Of the draft model's weights, or of the MTP layer's with a copy of the head: none, int8 or int4.",
        ),
    ] = "none"
    speculative_mtp: Annotated[
        bool,
        option(
            "--speculative-mtp",
            panel=SPECULATION,
            help="Speculative decoding by the layer in the model's own files that "
            "predicts a token further (MTP: Qwen 3.5, Qwen3-Next, DeepSeek V3, GLM 4.5 and later, ERNIE 4.5 MoE, "
            "Nemotron 3.5).",
        ),
    ] = False
    speculative_tokens: Annotated[
        int,
        option(
            "--speculative-tokens",
            panel=SPECULATION,
            metavar="K",
            help="Tokens the draft model or layer proposes for a stream per step, at most.",
        ),
    ] = 4
    speculative_adaptive: Annotated[
        bool,
        option(
            "--speculative-adaptive/--no-speculative-adaptive",
            panel=SPECULATION,
            help="Let the draft propose less where less is kept, and nothing where that saves no time.",
        ),
    ] = True
    threads: Annotated[
        int | None, option("--threads", panel=BATCHING, help="CPU threads for the model, of each rank.")
    ] = None
    tensor_parallel: Annotated[
        int,
        option(
            "--tensor-parallel",
            panel=BATCHING,
            metavar="N",
            help="Split the model over N processes, each with its share of "
            "every layer's heads and weights; they compute every step together: CPUs of one machine, or a GPU each.",
        ),
    ] = 1
    pin_cores: Annotated[
        bool,
        option(
            "--pin-cores/--no-pin-cores",
            panel=BATCHING,
            help="Keep the engine and the HTTP server off each other's "
            "cores: the server gets one, the engine the rest.",
        ),
    ] = False
    target_step_ms: Annotated[
        float,
        option(
            "--target-step-ms",
            panel=BATCHING,
            help="Prompts are cut so that a step beside running streams stays "
            "under this many milliseconds; 0: no bound.",
        ),
    ] = 250.0
    burst_ms: Annotated[
        float,
        option(
            "--burst-ms",
            panel=BATCHING,
            help="Where a model's steps are short, running streams may go on drawing tokens "
            "for this many milliseconds before the tokens are sent; 0: each token is sent at once.",
        ),
    ] = 20.0

    def parse_rope_scaling(self) -> RopeScaling | None:
        """From JSON, a profile's name or "auto"; raises LoadError or RequestError that names the field at fault."""
        if self.rope_scaling is None:
            return None
        if self.rope_scaling == AUTO_NAME:
            return AUTO
        profiles = self.profiles()
        if self.rope_scaling in profiles:
            return profiles[self.rope_scaling]
        if self.is_profile_reference():
            raise LoadError(
                f"--rope-scaling {self.rope_scaling}: no --rope-profile has that name: write {_ROPE_EXAMPLE}"
            )
        try:
            parsed = json.loads(self.rope_scaling)
        except (ValueError, RecursionError) as error:
            raise LoadError(f"--rope-scaling is not valid JSON ({error}): write {_ROPE_EXAMPLE}") from error
        if not isinstance(parsed, dict):
            raise LoadError(f"--rope-scaling must be a JSON object: write {_ROPE_EXAMPLE}")
        return RopeScaling.from_dict(parsed, param="--rope-scaling")

    def is_profile_reference(self) -> bool:
        """Whether --rope-scaling is a name rather than JSON."""
        return self.rope_scaling is not None and is_profile_name(self.rope_scaling)

    def profiles(self) -> dict[str, RopeScaling]:
        """The declared profiles; raises LoadError or RequestError that names the one at fault."""
        return parse_profiles(self.rope_profile or [])

    def scaling_thresholds(self) -> tuple[ScalingThreshold, ...]:
        """The operator's steps of `auto`, none where the model's own are meant; raises LoadError that names one."""
        return parse_ladder(self.rope_ladder, self.profiles())

    def parse_rope_update(self) -> RopeUpdate | None:
        """Raises LoadError for an unknown policy."""
        return None if self.rope_update is None else check_choice("--rope-update", self.rope_update, ROPE_UPDATES)

    def adapters(self) -> tuple[AdapterSource, ...]:
        """Those of --lora; raises LoadError that names the one at fault."""
        return parse_adapters(self.lora)

    def _kv_persist(self) -> str | None:
        if self.kv_persist is None:
            return None
        if not self.kv_persist:
            raise LoadError("--kv-persist is empty: give a folder")
        try:
            folder = Path(self.kv_persist).expanduser().absolute()
            is_other = folder.exists() and not folder.is_dir()
        except (OSError, RuntimeError) as error:
            raise LoadError(f"--kv-persist {self.kv_persist}: {error}: give a folder") from None
        if is_other:
            raise LoadError(f"--kv-persist {self.kv_persist} is a file: give a folder")
        return str(folder)

    def _weight_cache(self) -> str | None:
        if self.weight_cache is None or self.weight_cache == "beside":
            return self.weight_cache
        if not self.weight_cache:
            raise LoadError("--weight-cache is empty: give a folder, or beside for one in the model's directory")
        try:
            folder = Path(self.weight_cache).expanduser().absolute()
            is_file = folder.is_file()
        except (OSError, RuntimeError) as error:
            raise LoadError(f"--weight-cache {self.weight_cache}: {error}: give a folder, or beside") from None
        if is_file:
            raise LoadError(f"--weight-cache {self.weight_cache} is a file: give a folder, or beside")
        return str(folder)

    def to_config(self, model: Path) -> EngineConfig:
        """The engine's configuration; raises LoadError or RequestError that names the option at fault."""
        check_choice("--load-format", self.load_format, _LOAD_FORMATS)
        check_choice("--quantization", self.quantization, _QUANTIZATIONS)
        check_choice("--speculative-model-quantization", self.speculative_model_quantization, _QUANTIZATIONS)
        check_choice("--activations", self.activations, _ACTIVATIONS)
        if not 0 <= self.target_step_ms < math.inf:
            raise LoadError(f"--target-step-ms must be finite and not negative, got {self.target_step_ms:g}")
        if not 0 <= self.burst_ms <= MAX_BURST_SECONDS * 1000:
            raise LoadError(f"--burst-ms must lie between 0 and {MAX_BURST_SECONDS * 1000:g}, got {self.burst_ms:g}")
        self.profiles()
        parsed = {
            "dtype": read_dtype("--dtype", self.dtype),
            "kv_cache_dtype": read_dtype("--kv-cache-dtype", self.kv_cache_dtype, parse_cache_dtype),
            "lora_dtype": read_dtype("--lora-dtype", self.lora_dtype),
            "weight_cache": self._weight_cache(),
            "kv_cache_memory": None
            if self.kv_cache_memory is None
            else read_memory("--kv-cache-memory", self.kv_cache_memory),
            "kv_persist": self._kv_persist(),
            "kv_persist_size": None
            if self.kv_persist_size is None
            else read_memory("--kv-persist-size", self.kv_persist_size),
            "kv_host_memory": None
            if self.kv_host_memory is None
            else read_memory("--kv-host-memory", self.kv_host_memory),
            "rope_scaling": self.parse_rope_scaling(),
            "lora": self.adapters(),
            "rope_update": self.parse_rope_update(),
            "rope_ladder": self.scaling_thresholds(),
            "cores": split_cores()[0] if self.pin_cores else None,
            "target_step_seconds": self.target_step_ms / 1000,
            "burst_seconds": self.burst_ms / 1000,
        }
        as_given = {name: getattr(self, name) for name in flat_names().values() if hasattr(self, name)}
        return from_flat(str(model), as_given | parsed)


LADDER_OPTION = "--rope-ladder"

EXAMPLE = "8192=none,32768=long"

_NONE = "none"  # the model as it is

_MAX_DIGITS = 10


def parse_ladder(values: Sequence[str] | None, profiles: Mapping[str, RopeScaling]) -> tuple[ScalingThreshold, ...]:
    """Steps from any number of `TOKENS=PROFILE`, repeated or with commas between them; raises LoadError naming one."""
    parts = split(list(values or ()))
    if len(parts) > MAX_STEPS:
        raise LoadError(f"{LADDER_OPTION} has {len(parts)} steps: give at most {MAX_STEPS}")
    return tuple(_parse_threshold(part, profiles) for part in parts)


def _parse_threshold(part: str, profiles: Mapping[str, RopeScaling]) -> ScalingThreshold:
    tokens, equals, name = (piece.strip() for piece in part.partition("="))
    plain = tokens.isascii() and tokens.isdigit() and len(tokens) <= _MAX_DIGITS
    if not equals or not plain or not name or int(tokens) < 1:
        raise LoadError(
            f"{LADDER_OPTION} must be TOKENS=PROFILE, several with commas, such as {EXAMPLE}; got {part[:60]!r}"
        )
    if name in profiles:
        if name == _NONE:
            raise LoadError(
                f"{LADDER_OPTION} {part}: none is the model as it is, and a --rope-profile too: rename that"
            )
        return ScalingThreshold(int(tokens), profiles[name], name)
    if name == _NONE:
        return ScalingThreshold(int(tokens))
    raise LoadError(
        f"{LADDER_OPTION} {part[:60]}: no --rope-profile has that name{did_you_mean(name, [*profiles, _NONE])}; none is the "
        "model as it is"
    )


_LORA_OPTION = "--lora"

NAME_RULE = "1 to 128 letters, digits, dots, hyphens, underscores and slashes, a letter or digit first"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")


def is_adapter_name(name: str) -> bool:
    """Whether an adapter may have this name."""
    return _NAME.fullmatch(name) is not None


def parse_adapters(values: list[str] | None) -> tuple[AdapterSource, ...]:
    """Adapters from any number of NAME=DIR, numbered from 1 on; raises LoadError naming one."""
    found: dict[str, AdapterSource] = {}
    for value in split(values):
        name, equals, path = value.partition("=")
        if not equals or not path:
            raise LoadError(f"{_LORA_OPTION} must be NAME=DIR such as poet=adapters/poet, got {value[:80]!r}")
        if not is_adapter_name(name):
            raise LoadError(f"{_LORA_OPTION} {name[:80]!r}: a name has {NAME_RULE}")
        if name in found:
            raise LoadError(f"{_LORA_OPTION} {name} is given twice: keep one")
        try:
            directory = Path(path).expanduser().absolute()
            is_directory = directory.is_dir()
        except (OSError, RuntimeError, ValueError) as error:
            raise LoadError(f"{_LORA_OPTION} {name}: {error}: give a directory") from None
        if not is_directory:
            raise LoadError(f"{_LORA_OPTION} {name}: {path} is no directory: give one as PEFT writes it")
        found[name] = AdapterSource(len(found) + 1, name, str(directory))
    return tuple(found.values())
