"""Options of `windlass serve` and `windlass ray deploy`, without the engine's, and the settings that they make."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NoReturn, cast, get_args

from windlass.engine.errors import LoadError, did_you_mean
from windlass.engine.interface.context import MIN_PASSAGE_TOKENS
from windlass.server.config.api_keys import ApiKey, read_key_file
from windlass.server.config.engine_options import EngineOptions
from windlass.server.config.option import (
    MAX_SECONDS,
    MEMORY,
    SIZE_OR_ZERO,
    SWITCH,
    TOKENS,
    Kind,
    Option,
    Panel,
    UnusableValue,
    choice,
    excerpt,
    integer,
    json_object,
    options,
    options_of,
    path,
    read_template_file,
    read_tokens,
    seconds,
    split,
    text,
    texts,
)
from windlass.server.config.settings import (
    ContextOverflow,
    MetricsNames,
    RecordSettings,
    RopePolicy,
    ServerSettings,
    UnknownFields,
)

LOG_FORMATS = ("text", "json")
GENERATION_CONFIG_FILE = "generation_config.json"
NO_GENERATION_CONFIG = ("none", "vllm")  # the second is vLLM's word

REASONING_PARSERS = (
    *("auto", "deepseek_r1", "qwen3", "granite", "gemma4", "apertus", "cohere", "hunyuan", "longcat", "minicpm3"),
    *("minimax_m3", "mistral", "seed_oss", "gpt_oss", "none"),
)

# Importing the parsers takes time: a test compares this list with them.
TOOL_CALL_PARSERS = (
    *("hermes", "qwen3_coder", "llama3_json", "lfm2", "pythonic", "mistral", "mistral_args", "harmony"),
    *("deepseek_v3", "deepseek_v31", "gemma4", "granite", "apertus", "cohere", "command_r", "deepseek_v32"),
    *("deepseek_v4", "functiongemma", "functionary_v31", "functionary_v32", "gigachat3", "glm45", "glm47"),
    *("granite_20b", "hunyuan", "internlm", "kimi_k2", "longcat", "longcat_json", "minicpm3", "minicpm5"),
    *("minimax_m2", "minimax_m3", "nemotron", "olmo3", "phi4_mini", "phi4_mini_functools", "seed_oss", "plain_json"),
)

MAX_REPLICAS = 1024
_SAMPLING_EXAMPLE = '{"temperature": 0.7}'
ANY_NAME = "*"  # among the model's names: requests may use any
_KWARGS_EXAMPLE = '{"enable_thinking": false}'
_EXACT = "exact"
_DEPLOYMENT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

_Test = Callable[[float], bool]

# The bounds of the request fields of these names.
_NUMBERS: dict[str, tuple[_Test, str]] = {
    "temperature": (lambda value: 0 <= value <= 100, "a number from 0 to 100"),
    "top_p": (lambda value: 0 < value <= 1, "a number above 0, to 1"),
    "min_p": (lambda value: 0 <= value <= 1, "a number from 0 to 1"),
    "typical_p": (lambda value: 0 < value <= 1, "a number above 0, to 1"),
    "repetition_penalty": (lambda value: 0 < value <= 100, "a number above 0, to 100"),
}

_FIELDS = (*_NUMBERS, "top_k", "do_sample")
_MAX_INT32 = 2**31 - 1


def _read_window(value: Any) -> tuple[int, ...]:
    parts = value if isinstance(value, tuple | list) else str(value).split(",")
    numbers = tuple(read_tokens(part) for part in parts)
    if not 1 <= len(numbers) <= 2 or isinstance(value, float):
        raise ValueError
    return numbers


def _read_rope_policy(value: Any) -> str:
    words = [word.strip() for word in value.split(",")]
    policies = [word for word in words if word != _EXACT]
    known = get_args(RopePolicy)
    if len(policies) > 1 or len(words) > len(policies) + 1 or not set(policies) <= set(known):
        wrong = next((word for word in policies if word not in known), "")
        raise UnusableValue(f"must be {_POLICY_FORM}, got {value!r}{did_you_mean(wrong, [*known, _EXACT])}")
    return str(value)


def _host_pattern(given: str) -> str:
    """A name of `allowed_hosts` in lower case. Raises LoadError."""
    name = given.lower().removeprefix("[").removesuffix("]").removesuffix(".")
    with contextlib.suppress(ValueError):
        return str(ip_address(name))
    if not re.fullmatch(r"\*|(\*\.)?[\w-]+(\.[\w-]+)*", name, re.ASCII):
        raise LoadError(
            f"`allowed_hosts` must be names such as example.org or *.example.org, without scheme and port, got {given!r}"
        )
    return name


_POLICY_FORM = "allow, profiles, off or exact, or two with a comma such as profiles,exact"


@options
class SamplingOptions:
    """Default sampling parameters, of commands that run a model without serving it."""

    generation_config: str = Panel.ANSWERS.option(
        text("auto, none or a path", "auto|none|PATH"),
        default="auto",
        reported=True,
        help="Sampling defaults: auto (the model's generation_config.json, or what the authors of a known model recommend), "
        "none, or the path of such a file or its folder.",
    )
    override_generation_config: str | None = Panel.ANSWERS.option(
        json_object(_SAMPLING_EXAMPLE),
        in_llm=True,
        help=f"Sampling defaults that replace those of the file, such as '{_SAMPLING_EXAMPLE}'.",
    )

    def check(self) -> None:
        """Raise LoadError for values that cannot be used."""
        generation_config_path(self.generation_config)
        read_override(self.override_generation_config)


@options
class ServerOptions(SamplingOptions):
    """Options of `windlass serve`, without the engine's."""

    host: str = Panel.NETWORK.option(
        text("an address", "HOST"),
        default="127.0.0.1",
        main=True,
        help="Address to listen on; 0.0.0.0 for all addresses.",
    )
    port: int = Panel.NETWORK.option(
        integer(0, 65535), default=8000, main=True, help="Port to listen on; 0 chooses a free port."
    )
    uds: Path | None = Panel.NETWORK.option(
        path("PATH"),
        in_ray=False,
        help="Listen on a Unix socket at this path instead, open to the owner and group of this process.",
    )
    ssl_certfile: Path | None = Panel.NETWORK.option(
        path("FILE"), in_ray=False, help="Serve HTTPS with this certificate (PEM, followed by its chain)."
    )
    ssl_keyfile: Path | None = Panel.NETWORK.option(
        path("FILE"), in_ray=False, help="Private key of the certificate. Default: contained in --ssl-certfile."
    )
    ssl_keyfile_password: str | None = Panel.NETWORK.option(
        text("a password"), scope="variable", help="Password of the private key."
    )
    ssl_ca_certs: Path | None = Panel.NETWORK.option(
        path("FILE"), in_ray=False, help="Require client certificates signed by one of these authorities."
    )
    served_model_name: list[str] | None = Panel.MODEL.option(
        texts("NAME"),
        main=True,
        help="Model id in the API; repeatable or comma-separated. Responses use the first. *: requests may use any name. "
        "Default: the name of the model's directory.",
    )
    chat_template: Path | None = Panel.ANSWERS.option(
        path("FILE"), main=True, reported=True, help="A chat template (Jinja) that replaces the model's own."
    )
    rerank_tokens: list[str] | None = Panel.ANSWERS.option(
        texts("NO,YES"),
        reported=True,
        help="Rank documents by two tokens that the model predicts, such as no,yes, or by the logit of one. Default: as the "
        "model's files declare.",
    )
    rerank_template: str | None = Panel.ANSWERS.option(
        text("qwen3 or a path", "FILE"),
        reported=True,
        help="Prompt of a query and a document (Jinja), or qwen3: the prompt of Qwen3-Reranker. Default: the model's chat "
        "template, where it accepts both.",
    )
    default_chat_template_kwargs: str | None = Panel.ANSWERS.option(
        json_object(_KWARGS_EXAMPLE),
        reported=True,
        help=f"Default variables of the chat template, such as '{_KWARGS_EXAMPLE}'.",
    )
    root_path: str = Panel.NETWORK.option(
        text("a path such as /llm", "PATH"),
        default="",
        help="Path prefix under which a proxy serves the API, such as /llm.",
    )
    api_key: list[str] | None = Panel.ACCESS.option(
        texts("KEY"),
        main=True,
        help="A key that clients must send; repeatable or comma-separated. Other users of the machine can see command lines: "
        "prefer the variable or --api-key-file.",
    )
    api_key_file: Path | None = Panel.ACCESS.option(
        path("FILE"),
        main=True,
        help="A file with one key per line, or a TOML file of named keys with limits. Read again on SIGHUP.",
    )
    attention_maps: bool = Panel.ACCESS.option(
        SWITCH,
        default=False,
        help="Serve /v1/attention. Other requests wait for each map. With named keys, only for administrators.",
    )
    cors_origin: list[str] | None = Panel.ACCESS.option(
        texts("ORIGIN"),
        help="Origin whose pages may call the API, such as https://example.org; repeatable or comma-separated. Default: none.",
    )
    allowed_hosts: list[str] | None = Panel.ACCESS.option(
        texts("HOST"),
        help="Name by which clients may reach the server, such as example.org, *.example.org (all names below it) or * "
        "(any); repeatable or comma-separated. On a network, addresses are accepted too. Default: any name with an API key "
        "or on a network, else those of this machine (localhost).",
    )
    default_max_tokens: int | None = Panel.ANSWERS.option(
        TOKENS,
        in_llm=True,
        help="Longest answer, in tokens, of a chat that sets no max_tokens. Default: what the context leaves.",
    )
    unknown_fields: str = Panel.ANSWERS.option(
        choice(*get_args(UnknownFields)),
        default="refuse",
        help="Handling of unknown fields: refuse the request, warn (ignore and log them) or ignore. The header "
        "x-windlass-ignored names them.",
    )
    response_store: int = Panel.ANSWERS.option(
        SIZE_OR_ZERO,
        default=64 << 20,
        scope="key",
        help="Memory for stored responses of /v1/responses. 0: store none. Default: 64MiB.",
    )
    reasoning_parser: str = Panel.ANSWERS.option(
        choice(*REASONING_PARSERS),
        default="auto",
        reported=True,
        help="Format of the model's reasoning; auto: detected from the chat template.",
    )
    request_timeout: float | None = Panel.ANSWERS.option(
        seconds(allow_zero=False, allow_infinite=True),
        help="Deadline of requests that set none, in seconds. Default: no deadline.",
    )
    grace_period: float = Panel.OPERATION.option(
        seconds(allow_infinite=True),
        default=30.0,
        help="Time for running requests to finish after SIGTERM or ctrl-C, in seconds; inf: unlimited.",
    )
    tool_call_parser: str = Panel.ANSWERS.option(
        choice("auto", "none", *TOOL_CALL_PARSERS),
        default="auto",
        reported=True,
        help="Format of the model's tool calls; auto: detected from the chat template; none: calls remain in the text.",
    )
    context_overflow: str = Panel.CONTEXT.option(
        choice(*get_args(ContextOverflow)),
        default="stop",
        main=True,
        reported=True,
        help="Handling of requests that exceed the context: stop (the answer ends), error (refused), shift (the oldest "
        "tokens are dropped) or drop_turns (a chat's oldest turns are dropped).",
    )
    keep_tokens: int | None = Panel.CONTEXT.option(
        TOKENS,
        scope="key",
        reported=True,
        help="Leading tokens that context shift never drops, rounded up to whole blocks. Default: a chat's system prompt, "
        "else 16.",
    )
    attention_window: tuple[int, ...] | None = Panel.CONTEXT.option(
        Kind(
            form="a number of tokens, or two such as 4096,4: the window and the leading tokens that stay visible",
            read=_read_window,
            metavar="TOKENS[,SINKS]",
        ),
        reported=True,
        help="Number of tokens that each token attends to; a second number, as in 4096,4, adds leading tokens (attention "
        "sinks). Default: all tokens, no sinks.",
    )
    cache_reuse: int = Panel.CONTEXT.option(
        TOKENS,
        default=0,
        reported=True,
        help="Shortest cached passage, in tokens (at least 32), that is reused at any offset of a prompt. 0: reuse only "
        "equal prompt starts.",
    )
    shared_prefix_cache: bool = Panel.ACCESS.option(
        SWITCH,
        default=False,
        help="Share cached prefixes among API keys. A key can then find out, from the number of cached tokens, what others "
        "have sent. Default: every key has cached prefixes of its own.",
    )
    rope_policy: str = Panel.ROTARY.option(
        Kind(form=_POLICY_FORM, read=_read_rope_policy, metavar="POLICY"),
        default="allow",
        main=True,
        reported=True,
        help="Rotary scaling that requests may set: allow (anything), profiles (names of --rope-profile) or off (nothing). "
        "exact, alone or after a comma, also allows exact recomputing: the context again for every token past the model's "
        "length.",
    )
    metrics_names: str = Panel.OPERATION.option(
        choice(*get_args(MetricsNames)),
        default="windlass",
        help="Names of the metrics at /metrics: windlass, vllm (for dashboards made for vLLM) or both.",
    )
    lora_folder: Path | None = Panel.ADAPTERS.option(
        path("DIR"),
        help="Folder from which clients may load and unload adapters while the server runs. Default: they may not.",
    )
    ui: bool = Panel.OPERATION.option(SWITCH, default=True, help="Serve a page to try the model at /.")
    stats_interval: float = Panel.OPERATION.option(
        seconds(), default=10.0, scope="variable", help="Seconds between log lines about running requests; 0: no lines."
    )
    log_format: str = Panel.OPERATION.option(
        choice(*LOG_FORMATS), default="text", help="text, or json: every line on standard error is a JSON object."
    )
    otel_endpoint: str | None = Panel.OPERATION.option(
        text("a URL", "URL"),
        help="Send spans of requests to this collector (OTLP over HTTP), such as http://127.0.0.1:4318. Needs the extra "
        "otel. Default: none.",
    )
    crash_dir: str | None = Panel.OPERATION.option(
        text("a folder or none", "DIR"),
        scope="variable",
        help="Folder for reports, without prompts and keys, of engines that died; none: no reports. Default: crashes in "
        "WINDLASS_CACHE, else in ~/.cache/windlass.",
    )
    record: Path | None = Panel.OPERATION.option(
        path("FILE"),
        in_ray=False,
        help="Append a line of JSON per generation request, without any text. `windlass replay` repeats it.",
    )
    record_text: bool = Panel.OPERATION.option(
        SWITCH, default=False, help="Also record prompts as token ids, and digests of answers."
    )
    record_limit: int = Panel.OPERATION.option(
        MEMORY,
        default=256 << 20,
        scope="variable",
        help="Size of the record file at which recording stops. Default: 256MiB.",
    )
    access_log: bool = Panel.OPERATION.option(SWITCH, default=False, in_ray=False, help="Log a line per HTTP request.")

    def to_settings(self, model_name: str, engine: EngineOptions | None = None) -> ServerSettings:
        """The HTTP side's settings. Raises LoadError, or RequestError that names the field at fault.

        engine: the engine's options, some of which the HTTP side uses too; None for their defaults.
        """
        engine = engine or EngineOptions()
        self.check()
        if self.ssl_certfile is None:
            for name in ("ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs"):
                if getattr(self, name) is not None:
                    raise LoadError(f"`{name}` needs `ssl_certfile`: give both")
        if self.default_max_tokens is not None and self.default_max_tokens < 1:
            raise LoadError(f"`default_max_tokens` must be at least 1, got {self.default_max_tokens}")
        if self.cache_reuse < 0 or 0 < self.cache_reuse < MIN_PASSAGE_TOKENS:
            raise LoadError(f"`cache_reuse` must be 0 or at least {MIN_PASSAGE_TOKENS}, got {self.cache_reuse}")
        given = dict.fromkeys(split(self.served_model_name))
        names = tuple(name for name in given if name != ANY_NAME) or (model_name,)
        if self.served_model_name and not split(self.served_model_name):
            raise LoadError("`served_model_name` is empty: give a name, or leave it out")
        for source in engine.adapters():
            if source.name in names:
                raise LoadError(f"`lora` {source.name}: the model has this name: choose another")
        plain, callers = self._keys()
        policies = self.rope_policy.split(",")
        window, sinks = (*(self.attention_window or (None,)), 0)[:2]
        same = {each.name for each in fields(ServerSettings)} & set(options_of(self))
        values: dict[str, Any] = {name: getattr(self, name) for name in same}
        values |= dict(  # noqa: C408
            served_model_name=names[0],
            other_model_names=names[1:],
            any_model_name=ANY_NAME in given,
            api_keys=plain,
            callers=callers,
            cors_origins=tuple(split(self.cors_origin)),
            allowed_hosts=tuple(_host_pattern(each) for each in split(self.allowed_hosts)),
            attention_window=window,
            attention_sinks=sinks or 0,
            response_store_bytes=self.response_store,
            default_timeout=None if self.request_timeout == math.inf else self.request_timeout,
            grace_seconds=min(self.grace_period, MAX_SECONDS),
            template_kwargs=read_template_kwargs(self.default_chat_template_kwargs),
            rope_policy=cast(RopePolicy, next((word for word in policies if word != _EXACT), "allow")),
            rope_exact=_EXACT in policies,
            root_path=self._root_path(),
            lora_folder=self._lora_folder(),
            record=self._record(engine.deterministic),
            otel_endpoint=self._otel_endpoint(),
            rope_profiles=engine.profiles(),
            rope_update=engine.rope_update,
            adapters=engine.adapters(),
            max_loras=engine.max_loras,
        )
        return ServerSettings(**values)

    def _otel_endpoint(self) -> str | None:
        if self.otel_endpoint is None:
            return None
        if not re.fullmatch(r"https?://[^/\s?#]+(/[^\s?#]*)?", self.otel_endpoint):
            raise LoadError(f"`otel_endpoint` must be a URL such as http://127.0.0.1:4318, got {self.otel_endpoint!r}")
        try:
            import opentelemetry.exporter.otlp.proto.http
            import opentelemetry.sdk.trace  # noqa: F401
        except ImportError:
            raise LoadError(
                "`otel_endpoint` needs OpenTelemetry: run pip install -c constraints.txt -e '.[otel]' in the clone"
            ) from None
        return self.otel_endpoint

    def _record(self, deterministic: bool) -> RecordSettings | None:
        if self.record is None:
            if self.record_text:
                raise LoadError("`record_text` needs `record`: give both")
            return None
        try:
            os.close(os.open(self.record, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600))
        except OSError as error:
            raise LoadError(f"cannot write `record={self.record}`: {error.strerror or error}") from None
        return RecordSettings(
            path=self.record.absolute(), text=self.record_text, max_bytes=self.record_limit, deterministic=deterministic
        )

    def _lora_folder(self) -> Path | None:
        if self.lora_folder is not None and not self.lora_folder.is_dir():
            raise LoadError(f"`lora_folder={self.lora_folder}` is not a directory")
        return None if self.lora_folder is None else self.lora_folder.absolute()

    def _root_path(self) -> str:
        prefix = self.root_path.rstrip("/")
        if prefix and not re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", prefix):
            raise LoadError(f"`root_path` must be a path such as /llm, got {self.root_path!r}")
        return prefix

    def read_chat_template(self) -> str | None:
        """The text of the operator's chat template. Raises LoadError if the file cannot be read."""
        return None if self.chat_template is None else read_template_file("chat_template", self.chat_template)

    def plain_keys(self) -> tuple[str, ...]:
        """The keys of `api_key`, without those of the file. Raises LoadError."""
        keys = split(self.api_key)
        if self.api_key and not keys:
            raise LoadError("`api_key` is empty: give a key, or leave the option out to require none")
        return tuple(dict.fromkeys(keys))

    def _keys(self) -> tuple[tuple[str, ...], tuple[ApiKey, ...]]:
        plain, named = self.plain_keys(), tuple[ApiKey, ...]()
        if self.api_key_file is not None:
            found = read_key_file(self.api_key_file)
            plain += tuple(key for key in found if isinstance(key, str))
            named = tuple(key for key in found if not isinstance(key, str))
        return tuple(dict.fromkeys(plain)), named


