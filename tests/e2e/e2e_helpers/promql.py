"""Metrics and labels that a PromQL expression uses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("promql_parser", reason="needs the extra e2e: pip install -e '.[e2e]'")

import promql_parser as promql


@dataclass
class Uses:
    """names: every metric. labels: (label, metrics that must have it). matchers: (metric, label, operator, value)."""

    names: set[str] = field(default_factory=set)
    labels: set[tuple[str, frozenset[str]]] = field(default_factory=set)
    matchers: set[tuple[str, str, str, str]] = field(default_factory=set)


def uses(expression: str) -> Uses:
    """Raises ValueError where the expression is not PromQL."""
    found = Uses()
    _walk(promql.parse(expression), found)
    return found


def _walk(node: Any, found: Uses) -> frozenset[str]:
    """The metrics under a node."""
    match node:
        case promql.VectorSelector():
            assert node.name, "a selector without a metric's name"
            found.names.add(node.name)
            for matcher in node.matchers.matchers:
                found.labels.add((matcher.name, frozenset({node.name})))
                found.matchers.add((node.name, matcher.name, str(matcher.op), matcher.value))
            return frozenset({node.name})
        case promql.MatrixSelector():
            return _walk(node.vector_selector, found)
        case promql.AggregateExpr():
            names = _all([node.expr] if node.param is None else [node.expr, node.param], found)
            _expect(node.modifier, names, found)
            return names
        case promql.BinaryExpr():
            names = _all([node.lhs, node.rhs], found)
            _expect(node.modifier.matching if node.modifier else None, names, found)
            return names
        case promql.Call():
            return _all(node.args, found)
        case promql.ParenExpr() | promql.UnaryExpr() | promql.SubqueryExpr():
            return _walk(node.expr, found)
        case promql.NumberLiteral() | promql.StringLiteral():
            return frozenset()
    raise AssertionError(f"unknown node: {node!r}")


def _all(nodes: Iterable[Any], found: Uses) -> frozenset[str]:
    return frozenset().union(*[_walk(node, found) for node in nodes])


def _expect(modifier: Any, names: frozenset[str], found: Uses) -> None:
    if modifier is not None:
        found.labels.update((label, names) for label in modifier.labels)
