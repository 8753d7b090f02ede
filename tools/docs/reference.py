"""Generate the lists and tables of the reference pages: options, request fields, metrics and models.

A page marks the place of a list or table with `<!-- generated: NAME -->` and `<!-- end -->`; the rest is written by hand.

python tools/docs/reference.py [--check]
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import httpx
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from windlass.engine.model.families.family import Family, is_set
from windlass.engine.model.families.multimodal import MULTIMODAL
from windlass.engine.model.families.registry import FAMILIES
from windlass.engine.model.gguf.architectures import ARCHITECTURES
from windlass.server.application import create_app
from windlass.server.config.api_keys import ApiKey
from windlass.server.config.engine_options import EngineOptions
from windlass.server.config.migration_hints import REMOVED
from windlass.server.config.option import SWITCH, Option, options_of
from windlass.server.config.option_names import with_option_names
from windlass.server.config.server_options import (
    LOG_LEVEL,
    ClusterOptions,
    ConnectionOptions,
    ReplicaOptions,
    ServerOptions,
)
from windlass.server.config.settings import ServerSettings
from windlass.server.schemas.base import IGNORED_FIELDS, NEUTRAL_VALUES, EngineRequestFields, StrictModel
from windlass.server.schemas.generation import GenerationRequest, SharedRequest
from windlass.server.schemas.pooling import PromptRequest

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"(<!-- generated: ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)

# Pages with details about an option, relative to docs/reference.
SEE = {
    "../guides/cache.md": ("kv_persist", "kv_persist_size", "shared_prefix_cache", "cache_reuse"),
    "../guides/choosing-a-model.md": ("dtype", "quantization", "activations"),
    "../guides/choosing-a-model.md#lora-adapters": ("lora", "max_loras", "max_lora_rank", "lora_folder"),
    "../guides/deployment.md": ("ssl_certfile", "api_key", "api_key_file", "cors_origin", "allowed_hosts", "uds"),
    "../guides/embeddings.md#generative-rerankers": ("rerank_tokens", "rerank_template"),
    "../guides/endless-generation.md": (
        "context_overflow",
        "shift_context",
        "max_total_tokens",
        "keep_tokens",
        "attention_window",
    ),
    "../guides/gpu.md": ("device", "gpu_memory_utilization", "kv_host_memory", "cuda_graphs", "burst_ms"),
    "../guides/monitoring.md": (
        "metrics_names",
        "otel_endpoint",
        "log_format",
        "record",
        "record_text",
        "record_limit",
    ),
    "../guides/performance.md": (
        "kv_cache_dtype",
        "max_num_batched_tokens",
        "speculative_adaptive",
        "speculative_model",
        "speculative_model_quantization",
        "speculative_mtp",
        "speculative_ngram",
        "speculative_tokens",
        "target_step_ms",
        "weight_cache",
    ),
    "../guides/scaling-out.md": ("tensor_parallel", "replicas", "pin_cores"),
    "../guides/tool-calling.md": ("tool_call_parser",),
    "../guides/tool-calling.md#thinking": ("reasoning_parser", "default_chat_template_kwargs"),
    "../guides/troubleshooting.md": ("crash_dir",),
    "../start/chat.md": ("ui",),
    "http-api.md#introspection": ("attention_maps",),
    "http-api.md#limits": ("max_connections", "header_timeout", "keep_alive_timeout", "write_timeout"),
    "http-api.md#sampling-defaults": ("generation_config", "override_generation_config"),
    "http-api.md#stored-responses": ("response_store",),
    "rotary-scaling.md": ("rope_scaling", "rope_update", "rope_profile", "rope_policy"),
}
_LINKS = {name: page for page, names in SEE.items() for name in names}


def table(*head: str, rows: Iterable[Iterable[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def escape(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


# Options


def options() -> str:
    """The options of the command line, by panel."""
    served = _served()
    parts = []
    for panel in dict.fromkeys(each.panel for each in served):
        shown = [each for each in served if each.panel == panel and each.scope == "flag"]
        if shown:
            parts.append(f"## {panel}\n\n{_option_list(shown)}")
    return "\n".join(parts)


def configuration_keys() -> str:
    return _option_list(each for each in _served() if each.scope == "key")


def environment_variables() -> str:
    return _option_list(each for each in _served() if each.scope == "variable")


def cluster_options() -> str:
    return _option_list(options_of(ClusterOptions).values())


def removed_options() -> str:
    hints = {f"--{name.replace('_', '-')}": with_option_names(hint) for name, hint in REMOVED.items()}
    every = [each for cls in (EngineOptions, ServerOptions, ConnectionOptions) for each in options_of(cls).values()]
    moved = {
        scope: _listed(sorted(each.flag for each in every if each.scope == scope)) for scope in ("key", "variable")
    }
    replaced = "".join(f"* `{flag}`: {hints[flag]}\n" for flag in sorted(hints))
    return (
        f"{replaced}\n"
        f"Now [keys](#configuration-keys) of the same name: {moved['key']}.\n\n"
        f"Now [variables](#expert-variables): {moved['variable']}.\n"
    )


def _served() -> list[Option]:
    classes = (EngineOptions, ServerOptions, ReplicaOptions, ConnectionOptions)
    return [*(each for cls in classes for each in options_of(cls).values()), LOG_LEVEL]


def _option_list(shown: Iterable[Option]) -> str:
    """One item per option: its name, with a link to details, its meaning, and its default."""
    lines = []
    for each in shown:
        name = _spelling(each)
        name = f"[{name}]({_LINKS[each.name]})" if each.name in _LINKS else name
        meaning, _, stated = each.help.replace("*", r"\*").partition(" Default: ")
        default = stated.rstrip(".") or _option_default(each)
        lines.append(f"* {name}: {escape(meaning)}{f' Default: {escape(default)}.' if default else ''}\n")
    return "".join(lines)


def _spelling(option: Option) -> str:
    if option.scope == "variable":
        return f"`{option.variable}`"
    if option.scope == "key":
        return f"`{option.key}`"
    return f"`{option.flag}`, `--no-{option.key}`" if option.kind is SWITCH else f"`{option.flag}`"


def _option_default(option: Option) -> str:
    if option.default is None or option.default == "":
        return ""
    if isinstance(option.default, bool):
        return "on" if option.default else "off"
    return f"`{option.default:g}`" if isinstance(option.default, float) else f"`{option.default}`"


# Request fields

# Models whose fields several endpoints have, from general to special, with the headings of their lists.
SHARED: Mapping[type[StrictModel], str] = {
    EngineRequestFields: "Common fields",
    SharedRequest: "Generation fields",
    GenerationRequest: "Completion and chat fields",
    PromptRequest: "Text fields",
}
INT32_MAX = 2**31 - 1


@cache
def app() -> Any:
    """A server with every metric: a named caller, adapters, and both names."""
    sys.path.insert(0, str(ROOT / "tests"))
    engine = importlib.import_module("helpers.scripted_engine").ScriptedEngine()
    tokenizer = importlib.import_module("helpers.live_server").toy_tokenizer()
    callers = (replace(ApiKey.plain("key"), name="alice"),)
    settings = ServerSettings(served_model_name="toy", metrics_names="both", callers=callers, lora_folder=ROOT)
    return create_app(engine, tokenizer, settings)


def fields() -> str:
    """Lists of shared fields, of the fields of each endpoint, and of those of the objects that they contain.

    A field that an earlier list has is named with a link to that list.
    """
    document = app().openapi()
    schemas = document["components"]["schemas"]
    models = {model.__name__: model for model in _descendants(StrictModel)}
    shared = {model: _rows(_properties(model, model.model_json_schema()), model) for model in SHARED}
    parts, properties = [], []
    places: dict[Row, str] = {}
    for model, heading in SHARED.items():
        users = [path for path, name in _bodies(document) if issubclass(models[name], model)]
        own = [row for row in shared[model] if row not in places]
        parts.append(f"## {heading}\n\nFields of {_listed(users)}.\n\n{_field_list(own)}")
        places |= dict.fromkeys(own, heading)
        properties.append(_properties(model, model.model_json_schema()))
    bodies = {models[name]: path for path, name in _bodies(document)}
    for model, path in bodies.items():
        links = {SHARED[base]: _link(SHARED[base].lower(), SHARED[base]) for base in SHARED if issubclass(model, base)}
        inherited = {row for base in SHARED if issubclass(model, base) for row in shared[base]}
        for base in (base for base in model.__mro__[1:] if base in bodies):
            links = {path: _link(f"fields of `{bodies[base]}`", f"POST {bodies[base]}")}
            inherited |= set(_rows(_properties(base, schemas[base.__name__]), base))
        found = _properties(model, schemas[model.__name__])
        elsewhere: dict[str, list[str]] = {}
        own = []
        for row in _rows(found, model):
            if row not in inherited and row in places:
                elsewhere.setdefault(places[row], []).append(row[0])
            elif row not in inherited:
                own.append(row)
        for heading, names in elsewhere.items():
            links[f"{path} {heading}"] = f"{_listed(names)} of {_reference(heading)}"
        also = f"Also: {'; '.join(links.values())}.\n\n" if links else ""
        parts.append(f"## `POST {path}`\n\n{also}{_field_list(own) if own else ''}")
        places |= dict.fromkeys(own, f"POST {path}")
        properties.append(found)
    objects: dict[str, list[Row]] = {}
    for name in sorted(_objects(properties, schemas)):
        objects[name] = _rows(_properties(models.get(name), schemas[name]), models.get(name), schemas[name])
    shown = (_object(name, _description(schemas[name]), objects) for name in objects)
    return "\n".join([*parts, "## Objects\n", *shown])


Row = tuple[str, str, str, str]  # name, type, default, meaning


def _object(name: str, description: str, objects: Mapping[str, list[Row]]) -> str:
    """A list of the fields of an object, without those of an object with the same fields and none more."""
    rows = objects[name]
    within = [
        other
        for other, others in objects.items()
        if other != name
        and len(_typeless(others)) > 1
        and set(_typeless(others)) <= set(rows)
        and (len(others), other) < (len(rows), name)
    ]
    base = max(within, key=lambda other: len(objects[other]), default=None)
    own = [row for row in rows if base is None or row not in _typeless(objects[base])]
    also = f" Also: fields of {_link(base, base)}." if base else ""
    return f"### {name}\n\n{description}{also}\n\n{_field_list(own)}"


def _typeless(rows: list[Row]) -> list[Row]:
    return [row for row in rows if row[0] != "type"]


def _merged(rows: Iterable[Row]) -> Iterator[tuple[list[str], str]]:
    """Names of the fields that have equal types, defaults and meanings, with those."""
    names: dict[str, list[str]] = {}
    for name, *cells in rows:
        kind = "; ".join(filter(None, cells[:2]))
        names.setdefault(". ".join(filter(None, (f"*{kind}*", cells[2]))), []).append(name)
    return ((found, text if text.endswith(".") else f"{text}.") for text, found in names.items())


def ignored_fields() -> str:
    rows: dict[str, list[str]] = {}
    for name, definer in IGNORED_FIELDS.items():
        rows.setdefault(definer, []).append(f"`{name}`")
    return table("defined by", "fields", rows=((definer, ", ".join(names)) for definer, names in rows.items()))


def neutral_values() -> str:
    spelled = {True: "true", False: "false"}
    rows = ((f"`{k}`", f"`{spelled[v] if isinstance(v, bool) else v}`") for k, v in NEUTRAL_VALUES.items())
    return table("field", "accepted value", rows=rows)


def _bodies(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Paths that read a JSON body, and the names of its models."""
    found = []
    for path, methods in document["paths"].items():
        for operation in methods.values():
            if "requestBody" in operation:
                schema = operation["requestBody"]["content"]["application/json"]["schema"]
                found.append((path, _name(schema["$ref"])))
    return found


