"""What one run of a chat template may spend, and the sandbox that holds it to that.

A template comes from the owner of a model, the messages from anybody; neither may hold the process
up. Loops and calls are counted, and whatever multiplies text is checked before it is built.
What must not live here: what templates may use beyond plain Jinja (template.py).
"""

import functools
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sized
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final, cast

from jinja2 import nodes
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from kvtier.errors import LimitError
from kvtier.limits import (
    RENDERED_CHARS_MAX,
    TEMPLATE_BUILT_CHARS_MAX,
    TEMPLATE_INDENT_MAX,
    TEMPLATE_STEPS_MAX,
)

_INTEGER_BITS_MAX: Final = 4096
_SMALL_CHARS: Final = 4096
"""Sums of two texts up to this length are not charged: the steps around them are."""
_WIDE_FIELD: Final = re.compile(r"\d{5,}|\*")
"""Widths of 10,000 and more in a format, or one that an argument gives."""


@dataclass(slots=True)
class Budget:
    """What is left to one run. Each `take` raises LimitError when it asks for more than that."""

    steps: int = TEMPLATE_STEPS_MAX
    chars: int = TEMPLATE_BUILT_CHARS_MAX

    def take_steps(self, count: int) -> None:
        self.steps -= count
        if self.steps < 0:
            raise LimitError(f"chat template takes more than {TEMPLATE_STEPS_MAX} steps")

    def take_chars(self, count: int) -> None:
        require_length(count)
        self.chars -= count
        if self.chars < 0:
            raise LimitError(f"chat template builds more than {TEMPLATE_BUILT_CHARS_MAX} chars")


BUDGET: Final[ContextVar[Budget | None]] = ContextVar("kvtier_template_budget", default=None)
"""Of the run under way in this thread or task; None while a template is compiled."""


def require_length(chars: int) -> None:
    """Refuse a text longer than RENDERED_CHARS_MAX before it is built."""
    if chars > RENDERED_CHARS_MAX:
        raise LimitError(f"chat template makes a text of more than {RENDERED_CHARS_MAX} chars")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox that charges loops, calls and joined text to `BUDGET`."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _Metering().visit(tree)
        tree.set_environment(self)
        return tree

    def getitem(self, obj: object, argument: object) -> object:
        if type(obj) is dict and argument in obj:
            return obj[argument]
        return super().getitem(obj, argument)

    def getattr(self, obj: object, attribute: str) -> object:
        """As the base class, faster where templates spend their time."""
        if type(obj) is dict and attribute in obj and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute]
        if type(obj) is LoopContext and attribute in _LOOP_VALUES:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: object, attr: str, value: object) -> bool:
        if isinstance(obj, str) and attr in {"translate", "format_map", "encode"}:
            return False
        return bool(super().is_safe_attribute(obj, attr, value))

    def call(
        self,
        /,  # a macro of a template may have arguments of any name
        context: Context,
        obj: Callable[..., object],
        *args: object,
        **kwargs: object,
    ) -> object:
        _take_steps(1)
        if type(obj) is not Macro:
            method = getattr(obj, "__wrapped__", obj)  # jinja2 wraps `format` of strings
            owner = getattr(method, "__self__", None)
            if isinstance(owner, str):
                _check_method(owner, getattr(method, "__name__", ""), args, kwargs)
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, sign: str, left: object, right: object) -> object:
        match sign:
            case "*":
                _check_product(left, right)
            case "**":
                _check_power(left, right)
            case "%" if isinstance(left, str):
                check_format(left)
        return super().call_binop(context, sign, left, right)


def _take_steps(count: int) -> None:
    budget = BUDGET.get()
    if budget is not None:
        budget.take_steps(count)


def _take_chars(count: int) -> None:
    budget = BUDGET.get()
    if budget is not None:
        budget.take_chars(count)
    else:
        require_length(count)


def _size(value: object) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


def _check_product(left: object, right: object) -> None:
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > _INTEGER_BITS_MAX:
            raise LimitError(f"chat template makes a number of over {_INTEGER_BITS_MAX} bits")
    elif isinstance(left, int):
        _take_chars(_size(right) * max(left, 0))
    elif isinstance(right, int):
        _take_chars(_size(left) * max(right, 0))


