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

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """What holds for a request that does not say; top_k 0: off. The values here are neutral: the model's own distribution."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0

    def describe(self, sources: Mapping[str, str]) -> str:
        """Those that are not neutral, and where each comes from: "temperature 0.6, top_p 0.9 (generation_config.json)"."""
        neutral, of = asdict(SamplingDefaults()), dict[str, list[str]]()
        for name, value in asdict(self).items():
            if value != neutral[name]:
                of.setdefault(sources[name], []).append(f"{name} {value:g}")
        return ", ".join(f"{', '.join(values)} ({source})" for source, values in of.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordSettings:
    """Where requests are recorded. text: with what people wrote. max_bytes: of the file. deterministic: whether the engine is."""

    path: Path
    text: bool = False
    max_bytes: int = 256 * MIB
    deterministic: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSettings:
    """How pairs of texts are scored by a model that reads both.

    template: what puts them into a prompt, in Jinja; None: the model's chat template, where it shows a query and a document.
    needs_template: whether nothing is served without. tokens: of a model that answers, the one whose logit counts, and perhaps
    one whose logit is taken off it, by text or id; empty: a head of classes scores. instruction: of requests that bring none;
    None: what the template has.
    """

    template: str | None = None
    needs_template: bool = False
    tokens: tuple[str | int, ...] = ()
    instruction: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """All options of the HTTP server. Sizes are bytes and times are seconds unless the name says otherwise.

    served_model_name: the model's id in the API. other_model_names: further ids that requests may use.
    api_keys, callers: keys without limits, and named ones with theirs; where both are empty no key is asked for.
    cors_origins: origins allowed by CORS; empty (the default) switches CORS off. Credentials are never allowed.
    default_max_tokens: what a chat may generate when it does not say; completions default to 16 as OpenAI's do.
    stream_comment_seconds: silence on a stream after which a comment line is sent (0: never).
    grace_seconds: how long running streams may go on once draining has begun.
    max_response_bytes: largest answer that is not streamed, and the most that a stream keeps of its prompts for its first
    events; both are estimated before anything is generated.
    response_store_bytes: what `/v1/responses` keeps of its answers for later requests; 0: nothing.
    reasoning_parser: how thinking is told apart from answers; "auto": as the chat template marks it.
    max_total_body_bytes: of all requests in progress, see `windlass.server.app.middleware`.
    max_in_flight: generation requests handled at once, whatever the engine's queue holds; more get 429.
    default_timeout: deadline of a request that names none; None means no deadline.
    body_stall_seconds: how long a client may pause while it sends its body.
    max_tokenize_chars: longest text of /tokenize, and of a prompt to be truncated where the context holds less.
    text_processes: texts that are tokenized at once in processes of their own; a long one more may run beside them.
    text_seconds, text_memory: bounds on tokenizing one text. max_waiting_text_chars: characters that may wait for it.
    template_seconds, template_memory, max_concurrent_templates: bounds on rendering chat templates.
    deadline_slack: how long the engine is trusted to end a request past its deadline before the server does it.
    tool_call_parser: the format in which the model writes calls, "auto" for the one its chat template teaches, "none" where
    answers are not searched for calls.
    rope_profiles: scalings that requests may name. rope_policy: whether requests may bring scalings of their own
    ("allow"), name profiles ("profiles") or neither ("off"). rope_update: the engine's default, to describe requests by.
    rope_exact: whether a request may ask for recomputing at every token.
    context_overflow: what becomes of requests that are longer than the context and do not say; completions have no turns and
    stop. keep_tokens, attention_window, attention_sinks: see `ContextRule`, of requests that do not say; keep_tokens None: a
    chat's system prompt. cache_reuse: see `NonPrefixReuseParams.at_least`.
    sampling: of requests that leave it out. sampling_sources: where each of its fields that is set comes from, for people.
    recommended_sampling: those that hold since the model's authors recommend them.
    template_kwargs: variables of the chat template, of requests that do not give them.
    root_path: where a proxy has put the API, such as "/llm".
    metrics_names: whose names /metrics has: our own, those that dashboards made for vLLM ask for, or both.
    adapters: those that the engine loads at the start. max_loras: at once. lora_folder: where later ones may lie, None for no
    later ones. adapter_drain_seconds: longest wait for the requests of one that is unloaded.
    attention_maps: whether /v1/attention answers.
    otel_endpoint: the collector that spans go to, None for none.
    record: the file that requests are recorded in, None for none.
    ranking: how pairs of texts are scored; None: as models without a prompt for them are.
    """

    served_model_name: str
    other_model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    callers: tuple[ApiKey, ...] = ()
    cors_origins: tuple[str, ...] = ()
    default_max_tokens: int = 1024
    completion_max_tokens: int = 16
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
    def model_names(self) -> tuple[str, ...]:
        """Every id of the model; answers have the first."""
        return (self.served_model_name, *self.other_model_names)

    def __post_init__(self) -> None:
        if not self.served_model_name:
            raise ValueError("served_model_name must not be empty")
        if any(not name for name in self.other_model_names):
            raise ValueError("a model's name must not be empty")
        if any(not key for key in self.api_keys):
            raise ValueError("an API key must not be empty")
        for name in (
            "default_max_tokens",
            "completion_max_tokens",
            "max_body_bytes",
            "max_total_body_bytes",
            "max_header_bytes",
            "max_response_bytes",
            "max_in_flight",
            "max_prompts",
            "text_processes",
            "max_concurrent_templates",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in (
            "response_store_bytes",
            "stream_comment_seconds",
            "grace_seconds",
            "template_seconds",
            "deadline_slack",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
