"""What a PromQL expression asks for: metrics, labels, and whether a rate is taken.

What must not live here: which metrics there are.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import promql_parser

RATES = frozenset({"rate", "irate", "increase"})
_VARIABLES = {"$__rate_interval": "5m", "$job": ".*"}


@dataclass(frozen=True, slots=True)
class Selector:
    """One metric as an expression selects it."""

    metric: str
    matchers: tuple[tuple[str, str, str], ...]
    """(label, operator, value)."""
    is_rated: bool


def parsed(expression: str) -> Any:
    """The syntax tree, with the variables of a dashboard filled in. ValueError for bad syntax."""
    for name, value in _VARIABLES.items():
        expression = expression.replace(name, value)
    return promql_parser.parse(expression)


def selectors(expression: str) -> list[Selector]:
    """Every selector of an expression."""
    found: list[Selector] = []

    def visit(node: Any, rated: bool) -> None:
        if isinstance(node, promql_parser.MatrixSelector):
            visit(node.vector_selector, rated)
        elif isinstance(node, promql_parser.VectorSelector):
            matchers = tuple(
                (one.name, str(one.op).rpartition(".")[2], one.value)
                for one in node.matchers.matchers
            )
            found.append(Selector(str(node.name), matchers, rated))
        elif isinstance(node, promql_parser.Call):
            for argument in node.args:
                visit(argument, rated or node.func.name in RATES)
        else:
            for child in _children(node):
                visit(child, rated)

    visit(parsed(expression), False)
    return found


def grouped(expression: str) -> set[str]:
    """Labels that an expression groups or matches by."""
    labels: set[str] = set()

    def visit(node: Any) -> None:
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            labels.update(node.modifier.labels)
        matching = getattr(getattr(node, "modifier", None), "matching", None)
        labels.update(getattr(matching, "labels", ()))
        for child in _children(node):
            visit(child)

    visit(parsed(expression))
    return labels


def _children(node: Any) -> Iterator[Any]:
    if isinstance(node, promql_parser.Call):
        yield from node.args
        return
    for name in ("expr", "param", "lhs", "rhs"):
        child = getattr(node, name, None)
        if isinstance(child, promql_parser.Expr):
            yield child
