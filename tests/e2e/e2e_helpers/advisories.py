"""Requests of the kinds that brought other inference servers down, as their advisories and bug reports describe them.

Each has what may be answered. A connection that is closed without an answer is never among it.
"""

from __future__ import annotations

import base64
import json
import pickle
from dataclasses import dataclass, field
from typing import Any

REFUSED = frozenset({400, 401, 403, 404, 405, 413, 415, 431})
FINE = REFUSED | {200}
PROMPT = {"prompt": "hello", "max_tokens": 2}
HELLO = [{"role": "user", "content": "hello"}]
CHAT_BODY = {"messages": HELLO, "max_tokens": 2}


@dataclass(frozen=True)
class Hostile:
    """about: what it is like, with the advisory's number where it has one. keyed: sent with the server's key."""

    about: str
    method: str
    path: str
    body: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)
    allowed: frozenset[int] = REFUSED
    keyed: bool = True


def _post(about: str, path: str, fields: dict[str, Any], allowed: frozenset[int] = REFUSED) -> Hostile:
    return Hostile(about, "POST", path, json.dumps(fields).encode(), {"content-type": "application/json"}, allowed)


def _raw(about: str, body: bytes, path: str = "/v1/completions", **headers: str) -> Hostile:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Hostile(about, "POST", path, body, {"content-type": "application/json", **named})


def _unbounded() -> list[Hostile]:
    about = "unbounded counts (CVE-2026-34756)"
    found = [
        _post(about, "/v1/completions", {**PROMPT, name: value})
        for name in ("n", "best_of")
        for value in (10**6, 2**31, 2**63, 10**30, -1, 0)
    ]
    found += [_post(about, "/v1/chat/completions", {**CHAT_BODY, "n": 10**9, "top_logprobs": 10**9})]
    found += [_post(about, "/v1/completions", {"prompt": ["a"] * 5000, "max_tokens": 1})]
    found += [
        _post(about, "/v1/completions", {**PROMPT, "max_tokens": value}, FINE) for value in (10**9, 2**62, 10**40)
    ]
    found += [
        _post(about, "/v1/embeddings", {"input": ["a"] * 5000}),
        _post(about, "/v1/rerank", {"query": "a", "documents": ["b"] * 5000}),
    ]
    return found  # fmt: skip


def _templates() -> list[Hostile]:
    about = "template arguments that hold up or take over a server (CVE-2025-62426, CVE-2026-5760)"
    sources = [
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ 'x' * 10**10 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ]
    found = [_post(about, "/v1/chat/completions", {**CHAT_BODY, "chat_template": source}, FINE) for source in sources]
    for kwargs in (
        {"chat_template": sources[0]},
        {"messages": [{"role": "user", "content": "x"}] * 5},
        {"tokenize": True, "add_generation_prompt": False, "padding": "max_length", "max_length": 10**9},
        {"a" * 500: {"b": [[[[]]]] * 100}},
        {"self": 1, "__class__": 2, "loop": 3, "raise_exception": 4},
    ):
        found.append(_post(about, "/v1/chat/completions", {**CHAT_BODY, "chat_template_kwargs": kwargs}, FINE))
        found.append(_post(about, "/apply_template", {"messages": HELLO, "chat_template_kwargs": kwargs}, FINE))
    return found


def _grammars() -> list[Hostile]:
    about = "patterns, grammars and schemas that fail or never end (CVE-2025-48944, vllm#17313)"
    patterns = ["[", "(?P<", "(a+)+$", "a{1000000000}", "((a{1000}){1000}){1000}", "\\", "(?<=a)b", "\ud800", "*", "("]
    found = [
        _post(about, "/v1/completions", {**PROMPT, "structured_outputs": {"regex": pattern}}, FINE)
        for pattern in patterns
    ]
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
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        found.append(_post(about, "/v1/chat/completions", {**CHAT_BODY, "response_format": form}, FINE))
        tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
        body = {**CHAT_BODY, "tools": [tool], "tool_choice": "required"}
        found.append(_post(about, "/v1/chat/completions", body, FINE))
    found.append(
        _post(about, "/v1/completions", {**PROMPT, "structured_outputs": {"grammar": "start: start start"}}, FINE)
    )
    found.append(_post(about, "/v1/completions", {**PROMPT, "structured_outputs": {"choice": []}}))
    return found