def _descendants(model: type[StrictModel]) -> Iterator[type[StrictModel]]:
    for child in model.__subclasses__():
        yield child
        yield from _descendants(child)


def _properties(model: type[StrictModel] | None, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Properties of the model's own fields, without those of other services that are accepted without effect."""
    found = schema.get("properties", {})
    known = None if model is None else {field.alias or name for name, field in model.model_fields.items()}
    return {name: value for name, value in found.items() if known is None or name in known}


def _objects(properties: Iterable[Mapping[str, Any]], schemas: Mapping[str, Any]) -> set[str]:
    """Names of the objects that are reachable from these properties."""
    found: set[str] = set()
    waiting: list[Any] = list(properties)
    while waiting:
        item = waiting.pop()
        if isinstance(item, list):
            waiting += item
        elif isinstance(item, dict):
            if "$ref" in item and (name := _name(item["$ref"])) not in found:
                found.add(name)
                waiting.append(schemas[name])
            waiting += item.values()
    return found


def _rows(
    properties: Mapping[str, Any], model: type[StrictModel] | None, schema: Mapping[str, Any] | None = None
) -> list[Row]:
    if schema is not None:
        required = set(schema.get("required", ()))
    else:
        required = {name for name, field in model.model_fields.items() if field.is_required()} if model else set()
    rows = []
    for name, prop in properties.items():
        meaning, _, default = _description(prop).partition(" Default: ")
        default = "required" if name in required else default.rstrip(".")
        meaning = "" if re.fullmatch(r"Always `\w+`\.", meaning) else meaning
        rows.append((name, _type(prop), escape(default), escape(meaning)))
    return rows


def _field_list(rows: Iterable[Row]) -> str:
    """One item per field, and one for all that have no effect."""
    rows = list(rows)
    unused = [f"`{row[0]}`" for row in rows if row[3] == "No effect."]
    lines = [
        f"* {', '.join(f'`{one}`' for one in names)}: {text}\n"
        for names, text in _merged(row for row in rows if row[3] != "No effect.")
    ]
    return "".join(lines) + (f"* {', '.join(unused)}: without effect.\n" if unused else "")


def _description(schema: Mapping[str, Any]) -> str:
    return " ".join(str(schema.get("description", "")).split())


def _type(schema: Mapping[str, Any]) -> str:
    """The type and the limits of a value."""
    if "$ref" in schema:
        name = _name(schema["$ref"])
        return f"[{name}](#{name.lower()})"
    if "const" in schema or "enum" in schema:
        values = [value for value in schema.get("enum", [schema.get("const")]) if value]
        return ", ".join(f"`{json.dumps(value)}`" for value in values) or "empty"
    for key in ("anyOf", "oneOf"):
        if key in schema:
            *others, last = dict.fromkeys(_type(one) for one in schema[key] if one != {"type": "null"})
            return f"{', '.join(others)} or {last}" if others else last
    kind = str(schema.get("type", "any"))
    if kind in ("integer", "number"):
        return kind + _range(schema)
    if kind == "string":
        if "pattern" in schema:
            return f"string matching `{escape(schema['pattern'])}`"
        return f"string{_count(schema, 'Length')}"
    if kind == "array":
        return f"array{_count(schema, 'Items')} of {_types(schema.get('items', {}))}"
    contents = schema.get("additionalProperties")
    if kind == "object" and isinstance(contents, dict) and contents:
        return f"object{_count(schema, 'Properties')} of {_types(contents)}"
    return kind


def _types(schema: Mapping[str, Any]) -> str:
    return re.sub(r"(^|, | or )(string|integer|number|object|array)\b", r"\1\2s", _type(schema))


def _range(schema: Mapping[str, Any]) -> str:
    """Limits of a number, without those of 32 or 64 bits."""
    least, above, most = (schema.get(key) for key in ("minimum", "exclusiveMinimum", "maximum"))
    if least is not None and least <= -INT32_MAX:
        least = None
    if most is not None and most >= INT32_MAX:
        most = None
    if least is not None and most is not None:
        return f" {int(least):,} to {int(most):,}" if least < 0 else f" {int(least):,}–{int(most):,}"
    limits = ((">", above), ("≥", least), ("≤", most))
    shown = ", ".join(f"{sign} {int(value):,}" for sign, value in limits if value is not None)
    return f" {shown}" if shown else ""


def _count(schema: Mapping[str, Any], what: str) -> str:
    low, high = schema.get(f"min{what}", 0), schema.get(f"max{what}")
    if high is None:
        return f" (≥ {low:,})" if low > 1 else ""
    return f" ({low:,}–{high:,})" if low else f" (≤ {high:,})"


def _name(reference: str) -> str:
    return reference.rpartition("/")[2]


def _link(text: str, heading: str) -> str:
    return f"[{text}](#{_slug(heading)})"


def _reference(heading: str) -> str:
    """A link to the list with this heading."""
    path = heading.removeprefix("POST ")
    return _link(heading.lower() if path == heading else f"`{path}`", heading)


def _slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _listed(paths: list[str]) -> str:
    shown = [f"`{path}`" for path in paths]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


# Metrics


def metrics() -> str:
    return _metric_table(_families("windlass_"))


def vllm_metrics() -> str:
    """A list of the metrics with equal names and meanings under both prefixes, and a table of the others."""
    ours = {_suffix(family): family.documentation for family in _families("windlass_")}
    same: list[Metric] = []
    others: list[Metric] = []
    for family in _families("vllm:"):
        equal = ours.get(_suffix(family)) == family.documentation
        (same if equal else others).append(family)
    names = _listed(sorted(_metric_name(family) for family in same))
    return f"As the metrics above with the prefix `windlass_`: {names}.\n\n{_metric_table(others)}"


@cache
def _exposed() -> list[Metric]:
    """The families that a server exposes."""

    async def scrape() -> str:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app()), base_url="http://127.0.0.1") as client:
            return (await client.get("/metrics", headers={"x-api-key": "key"})).text

    return list(text_string_to_metric_families(asyncio.run(scrape())))


