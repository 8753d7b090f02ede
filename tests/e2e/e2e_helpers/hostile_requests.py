"""Requests that crashed or compromised other inference servers, by their advisories and bug reports.

Each has its permitted statuses. A connection that is closed without an answer is always wrong.
"""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

KEY = "k"  # of the server
REFUSED = frozenset({400, 401, 403, 404, 405, 413, 415, 431})
FINE = REFUSED | {200}
UNAUTHORIZED = frozenset({400, 401, 404, 405})
COMPLETIONS, CHAT, EMBEDDINGS, MODELS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/models"
HELLO = [{"role": "user", "content": "hello"}]


@dataclass(frozen=True)
class Case:
    """A request. allowed: permitted statuses; None: any below 500. keyed: sent with the key. route: for counts by route."""

    method: str
    path: str
    body: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)
    allowed: frozenset[int] | None = REFUSED
    keyed: bool = True
    base: str = ""

    @property
    def route(self) -> str:
        return self.base or (urlsplit(self.path).path if self.body is not None else "(corpus)")

    @property
    def sent_headers(self) -> dict[str, str]:
        return {**self.headers, **({"authorization": f"Bearer {KEY}"} if self.keyed else {})}


def _post(path: str, allowed: frozenset[int] = REFUSED, /, **fields: Any) -> Case:
    return Case("POST", path, json.dumps(fields).encode(), {"content-type": "application/json"}, allowed)


def _complete(allowed: frozenset[int] = REFUSED, **fields: Any) -> Case:
    return _post(COMPLETIONS, allowed, **{"prompt": "hello", "max_tokens": 2, **fields})


def _each(name: str, values: Iterable[Any], allowed: frozenset[int] = REFUSED) -> Iterator[Case]:
    """Completions with each value of a field."""
    return (_complete(allowed, **{name: value}) for value in values)


def _chat(allowed: frozenset[int] = REFUSED, **fields: Any) -> Case:
    return _post(CHAT, allowed, **{"messages": HELLO, "max_tokens": 2, **fields})


def _raw(body: bytes, **headers: str) -> Case:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Case("POST", COMPLETIONS, body, {"content-type": "application/json", **named})


def _counts() -> Iterator[Case]:
    """Unbounded counts (CVE-2026-34756)."""
    for name in ("n", "best_of"):
        yield from _each(name, (10**6, 2**31, 2**63, 10**30, -1, 0))
    yield _chat(n=10**9, top_logprobs=10**9)
    yield _complete(prompt=["a"] * 5000, max_tokens=1)
    yield from _each("max_tokens", (10**9, 2**62, 10**40), FINE)
    yield _post(EMBEDDINGS, input=["a"] * 5000)
    yield _post("/v1/rerank", query="a", documents=["b"] * 5000)


def _templates() -> Iterator[Case]:
    """Template arguments that block a server or run code in it (CVE-2025-62426, CVE-2026-5760)."""
    sources = [
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ 'x' * 10**10 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ]
    yield from (_chat(FINE, chat_template=source) for source in sources)
    for kwargs in (
        {"chat_template": sources[0]},
        {"messages": [{"role": "user", "content": "x"}] * 5},
        {"tokenize": True, "add_generation_prompt": False, "padding": "max_length", "max_length": 10**9},
        {"a" * 500: {"b": [[[[]]]] * 100}},
        {"self": 1, "__class__": 2, "loop": 3, "raise_exception": 4},
    ):
        yield _chat(FINE, chat_template_kwargs=kwargs)
        yield _post("/apply_template", FINE, messages=HELLO, chat_template_kwargs=kwargs)


def _grammars() -> Iterator[Case]:
    """Patterns, grammars and schemas that fail or never end (CVE-2025-48944, vllm#17313)."""
    patterns = ["[", "(?P<", "(a+)+$", "a{1000000000}", "((a{1000}){1000}){1000}", "\\", "(?<=a)b", "\ud800", "*", "("]
    yield from _each("structured_outputs", ({"regex": pattern} for pattern in patterns), FINE)
    schemas: list[Any] = [
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "(((("}}},
        {"$ref": "#"},
        {"$ref": "file:///etc/passwd"},
        {"$ref": "http://169.254.169.254/latest/meta-data"},
        {"type": "nonsense"},
        {"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}},
        {"enum": []},
        {"type": "array", "minItems": 10**9},
    ]
    for schema in schemas:
        yield _chat(FINE, response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}})
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        yield _chat(FINE, tools=[tool], tool_choice="required")
    yield _complete(FINE, structured_outputs={"grammar": "start: start start"})
    yield _complete(structured_outputs={"choice": []})


def _token_ids() -> Iterator[Case]:
    """Token ids outside the vocabulary (vllm#55164)."""
    ids = [-1, 10**6, 2**31, 2**63, -(2**63)]
    yield from _each("logit_bias", ({str(token): 1} for token in ids))
    yield from _each("stop_token_ids", ([token] for token in ids))
    yield from _each("allowed_token_ids", ([token] for token in ids))
    yield from (_complete(prompt=[token], max_tokens=1) for token in ids)
    yield from (_post("/detokenize", tokens=[token]) for token in ids)
    yield from (_post(EMBEDDINGS, input=[token]) for token in ids)
    yield _complete(allowed_token_ids=[])


