"""Settings of the HTTP server: plain data, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from windlass.engine.interface.model_info import AdapterSource
from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.engine.rotary.rotary_policy import RopeUpdate
from windlass.server.config.api_keys import ApiKey

RopePolicy = Literal["allow", "profiles", "off"]
MetricsNames = Literal["windlass", "vllm", "both"]
ContextOverflow = Literal["error", "stop", "shift", "drop_turns"]

# The kind of address at which a server listens.
Binding = Literal["loopback", "network"]

UnknownFields = Literal["refuse", "warn", "ignore"]

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """Sampling parameters of requests that set none. The defaults are neutral: the model's own distribution. top_k 0: off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0

    def describe(self, sources: Mapping[str, str]) -> str:
        """The parameters that are not neutral, with their sources: "temperature 0.6, top_p 0.9 (generation_config.json)"."""
        neutral, of = asdict(SamplingDefaults()), dict[str, list[str]]()
        for name, value in asdict(self).items():
            if value != neutral[name]:
                of.setdefault(sources[name], []).append(f"{name} {value:g}")
        return ", ".join(f"{', '.join(values)} ({source})" for source, values in of.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordSettings:
    """Recording of requests. text: includes prompts. max_bytes: of the file. deterministic: whether the engine is."""

    path: Path
    text: bool = False
    max_bytes: int = 256 * MIB
    deterministic: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSettings:
    """Scoring of text pairs by a model that reads both.

    template: Jinja template of the prompt; None: the model's chat template, if it shows a query and a document.
    needs_template: whether requests fail without one. tokens: of a generative model, the token whose logit is the score, and
    optionally one whose logit is subtracted, by text or id; empty: a classification head scores. instruction: of requests
    without one; None: the template's own.
    """

    template: str | None = None
    needs_template: bool = False
    tokens: tuple[str | int, ...] = ()
    instruction: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Settings of the HTTP side. Sizes are bytes and times are seconds unless the name states another unit.

    served_model_name: model id in the API. other_model_names: further ids that requests may use. any_model_name: requests may
    use any other name, too.
    api_keys, callers: plain keys, and named ones with limits; if both are empty, no key is required.
    cors_origins: origins allowed by CORS, without credentials; empty: CORS is off.
    binding: where the server listens; None: nowhere, as in `LLM`. allowed_hosts: names in lower case by which clients reach it,
    `*.` before one for all names that end so, or `*` for any. See `checks_hosts` and `checks_origins`.
    default_max_tokens: of chats that set no limit, None for what the context leaves; completions default to 16, as OpenAI's do.
    unknown_fields: whether requests with unknown fields are refused; or accepted, with a warning in the log or without.
    stream_comment_seconds: silence on a stream after which a comment line is sent (0: never).
    grace_seconds: time for running streams to finish once draining has begun.
    max_response_bytes: largest response that is not streamed, and limit of what a stream stores of its prompts for its first
    events.
    response_store_bytes: responses of `/v1/responses` stored for later requests; 0: none.
    max_total_body_bytes: of all requests in progress, see `windlass.server.app.middleware`.
    max_in_flight: generation requests handled at once, whatever the engine's queue holds; further ones get 429.
    default_timeout: deadline of requests that set none; None: no deadline.
    body_stall_seconds: longest pause of a client while it sends a body.
    max_tokenize_chars: longest text of /tokenize, and of a prompt to be truncated if the context is shorter.
    text_processes: texts tokenized at once in worker processes; one further long text may run at the same time.
    text_seconds, text_memory: limits on tokenizing one text. max_waiting_text_chars: characters that may wait for it.
    template_seconds, template_memory, max_concurrent_templates: limits on rendering chat templates.
    deadline_slack: time for the engine to end a request past its deadline before the server does.
    tool_call_parser: format of tool calls, "auto" for that of the chat template, "none" to leave calls in the text.
    reasoning_parser: format of reasoning, "auto" for that of the chat template.
    rope_profiles: scalings that requests may name. rope_policy: scalings that requests may set: their own ("allow"), profiles
    ("profiles") or none ("off"). rope_update: the engine's default, for reports. rope_exact: whether requests may ask for exact
    recomputing.
    context_overflow: handling of requests that are longer than the context and do not set it; completions have no turns and
    stop. keep_tokens, attention_window, attention_sinks: see `ContextRule`, of requests that do not set them; keep_tokens None:
    a chat's system prompt. cache_reuse: see `NonPrefixReuseParams.at_least`.
    shared_prefix_cache: whether cached prefixes are shared among API keys.
    sampling: of requests that set none. sampling_sources: the origin of each of its fields that is set, for display.
    recommended_sampling: the fields that come from the recommendation of the model's authors.
    template_kwargs: variables of the chat template, of requests that do not set them.
    root_path: path prefix of a proxy, such as "/llm".
    metrics_names: names at /metrics: Windlass's own, those of vLLM, or both.
    adapters: loaded at start. max_loras: loaded at once. lora_folder: folder of adapters that clients may load later, None for
    none. adapter_drain_seconds: longest wait for the requests of an adapter that is unloaded.
    attention_maps: whether /v1/attention is served.
    otel_endpoint: collector of spans, None for none.
    record: recording of requests, None for none.
    ranking: scoring of text pairs; None: as by models without a prompt for them.
    """

    served_model_name: str
    other_model_names: tuple[str, ...] = ()
    any_model_name: bool = False
    api_keys: tuple[str, ...] = ()
    callers: tuple[ApiKey, ...] = ()
    cors_origins: tuple[str, ...] = ()
    binding: Binding | None = None
    allowed_hosts: tuple[str, ...] = ()
    default_max_tokens: int | None = None
    completion_max_tokens: int = 16
    unknown_fields: UnknownFields = "refuse"
    stream_comment_seconds: float = 10.0
    grace_seconds: float = 30.0
    reasoning_parser: str = "auto"
    default_timeout: float | None = None
    retry_after_seconds: int = 1
    max_body_bytes: int = 32 * MIB
    max_total_body_bytes: int = 512 * MIB
    max_header_bytes: int = 64 * 1024
    body_stall_seconds: float = 30.0
    max_response_bytes: int = 64 * MIB
    response_store_bytes: int = 64 * MIB
    max_in_flight: int = 4096
    max_prompts: int = 1024
    max_tokenize_chars: int = 4 * MIB
    text_processes: int = 2
    text_seconds: float = 60.0
    text_memory: int = 2048 * MIB
    max_waiting_text_chars: int = 128 * MIB
    template_seconds: float = 5.0
    template_memory: int = 1024 * MIB
    max_concurrent_templates: int = 4
    deadline_slack: float = 0.5
    tool_call_parser: str = "auto"
    rope_profiles: Mapping[str, RopeScaling] = field(default_factory=dict)
    rope_policy: RopePolicy = "allow"
    rope_update: RopeUpdate | None = None
    rope_exact: bool = False
    context_overflow: ContextOverflow = "stop"
    keep_tokens: int | None = None
    attention_window: int | None = None
    attention_sinks: int = 0
    cache_reuse: int = 0
    shared_prefix_cache: bool = False
    sampling: SamplingDefaults = SamplingDefaults()
    sampling_sources: Mapping[str, str] = field(default_factory=dict)
    recommended_sampling: Mapping[str, float] = field(default_factory=dict)
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    root_path: str = ""
    ui: bool = True
    metrics_names: MetricsNames = "windlass"
    adapters: tuple[AdapterSource, ...] = ()
    max_loras: int = 8
    lora_folder: Path | None = None
    adapter_drain_seconds: float = 30.0
    attention_maps: bool = False
    record: RecordSettings | None = None
    otel_endpoint: str | None = None
    ranking: RankSettings | None = None

    @property
    def requires_key(self) -> bool:
        return bool(self.api_keys or self.callers)

    @property
    def checks_hosts(self) -> bool:
        """Whether requests must name a loopback host or one of `allowed_hosts`; an address is enough on a network."""
        return bool(self.allowed_hosts) or (self.binding == "loopback" and not self.requires_key)

    @property
    def checks_origins(self) -> bool:
        """Whether requests of web pages must come from the server's own host, `allowed_hosts` or `cors_origins`."""
        return self.binding == "network" and not self.requires_key

    @property
    def model_names(self) -> tuple[str, ...]:
        """Every id of the model; responses have the first."""
        return (self.served_model_name, *self.other_model_names)

    def __post_init__(self) -> None:
        if not self.served_model_name:
            raise ValueError("served_model_name must not be empty")
        if any(not name for name in self.other_model_names):
            raise ValueError("a model's name must not be empty")
        if any(not key for key in self.api_keys):
            raise ValueError("an API key must not be empty")
