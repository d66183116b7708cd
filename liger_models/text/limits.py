"""Limits on the work of chat templates. Templates come with checkpoints, so anybody may have written them.

jinja2's sandbox protects Python's objects from a template, but a template can still loop forever or produce gigabytes
of text. `LimitedEnvironment` counts every step of a template before the step runs, and every character before it is
produced. Counting works in every thread and needs no separate process. The place where the steps and characters are
counted depends on the kind of code:

    loops, macros                            in a statement that is inserted at the beginning of their bodies
    texts joined by ~, slices, comparisons   in a filter that is inserted around them in the syntax tree
    filters, calls, operators                in the methods by which jinja2's sandbox calls them
    outputs                                  in the function ``finalize``, to which jinja2 passes every output
"""

import functools
import re
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from jinja2 import TemplateError, meta, nodes, pass_context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

SECONDS = 10.0
"""Maximum CPU time of a thread for one conversation, in seconds."""
WORK = 100_000_000
"""Maximum work that a template may do for one conversation. Each character of any text that it creates counts as 1,
each element of a list counts as 8, and each loop iteration, call, filter, operator or output counts as `STEP`."""
STEP = 50
SOURCE = 100_000
"""Maximum number of characters in the source of a template."""

_BITS = 4096
"""Maximum number of bits in a product or a power of integers."""
_NUMERIC = frozenset({"abs", "d", "default", "float", "int", "round"})
"""Filters whose numeric arguments do not determine the length of the result, because they are not widths or counts."""
_SHALLOW = _NUMERIC | frozenset(
    {"attr", "batch", "count", "first", "items", "last", "length", "list", "map", "reject", "rejectattr", "reverse"}
    | {"select", "selectattr", "slice"}
)
"""Filters that neither write out nor compare the elements of a list, so only the number of elements counts as work."""


class _Budget(threading.local):
    """The remaining budget of the template that the current thread renders."""

    left = 0
    check_below = 0
    """The time is checked when the remaining work falls to this number."""
    end: float | None = None
    """The CPU time of the thread at which rendering must be done; None before the first check."""


_budget = _Budget()


class LimitError(TemplateError):
    """Raised if a template exceeds a limit."""

    def __init__(self, message: str) -> None:
        super().__init__(f"{message}. If you trust the template, raise the limit in {__name__}")


def begin() -> None:
    """Reset the budget of this thread for a new conversation."""
    # The clock is not read here, because this system call would take as much time as rendering a short conversation.
    _budget.left, _budget.check_below, _budget.end = WORK, WORK - 100 * STEP, None


def charge(characters: int = 0) -> None:
    """Count a step that produces ``characters`` characters. Raises `LimitError` if the template exceeds a limit."""
    _budget.left -= STEP + max(characters, 0)
    if _budget.left <= _budget.check_below:
        _budget.check_below = _budget.left - 100 * STEP
        if _budget.left < 0:
            raise LimitError(f"more work than {WORK} characters (WORK)")
        if _budget.end is None:
            _budget.end = time.thread_time() + SECONDS
        elif time.thread_time() > _budget.end:
            raise LimitError(f"more than {SECONDS:.0f} seconds (SECONDS)")


def charged(value: Any, *, deep: bool = True) -> Any:
    """Count the `size` of ``value``, and return ``value``."""
    charge(size(value, deep=deep))
    return value


# Sizes of values, now and after an operation


def size(value: Any, *, deep: bool = True) -> int:
    """Return the length of a text. For any other value, return the approximate length of its text form.

    Args:
        value: anything.
        deep: whether to also visit the elements of a list or dict, until they exceed the limit. If False, each element
            counts as 8.
    """
    if isinstance(value, str | bytes):
        return len(value)
    if not isinstance(value, list | tuple | dict | set | frozenset):
        return 8
    total = 8 * len(value)
    if deep:
        elements = (part for item in value.items() for part in item) if isinstance(value, dict) else value
        for element in elements:
            total += STEP + size(element)
            if total > WORK:
                break
    return total


def _result_size(name: str, subject: Any, args: list[Any], kwargs: Mapping[str, Any]) -> int:
    """Return an upper bound for the number of characters that a filter or a string method produces."""
    values = [*args, *kwargs.values()]
    if name in ("format", "format_map"):
        return _formatted_size(str(subject), sum(map(size, values)))

    text = subject if isinstance(subject, str) else ""
    total = size(subject, deep=name not in _SHALLOW)
    # Count texts that are added, and numbers, which may be widths or counts.
    added = 0 if name in _NUMERIC else sum(abs(value) if isinstance(value, int) else size(value) for value in values)
    times = 1  # how often the added texts can appear in the result
    if name == "replace" and values:
        times = text.count(str(values[0])) + 1
    elif name == "join":
        elements = args[0] if text or subject == "" else subject
        times = len(elements) if hasattr(elements, "__len__") else 1
        added = size(subject) if elements is not subject else added
        total = size(elements)
    elif name == "indent":
        times = text.count("\n") + 1
    elif name == "expandtabs":
        times = text.count("\t")
    elif name in ("translate", "wordwrap", "sum") or (name in ("strip", "lstrip", "rstrip", "trim") and added > 100):
        times = total
    return total + times * added