@options
class ConnectionOptions:
    """Limits on the number of connections, and timeouts."""

    max_connections: int = Panel.CONNECTIONS.option(
        integer(1),
        default=8192,
        help="Largest number of open connections, at most the limit of open files, less 128; further ones get status 503.",
    )
    max_connections_per_address: int = Panel.CONNECTIONS.option(
        integer(1),
        default=512,
        help="Largest number of connections of one IPv4 address or IPv6 network of 64 bits; further ones get status 429.",
    )
    forwarded_allow_ips: list[str] | None = Panel.CONNECTIONS.option(
        texts("ADDRESS"),
        help="Trusted proxies, as addresses or networks, * for all; repeatable or comma-separated. Their X-Forwarded-For is "
        "used. Default: 127.0.0.1.",
    )
    header_timeout: float = Panel.CONNECTIONS.option(
        seconds(allow_zero=False),
        default=10.0,
        scope="variable",
        help="Seconds for the request line and headers of a request.",
    )
    keep_alive_timeout: float = Panel.CONNECTIONS.option(
        seconds(allow_zero=False),
        default=75.0,
        scope="variable",
        help="Idle timeout of connections, in seconds; a load balancer's must be shorter.",
    )
    write_timeout: float = Panel.CONNECTIONS.option(
        seconds(allow_zero=False),
        default=60.0,
        scope="variable",
        help="Seconds after which a client that accepts no byte of its response is disconnected.",
    )


