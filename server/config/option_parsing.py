"""Parsing of options: their spelling, environment variables, the configuration file, and hints for options of other servers."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
import yaml  # type: ignore[import-untyped]  # stubs are a package of their own

from windlass.engine.errors import LoadError, did_you_mean, nearest
from windlass.engine.interface.config import parse_dtype, parse_size

LOG_FORMATS = ("text", "json")

MAX_TEMPLATE_BYTES = 1024 * 1024

_TOKENS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}

_MIN_BARE_BYTES = 1 << 20

MAX_SECONDS = 1e9  # a system's clocks count a little further

_LOG_LEVELS = ("debug", "info", "warning", "error")

Choice = TypeVar("Choice", bound=str)


def option(
    *names: str,
    help: str,
    panel: str | None = None,
    metavar: str | None = None,
    parser: Callable[[str], Any] | None = None,
) -> Any:
    """A typer option that also reads WINDLASS_<FIRST NAME>. parser: makes its value of what is written."""
    variable = "WINDLASS_" + names[0].split("/")[0].removeprefix("--").replace("-", "_").upper()
    return typer.Option(*names, help=help, envvar=variable, rich_help_panel=panel, metavar=metavar, parser=parser)


def tokens_option(name: str, *, help: str, panel: str, auto: bool = False) -> Any:
    """An option that is a number of tokens. auto: it may be the word, too, for what holds without the option."""
    return option(name, help=help, panel=panel, metavar="TOKENS", parser=_read_tokens_or_auto if auto else _read_tokens)


ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A name that `windlass models` lists, a directory of a Hugging Face model, a GGUF file, or a hub id such as "
        "Qwen/Qwen3-0.6B. Default: smollm2, downloaded the first time; where that cannot be had, the bundled model.",
        envvar="WINDLASS_MODEL",
        show_default=False,
    ),
]

ModelOption = Annotated[
    str | None,
    option(
        "--model", help="A known name, a directory, a GGUF file or a hub id. Default: smollm2, else the bundled model."
    ),
]

LogLevel = Annotated[str, option("--log-level", help=f"{', '.join(_LOG_LEVELS)}.")]


def check_log_level(level: str) -> str:
    """The level in lower case; raises LoadError for an unknown one."""
    return check_choice("--log-level", level.lower(), _LOG_LEVELS)


def check_choice(name: str, value: str, known: Sequence[Choice]) -> Choice:
    """The value, which is one of those known; raises LoadError."""
    for choice in known:
        if value == choice:
            return choice
    *others, last = known
    raise LoadError(f"{name} must be {', '.join(others)} or {last}, got {value!r}{did_you_mean(value, known)}")


def read_dtype(name: str, value: str, parse: Callable[[str], str] = parse_dtype) -> str:
    try:
        return parse(value)
    except LoadError as error:
        raise LoadError(f"{name}: {error}") from error


def _read_tokens(text: str | int) -> int:
    """A number of tokens, as vLLM writes them too: 8192, 8k (8,000) or 8K (8,192)."""
    match = re.fullmatch(r"\s*(-?\d{1,18})(\.\d{1,18})?([kmgKMG]?)\s*", str(text))
    if match is None or (match[2] and match[3] not in ("k", "m", "g")):
        raise typer.BadParameter(
            f"cannot read {str(text)[:64]!r} as tokens: write for example 8192, 8k (8,000) or 8K (8,192)"
        )
    return int(Decimal(match[1] + (match[2] or "")) * _TOKENS[match[3]])


def _read_tokens_or_auto(text: str | int) -> int | None:
    """None for auto, which is what holds without the option."""
    return None if str(text).strip().lower() == "auto" else _read_tokens(text)


def read_size(name: str, value: str) -> int:
    try:
        return parse_size(value)
    except LoadError as error:
        raise LoadError(f"{name}: {error}") from error


def read_memory(name: str, value: str) -> int:
    """A size of memory: one that was meant in GiB is not taken for bytes. Raises LoadError."""
    size = read_size(name, value)
    if size < _MIN_BARE_BYTES and (number := value.strip()).isdecimal():
        raise LoadError(f"{name}: {number} is {number} bytes: write {number}{'GiB' if size < 1024 else 'MiB'}")
    return size


def check_seconds(name: str, value: float | None, *, allow_zero: bool = True, allow_infinite: bool = False) -> None:
    """LoadError for a length of time that is none, or that no clock counts. zero, endless: whether it may be 0, or inf."""
    if value is None or (allow_infinite and value == math.inf):
        return
    if not (0 <= value <= MAX_SECONDS and (allow_zero or value > 0)):
        least, most = ("0 or more" if allow_zero else "more than 0"), (" or inf" if allow_infinite else "")
        raise LoadError(f"{name} must be {least} seconds, at most {MAX_SECONDS:g}{most}, got {value:g}")


def read_template_file(name: str, path: Path) -> str:
    """The text of a file with a template; raises LoadError for one that cannot be read or is too large."""
    try:
        if path.stat().st_size > MAX_TEMPLATE_BYTES:
            raise LoadError(f"{name} {path} is larger than {MAX_TEMPLATE_BYTES} bytes")
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"cannot read {name} {path}: {error}") from None


def split(values: list[str] | None) -> list[str]:
    """Repeated options and comma-separated lists alike."""
    return [part.strip() for value in values or [] for part in value.split(",") if part.strip()]


def to_arguments(options: Any) -> list[str]:
    """The command line that gives the same options to another process: those of a dataclass that are not at their default."""
    arguments: list[str] = []
    for field in fields(options):
        value, name = getattr(options, field.name), field.name.replace("_", "-")
        if value == field.default:
            continue
        if isinstance(value, bool):
            arguments.append(f"--{name}" if value else f"--no-{name}")
        else:
            arguments += [f"--{name}={item}" for item in (value if isinstance(value, list) else [value])]
    return arguments


MODEL = "Model and weights"

CONTEXT = "Context and cache"

BATCHING = "Batching and processors"

ROTARY = "Rotary scaling"

ADAPTERS = "LoRA adapters"

SPECULATION = "Speculative decoding"

NETWORK = "Network"

ACCESS = "Access"

ANSWERS = "Requests and answers"

OPERATION = "Operation"

CONNECTIONS = "Connections"

CLUSTER = "Cluster"

MAX_BYTES = 1024 * 1024

_Value = str | list[str]

_EMPTY = ("", "~", "null", "Null", "NULL")

# Older typers use click's exceptions, newer ones their own copy of them.
_BadParameter: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "UsageError")


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """In objects `1e6` is a number, as in JSON and YAML 1.2: to YAML 1.1 it is a word unless it is spelt `1.0e+6`."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"), list("-+.0123456789")
)


