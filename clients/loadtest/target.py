"""The server under test: its address, model, tokenizer and metrics."""

from __future__ import annotations

import asyncio
import math
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import httpx
from prometheus_client.parser import text_string_to_metric_families

# Metrics of the process and the language runtime, not of the server's work.
_PROCESS_PREFIXES = ("process_", "python_", "go_", "http_")
_METRIC_TYPES = ("counter", "gauge", "histogram", "summary")

# Servers by `owned_by` of their models.
_SUPPORTS_IGNORE_EOS = frozenset({"windlass", "vllm", "sglang", "llamacpp"})
_SUPPORTS_TOKEN_IDS = frozenset({"windlass", "vllm"})  # `return_token_ids`
_IGNORES_SCALINGS = frozenset({"vllm", "llamacpp"})  # responses are as without `rope_scaling`

# Fields of a model's entry that do not describe the server: vLLM changes them with each response.
_VOLATILE_FIELDS = frozenset({"created", "permission"})

_RESERVED_HEADERS = frozenset({"content-length", "transfer-encoding", "connection"})
_CONTROL_SECONDS = 30.0
_METRICS_SECONDS = 5.0  # a server that no longer responds must not delay the report


class LoadTestError(Exception):
    """A load test cannot be made: one line that names what to change, such as the URL, the key, the model or a length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The server to load.

    url: with or without /v1. model: None for the server's first. headers: added to each request. Raises LoadTestError for
    a URL, a key or a header that cannot be sent.
    """

    url: str
    model: str | None = None
    api_key: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            parsed = httpx.URL(self.base)
        except httpx.InvalidURL as error:
            raise LoadTestError(f"invalid URL {self.url!r}: {error}") from None
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise LoadTestError(f"invalid URL {self.url!r}: write one such as http://127.0.0.1:8000")
        if parsed.userinfo or parsed.query or parsed.fragment:
            raise LoadTestError(
                f"the URL {self.base.split('@')[-1]!r} must not have credentials, a query or a fragment: give credentials with "
                "--api-key or --header"
            )
        for name, value in self.all_headers().items():
            if name in _RESERVED_HEADERS:
                raise LoadTestError(f"the header {name} is reserved: omit it")
            if not (name.isascii() and name.replace("-", "").replace("_", "").isalnum()):
                raise LoadTestError(f"{name!r} is not a valid header name: write NAME: VALUE")
            if not (value.isascii() and value.isprintable() and value == value.strip()):
                what = "the API key" if name == "authorization" else f"the header {name}"
                raise LoadTestError(f"{what} has characters that are not allowed in an HTTP header: check it")

    @property
    def base(self) -> str:
        """The URL without /v1 and slashes at its end."""
        return self.url.strip().rstrip("/").removesuffix("/v1").rstrip("/")

    def tls(self) -> ssl.SSLContext | None:
        """A context with certifi's authorities, or those of SSL_CERT_FILE. None for plain HTTP."""
        return httpx.create_ssl_context() if self.base.startswith("https:") else None

    def all_headers(self) -> dict[str, str]:
        """All headers, names in lower case. The key is a bearer token unless `headers` has an authorization."""
        key = {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return {"user-agent": "windlass-bench", **key, **{name.lower(): text for name, text in self.headers.items()}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Properties of the server. entry: the model's object in its list of models."""

    model: str
    entry: Mapping[str, Any] = field(default_factory=dict)
    version: str | None = None

    @property
    def owner(self) -> str | None:
        owner = self.entry.get("owned_by")
        return owner.lower() if isinstance(owner, str) else None

    @property
    def max_model_len(self) -> int | None:
        """Maximum number of tokens of a prompt and its response; None where unknown."""
        meta = self.entry.get("meta")  # llama.cpp
        limit = self.entry.get("max_model_len") or (meta.get("n_ctx") if isinstance(meta, Mapping) else None)
        return limit if isinstance(limit, int) and limit > 0 else None

    @property
    def supports_ignore_eos(self) -> bool:
        return self.owner in _SUPPORTS_IGNORE_EOS

    @property
    def supports_token_ids(self) -> bool:
        """Whether it can return the token ids of a response."""
        return self.owner in _SUPPORTS_TOKEN_IDS

    @property
    def ignores_scalings(self) -> bool:
        """Whether it silently ignores the rotary scaling of a request."""
        return self.owner in _IGNORES_SCALINGS

    def to_dict(self) -> dict[str, Any]:
        """For the report."""
        entry = {name: value for name, value in self.entry.items() if name not in _VOLATILE_FIELDS}
        return {"version": self.version, **entry, "model": self.model}


class ControlClient:
    """Connection for models, tokenizer and metrics, which is not measured. An asynchronous context manager."""

    def __init__(self, target: Target) -> None:
        self.target = target
        # No proxies: the measured requests use none either.
        self._http = httpx.AsyncClient(
            base_url=target.base,
            headers=target.all_headers(),
            timeout=_CONTROL_SECONDS,
            trust_env=False,
            verify=target.tls() or True,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._http.aclose()

    async def discover(self, ready_seconds: float = 60.0) -> Server:
        """The server and its model. Waits while a Windlass server is loading. Raises LoadTestError."""
        end = time.monotonic() + ready_seconds
        while True:
            server = await self._model()
            loading = server.owner == "windlass" and server.max_model_len is None
            if not loading:
                break
            if time.monotonic() > end:
                raise LoadTestError(f"{self.target.base} was still loading after {ready_seconds:g} s: try again later")
            await asyncio.sleep(0.25)
        return Server(model=server.model, entry=server.entry, version=await self._version())

    async def _version(self) -> str | None:
        for path, name in (("/version", "version"), ("/props", "build_info")):  # llama.cpp has /props
            response = await self._json("GET", path)
            reported = response.get(name) if isinstance(response, Mapping) else None
            if isinstance(reported, str):
                return reported
        return None

    async def _model(self) -> Server:
        base, wanted = self.target.base, self.target.model
        try:
            response = await self._http.get("/v1/models")
        except httpx.HTTPError as error:
            what = " ".join(str(error).split()) or type(error).__name__
            raise LoadTestError(f"cannot reach {base} ({what}): is the server running, and is --url correct?") from None
        if response.status_code in (401, 403):
            given = "refuses the API key" if self.target.api_key else "requires an API key"
            raise LoadTestError(f"{base} {given}: set --api-key or WINDLASS_API_KEY")
        entries: list[Mapping[str, Any]] = []
        if response.status_code == 200:
            try:
                listed = response.json()["data"]
                entries = [entry for entry in listed if isinstance(entry["id"], str)]
            except (ValueError, KeyError, TypeError, RecursionError):
                pass
        if not entries:
            if wanted is not None:
                return Server(model=wanted)  # a server without a list of models may still serve it
            raise LoadTestError(
                f"{base} lists no models (HTTP {response.status_code} from /v1/models): is it an OpenAI-compatible "
                f"server? If so, name the model with --model"
            )
        if wanted is None:
            return Server(model=entries[0]["id"], entry=entries[0])
        for entry in entries:
            if entry["id"] == wanted:
                return Server(model=wanted, entry=entry)
        ids = ", ".join(entry["id"] for entry in entries[:5]) + (", …" if len(entries) > 5 else "")
        raise LoadTestError(f"{base} has no model {wanted!r}: it serves {ids}")

    async def tokenize(self, **body: Any) -> Mapping[str, Any] | None:
        """The response of /tokenize, with a list of ids as `tokens`; None where the server does not support it.

        body: in the form of Windlass and vLLM; llama.cpp's names are tried if it fails. With `return_token_strs`, which
        Windlass does not support, `token_strs` holds the text of each token.
        """
        bodies = [body]
        if "prompt" in body:
            add = body.get("add_special_tokens") is not False
            pieces = body.get("return_token_strs", False)
            bodies.append({"content": body["prompt"], "add_special": add, "with_pieces": pieces})
        for candidate in bodies:
            response = await self._json("POST", "/tokenize", candidate)
            tokens = response.get("tokens") if isinstance(response, Mapping) else None
            if not isinstance(tokens, list) or not tokens:
                continue
            found = dict(response)
            if all(isinstance(item, Mapping) for item in tokens):  # llama.cpp's pieces
                found["tokens"] = tokens = [item.get("id") for item in tokens]
                found["token_strs"] = [item.get("piece") for item in response["tokens"]]
            if all(isinstance(item, int) and item >= 0 for item in tokens):
                return found
        return None

    async def count(self, **body: Any) -> int | None:
        """Number of tokens of a prompt or of messages, in the form of `tokenize`; None where the server does not count."""
        response = await self.tokenize(**body)
        if response is not None:
            return len(response["tokens"])
        if "messages" not in body:
            return None
        counted = await self._json("POST", "/v1/chat/completions/input_tokens", body)  # llama.cpp
        tokens = counted.get("input_tokens") if isinstance(counted, Mapping) else None
        return tokens if isinstance(tokens, int) and tokens > 0 else None

    async def metrics(self) -> str | None:
        """The text of /metrics; None where the server has none."""
        try:
            response = await self._http.get("/metrics", timeout=_METRICS_SECONDS)
        except httpx.HTTPError:
            return None
        return response.text if response.status_code == 200 else None

    async def _json(self, method: str, path: str, body: Any = None) -> Any:
        try:
            response = await self._http.request(method, path, json=body)
            return response.json() if response.status_code == 200 else None
        except (httpx.HTTPError, ValueError, RecursionError):
            return None


def metric_changes(before: str | None, after: str | None) -> dict[str, float]:
    """Changes of counters (and of sums and counts of histograms) and last values of gauges, by metric name.

    Samples that differ only in labels are added. Where the server restarted in between, its counters count from there.
    Empty where the server has no metrics or they cannot be parsed.
    """
    first, last = _read_metrics(before), _read_metrics(after)
    result = {}
    for name, (kind, value) in last.items():
        if kind != "gauge":
            initial = first.get(name, (kind, 0.0))[1]
            value -= initial if initial <= value else 0.0  # a lower value means that the server restarted
        if math.isfinite(value):
            result[name] = value
    return result


def _read_metrics(text: str | None) -> dict[str, tuple[str, float]]:
    found: dict[str, tuple[str, float]] = {}
    try:
        families: Any = list(text_string_to_metric_families(text or ""))
    except (ValueError, KeyError, IndexError):
        return {}
    for family in families:
        if family.name.startswith(_PROCESS_PREFIXES):
            continue
        for sample in family.samples:
            if sample.name.endswith(("_bucket", "_created")) or "quantile" in sample.labels:
                continue
            # Some servers declare a counter without the suffix _total, so that its samples have no type.
            if family.type not in _METRIC_TYPES and not sample.name.endswith("_total"):
                continue
            _, value = found.get(sample.name, (family.type, 0.0))
            found[sample.name] = (family.type, value + sample.value)
    return found