def _token_ids() -> list[Hostile]:
    about = "token ids outside the vocabulary (vllm#55164)"
    ids = [-1, 10**6, 2**31, 2**63, -(2**63)]
    found = [_post(about, "/v1/completions", {**PROMPT, "logit_bias": {str(token): 1}}) for token in ids]
    found += [_post(about, "/v1/completions", {**PROMPT, "stop_token_ids": [token]}) for token in ids]
    found += [_post(about, "/v1/completions", {**PROMPT, "allowed_token_ids": [token]}) for token in ids]
    found += [_post(about, "/v1/completions", {"prompt": [token], "max_tokens": 1}) for token in ids]
    found += [_post(about, "/detokenize", {"tokens": [token]}) for token in ids]
    found += [_post(about, "/v1/embeddings", {"input": [token]}) for token in ids]
    found += [_post(about, "/v1/completions", {**PROMPT, "allowed_token_ids": []})]
    return found


def _shifts() -> list[Hostile]:
    about = "negative counts in a context shift (CVE-2026-21869)"
    found = [_post(about, "/infill", {"input_prefix": "a", "input_suffix": "b", "n_discard": -(2**31)})]
    for name in ("keep_tokens", "attention_window", "attention_sinks", "truncate_prompt_tokens", "cache_reuse"):
        for value in (-1, -(2**31), -(2**63), 2**63):
            body = {**PROMPT, "context_overflow": "shift", name: value}
            found.append(_post(about, "/v1/completions", body, FINE if value > 0 else REFUSED))
    return found


def _foreign() -> list[Hostile]:
    about = "pickles, files and addresses of others (CVE-2026-3059)"
    packed = pickle.dumps({"a": 1})
    return [
        Hostile(about, "POST", "/v1/completions", packed, {"content-type": "application/x-python-pickle"}),
        _raw(about, packed),
        _post(about, "/v1/completions", {"prompt_embeds": base64.b64encode(packed).decode(), "max_tokens": 1}),
        *(
            _post(
                about,
                "/v1/chat/completions",
                {
                    "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}],
                    "max_tokens": 1,
                },
            )
            for url in ("http://169.254.169.254/latest", "file:///etc/passwd", "gopher://127.0.0.1:6379/_x", "")
        ),
        *(
            _post(about, "/v1/load_lora_adapter", {"lora_name": "a", "lora_path": path})
            for path in ("/etc", "../../../etc/passwd", "\x00", "a" * 4000, "https://example.com/a", ".", "~root")
        ),
    ]


def _keys() -> list[Hostile]:
    about = "ways past a key by the path or its header (CVE-2025-59425, CVE-2026-48746)"
    refused = frozenset({400, 401, 404, 405})
    paths = [
        "//v1/models",
        "/v1/models/",
        "/health/../v1/models",
        "/v1/models;/health",
        "/v1/models?/health",
        "/v1/%6dodels",
        "/%2e/v1/models",
        "/health%2f..%2fv1/models",
        "/metrics#/health",
        "/V1/MODELS",
        "http://health/v1/models",
        "/health\\..\\v1\\models",
    ]
    found = [Hostile(about, "GET", path, allowed=refused, keyed=False) for path in paths]
    for value in ("", "Bearer", "Bearer ", "Basic aw==", "bearer k ", "Bearer kk", "Bearer " + "k" * 5000):
        headers = {"authorization": value} if value else {}
        allowed = refused | {200} if value == "bearer k " else refused
        found.append(Hostile(about, "GET", "/v1/models", None, headers, allowed, keyed=False))
    hosts = {"host": "health", "x-forwarded-prefix": "/health", "x-original-url": "/health", "x-rewrite-url": "/ready"}
    found += [Hostile(about, "GET", "/v1/models", None, {name: value}, refused, False) for name, value in hosts.items()]
    return found