@options
class ReplicaOptions:
    """The number of engines of `windlass serve`."""

    replicas: int = Panel.BATCHING.option(
        integer(1, MAX_REPLICAS),
        default=1,
        main=True,
        help="Engine processes behind one address, each with a share of the cores and its own cache. Requests go to the "
        "engine that has cached the start of their prompt.",
    )


def _read_replica_range(value: Any) -> str:
    found = re.fullmatch(r"(\d{1,5})(?:\.\.(\d{1,5}))?", str(value).strip())
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= least <= most <= MAX_REPLICAS:
        raise ValueError
    return f"{least}..{most}"


def _read_deployment_name(value: Any) -> str:
    if not _DEPLOYMENT_NAME.fullmatch(value):
        raise ValueError
    return str(value)


@options
class ClusterOptions:
    """Options of `windlass ray deploy`, without the engine's and the server's."""

    replicas: str = Panel.CLUSTER.option(
        Kind(
            form=f"a number between 1 and {MAX_REPLICAS}, or two such as 2..8",
            read=_read_replica_range,
            metavar="N|MIN..MAX",
        ),
        default="1",
        main=True,
        help="Number of engines, or a range such as 2..8, in which it follows the number of requests.",
    )
    address: str | None = Panel.CLUSTER.option(
        text("an address", "HOST:PORT"),
        help="Address of the Ray cluster. Default: RAY_ADDRESS, else the cluster of this machine.",
    )
    name: str = Panel.CLUSTER.option(
        Kind(form="letters, digits, dots, dashes and underscores", read=_read_deployment_name, metavar="NAME"),
        default="windlass",
        help="Name of the application. One of the same name is updated, one replica at a time.",
    )
    listener: str = Panel.CLUSTER.option(
        choice("ingress", "proxy"),
        default="ingress",
        help="What accepts connections at --host and --port of the head node: the server itself (ingress), or Ray's "
        "proxy.",
    )
    target_requests: int = Panel.CLUSTER.option(
        integer(1), default=8, help="With a range: running and waiting requests per replica, above which one is added."
    )
    scale_up_seconds: float = Panel.CLUSTER.option(
        seconds(), default=10.0, help="Seconds with more requests after which a replica is added."
    )
    scale_down_seconds: float = Panel.CLUSTER.option(
        seconds(), default=300.0, help="Seconds with fewer requests after which a replica is removed."
    )

    def replica_bounds(self) -> tuple[int, int]:
        """The smallest and the largest number of replicas."""
        least, _, most = self.replicas.partition("..")
        return int(least), int(most or least)


