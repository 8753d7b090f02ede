"""Command-line options as dataclasses: written once, taken by every command, each also an environment variable.

Knows how options are spelt and turns them into the engine's and the server's configuration. It starts nothing, and
imports neither torch nor fastapi.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast, get_args

import typer

from windlass.engine.api.config import (
    EngineConfig,
    LoadFormat,
    Quantization,
    parse_cache_dtype,
    parse_dtype,
    parse_size,
)
from windlass.engine.core.threads import split_cores
from windlass.engine.errors import LoadError, did_you_mean
from windlass.engine.rotary.policy import ROPE_UPDATES, RopeUpdate
from windlass.engine.rotary.scaling import RopeScaling
from windlass.server.generation.profiles import is_profile_name, parse_profiles
from windlass.server.options.engine_names import flat_names, from_flat
from windlass.server.startup.settings import RopePolicy, ServerSettings

_LOG_LEVELS = ("debug", "info", "warning", "error")
_ROPE_POLICIES = ("allow", "profiles", "off")
_LOAD_FORMATS: tuple[LoadFormat, ...] = get_args(LoadFormat)
_QUANTIZATIONS: tuple[Quantization, ...] = get_args(Quantization)

Choice = TypeVar("Choice", bound=str)

_engine = "Engine options"
_server = "Server options"


def option(*names: str, help: str, panel: str | None = None, metavar: str | None = None) -> Any:
    """A typer option that also reads WINDLASS_<FIRST NAME>."""
    variable = "WINDLASS_" + names[0].split("/")[0].removeprefix("--").replace("-", "_").upper()
    return typer.Option(*names, help=help, envvar=variable, rich_help_panel=panel, metavar=metavar)


ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="Directory of a Hugging Face model, or a hub id such as Qwen/Qwen3-0.6B. Default: the bundled model.",
        envvar="WINDLASS_MODEL",
        show_default=False,
    ),
]
ModelOption = Annotated[str | None, option("--model", help="Directory or hub id. Default: the bundled model.")]


@dataclass(slots=True, kw_only=True)
class EngineOptions:
    """What a command that starts an engine takes."""

    device: Annotated[str, option("--device", panel=_engine, help="cpu, cuda, cuda:1 or auto.")] = "auto"
    dtype: Annotated[str, option("--dtype", panel=_engine, help="auto, float32, bfloat16 or float16.")] = "auto"
    kv_cache_dtype: Annotated[
        str, option("--kv-cache-dtype", panel=_engine, help="The same for cached keys and values, or int8.")
    ] = "auto"
    quantization: Annotated[
        str,
        option("--quantization", panel=_engine, help="Weights of fewer bits, quantized while they load: none, int8 or "
               "int4. Less memory and more speed on a CPU for a small loss of quality."),
    ] = "none"  # fmt: skip
    weight_cache: Annotated[
        str | None,
        option("--weight-cache", panel=_engine, metavar="DIR", help="Keep quantized weights in this folder for the next "
               "start, which then need not quantize them again; beside: in the model's own directory. Default: nowhere."),
    ] = None  # fmt: skip
    load_format: Annotated[
        str, option("--load-format", panel=_engine, help="safetensors, or dummy: random weights, for benchmarks.")
    ] = "safetensors"
    max_model_len: Annotated[
        int | None,
        option("--max-model-len", panel=_engine, help="Longest prompt and output together, in tokens. May exceed the "
               "model's own length (see --rope-scaling). Default: the model's own, if it fits."),
    ] = None  # fmt: skip
    max_num_batched_tokens: Annotated[
        int, option("--max-num-batched-tokens", panel=_engine, help="Token budget of one step.")
    ] = 2048
    max_num_seqs: Annotated[int, option("--max-num-seqs", panel=_engine, help="Sequences that run at once.")] = 64
    max_waiting: Annotated[
        int, option("--max-waiting", panel=_engine, help="Requests that may wait; more are refused with 429.")
    ] = 1024
    kv_cache_memory: Annotated[
        str | None,
        option("--kv-cache-memory", panel=_engine, metavar="SIZE", help="Memory for cached keys and values: 4GiB."),
    ] = None
    block_size: Annotated[int, option("--block-size", panel=_engine, help="Tokens per cache block.")] = 16
    prefix_caching: Annotated[
        bool,
        option("--prefix-caching/--no-prefix-caching", panel=_engine, help="Reuse the cache of equal prompt starts."),
    ] = True
    rope_scaling: Annotated[
        str | None,
        option("--rope-scaling", panel=_engine, metavar="JSON",
               help='Rotary scaling in Hugging Face\'s names: \'{"rope_type": "yarn", "factor": 4}\'; or the name of '
               "a profile."),
    ] = None  # fmt: skip
    rope_profile: Annotated[
        list[str] | None,
        option("--rope-profile", panel=_engine, metavar="NAME=JSON",
               help="A scaling that requests may use by its name; repeatable. The variable may hold an object of "
               'several: \'{"long": {"rope_type": "yarn", "factor": 4}}\'.'),
    ] = None  # fmt: skip
    rope_update: Annotated[
        str | None,
        option("--rope-update", panel=_engine, help="When frequencies that depend on length change, for requests that "
               "do not say: frozen (never), recompute (with the cache), rotate (cached keys are turned). Default: "
               "recompute for longrope, else frozen."),
    ] = None  # fmt: skip
    deterministic: Annotated[
        bool,
        option("--deterministic/--no-deterministic", panel=_engine, help="The same greedy tokens whatever else runs "
               "and however prompts are cut. Costs speed, mostly with long prompts and many requests at once."),
    ] = False  # fmt: skip
    speculative_ngram: Annotated[
        int,
        option("--speculative-ngram", panel=_engine, metavar="K", help="Speculative decoding by prompt lookup: a stream "
               "proposes up to K tokens per step that followed its last tokens before; those the model would have "
               "drawn itself are kept. Answers stay the same. 0: off; 4 is a good value."),
    ] = 0  # fmt: skip
    speculative_ngram_min: Annotated[
        int,
        option("--speculative-ngram-min", panel=_engine, help="So many of a stream's last tokens must have stood before."),
    ] = 2  # fmt: skip
    speculative_ngram_max: Annotated[
        int,
        option("--speculative-ngram-max", panel=_engine, help="Of several such places the one where most tokens agree "
               "counts, up to this many."),
    ] = 4  # fmt: skip
    threads: Annotated[int | None, option("--threads", panel=_engine, help="CPU threads for the model.")] = None
    pin_cores: Annotated[
        bool,
        option("--pin-cores/--no-pin-cores", panel=_engine, help="Keep the engine and the HTTP server off each other's "
               "cores: the server gets one, the engine the rest."),
    ] = False  # fmt: skip
    target_step_ms: Annotated[
        float,
        option("--target-step-ms", panel=_engine, help="Prompts are cut so that a step beside running streams stays "
               "under this many milliseconds; 0: no bound."),
    ] = 250.0  # fmt: skip

    def parse_rope_scaling(self) -> RopeScaling | None:
        """From JSON or a profile's name; raises LoadError or RequestError that names the field at fault."""
        if self.rope_scaling is None:
            return None
        profiles = self.profiles()
        if self.rope_scaling in profiles:
            return profiles[self.rope_scaling]
        if self.names_profile():
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

    def names_profile(self) -> bool:
        """Whether --rope-scaling is a name rather than JSON."""
        return self.rope_scaling is not None and is_profile_name(self.rope_scaling)

    def profiles(self) -> dict[str, RopeScaling]:
        """The declared profiles; raises LoadError or RequestError that names the one at fault."""
        return parse_profiles(self.rope_profile or [])

    def parse_rope_update(self) -> RopeUpdate | None:
        """Raises LoadError for an unknown policy."""
        return None if self.rope_update is None else _choose("--rope-update", self.rope_update, ROPE_UPDATES)

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
        _choose("--load-format", self.load_format, _LOAD_FORMATS)
        _choose("--quantization", self.quantization, _QUANTIZATIONS)
        if self.target_step_ms < 0:
            raise LoadError(f"--target-step-ms must not be negative, got {self.target_step_ms:g}")
        self.profiles()
        parsed = {
            "dtype": _dtype("--dtype", self.dtype),
            "kv_cache_dtype": _dtype("--kv-cache-dtype", self.kv_cache_dtype, parse_cache_dtype),
            "weight_cache": self._weight_cache(),
            "kv_cache_memory": None
            if self.kv_cache_memory is None
            else _size("--kv-cache-memory", self.kv_cache_memory),
            "rope_scaling": self.parse_rope_scaling(),
            "rope_update": self.parse_rope_update(),
            "cores": split_cores()[0] if self.pin_cores else None,
            "target_step_seconds": self.target_step_ms / 1000,
        }
        as_given = {name: getattr(self, name) for name in flat_names().values() if hasattr(self, name)}
        return from_flat(str(model), as_given | parsed)