def _shifts() -> Iterator[Case]:
    """Negative counts in a context shift (CVE-2026-21869)."""
    yield _post("/infill", input_prefix="a", input_suffix="b", n_discard=-(2**31))
    for name in ("keep_tokens", "attention_window", "attention_sinks", "truncate_prompt_tokens", "cache_reuse"):
        for value in (-1, -(2**31), -(2**63), 2**63):
            yield _complete(FINE if value > 0 else REFUSED, context_overflow="shift", **{name: value})


def _references() -> Iterator[Case]:
    """Pickles, and files and addresses to be read by the server (CVE-2026-3059)."""
    packed = pickle.dumps({"a": 1})
    yield Case("POST", COMPLETIONS, packed, {"content-type": "application/x-python-pickle"})
    yield _raw(packed)
    yield _post(COMPLETIONS, prompt_embeds=base64.b64encode(packed).decode(), max_tokens=1)
    for url in ("http://169.254.169.254/latest", "file:///etc/passwd", "gopher://127.0.0.1:6379/_x", ""):
        content = [{"type": "image_url", "image_url": {"url": url}}]
        yield _chat(messages=[{"role": "user", "content": content}], max_tokens=1)
    for path in ("/etc", "../../../etc/passwd", "\x00", "a" * 4000, "https://example.com/a", ".", "~root"):
        yield _post("/v1/load_lora_adapter", lora_name="a", lora_path=path)


def _keys() -> Iterator[Case]:
    """Paths and headers that circumvented a key (CVE-2025-59425, CVE-2026-48746)."""
    paths = ["//v1/models", "/v1/models/", "/health/../v1/models", "/v1/models;/health", "/v1/models?/health"]
    paths += ["/v1/%6dodels", "/%2e/v1/models", "/health%2f..%2fv1/models", "/metrics#/health", "/V1/MODELS"]
    paths += ["http://health/v1/models", "/health\\..\\v1\\models"]
    yield from (Case("GET", path, allowed=UNAUTHORIZED, keyed=False) for path in paths)
    for value in ("", "Bearer", "Bearer ", "Basic aw==", "bearer k ", "Bearer kk", "Bearer " + "k" * 5000):
        headers = {"authorization": value} if value else {}
        allowed = UNAUTHORIZED | {200} if value == "bearer k " else UNAUTHORIZED
        yield Case("GET", MODELS, None, headers, allowed, keyed=False)
    hosts = {"host": "health", "x-forwarded-prefix": "/health", "x-original-url": "/health", "x-rewrite-url": "/ready"}
    yield from (Case("GET", MODELS, None, {name: value}, UNAUTHORIZED, keyed=False) for name, value in hosts.items())


def _bytes() -> Iterator[Case]:
    """Bodies and heads that break parsers."""
    yield _raw(b"[" * 100_000 + b"]" * 100_000)
    yield _raw(b'{"prompt":' * 5000 + b"1" + b"}" * 5000)
    yield _raw(b'{"prompt": "a", "max_tokens": NaN}')
    yield _raw(b'{"prompt": "a", "temperature": Infinity}')
    yield _raw(b'{"prompt": "a", "seed": ' + b"9" * 100_000 + b"}")
    yield _raw(b'{"prompt": "\\ud800"}')
    yield _raw(b'{"prompt": "\\u0000"}')
    yield _raw(b'{"prompt": "\xff\xfe"}')
    yield _raw(b"")
    yield _raw(b"null")
    yield _raw(b"\x1f\x8b\x08\x00", content_encoding="gzip")
    for kind in ("text/plain", "application/json; charset=utf-16", "multipart/form-data; boundary=x"):
        yield _raw(b'{"prompt": "a"}', content_type=kind)
    yield _raw(b'{"prompt": "' + b"a" * 3_000_000 + b'"}')
    yield _raw(b'{"prompt": [' + b"1," * 400_000 + b"1]}")
    yield Case("GET", "/health", None, {"x-long": "a" * 70_000})
    yield Case("GET", "/v1/models?" + "a" * 70_000)


def _files() -> Iterator[Case]:
    """Paths of files that are not served."""
    paths = ["/ui/../../etc/passwd", "/ui/%2e%2e/%2e%2e/etc/passwd", "/docs/..%2f..%2fetc%2fpasswd", "/ui/..\\..\\etc"]
    paths += ["/v1/models/..%2f..%2fetc%2fpasswd", "/v1/responses/..%2f..%2f", "/ui//etc/passwd", "/docs/%00"]
    yield from (Case("GET", path) for path in paths)


def _others() -> Iterator[Case]:
    """Origins, salts, lengths and further fields."""
    long = "a" * 20_000
    yield Case("OPTIONS", CHAT, None, {"origin": "https://evil.example"}, FINE | {204})
    yield Case("GET", MODELS, None, {"origin": "null"}, FINE)
    yield from _each("cache_salt", (long, ""), FINE)
    yield _complete(prompt=long, max_tokens=1)  # cut without notice (ollama#3839)
    yield _complete(FINE, request_id="../../" * 50)
    yield _complete(stop=["a"] * 1000)
    yield _complete(FINE, bad_words=["a" * 1000] * 1000)
    yield _complete(FINE, rope_scaling={"rope_type": "yarn", "factor": 10**300})
    yield _complete(rope_scaling={"rope_type": "longrope", "short_factor": [0.0]})
    yield _complete(FINE, priority=-(2**63))


_GROUPS = (_counts, _templates, _grammars, _token_ids, _shifts, _references, _keys, _bytes, _files, _others)
CORPUS: list[Case] = [case for group in _GROUPS for case in group()]