def load_config_file(context: typer.Context, path: Path | None) -> None:
    """Let the file stand for what neither the command line nor the environment says; raises LoadError, one line."""
    if path is None or context.resilient_parsing:
        return
    parameters = {name: found for found in context.command.params if (name := found.name) and name != "config"}
    values: dict[str, _Value] = {}
    for line, key, node in _entries(path):
        where = f"{path}, line {line}"
        parameter: Any = parameters.get(key.replace("-", "_"))
        if parameter is None:
            known = [name.replace("_", "-") for name in parameters]
            ours = foreign_option_hint(context, "--" + key.replace("_", "-"))
            meant = did_you_mean(key[:64], known) if ours is None else f": {ours}"
            raise LoadError(f"{where}: {key[:64]!r} is no option of {context.command_path}{meant}")
        if parameter.name in values:
            raise LoadError(f"{where}: {key} is there twice")
        value = _to_argument(where, key, node, repeatable=bool(getattr(parameter, "multiple", False)))
        if value is not None:
            try:
                parameter.process_value(context, value)
            except _BadParameter as error:
                raise LoadError(f"{where}: {key}: {error.message}") from None
            values[parameter.name] = value
    context.default_map = {**(context.default_map or {}), **values}


def config_option() -> Any:
    """The option; eager, since defaults are looked up as the others are read."""
    made = option(
        "--config",
        metavar="FILE",
        help='A YAML file of options, such as "port: 8001"; the command line and the environment win over it.',
    )
    made.is_eager, made.expose_value, made.callback = True, False, load_config_file
    return made


