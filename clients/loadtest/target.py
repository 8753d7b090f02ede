"""The server under test: its address, its tokenizer, its metrics, and its limits."""

from __future__ import annotations

import asyncio
import math
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import httpx
from prometheus_client.parser import text_string_to_metric_families


class LoadTestError(Exception):
    """One line that says what to change: the address, the key, the model, a length, a line of a trace."""


# Of the process and the language, not of the work it did.
_PROCESS_PREFIXES = ("process_", "python_", "go_", "http_")

_KINDS = ("counter", "gauge", "histogram", "summary")


def metric_changes(before: str | None, after: str | None) -> dict[str, float]:
    """Differences of counters (and of the sums and counts of histograms), last values of gauges, by metric name.

    Of a server that was started anew in between, what it has counted since.

    Samples that differ in labels only are added up. Empty where the server has no metrics or they cannot be read.
    """
    first, last = _read_metrics(before), _read_metrics(after)
    result = {}
    for name, (kind, value) in last.items():
        if kind != "gauge":
            initial = first.get(name, (kind, 0.0))[1]
            value -= initial if initial <= value else 0.0  # a counter that is lower began anew with its server
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
            # Some servers declare a counter by its name without _total, which leaves its samples without a type.
            if family.type not in _KINDS and not sample.name.endswith("_total"):
                continue
            _, value = found.get(sample.name, (family.type, 0.0))
            found[sample.name] = (family.type, value + sample.value)
    return found


# Servers that are known to take `ignore_eos`, by what their models say under `owned_by`.
_SUPPORTS_IGNORE_EOS = frozenset({"windlass", "vllm", "sglang", "llamacpp"})

_SUPPORTS_TOKEN_IDS = frozenset({"windlass", "vllm"})  # `return_token_ids`

_IGNORES_SCALINGS = frozenset({"vllm", "llamacpp"})  # they answer as if `rope_scaling` had not been asked for

# Of a model's entry, what is no property of the server: vLLM makes it anew for each answer.
_VOLATILE_FIELDS = frozenset({"created", "permission"})

_RESERVED_HEADERS = frozenset({"content-length", "transfer-encoding", "connection"})

_CONTROL_SECONDS = 30.0