def _families(prefix: str) -> list[Metric]:
    return [one for one in _exposed() if one.name.startswith(prefix) and not one.name.endswith("_created")]


def _suffix(family: Metric) -> str:
    return str(re.split("[:_]", family.name, maxsplit=1)[1])


def _metric_name(family: Metric) -> str:
    return f"{family.name}_total" if family.type == "counter" else str(family.name)


def _metric_table(families: Iterable[Metric]) -> str:
    """A table of metrics, without the labels that every metric of vLLM has."""
    rows = []
    for family in families:
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        if family.name.startswith("vllm:"):
            labels -= {"engine", "model_name"}
        by = f" by {_listed(sorted(labels))}" if labels else ""
        rows.append((f"`{_metric_name(family)}`", f"{family.type}{by}", escape(family.documentation)))
    return table("name", "type, labels", "meaning", rows=rows)


# Models

POSITIONS = {"learned": "learned, a table", "alibi": "ALiBi, slopes by head"}


def causal_models() -> str:
    rows = []
    for family in _compared(lambda one: one.causal and one.positions not in POSITIONS):
        rows.append(
            (
                family.models,
                f"`{family.architecture}`",
                _pairs(family) if family.positions == "rotary" else "none",
                ", ".join(f"`{name}`" for name, one in ARCHITECTURES.items() if family in one.families),
            )
        )
    return table("models", "`architectures`", "pairs; share; theta", "GGUF", rows=rows)