_ROPE_EXAMPLE = '\'{"rope_type": "yarn", "factor": 4}\''


@dataclass(slots=True, kw_only=True)
class ServerOptions:
    """What `windlass serve` takes beside the engine's options."""

    host: Annotated[str, option("--host", panel=_server, help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1"
    port: Annotated[int, option("--port", panel=_server, help="Port to listen on; 0 takes a free one.")] = 8000
    served_model_name: Annotated[
        str | None,
        option("--served-model-name", panel=_server, help="The model's id in the API. Default: its directory's name."),
    ] = None
    api_key: Annotated[
        list[str] | None,
        option("--api-key", panel=_server, help="A key that clients must send; repeat it, or separate several by "
               "commas. Command lines are visible to other users: prefer the variable or --api-key-file."),
    ] = None  # fmt: skip
    api_key_file: Annotated[
        Path | None, option("--api-key-file", panel=_server, help="A file with one key a line; # starts a comment.")
    ] = None
    cors_origin: Annotated[
        list[str] | None,
        option("--cors-origin", panel=_server, help="Origin whose pages may call the API, such as "
               "https://example.org; repeatable or comma separated. Default: none."),
    ] = None  # fmt: skip
    default_max_tokens: Annotated[
        int, option("--default-max-tokens", panel=_server, help="Longest answer of a chat that sets no max_tokens.")
    ] = 1024
    max_response_bytes: Annotated[
        str,
        option("--max-response-bytes", panel=_server, metavar="SIZE", help="Largest answer that is not streamed; what could "
               "become larger is refused before it is generated."),
    ] = "64MiB"  # fmt: skip
    request_timeout: Annotated[
        float | None,
        option("--request-timeout", panel=_server, help="Deadline in seconds of requests that set none."),
    ] = None
    grace_period: Annotated[
        float,
        option("--grace-period", panel=_server, help="Seconds running streams may go on after SIGTERM or ctrl-C."),
    ] = 30.0
    rope_policy: Annotated[
        str,
        option("--rope-policy", panel=_server, help="What requests may set of rotary scaling: allow (anything), profiles "
               "(names of --rope-profile only) or off (nothing)."),
    ] = "allow"  # fmt: skip
    rope_exact: Annotated[
        bool,
        option("--rope-exact/--no-rope-exact", panel=_server, help="Let requests ask for exact recomputing: their whole "
               "context is computed again for every token past the model's length, which takes much work."),
    ] = False  # fmt: skip
    access_log: Annotated[
        bool, option("--access-log/--no-access-log", panel=_server, help="Log a line per HTTP request.")
    ] = False

    def to_settings(self, model_name: str, engine: EngineOptions | None = None) -> ServerSettings:
        """The HTTP side's settings; raises LoadError or RequestError that names the option at fault.

        engine: options the two sides share, None for their defaults.
        """
        engine = engine or EngineOptions()
        _choose("--rope-policy", self.rope_policy, _ROPE_POLICIES)
        if not 0 <= self.port <= 65535:
            raise LoadError(f"--port must lie between 0 and 65535, got {self.port}")
        if self.default_max_tokens < 1:
            raise LoadError(f"--default-max-tokens must be at least 1, got {self.default_max_tokens}")
        if self.grace_period < 0:
            raise LoadError(f"--grace-period must not be negative, got {self.grace_period:g}")
        if self.request_timeout is not None and self.request_timeout <= 0:
            raise LoadError(f"--request-timeout must be more than 0 seconds, got {self.request_timeout:g}")
        return ServerSettings(
            served_model_name=self.served_model_name or model_name,
            api_keys=self._api_keys(),
            cors_origins=tuple(split(self.cors_origin)),
            default_max_tokens=self.default_max_tokens,
            max_response_bytes=_size("--max-response-bytes", self.max_response_bytes),
            default_timeout=self.request_timeout,
            grace_seconds=self.grace_period,
            rope_profiles=engine.profiles(),
            rope_policy=cast(RopePolicy, self.rope_policy),
            rope_update=engine.parse_rope_update(),
            rope_exact=self.rope_exact,
        )

    def _api_keys(self) -> tuple[str, ...]:
        keys = split(self.api_key)
        if self.api_key and not keys:
            raise LoadError("--api-key is empty: give a key, or leave the option out to ask for none")
        if self.api_key_file is not None:
            try:
                lines = self.api_key_file.read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise LoadError(f"cannot read --api-key-file {self.api_key_file}: {error}") from error
            found = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
            # An empty file must not open the server to everybody.
            if not found:
                raise LoadError(f"--api-key-file {self.api_key_file} holds no key: write one key a line")
            keys += found
        return tuple(dict.fromkeys(keys))


LogLevel = Annotated[str, option("--log-level", help=f"{', '.join(_LOG_LEVELS)}.")]


def check_log_level(level: str) -> str:
    """The level in lower case; raises LoadError for an unknown one."""
    return _choose("--log-level", level.lower(), _LOG_LEVELS)


def _choose(name: str, value: str, known: Sequence[Choice]) -> Choice:
    """The value, which is one of those known; raises LoadError."""
    for choice in known:
        if value == choice:
            return choice
    *others, last = known
    raise LoadError(f"{name} must be {', '.join(others)} or {last}, got {value!r}{did_you_mean(value, known)}")


def _dtype(name: str, value: str, parse: Callable[[str], str] = parse_dtype) -> str:
    try:
        return parse(value)
    except LoadError as error:
        raise LoadError(f"{name}: {error}") from error


def _size(name: str, value: str) -> int:
    try:
        return parse_size(value)
    except LoadError as error:
        raise LoadError(f"{name}: {error}") from error


def split(values: list[str] | None) -> list[str]:
    """Repeated options and comma-separated lists alike."""
    return [part.strip() for value in values or [] for part in value.split(",") if part.strip()]