def _formatted_size(pattern: str, values: int) -> int:
    """Return an upper bound for the length of ``pattern % values`` or ``pattern.format(values)``."""
    if "*" in pattern or re.search(r"{[^{}]+{", pattern):
        raise LimitError("a format that takes its width from its arguments, which cannot be bounded")
    width = max(map(int, re.findall(r"\d{1,9}", pattern)), default=0)
    return len(pattern) + (pattern.count("%") + pattern.count("{")) * (values + width)


# Filters that the syntax tree calls


@pass_context  # without this, jinja2 would apply the filter to a constant only once, when it compiles the template
def _charge_step(context: object, characters: int) -> None:
    charge(characters)


def _charge_compared(value: Any) -> Any:
    return charged(value) if isinstance(value, list | tuple | dict) else value


def _join(parts: list[Any]) -> str:
    charge(sum(map(size, parts)))
    return "".join(map(str, parts))


_INSERTED = {
    " charge": _charge_step,
    " compared": _charge_compared,
    " copied": functools.partial(charged, deep=False),
    " joined": _join,
}
"""Filters that `_Counting` inserts. They are not globals, because templates can replace globals but not filters. Their
names begin with a space, so templates can't use them.
"""


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """jinja2's sandbox, with the limits of this module for its templates.

    Args:
        filters: filters to add to jinja2's filters.
        options: as for `jinja2.Environment`.
    """

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self, filters: Mapping[str, Callable[..., Any]], **options: Any) -> None:
        super().__init__(finalize=charged, **options)
        del self.globals["lipsum"]
        self.filters = {name: _counted(name, function) for name, function in {**self.filters, **filters}.items()}
        self.filters |= _INSERTED

    def variables(self, source: str) -> set[str]:
        """Return the names of the variables that a template reads but does not set itself."""
        return meta.find_undeclared_variables(super()._parse(source, None, None)) - self.globals.keys()

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > SOURCE:
            raise LimitError(f"more than {SOURCE} characters of source (SOURCE)")
        tree: nodes.Template = _Counting().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call an object, after counting the characters that the call can produce."""
        method = getattr(__obj, "__wrapped__", __obj)  # jinja2 wraps str.format
        subject = getattr(method, "__self__", None)
        if isinstance(subject, str):
            # Convert a generator to a list first, because counting would use the generator up.
            args = tuple(list(value) if hasattr(value, "__next__") else value for value in args)
            charge(_result_size(method.__name__, subject, list(args), kwargs))
        else:
            charge(size(subject, deep=False))
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator, after counting the characters that the result can have."""
        # Limit the bits of products of integers. Count the length of repeated texts, and the widths in formats.
        if isinstance(left, int) and isinstance(right, int):
            bits = {"*": left.bit_length() + right.bit_length(), "**": left.bit_length() * right}.get(operator, 0)
            if bits > _BITS:
                raise LimitError(f"an integer of more than {_BITS} bits")
            charge()
        elif operator == "*" and isinstance(left, int) != isinstance(right, int):
            count, value = (left, right) if isinstance(left, int) else (right, left)
            charge(size(value, deep=False) * max(count, 1))
        elif operator == "%" and isinstance(left, str):
            charge(_formatted_size(left, size(right)))
        else:
            charge(size(left, deep=False) + size(right, deep=False))
        return super().call_binop(context, operator, left, right)


class _Counting(NodeTransformer):
    """Inserts filters that count work into a syntax tree: in loops, macros, concatenations (``~``), slices and
    comparisons."""

    def _visit_body(self, node: Any) -> Any:
        """Insert a statement at the beginning of a body.

        Whenever the body runs, this statement counts one step and the characters of the body's literal text.
        """
        characters = sum(len(part.data) for part in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        count = nodes.ExprStmt(_filter(" charge", nodes.Const(characters)))
        node.body.insert(0, count.set_lineno(node.lineno))
        return node

    visit_For = visit_Macro = visit_CallBlock = _visit_body

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter(" joined", nodes.List(node.nodes)).set_lineno(node.lineno)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filter(" copied", node).set_lineno(node.lineno) if isinstance(node.arg, nodes.Slice) else node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _filter(" compared", node.expr)
        node.set_lineno(node.lineno)
        return node


def _filter(name: str, value: nodes.Expr) -> nodes.Expr:
    return nodes.Filter(value, name, [], [], None, None)


def _counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    # jinja2 passes the environment or the context as the first argument to functions that are marked for this.
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        subject, rest = args[first], list(args[first + 1 :])
        if name in ("join", "sum") and hasattr(subject, "__next__"):
            subject = list(subject)
        charge(_result_size(name, subject, rest, kwargs))
        return function(*args[:first], subject, *rest, **kwargs)

    return counted