_METRICS_SECONDS = 5.0  # a server that no longer answers must not delay the report


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where to send the load. url: with or without /v1. model: None for the server's first. headers: sent on each request.

    Raises LoadTestError for an address, a key or a header that cannot be sent.
    """

    url: str
    model: str | None = None
    api_key: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            parsed = httpx.URL(self.base)
        except httpx.InvalidURL as error:
            raise LoadTestError(f"cannot read the address {self.url!r}: {error}") from None
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise LoadTestError(f"the address {self.url!r} should look like http://127.0.0.1:8000")
        if parsed.userinfo or parsed.query or parsed.fragment:
            raise LoadTestError(
                f"the address {self.base.split('@')[-1]!r} should hold neither a name nor a query: credentials go into "
                f"--api-key or --header"
            )
        for name, value in self.all_headers().items():
            if name in _RESERVED_HEADERS:
                raise LoadTestError(f"the header {name} is not yours to set: leave it out")
            if not (name.isascii() and name.replace("-", "").replace("_", "").isalnum()):
                raise LoadTestError(f"{name!r} is no name of a header: write NAME: VALUE")
            if not (value.isascii() and value.isprintable() and value == value.strip()):
                what = "the API key" if name == "authorization" else f"the header {name}"
                raise LoadTestError(f"{what} holds characters that no HTTP header may carry: check it")

    @property
    def base(self) -> str:
        """The address without /v1 and slashes at its end."""
        return self.url.strip().rstrip("/").removesuffix("/v1").rstrip("/")

    def tls(self) -> ssl.SSLContext | None:
        """Whom to trust: certifi's authorities, or those of SSL_CERT_FILE. None for plain HTTP."""
        return httpx.create_ssl_context() if self.base.startswith("https:") else None

    def all_headers(self) -> dict[str, str]:
        """Names in lower case; the key as a bearer token unless a header of that name is given."""
        key = {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return {"user-agent": "windlass-bench", **key, **{name.lower(): text for name, text in self.headers.items()}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """What is known of the server. entry: its own object of the model. max_model_len: None where it does not tell."""

    model: str
    entry: Mapping[str, Any] = field(default_factory=dict)
    version: str | None = None

    @property
    def owner(self) -> str | None:
        owner = self.entry.get("owned_by")
        return owner.lower() if isinstance(owner, str) else None

    @property
    def max_model_len(self) -> int | None:
        meta = self.entry.get("meta")  # llama.cpp
        limit = self.entry.get("max_model_len") or (meta.get("n_ctx") if isinstance(meta, Mapping) else None)
        return limit if isinstance(limit, int) and limit > 0 else None

    @property
    def supports_ignore_eos(self) -> bool:
        return self.owner in _SUPPORTS_IGNORE_EOS

    @property
    def supports_token_ids(self) -> bool:
        """Whether it tells the token ids of an answer."""
        return self.owner in _SUPPORTS_TOKEN_IDS

    @property
    def ignores_scalings(self) -> bool:
        """Whether it is known to take no rotary scaling from a request, and not to say so."""
        return self.owner in _IGNORES_SCALINGS

    def to_dict(self) -> dict[str, Any]:
        """For the report."""
        entry = {name: value for name, value in self.entry.items() if name not in _VOLATILE_FIELDS}
        return {"version": self.version, **entry, "model": self.model}


class ControlClient:
    """The control connection to a target; an asynchronous context manager."""

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

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def discover(self, ready_seconds: float = 60.0) -> Server:
        """The server and its model; waits while a Windlass server loads. Raises LoadTestError with what to change."""
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
        for path, name in (("/version", "version"), ("/props", "build_info")):  # llama.cpp has the second
            answer = await self._json("GET", path)
            reported = answer.get(name) if isinstance(answer, Mapping) else None
            if isinstance(reported, str):
                return reported
        return None

    async def _model(self) -> Server:
        base, wanted = self.target.base, self.target.model
        try:
            response = await self._http.get("/v1/models")
        except httpx.HTTPError as error:
            what = " ".join(str(error).split()) or type(error).__name__
            raise LoadTestError(f"cannot reach {base} ({what}): is the server running, and is --url right?") from None
        if response.status_code in (401, 403):
            given = "refuses the API key" if self.target.api_key else "wants an API key"
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
                return Server(model=wanted)  # a server without a list may still serve it
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
        """The answer of /tokenize, with a list of ids under `tokens`; None where the server has no such thing.

        body: as Windlass and vLLM take it. Where that does not do, llama.cpp's names are tried. With
        `return_token_strs`, which Windlass does not take, `token_strs` holds the text of each token.
        """
        bodies = [body]
        if "prompt" in body:
            add = body.get("add_special_tokens") is not False
            pieces = body.get("return_token_strs", False)
            bodies.append({"content": body["prompt"], "add_special": add, "with_pieces": pieces})
        for candidate in bodies:
            answer = await self._json("POST", "/tokenize", candidate)
            tokens = answer.get("tokens") if isinstance(answer, Mapping) else None
            if not isinstance(tokens, list) or not tokens:
                continue
            found = dict(answer)
            if all(isinstance(item, Mapping) for item in tokens):  # llama.cpp's pieces
                found["tokens"] = tokens = [item.get("id") for item in tokens]
                found["token_strs"] = [item.get("piece") for item in answer["tokens"]]
            if all(isinstance(item, int) and item >= 0 for item in tokens):
                return found
        return None

    async def count(self, **body: Any) -> int | None:
        """How many tokens a prompt or messages are, as `tokenize` takes them; None where the server does not tell."""
        answer = await self.tokenize(**body)
        if answer is not None:
            return len(answer["tokens"])
        if "messages" not in body:
            return None
        counted = await self._json("POST", "/v1/chat/completions/input_tokens", body)  # llama.cpp
        tokens = counted.get("input_tokens") if isinstance(counted, Mapping) else None
        return tokens if isinstance(tokens, int) and tokens > 0 else None

    async def metrics(self) -> str | None:
        """The text of /metrics; None where there is none."""
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