_log_levels = choice("debug", "info", "warning", "error")

LOG_LEVEL = Option(
    name="log_level",
    kind=Kind(
        form=_log_levels.form, read=lambda value: _log_levels.read(str(value).lower()), metavar=_log_levels.metavar
    ),
    default="info",
    panel=Panel.OPERATION,
    help="Least severe messages in the log.",
)

# Every option that messages may name; `replicas` is both a number and a range.
OPTIONS: dict[str, Option] = {
    name: each
    for cls in (ClusterOptions, ReplicaOptions, ConnectionOptions, ServerOptions, EngineOptions)
    for name, each in options_of(cls).items()
} | {LOG_LEVEL.name: LOG_LEVEL}


def check_log_level(level: str) -> str:
    """The level in lower case. Raises LoadError for an unknown one."""
    return str(LOG_LEVEL.read(level))


def changed_options(engine: EngineOptions, server: ServerOptions) -> list[str]:
    """The options that change results or what requests may set, if they are not at their defaults, as written."""
    changed = []
    for given in (engine, server):
        for each in options_of(given).values():
            value = getattr(given, each.name)
            if each.reported and value != each.default:
                changed.append(each.spell(None if value is True else each.to_text(value)))
    if engine.scaling_thresholds():
        changed.append(OPTIONS["rope_scaling"].spell(engine.rope_scaling))
    return changed


