"""Options of `windlass serve` and `windlass ray deploy` besides the engine's, and the settings that they make."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn, cast

from windlass.engine.errors import LoadError, did_you_mean
from windlass.server.config.api_keys import read_key_file
from windlass.server.config.engine_options import EngineOptions
from windlass.server.config.option_parsing import (
    ACCESS,
    ADAPTERS,
    ANSWERS,
    BATCHING,
    CLUSTER,
    CONNECTIONS,
    CONTEXT,
    MAX_SECONDS,
    MODEL,
    NETWORK,
    OPERATION,
    ROTARY,
    check_choice,
    check_seconds,
    option,
    read_size,
    read_template_file,
    split,
)
from windlass.server.config.settings import (
    ContextOverflow,
    MetricsNames,
    RecordSettings,
    RopePolicy,
    ServerSettings,
)

_CONTEXT_OVERFLOWS = ("stop", "error", "shift", "drop_turns")

_ROPE_POLICIES = ("allow", "profiles", "off")

_METRICS_NAMES = ("windlass", "vllm", "both")

REASONING_PARSERS = ("auto", "deepseek_r1", "qwen3", "granite", "gemma4", "gpt_oss", "none")

# Options know no formats: a test compares this list with them.
TOOL_CALL_PARSERS = (
    "hermes",
    "qwen3_coder",
    "llama3_json",
    "lfm2",
    "pythonic",
    "mistral",
    "mistral_args",
    "harmony",
    "deepseek_v3",
    "deepseek_v31",
    "gemma4",
    "granite",
    "plain_json",
)


@dataclass(slots=True, kw_only=True)
class ServerOptions:
    """What `windlass serve` takes beside the engine's options."""

    host: Annotated[str, option("--host", panel=NETWORK, help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1"
    port: Annotated[int, option("--port", panel=NETWORK, help="Port to listen on; 0 takes a free one.")] = 8000
    uds: Annotated[
        Path | None,
        option(
            "--uds",
            panel=NETWORK,
            metavar="PATH",
            help="Listen on a Unix socket at this path instead, for the owner and group of this process.",
        ),
    ] = None
    ssl_certfile: Annotated[
        Path | None,
        option(
            "--ssl-certfile",
            panel=NETWORK,
            metavar="FILE",
            help="Speak HTTPS with this certificate (PEM, its chain behind it).",
        ),
    ] = None
    ssl_keyfile: Annotated[
        Path | None,
        option(
            "--ssl-keyfile",
            panel=NETWORK,
            metavar="FILE",
            help="The certificate's key. Default: in --ssl-certfile.",
        ),
    ] = None
    ssl_keyfile_password: Annotated[
        str | None,
        option(
            "--ssl-keyfile-password",
            panel=NETWORK,
            help="The key's password. Command lines are visible to other users: prefer the variable.",
        ),
    ] = None
    ssl_ca_certs: Annotated[
        Path | None,
        option(
            "--ssl-ca-certs",
            panel=NETWORK,
            metavar="FILE",
            help="Ask clients for a certificate that one of these has signed.",
        ),
    ] = None
    served_model_name: Annotated[
        list[str] | None,
        option(
            "--served-model-name",
            panel=MODEL,
            help="The model's id in the API; repeatable or comma separated: answers "
            "have the first, requests may use any. Default: its directory's name.",
        ),
    ] = None
    chat_template: Annotated[
        Path | None,
        option(
            "--chat-template",
            panel=ANSWERS,
            metavar="FILE",
            help="A chat template (Jinja) in place of the model's own.",
        ),
    ] = None
    rerank_tokens: Annotated[
        list[str] | None,
        option(
            "--rerank-tokens",
            panel=ANSWERS,
            metavar="NO,YES",
            help="Rank documents by which of these tokens the model "
            "goes on with, such as no,yes; one alone: by that one's logit. Default: what the model's files say.",
        ),
    ] = None
    rerank_template: Annotated[
        str | None,
        option(
            "--rerank-template",
            panel=ANSWERS,
            metavar="FILE",
            help="The prompt of a query and a document (Jinja), or "
            "qwen3: that of Qwen3-Reranker. Default: the model's chat template, where it takes both.",
        ),
    ] = None
    generation_config: GenerationConfig = "auto"
    override_generation_config: OverrideGenerationConfig = None
    default_chat_template_kwargs: Annotated[
        str | None,
        option(
            "--default-chat-template-kwargs",
            panel=ANSWERS,
            metavar="JSON",
            help="Variables of the chat template, for "
            "requests that do not give them, such as '{\"enable_thinking\": false}'.",
        ),
    ] = None
    root_path: Annotated[
        str,
        option(
            "--root-path",
            panel=NETWORK,
            metavar="PATH",
            help="Where a proxy has put this server, such as /llm; the proxy may take it off the path or leave it on.",
        ),
    ] = ""
    api_key: Annotated[
        list[str] | None,
        option(
            "--api-key",
            panel=ACCESS,
            help="A key that clients must send; repeat it, or separate several by "
            "commas. Command lines are visible to other users: prefer the variable or --api-key-file.",
        ),
    ] = None
    api_key_file: Annotated[
        Path | None,
        option("--api-key-file", panel=ACCESS, help="A file with one key a line; # starts a comment."),
    ] = None
    api_keys: Annotated[
        Path | None,
        option(
            "--api-keys",
            panel=ACCESS,
            metavar="FILE",
            help="Named keys with limits (TOML): rates, concurrency, shares, "
            "priorities, and who may administer. Read again on SIGHUP.",
        ),
    ] = None
    attention_maps: Annotated[
        bool,
        option(
            "--attention-maps/--no-attention-maps",
            panel=ACCESS,
            help="Answer /v1/attention, which shows what a layer "
            "attends to in a short text; other requests wait meanwhile. Of named keys only administrators' may ask.",
        ),
    ] = False
    cors_origin: Annotated[
        list[str] | None,
        option(
            "--cors-origin",
            panel=ACCESS,
            help="Origin whose pages may call the API, such as "
            "https://example.org; repeatable or comma separated. Default: none.",
        ),
    ] = None
    default_max_tokens: Annotated[
        int,
        option("--default-max-tokens", panel=ANSWERS, help="Longest answer of a chat that sets no max_tokens."),
    ] = 1024
    max_response_bytes: Annotated[
        str,
        option(
            "--max-response-bytes",
            panel=ANSWERS,
            metavar="SIZE",
            help="Largest answer that is not streamed; what could become larger is refused before it is generated.",
        ),
    ] = "64MiB"
    response_store: Annotated[
        str,
        option(
            "--response-store",
            panel=ANSWERS,
            metavar="SIZE",
            help="What is kept in memory of answers of /v1/responses, for "
            "requests that go on from them; 0: nothing. The oldest are forgotten.",
        ),
    ] = "64MiB"
    reasoning_parser: Annotated[
        str,
        option(
            "--reasoning-parser",
            panel=ANSWERS,
            help="How the model marks its thinking, which chats answer apart from "
            "the content: deepseek_r1, qwen3, granite, gemma4, gpt_oss, none, or auto (as its chat template does).",
        ),
    ] = "auto"
    request_timeout: Annotated[
        float | None,
        option("--request-timeout", panel=ANSWERS, help="Deadline in seconds of requests that set none."),
    ] = None
    grace_period: Annotated[
        float,
        option("--grace-period", panel=OPERATION, help="Seconds running streams may go on after SIGTERM or ctrl-C."),
    ] = 30.0
    tool_call_parser: Annotated[
        str,
        option(
            "--tool-call-parser",
            panel=ANSWERS,
            help="The format in which the model writes calls: auto (the one its chat "
            f"template teaches), none (calls are left in the text), {', '.join(TOOL_CALL_PARSERS)}.",
        ),
    ] = "auto"
    context_overflow: Annotated[
        str,
        option(
            "--context-overflow",
            panel=CONTEXT,
            help="What becomes of requests that are longer than the context: stop (the "
            "answer ends there), error (they are refused), shift (the oldest tokens are dropped and it goes on) or drop_turns "
            "(chats lose their oldest turns).",
        ),
    ] = "stop"
    keep_tokens: Annotated[
        int | None,
        option(
            "--keep-tokens",
            panel=CONTEXT,
            help="Leading tokens that shift never drops, in whole blocks. Default: a chat's system prompt, else 16.",
        ),
    ] = None
    attention_window: Annotated[
        int | None,
        option(
            "--attention-window",
            panel=CONTEXT,
            help="Tokens that each token sees, itself included. Default: all.",
        ),
    ] = None
    cache_reuse: Annotated[
        int,
        option(
            "--cache-reuse",
            panel=CONTEXT,
            metavar="N",
            help="Cached passages of at least N tokens are used wherever they "
            "stood, in requests that do not say. 0: only equal beginnings are.",
        ),
    ] = 0
    attention_sinks: Annotated[
        int,
        option("--attention-sinks", panel=CONTEXT, help="Leading tokens that are seen beside the attention window."),
    ] = 0
    rope_policy: Annotated[
        str,
        option(
            "--rope-policy",
            panel=ROTARY,
            help="What requests may set of rotary scaling: allow (anything), profiles "
            "(names of --rope-profile only) or off (nothing).",
        ),
    ] = "allow"
    rope_exact: Annotated[
        bool,
        option(
            "--rope-exact/--no-rope-exact",
            panel=ROTARY,
            help="Let requests ask for exact recomputing: their whole "
            "context is computed again for every token past the model's length, which takes much work.",
        ),
    ] = False
    metrics_names: Annotated[
        str,
        option(
            "--metrics-names",
            panel=OPERATION,
            help="Whose names /metrics has: windlass, vllm (those that dashboards made for vLLM ask for) or both.",
        ),
    ] = "windlass"
    lora_folder: Annotated[
        Path | None,
        option(
            "--lora-folder",
            panel=ADAPTERS,
            metavar="DIR",
            help="Let clients load adapters that lie in this folder, and "
            "unload them, while the server runs. Default: they cannot.",
        ),
    ] = None
    ui: Annotated[bool, option("--ui/--no-ui", panel=OPERATION, help="Serve a page to try the model at /.")] = True
    stats_interval: Annotated[
        float,
        option(
            "--stats-interval",
            panel=OPERATION,
            metavar="SECONDS",
            help="While requests run, a line this often on "
            "how many do and how fast; 0: never. None with --log-level warning.",
        ),
    ] = 10.0
    log_format: Annotated[
        str,
        option("--log-format", panel=OPERATION, help="text, or json: every line on standard error is one object."),
    ] = "text"
    otel_endpoint: Annotated[
        str | None,
        option(
            "--otel-endpoint",
            panel=OPERATION,
            metavar="URL",
            help="Send spans of requests and of their phases to "
            "this collector (OTLP over HTTP), such as http://127.0.0.1:4318. Needs the extra otel.",
        ),
    ] = None
    crash_dir: Annotated[
        str | None,
        option(
            "--crash-dir",
            panel=OPERATION,
            metavar="DIR",
            help="Where a report is left when the engine dies, without "
            "prompts and keys; none: nowhere. Default: crashes in WINDLASS_CACHE, else in ~/.cache/windlass.",
        ),
    ] = None
    record: Annotated[
        Path | None,
        option(
            "--record",
            panel=OPERATION,
            metavar="FILE",
            help="Append a line of JSON for each generation request: time, "
            "parameters, token counts and how it ended, without any text. `windlass replay` repeats it.",
        ),
    ] = None
    record_text: Annotated[
        bool,
        option(
            "--record-text/--no-record-text",
            panel=OPERATION,
            help="Record prompts as token ids too, and digests of answers, so that a replay compares.",
        ),
    ] = False
    record_limit: Annotated[
        str,
        option("--record-limit", panel=OPERATION, metavar="SIZE", help="Size of that file at which recording stops."),
    ] = "256MiB"
    access_log: Annotated[
        bool, option("--access-log/--no-access-log", panel=OPERATION, help="Log a line per HTTP request.")
    ] = False

    def to_settings(self, model_name: str, engine: EngineOptions | None = None) -> ServerSettings:
        """The HTTP side's settings; raises LoadError or RequestError that names the option at fault.

        engine: options the two sides share, None for their defaults.
        """
        engine = engine or EngineOptions()
        check_choice("--tool-call-parser", self.tool_call_parser, ("auto", "none", *TOOL_CALL_PARSERS))
        generation_config_path(self.generation_config)
        read_override(self.override_generation_config)
        check_choice("--context-overflow", self.context_overflow, _CONTEXT_OVERFLOWS)
        check_choice("--rope-policy", self.rope_policy, _ROPE_POLICIES)
        check_choice("--metrics-names", self.metrics_names, _METRICS_NAMES)
        check_choice("--reasoning-parser", self.reasoning_parser, REASONING_PARSERS)
        if not 0 <= self.port <= 65535:
            raise LoadError(f"--port must lie between 0 and 65535, got {self.port}")
        if self.ssl_certfile is None:
            for name in ("ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs"):
                if getattr(self, name) is not None:
                    raise LoadError(f"--{name.replace('_', '-')} goes with --ssl-certfile")
        if self.default_max_tokens < 1:
            raise LoadError(f"--default-max-tokens must be at least 1, got {self.default_max_tokens}")
        check_seconds("--grace-period", self.grace_period, allow_infinite=True)
        check_seconds("--stats-interval", self.stats_interval)
        check_seconds("--request-timeout", self.request_timeout, allow_zero=False, allow_infinite=True)
        names = tuple(dict.fromkeys(split(self.served_model_name))) or (model_name,)
        if self.served_model_name and not split(self.served_model_name):
            raise LoadError("--served-model-name is empty: give a name, or leave it out")
        for source in engine.adapters():
            if source.name in names:
                raise LoadError(f"--lora {source.name}: the model has this name: choose another")
        return ServerSettings(
            served_model_name=names[0],
            other_model_names=names[1:],
            api_keys=self._plain_keys(),
            callers=() if self.api_keys is None else read_key_file(self.api_keys),
            attention_maps=self.attention_maps,
            cors_origins=tuple(split(self.cors_origin)),
            default_max_tokens=self.default_max_tokens,
            context_overflow=cast(ContextOverflow, self.context_overflow),
            keep_tokens=self.keep_tokens,
            attention_window=self.attention_window,
            attention_sinks=self.attention_sinks,
            cache_reuse=self.cache_reuse,
            max_response_bytes=read_size("--max-response-bytes", self.max_response_bytes),
            response_store_bytes=0
            if self.response_store == "0"
            else read_size("--response-store", self.response_store),
            reasoning_parser=self.reasoning_parser,
            default_timeout=None if self.request_timeout == math.inf else self.request_timeout,
            grace_seconds=min(self.grace_period, MAX_SECONDS),
            tool_call_parser=self.tool_call_parser,
            template_kwargs=read_template_kwargs(self.default_chat_template_kwargs),
            rope_profiles=engine.profiles(),
            rope_policy=cast(RopePolicy, self.rope_policy),
            rope_update=engine.parse_rope_update(),
            rope_exact=self.rope_exact,
            root_path=self._root_path(),
            ui=self.ui,
            metrics_names=cast(MetricsNames, self.metrics_names),
            adapters=engine.adapters(),
            max_loras=engine.max_loras,
            lora_folder=self._lora_folder(),
            record=self._record(engine.deterministic),
            otel_endpoint=self._otel_endpoint(),
        )

    def _otel_endpoint(self) -> str | None:
        if self.otel_endpoint is None:
            return None
        if not re.fullmatch(r"https?://[^/\s?#]+(/[^\s?#]*)?", self.otel_endpoint):
            raise LoadError(f"--otel-endpoint must be a URL such as http://127.0.0.1:4318, got {self.otel_endpoint!r}")
        try:
            import opentelemetry.exporter.otlp.proto.http
            import opentelemetry.sdk.trace  # noqa: F401
        except ImportError:
            raise LoadError(
                "--otel-endpoint needs OpenTelemetry: run pip install -c constraints.txt -e '.[otel]' in the clone"
            ) from None
        return self.otel_endpoint

    def _record(self, deterministic: bool) -> RecordSettings | None:
        limit = read_size("--record-limit", self.record_limit)
        if self.record is None:
            if self.record_text:
                raise LoadError("--record-text goes with --record FILE")
            return None
        try:
            os.close(os.open(self.record, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600))
        except OSError as error:
            raise LoadError(f"cannot write --record {self.record}: {error.strerror or error}") from None
        return RecordSettings(
            path=self.record.absolute(), text=self.record_text, max_bytes=limit, deterministic=deterministic
        )

    def _lora_folder(self) -> Path | None:
        if self.lora_folder is not None and not self.lora_folder.is_dir():
            raise LoadError(f"--lora-folder {self.lora_folder} is no directory")
        return None if self.lora_folder is None else self.lora_folder.absolute()

    def _root_path(self) -> str:
        path = self.root_path.rstrip("/")
        if path and not re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", path):
            raise LoadError(f"--root-path must be a path such as /llm, got {self.root_path!r}")
        return path

    def read_chat_template(self) -> str | None:
        """The text of --chat-template; raises LoadError where it cannot be read."""
        return None if self.chat_template is None else read_template_file("--chat-template", self.chat_template)

    def _plain_keys(self) -> tuple[str, ...]:
        keys = split(self.api_key)
        if self.api_key and not keys:
            raise LoadError("--api-key is empty: give a key, or leave the option out to ask for none")
        if self.api_key_file is not None:
            try:
                lines = self.api_key_file.read_text(encoding="utf-8-sig").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise LoadError(f"cannot read --api-key-file {self.api_key_file}: {error}") from error
            found = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
            # An empty file must not open the server to everybody.
            if not found:
                raise LoadError(f"--api-key-file {self.api_key_file} holds no key: write one key a line")
            keys += found
        return tuple(dict.fromkeys(keys))


GENERATION_CONFIG = "--generation-config"

OVERRIDE_OPTION = "--override-generation-config"

TEMPLATE_KWARGS = "--default-chat-template-kwargs"

GENERATION_CONFIG_FILE = "generation_config.json"

NO_GENERATION_CONFIG = ("none", "vllm")  # the second is vLLM's word

GenerationConfig = Annotated[
    str,
    option(
        GENERATION_CONFIG,
        panel=ANSWERS,
        metavar="auto|none|PATH",
        help="What holds for requests that leave sampling "
        "out: auto (the model's generation_config.json, and for a known model what its authors recommend), none, or "
        "another such file or its folder.",
    ),
]

OverrideGenerationConfig = Annotated[
    str | None,
    option(
        OVERRIDE_OPTION,
        panel=ANSWERS,
        metavar="JSON",
        help="Sampling in place of what that file says, such as '{\"temperature\": 0.7}'.",
    ),
]

_SAMPLING_EXAMPLE = '{"temperature": 0.7, "top_p": 0.9}'

_KWARGS_EXAMPLE = '{"enable_thinking": false}'

_Test = Callable[[float], bool]

# The bounds of the request's fields of these names.
_NUMBERS: dict[str, tuple[_Test, str]] = {
    "temperature": (lambda value: 0 <= value <= 100, "a number from 0 to 100"),
    "top_p": (lambda value: 0 < value <= 1, "a number above 0, to 1"),
    "min_p": (lambda value: 0 <= value <= 1, "a number from 0 to 1"),
    "typical_p": (lambda value: 0 < value <= 1, "a number above 0, to 1"),
    "repetition_penalty": (lambda value: 0 < value <= 100, "a number above 0, to 100"),
}

_MAX_INT32 = 2**31 - 1

_FIELDS = (*_NUMBERS, "top_k", "do_sample")


@dataclass(slots=True, kw_only=True)
class SamplingOptions:
    """What a command takes that is no server; `ServerOptions` has the same among its own."""

    generation_config: GenerationConfig = "auto"
    override_generation_config: OverrideGenerationConfig = None

    def check(self) -> None:
        """Raise LoadError for what cannot be meant."""
        generation_config_path(self.generation_config)
        read_override(self.override_generation_config)


def read_sampling(values: Mapping[str, Any], source: str, advice: str) -> dict[str, Any]:
    """The fields of a request that these values of a generation_config.json set; what is null sets nothing.

    `do_sample: false` means temperature 0, as in transformers. Other keys are passed over. place, advice: with what an error
    begins and ends. Raises LoadError, one line, for values that no request could set either.
    """
    found: dict[str, Any] = {}
    for name, (holds, expected) in _NUMBERS.items():
        if (value := values.get(name)) is not None:
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not holds(value):  # false for NaN
                raise _value_error(source, name, expected, value, advice)
            found[name] = float(value)
    if (value := values.get("top_k")) is not None:
        if isinstance(value, bool) or not isinstance(value, int) or not -1 <= value <= _MAX_INT32:
            raise _value_error(source, "top_k", f"an integer from -1 to {_MAX_INT32}", value, advice)
        found["top_k"] = max(value, 0)
    if (value := values.get("do_sample")) is not None:
        if not isinstance(value, bool):
            raise _value_error(source, "do_sample", "true or false", value, advice)
        if not value:
            found["temperature"] = 0.0
    return found


def read_override(text: str | None) -> dict[str, Any]:
    """What --override-generation-config says, as it stands there; raises LoadError, one line, for what no request could set."""
    values = _object(OVERRIDE_OPTION, text, _SAMPLING_EXAMPLE)
    for name in values:
        if name == "max_new_tokens":
            raise LoadError(f"{OVERRIDE_OPTION}: {name} is --default-max-tokens here")
        if name not in _FIELDS:
            known = f"it may set {', '.join(_FIELDS)}"
            raise LoadError(
                f"{OVERRIDE_OPTION}: there is no {name[:64]!r} in it{did_you_mean(name[:64], _FIELDS)}: {known}"
            )
    read_sampling(values, OVERRIDE_OPTION, f"write it like '{_SAMPLING_EXAMPLE}'")
    return values


def generation_config_path(given: str) -> Path | None:
    """The file that --generation-config names; None for the model's own or none. Raises LoadError where it is not there."""
    if given in ("auto", *NO_GENERATION_CONFIG):
        return None
    path, folder = Path(given).expanduser(), False
    try:
        folder = bool(given) and path.is_dir()
        file = path / GENERATION_CONFIG_FILE if folder else path
        if file.is_file():
            return file
    except (OSError, ValueError):
        pass  # that is no name of a file
    raise LoadError(
        f"{GENERATION_CONFIG} {given}: this folder holds no {GENERATION_CONFIG_FILE}"
        if folder
        else f"{GENERATION_CONFIG} must be auto, none, or a {GENERATION_CONFIG_FILE} or its folder, "
        f"and {given[:200]!r} is none that is there"
        f"{did_you_mean(given, ('auto', *NO_GENERATION_CONFIG))}"
    )


def read_template_kwargs(text: str | None) -> dict[str, Any]:
    """What --default-chat-template-kwargs says; raises LoadError, one line."""
    return _object(TEMPLATE_KWARGS, text, _KWARGS_EXAMPLE)


def _object(option: str, text: str | None, example: str) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{option} is not valid JSON ({error}): write it like '{example}'") from None
    if not isinstance(value, dict):
        raise LoadError(f"{option} must be a JSON object: write it like '{example}'")
    return value


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"JSON has no {name}")


def _value_error(source: str, name: str, expected: str, value: object, advice: str) -> LoadError:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return LoadError(f"{source}: {name} must be {expected}, got {shown}: {advice}")


@dataclass(slots=True, kw_only=True)
class ConnectionOptions:
    """How many connections are held, and how long each may keep the server waiting."""

    max_connections: Annotated[
        int,
        option(
            "--max-connections",
            panel=CONNECTIONS,
            help="Connections held at once; further ones get 503 unless one "
            "that has sent no request can be closed instead. Never more than the limit of open files leaves room for.",
        ),
    ] = 8192
    max_connections_per_address: Annotated[
        int,
        option(
            "--max-connections-per-address",
            panel=CONNECTIONS,
            help="Connections held at once by one address; further ones get 429.",
        ),
    ] = 512
    forwarded_allow_ips: Annotated[
        list[str] | None,
        option(
            "--forwarded-allow-ips",
            panel=CONNECTIONS,
            help="Proxies to trust, as addresses or networks, * for all; "
            "repeatable or comma separated: their X-Forwarded-For is believed, and they may hold any number of "
            "connections. Default: 127.0.0.1.",
        ),
    ] = None
    header_timeout: Annotated[
        float,
        option(
            "--header-timeout", panel=CONNECTIONS, help="Seconds a client has for the line and headers of a request."
        ),
    ] = 10.0
    keep_alive_timeout: Annotated[
        float,
        option("--keep-alive-timeout", panel=CONNECTIONS, help="Seconds a connection may rest between two requests."),
    ] = 75.0
    write_timeout: Annotated[
        float,
        option(
            "--write-timeout",
            panel=CONNECTIONS,
            help="A client that takes no byte of its answer for so many seconds is dropped, and its request aborted.",
        ),
    ] = 60.0


MAX_REPLICAS = 1024

LISTENERS = ("ingress", "proxy")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(slots=True, kw_only=True)
class ReplicaOptions:
    """What `windlass serve` takes."""

    replicas: Annotated[
        int,
        option(
            "--replicas",
            panel=BATCHING,
            metavar="N",
            help="Engine processes behind one address, each on its share of the "
            "cores and with a cache of its own, with one copy of the weights; requests go where their beginning is cached.",
        ),
    ] = 1

    def checked(self) -> int:
        """How many; raises LoadError."""
        if not 1 <= self.replicas <= MAX_REPLICAS:
            raise LoadError(f"--replicas must lie between 1 and {MAX_REPLICAS}, got {self.replicas}")
        return self.replicas


@dataclass(slots=True, kw_only=True)
class ClusterOptions:
    """What `windlass ray deploy` takes beside the engine's and the server's options."""

    replicas: Annotated[
        str,
        option(
            "--replicas",
            panel=CLUSTER,
            metavar="N or MIN..MAX",
            help="Engines: so many, or between two numbers, by how many requests they have.",
        ),
    ] = "1"
    address: Annotated[
        str | None,
        option(
            "--address",
            panel=CLUSTER,
            metavar="HOST:PORT",
            help="Where the Ray cluster is. Default: the one that runs on this machine, or RAY_ADDRESS.",
        ),
    ] = None
    name: Annotated[
        str,
        option(
            "--name", panel=CLUSTER, help="Of the application; one of the same name is updated, a replica at a time."
        ),
    ] = "windlass"
    listener: Annotated[
        str,
        option(
            "--listener",
            panel=CLUSTER,
            metavar="ingress or proxy",
            help="Who accepts connections at --host and --port "
            "of the head's machine: the server itself, or Ray's proxy, which passes requests and tokens on.",
        ),
    ] = "ingress"
    target_requests: Annotated[
        int,
        option(
            "--target-requests",
            panel=CLUSTER,
            help="Between two numbers of replicas: requests that each should have, "
            "running and waiting; more of them bring another replica.",
        ),
    ] = 8
    scale_up_seconds: Annotated[
        float, option("--scale-up-seconds", panel=CLUSTER, help="How long there have to be more, before one is added.")
    ] = 10.0
    scale_down_seconds: Annotated[
        float, option("--scale-down-seconds", panel=CLUSTER, help="And fewer, before one is taken away.")
    ] = 300.0

    def replica_bounds(self) -> tuple[int, int]:
        """The least and the most replicas; raises LoadError."""
        found = re.fullmatch(r"(\d{1,5})(?:\.\.(\d{1,5}))?", self.replicas.strip())
        least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 1 <= least <= most <= MAX_REPLICAS:
            raise LoadError(
                f"--replicas must be a number between 1 and {MAX_REPLICAS}, or two such as 2..8, got {self.replicas!r}"
            )
        return least, most

    def check(self) -> None:
        """Raise LoadError for what cannot be meant."""
        self.replica_bounds()
        check_choice("--listener", self.listener, LISTENERS)
        if not _NAME.fullmatch(self.name):
            raise LoadError(f"--name must be letters, digits, dots, dashes and underscores, got {self.name!r}")
        if self.target_requests < 1:
            raise LoadError(f"--target-requests must be at least 1, got {self.target_requests}")
        for name in ("scale_up_seconds", "scale_down_seconds"):
            if not 0 <= getattr(self, name) < 86_400:
                raise LoadError(f"--{name.replace('_', '-')} must be 0 or more seconds, got {getattr(self, name):g}")