def _entries(path: Path) -> Iterator[tuple[int, str, Any]]:
    """Line, key and node of each entry. Nodes are not yet values: `off` and `1e3` are kept as they are written."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise LoadError(f"--config {path} is larger than {MAX_BYTES} bytes")
        root = yaml.compose(path.read_text(encoding="utf-8"), _Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"cannot read --config {path}: {error}") from None
    except yaml.YAMLError as error:
        raise LoadError(f"{_location(path, error)}: this is no YAML ({_reason(error)})") from None
    except RecursionError:
        raise LoadError(f"--config {path} is nested too deeply") from None
    if root is None:
        return
    if not isinstance(root, yaml.MappingNode):
        raise LoadError(f"--config {path} must hold options as NAME: VALUE")
    for key, node in root.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise LoadError(f"{path}, line {line}: the name of an option must be a word")
        yield line, key.value, node


def _to_argument(where: str, key: str, node: Any, repeatable: bool) -> _Value | None:
    """A value as the command line would have it; None where the file leaves it empty."""
    if isinstance(node, yaml.ScalarNode):
        if node.style is None and node.value in _EMPTY:
            return None
        return [node.value] if repeatable else str(node.value)
    if not repeatable and isinstance(node, yaml.MappingNode):
        return _json(where, node)
    if not repeatable:
        raise LoadError(f"{where}: {key} takes one value, not a list")
    if isinstance(node, yaml.MappingNode):  # of an option that is spelt NAME=VALUE
        return [f"{name.value}={_text(where, value)}" for name, value in node.value]
    return [_text(where, value) for value in node.value]


def _text(where: str, node: Any) -> str:
    return str(node.value) if isinstance(node, yaml.ScalarNode) else _json(where, node)


def _json(where: str, node: Any) -> str:
    loader = _Loader("")
    try:
        return json.dumps(loader.construct_document(node))
    except (yaml.YAMLError, TypeError, ValueError, RecursionError) as error:
        raise LoadError(f"{where}: this cannot be written as JSON ({_reason(error)})") from None
    finally:
        loader.dispose()


def _location(path: Path, error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    return str(path) if mark is None else f"{path}, line {mark.line + 1}"


def _reason(error: Exception) -> str:
    return str(getattr(error, "problem", None) or error)


_SCALING = '--rope-scaling, an object such as \'{"rope_type": "yarn", "factor": 4}\''

_RENAMED_OPTIONS = {  # theirs, separated by spaces: ours
    # vLLM
    "--enforce-eager": "--no-cuda-graphs",
    "--kv-cache-memory-bytes --num-gpu-blocks-override": "--kv-cache-memory",
    "--enable-prefix-caching": "--prefix-caching, which is on by default",
    "--no-enable-prefix-caching": "--no-prefix-caching",
    "--hf-overrides": "--rope-scaling, the object of rope_parameters alone",
    "--allowed-origins --cors-origins": "--cors-origin",
    "--lora-modules": "--lora",
    "--speculative-config": "--speculative-model, --speculative-mtp or --speculative-ngram",
    "--enable-log-requests": "--access-log, which writes no prompts",
    "--disable-log-stats": "--stats-interval 0",
    "--otlp-traces-endpoint": "--otel-endpoint",
    "--data-parallel-size -dp": "--replicas",
    "--tensor-parallel-size -tp": "--tensor-parallel",
    "--kv-offloading-size": "--kv-host-memory, a size such as 64GiB",
    "--kv-transfer-config": "--kv-host-memory or --kv-persist",
    # llama.cpp
    "-m --model": "--model",
    "-c --ctx-size": "--max-model-len",
    "-np --parallel": "--max-num-seqs",
    "-b -ub --batch-size --ubatch-size": "--max-num-batched-tokens",
    "-t -tb --threads-batch": "--threads",
    "--cpu-mask --cpu-range": "--pin-cores",
    "-ctk -ctv --cache-type-k --cache-type-v": "--kv-cache-dtype",
    "--rope-scale --rope-freq-scale --rope-freq-base --yarn-orig-ctx": _SCALING,
    "--yarn-beta-fast --yarn-beta-slow --yarn-attn-factor": _SCALING,
    "--keep": "--keep-tokens",
    "-n --predict --n-predict": "--default-max-tokens",
    "-a --alias": "--served-model-name",
    "--chat-template-file": "--chat-template",
    "--chat-template-kwargs": "--default-chat-template-kwargs",
    "--reasoning-format": "--reasoning-parser",
    "--api-prefix": "--root-path",
    "--ssl-key-file": "--ssl-keyfile",
    "--ssl-cert-file": "--ssl-certfile",
    "--slot-save-path": "--kv-persist",
    "-to --timeout": "--write-timeout or --request-timeout",
    "-lv -v": "--log-level",
    "--log-jsonl": "--log-format json",
    "-md --model-draft": "--speculative-model",
    "--draft-max --spec-draft-n-max": "--speculative-tokens",
    "--spec-type": "--speculative-mtp (draft-mtp), --speculative-model or --speculative-ngram",
    "--lookup-cache-static --lookup-cache-dynamic": "--speculative-ngram",
}

_REQUEST_FIELDS = {  # theirs: the field of a request
    "--seed": "seed",
    "--temp": "temperature",
    "--top-p": "top_p",
    "--top-k": "top_k",
    "--min-p": "min_p",
    "--repeat-penalty": "repetition_penalty",
    "--presence-penalty": "presence_penalty",
    "--frequency-penalty": "frequency_penalty",
    "--logit-bias": "logit_bias",
    "--ignore-eos": "ignore_eos",
    "--dry-multiplier": "dry_multiplier",
    "--xtc-probability": "xtc_probability",
    "--typical": "typical_p",
    "--grammar": "grammar",
    "--json-schema": "json_schema",
    "--reasoning": "chat_template_kwargs",
    "--reasoning-effort": "reasoning_effort",
    "--reasoning-budget": "thinking_budget",
    "--scheduling-policy": "priority",
}

_SAMPLING_OPTION = "--override-generation-config"  # sets some of these fields where a request does not

_SAMPLING_FIELDS = {"temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty"}

_ALTERNATIVES = {  # theirs: what to do
    "-m": "name the model without an option, as in windlass serve MODEL",
    "--revision": "name it with the model, as org/name@REV",
    "--download-dir": "set HF_HOME",
    "--offline": "set HF_HUB_OFFLINE=1",
    "--log-file": "the log goes to standard error",
    "--models-dir --models-max": "one model per server",
}

_UNNEEDED_OPTIONS = {  # theirs: why it can be left out
    # vLLM
    "--enable-chunked-prefill": "prompts are always cut into pieces",
    "--compilation-config": "models are not compiled",
    "--swap-space --cpu-offload-gb": "a request that gives up its place is computed again",
    "--enable-lora": "--lora NAME=DIR is enough",
    "--enable-auto-tool-choice": "calls of tools are always read",
    "--tokenizer --tokenizer-mode": "the tokenizer lies beside the weights",
    "--runner --convert --task": "every model makes vectors, and generates if it can",
    "--max-logprobs": "a request may ask for up to 20 of a token",
    "--structured-outputs-config --guided-decoding-backend": "structured output is always there",
    "--disable-log-requests": "requests are not logged, unless --access-log asks for a line of each",
    "--disable-fastapi-docs": "the pages hold nothing of the server",
    "--enable-request-id-headers": "X-Request-Id is always sent",
    "--enable-server-load-tracking": "GET /metrics and windlass top always tell",
    "--limit-mm-per-prompt --mmproj": "it is text only here",
    "--pipeline-parallel-size -pp": "a model runs on one machine",
    "--trust-remote-code": "no code of a model is ever run",
    # llama.cpp
    "--mlock --no-mmap --load-mode --numa --repack": "weights are read once into memory",
    "-fit": "`windlass size` tells what fits",
    "-ngl --n-gpu-layers --gpu-layers -sm -ts -mg -ot --cpu-moe --kv-offload --rpc": "a model lies on one device, all of it",
    "-cram --kv-unified --ctx-checkpoints --swa-full": "one cache is for all, of --kv-cache-memory",
    "-fa --flash-attn --jinja --metrics --cont-batching --cache-prompt --warmup": "always so",
    "--context-shift": "--context-overflow shift is what does it",
    "--override-kv --control-vector --lora-scaled --prio": "there is nothing like it",
    "--samplers --mirostat --dynatemp-range --top-n-sigma --adaptive-target": "there is nothing like it",
    "--check-tensors": "sizes and names are always checked",
    "--slots --props": "GET /v1/cache and GET /v1/models are there",
    "--threads-http": "one process answers all",
    "--tools --mcp-servers-config": "no tool is ever run here",
    "--embedding --reranking": "they are always there",
}

_COMMANDS = {
    "run": "here it is `windlass chat`",
    "list ls": "here it is `windlass models`",
    "ps": "here it is `windlass top`, of a server",
    "show": "here it is `windlass size`, and GET /v1/models of a server",
    "create": "a model is served as it is: `windlass serve --config FILE` takes what a Modelfile sets",
    "rm": "remove the file that `windlass models` shows",
    "stop": "a server ends with ctrl-C or SIGTERM",
}

_NAMED = re.compile(r"(?<!\S)--[a-z][a-z-]*")


def foreign_option_hint(context: Any, given: str) -> str | None:
    """What another server's option or command is called here, or that it is not needed; None for any other name."""
    if not given.startswith("-"):
        return _find(_COMMANDS, given) if context.parent is None else None
    known = {name for parameter in context.command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    if (ours := _find(_RENAMED_OPTIONS, given)) and known.issuperset(_NAMED.findall(ours)):
        return f"here it is {ours}"
    if field := _find(_REQUEST_FIELDS, given):
        option = "--" + field.replace("_", "-")
        for_all = (
            f"; {_SAMPLING_OPTION} sets it for those without"
            if field in _SAMPLING_FIELDS and _SAMPLING_OPTION in known
            else ""
        )
        return f"here it is {option}" if option in known else f"here it is a field of a request, {field}{for_all}"
    if why := _find(_UNNEEDED_OPTIONS, given):
        return f"{why}: leave it out" if known.issuperset(_NAMED.findall(why)) else "leave it out"
    return _find(_ALTERNATIVES, given)


def _find(table: dict[str, str], given: str) -> str | None:
    return next((what for names, what in table.items() if given in names.split()), None)


_PREFIX = "WINDLASS_"

# What is no option: a folder, a processor's instructions, the address that clients use, a key for them.
_OTHER_VARIABLES = {
    "WINDLASS_CACHE",
    "WINDLASS_CPU_ISA",
    "WINDLASS_BASE_URL",
    "WINDLASS_API_KEY",
    "WINDLASS_CLIENT_KEY",
}


def misspelled_variables(program: Any, environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Each variable that no command of the program (a group of commands) reads, and the one that is near to it.

    One that is near to none is somebody else's: whoever runs a service of this name is given such variables by Kubernetes.
    """
    known = _OTHER_VARIABLES | set(_variables(program))
    plain = {name.removeprefix(_PREFIX): name for name in known}
    for name in sorted(environment):
        if name.startswith(_PREFIX) and name not in known and (near := nearest(name.removeprefix(_PREFIX), plain)):
            yield name, plain[near]


def _variables(command: Any) -> Iterator[str]:
    for parameter in command.params:
        if isinstance(variable := parameter.envvar, str):
            yield variable
    for inner in getattr(command, "commands", {}).values():
        yield from _variables(inner)