def encoders() -> str:
    found = _compared(lambda one: not one.causal)
    rows = ((family.models, _architectures(family), _pairs(family)) for family in found)
    return table("models", "`architectures`", "pairs; theta", rows=rows)


def models_without_rotation() -> str:
    rows = (
        (family.models, _architectures(family), POSITIONS[family.positions])
        for family in _compared(lambda one: one.positions in POSITIONS)
    )
    return table("models", "`architectures`", "positions", rows=rows)


def multimodal_models() -> str:
    kinds = sorted(MULTIMODAL, key=lambda one: one.title.lower())
    return "".join(f"* {kind.title}: `{kind.architecture}`\n" for kind in kinds)


def checkpoints() -> set[str]:
    """Architectures of the tiny checkpoints in every table `FAMILIES` of tests/helpers/tiny_*.py."""
    tests = ROOT / "tests"
    if str(tests) not in sys.path:
        sys.path.insert(0, str(tests))
    found: set[str] = set()
    for path in sorted((tests / "helpers").glob("tiny_*.py")):
        tiny: dict[str, tuple[str, Any]] = getattr(importlib.import_module(f"helpers.{path.stem}"), "FAMILIES", {})
        for prefix, _ in tiny.values():
            whole = prefix.endswith(("Model", "ForCausalLM"))
            found.add(prefix if whole else f"{prefix}ForCausalLM")
    return found