def read_sampling(values: Mapping[str, Any], source: str, advice: str) -> dict[str, Any]:
    """The request fields that these values of a generation_config.json set; null values set nothing.

    `do_sample: false` means temperature 0, as in transformers. Other keys are ignored. source, advice: start and end of an
    error. Raises LoadError for values that no request could set either.
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


def read_override(given: str | None) -> dict[str, Any]:
    """The object of `override_generation_config`. Raises LoadError for values that no request could set."""
    name = "`override_generation_config`"
    values = _object(name, given, _SAMPLING_EXAMPLE)
    for key in values:
        if key == "max_new_tokens":
            raise LoadError(f"{name}: use `default_max_tokens` instead of {key}")
        if key not in _FIELDS:
            raise LoadError(
                f"{name} has an unknown field {key[:64]!r}{did_you_mean(key[:64], _FIELDS)}: it may set {', '.join(_FIELDS)}"
            )
    read_sampling(values, name, f"write it like '{_SAMPLING_EXAMPLE}'")
    return values


def generation_config_path(given: str) -> Path | None:
    """The file that `generation_config` names; None for the model's own or none. Raises LoadError if it does not exist."""
    if given in ("auto", *NO_GENERATION_CONFIG):
        return None
    found, is_folder = Path(given).expanduser(), False
    try:
        is_folder = bool(given) and found.is_dir()
        file = found / GENERATION_CONFIG_FILE if is_folder else found
        if file.is_file():
            return file
    except (OSError, ValueError):
        pass  # not a valid file name
    if is_folder:
        raise LoadError(f"`generation_config={given}`: this folder has no {GENERATION_CONFIG_FILE}")
    raise LoadError(
        f"`generation_config` must be auto, none, or an existing {GENERATION_CONFIG_FILE} or its folder, got {given[:200]!r}"
        f"{did_you_mean(given, ('auto', *NO_GENERATION_CONFIG))}"
    )


def read_template_kwargs(given: str | None) -> dict[str, Any]:
    """The object of `default_chat_template_kwargs`. Raises LoadError."""
    return _object("`default_chat_template_kwargs`", given, _KWARGS_EXAMPLE)


def _object(name: str, given: str | None, example: str) -> dict[str, Any]:
    if given is None:
        return {}
    try:
        value = json.loads(given, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{name} is not valid JSON ({error}): write it like '{example}'") from None
    if not isinstance(value, dict):
        raise LoadError(f"{name} must be a JSON object: write it like '{example}'")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"JSON has no {name}")


def _value_error(source: str, name: str, expected: str, value: object, advice: str) -> LoadError:
    return LoadError(f"{source}: {name} must be {expected}, got {excerpt(value)}: {advice}")