def _bytes() -> list[Hostile]:
    about = "bodies that no parser should survive badly"
    deep = 100_000
    return [
        _raw(about, b"[" * deep + b"]" * deep),
        _raw(about, b'{"prompt":' * 5000 + b"1" + b"}" * 5000),
        _raw(about, b'{"prompt": "a", "max_tokens": NaN}'),
        _raw(about, b'{"prompt": "a", "temperature": Infinity}'),
        _raw(about, b'{"prompt": "a", "seed": ' + b"9" * 100_000 + b"}"),
        _raw(about, b'{"prompt": "\\ud800"}'),
        _raw(about, b'{"prompt": "\\u0000"}'),
        _raw(about, b'{"prompt": "\xff\xfe"}'),
        _raw(about, b""),
        _raw(about, b"null"),
        _raw(about, b"\x1f\x8b\x08\x00", content_encoding="gzip"),
        _raw(about, b'{"prompt": "a"}', content_type="text/plain"),
        _raw(about, b'{"prompt": "a"}', content_type="application/json; charset=utf-16"),
        _raw(about, b'{"prompt": "a"}', content_type="multipart/form-data; boundary=x"),
        _raw(about, b'{"prompt": "' + b"a" * 3_000_000 + b'"}'),
        _raw(about, b'{"prompt": [' + b"1," * 400_000 + b"1]}"),
        Hostile(about, "GET", "/health", None, {"x-long": "a" * 70_000}),
        Hostile(about, "GET", "/v1/models?" + "a" * 70_000, None),
    ]


def _places() -> list[Hostile]:
    about = "files outside of what is served"
    paths = ["/ui/../../etc/passwd", "/ui/%2e%2e/%2e%2e/etc/passwd", "/docs/..%2f..%2fetc%2fpasswd", "/ui/..\\..\\etc"]
    paths += ["/v1/models/..%2f..%2fetc%2fpasswd", "/v1/responses/..%2f..%2f", "/ui//etc/passwd", "/docs/%00"]
    return [Hostile(about, "GET", path, allowed=FINE - {200}) for path in paths]


def _elsewhere() -> list[Hostile]:
    about = "origins, salts, lengths and other fields that were handled badly"
    long = "a" * 20_000
    return [
        Hostile(about, "OPTIONS", "/v1/chat/completions", None, {"origin": "https://evil.example"}, FINE | {204}),
        Hostile(about, "GET", "/v1/models", None, {"origin": "null"}, FINE),
        _post(about, "/v1/completions", {**PROMPT, "cache_salt": long}, FINE),
        _post(about, "/v1/completions", {**PROMPT, "cache_salt": ""}, FINE),
        _post(
            "an answer that says nothing of a cut prompt (ollama#3839)",
            "/v1/completions",
            {"prompt": long, "max_tokens": 1},
        ),
        _post(about, "/v1/completions", {**PROMPT, "request_id": "../../" * 50}, FINE),
        _post(about, "/v1/completions", {**PROMPT, "stop": ["a"] * 1000}),
        _post(about, "/v1/completions", {**PROMPT, "bad_words": ["a" * 1000] * 1000}, FINE),
        _post(about, "/v1/completions", {**PROMPT, "rope_scaling": {"rope_type": "yarn", "factor": 10**300}}, FINE),
        _post(about, "/v1/completions", {**PROMPT, "rope_scaling": {"rope_type": "longrope", "short_factor": [0.0]}}),
        _post(about, "/v1/completions", {**PROMPT, "priority": -(2**63)}, FINE),
    ]


CORPUS: list[Hostile] = [
    *_unbounded(),
    *_templates(),
    *_grammars(),
    *_token_ids(),
    *_shifts(),
    *_foreign(),
    *_keys(),
    *_bytes(),
    *_places(),
    *_elsewhere(),
]