def _check_power(base: object, exponent: object) -> None:
    bits = base.bit_length() if isinstance(base, int) else 0
    if isinstance(exponent, int) and bits * exponent > _INTEGER_BITS_MAX:
        raise LimitError(f"chat template makes a number of over {_INTEGER_BITS_MAX} bits")


def check_format(pattern: str) -> None:
    """Refuse a format with a field so wide that it would fill memory."""
    if _WIDE_FIELD.search(pattern):
        raise LimitError("chat template formats with a width of more than 4 digits")


def check_indent(width: object) -> None:
    """Refuse an indentation wider than TEMPLATE_INDENT_MAX; it is multiplied by lines."""
    wide = len(width) if isinstance(width, str) else width
    if isinstance(wide, int) and wide > TEMPLATE_INDENT_MAX:
        raise LimitError(f"chat template indents by more than {TEMPLATE_INDENT_MAX}")


def check_replace(text: str, old: object, new: object) -> None:
    """Charge what replacing every `old` in `text` by `new` can build."""
    if isinstance(old, str) and isinstance(new, str):
        _take_chars(len(text) + text.count(old) * len(new))


def _check_method(
    text: str, method: str, args: tuple[object, ...], kwargs: dict[str, object]
) -> None:
    match method, args:
        case ("ljust" | "rjust" | "center" | "zfill", (int(width), *_)):
            _take_chars(max(width, 0))
        case "expandtabs", _:
            check_indent(kwargs.get("tabsize", args[0] if args else 8))
        case "replace", (old, new, *_):
            check_replace(text, old, new)
        case "join", (Sized() as items, *_):
            _take_chars(len(text) * len(items))
        case "format", _:
            check_format(text)


# What the parser's tree gets so that loops and sums of texts are charged too


class _Metering(NodeTransformer):
    """Puts filters of ours into a template's tree; what it renders stays the same."""

    def visit_For(self, loop: nodes.For) -> nodes.Node:
        self.generic_visit(loop)
        if isinstance(loop.iter, nodes.Expr):
            loop.iter = _filtered(loop.iter, METERED)
        return loop

    def visit_Concat(self, joined: nodes.Concat) -> nodes.Node:
        self.generic_visit(joined)
        return _filtered(nodes.List(joined.nodes, lineno=joined.lineno), JOINED)

    def visit_Add(self, last: nodes.Add) -> nodes.Node:
        terms: list[nodes.Expr] = []
        term: nodes.Expr = last
        while isinstance(term, nodes.Add):
            terms.append(term.right)
            term = term.left
        together = nodes.List([term, *reversed(terms)], lineno=last.lineno)
        self.generic_visit(together)
        return _filtered(together, ADDED)


def _filtered(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


METERED: Final = "kvtier_metered"
JOINED: Final = "kvtier_joined"
ADDED: Final = "kvtier_added"


def metered(items: object) -> object:
    """Charge a step for each of `items`, at once where their number is known."""
    if isinstance(items, Sized):
        _take_steps(len(items))
        return items
    if isinstance(items, Iterable):
        return _each(items)
    return items


def _each(items: Iterable[object]) -> Iterator[object]:
    for item in items:
        _take_steps(1)
        yield item


def joined(parts: list[object]) -> str:
    """The text of `parts` one after the other, as `~` makes it, charged before it is built."""
    return _join(list(map(str, parts)))


def added(terms: list[object]) -> object:
    """`terms[0] + terms[1] + …`, charged before it is built."""
    if set(map(type, terms)) == _ONLY_TEXT:
        return _join(cast("list[str]", terms))
    return functools.reduce(_add, terms)


def _join(texts: list[str]) -> str:
    length = sum(map(len, texts))
    if length > _SMALL_CHARS:
        _take_chars(length)
    return "".join(texts)


def _add(left: object, right: object) -> object:
    _take_chars(_size(left) + _size(right))
    return operator.add(left, right)


_ONLY_TEXT: Final = {str}
_DICT_ATTRIBUTES: Final = frozenset(dir(dict))
_LOOP_VALUES: Final = frozenset({"first", "last", "index", "index0", "length"})
