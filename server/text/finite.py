"""Whether a JSON schema demands documents without end: an object that requires a member of its own kind, and so on.

llguidance does not look for that: a sample would go down that way until its tokens are used up. What this does not
understand counts as finite.
"""

from __future__ import annotations

from typing import Any

_MANY = 20_000  # schemas inside one schema that are looked at


def never_ends(schema: Any) -> bool:
    """Whether no finite document can match, by what is required of objects and arrays alone."""
    nodes: dict[int, Any] = {}
    stack = [schema]
    while stack:  # every part that may be a schema
        part = stack.pop()
        if isinstance(part, dict) and id(part) not in nodes:
            if len(nodes) >= _MANY:
                return False
            nodes[id(part)] = part
        if isinstance(part, dict | list):
            stack.extend(part.values() if isinstance(part, dict) else part)
    finite: set[int] = set()
    while True:  # the least set that holds every schema which needs only schemas of the set
        more = {key for key, part in nodes.items() if key not in finite and _ends(part, schema, finite)}
        if not more:
            return isinstance(schema, dict) and id(schema) not in finite
        finite |= more


def _ends(schema: dict[str, Any], root: Any, finite: set[int]) -> bool:
    def known(part: Any) -> bool:
        return not isinstance(part, dict) or id(part) in finite

    reference = schema.get("$ref")
    if isinstance(reference, str) and not known(target(root, reference)):
        return False
    for key, quantifier in (("allOf", all), ("anyOf", any), ("oneOf", any)):
        parts = schema.get(key)
        if isinstance(parts, list) and parts and not quantifier(map(known, parts)):
            return False
    kinds = schema.get("type")
    if kinds == "object":
        properties, required = schema.get("properties"), schema.get("required")
        if isinstance(properties, dict) and isinstance(required, list):
            return all(known(properties.get(name)) for name in required if isinstance(name, str))
    if kinds == "array":
        prefix, least = schema.get("prefixItems"), schema.get("minItems")
        if isinstance(least, int | float) and least > 0:
            first = prefix[: int(least)] if isinstance(prefix, list) else []
            return all(map(known, first)) and (len(first) >= least or known(schema.get("items")))
    return True


def target(root: Any, reference: str) -> Any:
    """What a reference inside the document points at; None for any other."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    found = root
    for name in reference[1:].split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, dict) or name not in found:
            return None
        found = found[name]
    return found