def _compared(chosen: Callable[[Family], bool]) -> Iterator[Family]:
    """The chosen families by name. Each must have a tiny checkpoint that tests compare with a reference."""
    compared = checkpoints()
    for family in sorted(filter(chosen, FAMILIES), key=lambda one: one.models.lower()):
        if family.architecture not in compared:
            raise SystemExit(f"no tiny checkpoint of {family.architecture}: add one to tests/helpers/tiny_families.py")
        yield family


def _architectures(family: Family) -> str:
    return ", ".join(f"`{name}`" for name in (*family.names, family.classifier, family.token_classifier))


def _pairs(family: Family) -> str:
    """Numbering of pairs, the share that rotates if it is not 1, and theta if it is not 10,000."""
    rules = family.rules
    parts = ["interleaved" if is_set({}, family.interleaved) else "halves"]
    if rules.partial_rotary_factor != 1:
        parts.append(f"{rules.partial_rotary_factor:g}")
    if rules.rope_theta != 10_000:
        local = rules.local_rope_theta
        parts.append(f"{rules.rope_theta:,.0f}" + ("" if local is None else f" (local layers {local:,.0f})"))
    return "; ".join(parts)


TABLES: Mapping[str, Callable[[], str]] = {
    each.__name__.replace("_", " "): each
    for each in (
        options,
        configuration_keys,
        environment_variables,
        cluster_options,
        removed_options,
        fields,
        ignored_fields,
        neutral_values,
        metrics,
        vllm_metrics,
        causal_models,
        encoders,
        models_without_rotation,
        multimodal_models,
    )
}


def updated(text: str) -> str:
    """The text of a page with its tables generated again."""
    return BLOCK.sub(lambda match: f"{match[1]}\n{TABLES[match[2]]()}\n{match[3]}", text)


def pages() -> dict[Path, list[str]]:
    """The pages with generated tables, and their names."""
    texts = ((path, path.read_text(encoding="utf-8")) for path in sorted((ROOT / "docs").rglob("*.md")))
    return {path: [name for _, name, _ in found] for path, text in texts if (found := BLOCK.findall(text))}


def main() -> int:
    """Write the tables, or with --check report the pages that differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if a page is not up to date")
    check = parser.parse_args().check
    outdated = 0
    for path in pages():
        text = path.read_text(encoding="utf-8")
        if (new := updated(text)) != text:
            outdated += 1
            print(path.relative_to(ROOT))
            if not check:
                path.write_text(new, encoding="utf-8")
    return int(check and outdated > 0)


if __name__ == "__main__":
    sys.exit(main())
