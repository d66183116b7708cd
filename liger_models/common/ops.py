"""Registration of ops: the library of all ops, and two ways to define an op and its backward.

`define_op` defines an op whose inputs are the parameters of a function. The annotations of these parameters determine
the op's schema. The names of the backward's parameters determine which values the forward saves::

    def _backward(dy: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]: ...
    def _forward(x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    BACKWARD = define_op("norm_backward", _backward, _backward_fake)
    FORWARD = define_op("norm", _forward, _fake, backward=BACKWARD, gradients="x weight")

PyTorch's dispatcher takes the arguments of an op by position. An op with many arguments is therefore defined with `Op`:
one NamedTuple holds the inputs, another NamedTuple holds the outputs, and all functions of the op take and return these
NamedTuples. The schema of the op is derived from the annotations of the fields::

    class Inputs(NamedTuple):
        x: Tensor
        norm: FusedNorm                   a NamedTuple, whose fields become norm_weight, norm_eps, ...
        weight: Annotated[Weight, WEIGHT]     a type that schemas lack; the `Argument` WEIGHT converts its values

    class Outputs(NamedTuple):
        y: Tensor
        statistics: Tensor | None         None where it is not needed

    def _forward(inputs: Inputs) -> Outputs: ...
    def _fake(inputs: Inputs) -> Outputs: ...

    op = Op("norm_linear", _forward, _fake)
    outputs = op(Inputs(x=x, norm=norm, weight=weight))

`Op.differentiable` adds the backward, with two more NamedTuples: one for the saved values, and one for the gradients.
The fields of the NamedTuple for gradients are annotated as `Any`, because the NamedTuple has two uses. With the
annotation ``Gradients``, it holds the gradients: each field is a ``Tensor | None``. With the annotation
``Annotated[Gradients, bool]``, it says which gradients are needed: each field is a bool::

    class Gradients(NamedTuple):
        x: Any = None
        norm: NormGradients = NormGradients()

    Needs = Annotated[Gradients, bool]
"""

import types
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from inspect import Parameter, signature
from itertools import compress
from operator import itemgetter
from typing import Annotated, Any, Generic, NamedTuple, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

LIBRARY = torch.library.Library("liger_models", "DEF")
"""The library of all ops. An op is available as `torch.ops.liger_models.<op>`."""

TYPES: dict[Any, str] = {
    Tensor: "Tensor",
    int: "int",
    float: "float",
    bool: "bool",
    str: "str",
    torch.dtype: "ScalarType",
    list[int]: "int[]",
    list[bool]: "bool[]",
    list[float]: "float[]",
}
"""Maps annotations to types in a schema. ``T | None`` becomes an optional type, and ``Annotated[T, "SymInt"]`` becomes
the type SymInt."""

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

Inputs = TypeVar("Inputs", bound=tuple[Any, ...])
Outputs = TypeVar("Outputs")
Saved = TypeVar("Saved", bound=tuple[Any, ...])
Needs = TypeVar("Needs", bound=tuple[Any, ...])
Gradients = TypeVar("Gradients", bound=tuple[Any, ...])


class Argument(NamedTuple):
    """Describes how an op passes a value whose type T cannot appear in an op's schema.

    The field that holds the value is annotated with ``Annotated[T, Argument(...)]``.

    Attributes:
        schema: the arguments that represent the value, with ``{0}`` for the name of the field. Only the first argument
            may lack a default value. If it does, a value that needs no conversion is passed as the first argument, and
            all other arguments keep their default values. If every argument has a default value, these default values
            represent None. The op recognizes a converted value by the first argument that has a default value.
            ``to_op`` must therefore never return the default value for this argument.
        to_op: function that maps the value, which is not None, to all of its arguments. It returns None if the value
            itself is the first argument.
        from_op: function that maps all arguments of the value back to the value.
    """

    schema: str
    to_op: Callable[[Any], Sequence[Any] | None]
    from_op: Callable[..., Any]


class Arguments:
    """Converts a NamedTuple to the flat arguments of an op, and back.

    Attributes:
        schema: the schema of the arguments. Arguments without a default value come first.
        names: the names of the arguments.
        defaults: the arguments' default values; None for arguments without a default.
        is_tensor: for each argument, whether it is a tensor or an optional tensor.
        flatten: function that maps the NamedTuple to the arguments, leaving out trailing arguments that have their
            default values.
        unflatten: the inverse of ``flatten``.
    """

    def __init__(self, fields: Any) -> None:
        required: list[str] = []
        optional: list[tuple[str, list[str], tuple[Any, ...]]] = []  # (field, its optional arguments, their defaults)
        conversions: list[str] = []  # statements of `flatten`
        namespace: dict[str, Any] = {"_join": _join, "_new": tuple.__new__}

        def add(fields: Any, prefix: str, any_type: str) -> tuple[str, str]:
            """Turn the fields of a NamedTuple into arguments of the op. Return the source code of a pattern and of an
            expression.

            The pattern unpacks the NamedTuple, and the expression rebuilds the NamedTuple.
            """
            if get_origin(fields) is Annotated:
                fields, any_type = fields.__origin__, TYPES[get_args(fields)[1]]
            patterns, expressions = [], []
            for field, hint in get_type_hints(fields, include_extras=True).items():
                name = prefix + field
                pattern = expression = name
                # The type of a field has an `Argument`, is a NamedTuple of further fields, or can appear in a schema.
                argument = _argument(hint)
                if argument is not None:
                    expression = add_argument(name, argument)
                elif hasattr(hint, "_fields"):
                    pattern, expression = add(hint, f"{name}_", any_type)
                else:
                    required.append(f"{any_type if hint is Any else _type_name(hint)} {name}")
                patterns.append(pattern)
                expressions.append(expression)
            namespace[f"_type_{prefix}"] = fields
            return f"({', '.join(patterns)},)", f"_new(_type_{prefix}, ({', '.join(expressions)},))"

        def add_argument(name: str, argument: Argument) -> str:
            """Turn a field with an `Argument` into an argument of the op. Return the source code that restores the
            value of the field.
            """
            # Only the first parameter, the head, may lack a default. In the op's schema, the heads of all fields come
            # before all parameters with defaults.
            schema = argument.schema.format(name)
            parameters = _parse(schema)
            names = ", ".join(parameter.name for parameter in parameters)
            tail = [parameter for parameter in parameters if parameter.has_default_value()]
            has_head = len(tail) < len(parameters)
            texts = schema.split(", ")
            required.extend(texts[:has_head])
            optional.append((name, texts[has_head:], tuple(parameter.default_value for parameter in tail)))
            namespace[f"_to_op_{name}"], namespace[f"_from_op_{name}"] = argument.to_op, argument.from_op
            # Generate code for `flatten`: convert the value, and assign the head to the variable of the field.
            conversions.append(f"_all_{name} = None if {name} is None else _to_op_{name}({name})")
            if has_head:
                conversions.append(f"if _all_{name} is not None: {name}, *_all_{name} = _all_{name}")
            # Generate code for `unflatten`: default values mean that the value was not converted.
            default = tail[0].default_value
            test = f"{tail[0].name} is None" if default is None else f"{tail[0].name} == {default!r}"
            return f"{name if has_head else None} if {test} else _from_op_{name}({names})"

        pattern, expression = add(fields, "", "Tensor?")
        optional.sort(
            key=lambda field: len(field[1])
        )  # fields with many arguments last, so that more defaults can be left out
        self.schema = ", ".join(required + [text for _, texts, _ in optional for text in texts])
        parameters = _parse(self.schema)
        self.names = [parameter.name for parameter in parameters]
        self.defaults = tuple(parameter.default_value for parameter in parameters)
        self.is_tensor = [str(parameter.type) in ("Tensor", "Optional[Tensor]") for parameter in parameters]

        # Both functions run in every call, so they are generated as source code, like the methods of a NamedTuple.
        head = "".join(f"{name}, " for name in self.names[: len(required)])
        tail = "".join(f"{name}=_defaults[{i}], " for i, name in enumerate(self.names) if i >= len(required))
        tails = "".join(f"_all_{name}, " for name, _, _ in optional)
        result = f"({head})"
        if optional:
            is_plain = " and ".join(f"_all_{name} is None" for name, _, _ in optional)
            result = f"({head}) if {is_plain} else _join(({head}), ({tails}), _groups)"
        source = [
            "def flatten(_values):",
            *(f"    {line}" for line in [f"{pattern} = _values", *conversions, f"return {result}"]),
            f"def unflatten({head}{tail}):",
            f"    return {expression}",
        ]
        namespace |= {"_defaults": self.defaults, "_groups": [defaults for _, _, defaults in optional]}
        exec(compile("\n".join(source), f"<arguments of {fields}>", "exec"), namespace)
        self.flatten: Callable[[Any], tuple[Any, ...]] = namespace["flatten"]
        self.unflatten: Callable[..., Any] = namespace["unflatten"]

    def flatten_all(self, value: Any) -> tuple[Any, ...]:
        """Return all arguments, including the trailing default values that `flatten` leaves out."""
        arguments = self.flatten(value)
        return arguments + self.defaults[len(arguments) :]


def _parse(schema: str) -> list[Any]:
    """Parse a schema, and return its parameters."""
    return torch._C.parse_schema(f"op({schema}) -> ()").arguments


def _argument(hint: Any) -> Argument | None:
    """Return the `Argument` in the annotation of a field, or None if there is none."""
    extras = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return next((extra for extra in extras if isinstance(extra, Argument)), None)


def _type_name(hint: Any) -> str:
    """Return the schema type for the annotation of a field or a parameter."""
    if get_origin(hint) is Annotated:
        return str(get_args(hint)[1])
    if get_origin(hint) not in (types.UnionType, Union):
        return TYPES[hint]
    (option_type,) = (option for option in get_args(hint) if option is not type(None))
    return f"{TYPES[option_type]}?"


def _join(
    head: tuple[Any, ...], tails: tuple[Sequence[Any] | None, ...], groups: list[tuple[Any, ...]]
) -> tuple[Any, ...]:
    """Return one tuple: the arguments without default values, then the groups of arguments with default values.

    If a group is None, its arguments get their default values. Trailing groups that are None are left out.
    """
    joined: tuple[Any, ...] = ()
    for tail, defaults in zip(tails[::-1], groups[::-1], strict=True):
        if tail is not None or joined:
            joined = (*(defaults if tail is None else tail), *joined)
    return head + joined


def _picker(indices: list[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Return a function that picks the values at the given indices from a sequence, and returns them as a tuple."""
    if len(indices) > 1:
        return itemgetter(*indices)
    return lambda values: tuple(values[index] for index in indices)


class Op(Generic[Inputs, Outputs]):
    """An op whose inputs and outputs are NamedTuples.

    Args:
        name: name of the op, which is available as ``torch.ops.liger_models.<name>``.
        forward: implementation of the op. Its parameter is annotated with a NamedTuple, and its result is annotated
            with a NamedTuple or with ``Tensor``. Fields of the result may be ``Tensor | None``.
        fake: implementation for fake tensors, which have shapes and dtypes but no values.
    """

    def __init__(self, name: str, forward: Callable[[Inputs], Outputs], fake: Callable[[Inputs], Outputs]) -> None:
        hints = get_type_hints(forward, include_extras=True)
        result = hints.pop("return")
        (parameter,) = hints.values()
        self.name, self.inputs, self.forward = name, Arguments(parameter), forward
        self.outputs = None if result is Tensor else Arguments(result)

        # Define one op with a flat schema. CompositeExplicitAutograd means that the same code runs on every device.
        count = 1 if self.outputs is None else len(self.outputs.names)
        returned = ", ".join(["Tensor"] * count)
        LIBRARY.define(f"{name}({self.inputs.schema}) -> {returned if count == 1 else f'({returned})'}")
        LIBRARY.impl(name, self._flat(forward), "CompositeExplicitAutograd")
        torch.library.register_fake(f"{LIBRARY.ns}::{name}", self._flat(fake), lib=LIBRARY)
        self.run = getattr(getattr(torch.ops, LIBRARY.ns), name).default
        """The op with flat arguments and results."""
        self.kernel = _autograd_kernel(self.run, *_no_derivative(name))
        LIBRARY.impl(name, lambda *arguments: self.kernel(*arguments), "Autograd")
        self.apply: Callable[..., Any] | None = None
        """The differentiable op without the dispatcher. It takes the inputs twice: as a NamedTuple, and as flat
        arguments."""

    def _flat(self, function: Callable[[Inputs], Outputs]) -> Callable[..., Any]:
        """Wrap a function so that it takes flat arguments and returns flat values, as the dispatcher requires."""
        unflatten = self.inputs.unflatten
        if self.outputs is None:
            return lambda *arguments: function(unflatten(*arguments))
        flatten = self.outputs.flatten
        return lambda *arguments: flatten(function(unflatten(*arguments)))

    def __call__(self, inputs: Inputs) -> Outputs:
        """Run the op."""
        arguments = self.inputs.flatten(inputs)
        need = _need_without_dispatcher(arguments)
        if need is False:
            return self.forward(inputs)
        result = self.run(*arguments) if need is None or self.apply is None else self.apply(inputs, *arguments)
        return result if self.outputs is None else self.outputs.unflatten(*result)  # type: ignore[no-any-return]

    def differentiable(
        self,
        save: Callable[[Any, Inputs, Outputs, Needs], Saved],
        backward: Callable[[Saved, Needs, Outputs], Gradients],
    ) -> None:
        """Register the backward.

        Args:
            save: function that is called with the autograd context, the inputs, the outputs, and a NamedTuple of bools
                that say which inputs need a gradient. It returns the values to save, and may mark outputs as
                non-differentiable.
            backward: function that is called with the saved values, the NamedTuple of bools, and the gradients of the
                outputs (None for outputs without a gradient). It returns the gradients of the inputs. In the NamedTuple
                of bools and in the result, the fields have the names of the inputs.
        """
        hints = get_type_hints(backward, include_extras=True)
        saved_type, needs_type, _ = (hint for name, hint in hints.items() if name != "return")
        saved, needs, gradients = Arguments(saved_type), Arguments(needs_type), Arguments(hints["return"])
        inputs, outputs = self.inputs, self.outputs
        count = len(inputs.names)
        frozen = (False,) * count
        need_of = _picker([inputs.names.index(name) for name in needs.names])
        places = [inputs.names.index(name) for name in gradients.names]
        is_constant = [not is_tensor for is_tensor in saved.is_tensor]
        order = sorted(range(len(saved.names)), key=is_constant.__getitem__)  # tensors first, then constants
        restore = _picker(sorted(range(len(order)), key=order.__getitem__))

        def keep(ctx: Any, values: Inputs, named: Any, flags: tuple[bool, ...]) -> None:
            ctx.set_materialize_grads(False)
            ctx.needs = needs.unflatten(*need_of(flags + frozen[len(flags) :]))  # arguments may have been left out
            kept = saved.flatten_all(save(ctx, values, named, ctx.needs))
            ctx.constants = tuple(compress(kept, is_constant))
            ctx.save_for_backward(*compress(kept, saved.is_tensor))

        def setup(ctx: Any, arguments: tuple[Any, ...], output: Any) -> None:
            named = output if outputs is None else outputs.unflatten(*output)
            keep(ctx, inputs.unflatten(*arguments), named, ctx.needs_input_grad)

        def forward(ctx: Any, values: Inputs, *_: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                named = self.forward(values)
            keep(ctx, values, named, ctx.needs_input_grad[1:])
            return named if outputs is None else outputs.flatten(named)

        def flat_backward(ctx: Any, *d_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
            if all(d_output is None for d_output in d_outputs):
                return (None,) * count
            named: Any = d_outputs[0] if outputs is None else outputs.unflatten(*d_outputs)
            values = saved.unflatten(*restore((*ctx.saved_tensors, *ctx.constants)))
            result: list[Tensor | None] = [None] * count
            for place, gradient in zip(places, gradients.flatten(backward(values, ctx.needs, named)), strict=True):
                result[place] = gradient
            return tuple(result)

        self.kernel = _autograd_kernel(self.run, flat_backward, setup)
        alone = _function(self.name, forward, lambda ctx, *d_outputs: (None, *flat_backward(ctx, *d_outputs)))
        self.apply = alone.apply


def _need_without_dispatcher(arguments: Sequence[Any]) -> bool | None:
    """Return whether a call needs gradients, or None if the call must pass through PyTorch's dispatcher.

    On the host, the dispatcher takes as much time as the rest of a forward. A call can skip the dispatcher if nothing
    traces, transforms or observes the call (no compiler, mode, tensor subclass or profiler). The dispatcher would then
    only call autograd and the op's forward.
    """
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() != 0
        or torch._C._len_torch_function_stack() != 0
        or torch._C._are_functorch_transforms_active()
        or torch._C._autograd._profiler_enabled()
        or forward_ad._current_level >= 0
    ):
        return None
    need = False
    for value in arguments:
        kind = type(value)
        if kind is Tensor or kind is torch.nn.Parameter:
            if value.is_meta:
                return None
            need = need or value.requires_grad
        elif isinstance(value, Tensor):
            return None
    return need and torch.is_grad_enabled()


def without_dispatcher(
    op: Any, implementation: Callable[..., Any], apply: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Return a function that calls an op, and skips PyTorch's dispatcher when the dispatcher is not needed.

    The dispatcher is not needed if nothing traces, transforms or observes the call.

    Args:
        op: the op, which is called with all of its arguments by position.
        implementation: the implementation of the op on every device.
        apply: the differentiable op; None if the op has no backward.
    """

    def call(*inputs: Any) -> Any:
        need = _need_without_dispatcher(inputs)
        if need is None or (need and apply is None):
            return op(*inputs)
        return apply(*inputs) if need and apply is not None else implementation(*inputs)

    return call


def define_op(
    name: str,
    forward: Callable[Parameters, Result],
    fake: Callable[..., Any] | str,
    *,
    outputs: str = "",
    backward: Callable[..., Any] | None = None,
    gradients: str = "",
    constants: str = "",
    needs: Mapping[str, str] | None = None,
    sizes: Mapping[str, tuple[str, int]] | None = None,
) -> Callable[Parameters, Result]:
    """Define an op whose inputs are the parameters of a function, and return the function that runs the op.

    The returned function takes all inputs by position. The function skips PyTorch's dispatcher where possible (see
    `without_dispatcher`).

    The first parameters of ``backward`` get the gradients of the outputs. The other parameters of ``backward`` get
    values that depend on their names. A parameter that has the name of an input or an output gets the value of this
    input or output, which the forward saves. A parameter ``need_<input>`` gets a bool that says whether this input
    needs a gradient. If the gradients of all outputs are missing, the inputs get no gradients, and ``backward`` is not
    called. If only some of these gradients are missing, each missing gradient is replaced: by None for a parameter
    annotated as ``Tensor | None``, and by zeros for any other parameter.

    Args:
        name: name of the op, which is available as ``torch.ops.liger_models.<name>``.
        forward: implementation of the op on every device. The annotations and the defaults of its parameters determine
            the op's schema.
        fake: implementation for fake tensors, which have shapes and dtypes but no values. If each output has the shape
            and dtype of an input, the names of these inputs suffice. If such an input is None, the output is an empty
            tensor.
        outputs: names of the outputs, separated by spaces. The names are needed if ``backward`` takes outputs, or if
            the result is annotated as a tuple of any length.
        backward: function that returns the gradients of inputs; None if the op has no backward. The function may itself
            be an op.
        gradients: names of the inputs whose gradients ``backward`` returns, in this order. For an input that needs no
            gradient, the gradient may be any tensor.
        constants: names of the outputs that have no gradients.
        needs: maps parameters of ``backward`` to names of inputs. Each of these parameters gets a bool that says
            whether at least one of its inputs needs a gradient.
        sizes: maps parameters of ``backward`` to pairs: the name of an input, and the index of one of its dimensions.
            Each of these parameters gets the size of the dimension, so the input need not be saved.
    """
    hints = get_type_hints(forward, include_extras=True)
    arguments = []
    for parameter in signature(forward).parameters.values():
        default = "" if parameter.default is Parameter.empty else f"={parameter.default}"
        arguments.append(f"{_type_name(hints[parameter.name])} {parameter.name}{default}")
    LIBRARY.define(f"{name}({', '.join(arguments)}) -> {_result_type(hints['return'], outputs.split())}")
    LIBRARY.impl(name, forward, "CompositeExplicitAutograd")
    fake = fake if callable(fake) else _fake_like([list(hints).index(name) for name in fake.split()])
    torch.library.register_fake(f"{LIBRARY.ns}::{name}", fake, lib=LIBRARY)
    if backward is None:
        op = getattr(getattr(torch.ops, LIBRARY.ns), name).default
        if not op._schema.is_mutable:
            LIBRARY.impl(name, _autograd_kernel(op, *_no_derivative(name)), "Autograd")
        run = without_dispatcher(op, forward)
    else:
        groups = {parameter: inputs.split() for parameter, inputs in (needs or {}).items()}
        setup, differentiate = _autograd_functions(
            hints, outputs.split() or ["y"], backward, gradients.split(), constants.split(), groups, sizes or {}
        )
        run = register_autograd(name, differentiate, setup, forward)
    return wraps(forward)(run)


def _fake_like(places: list[int]) -> Callable[..., Any]:
    """Return a fake implementation.

    Output n of this implementation has the shape and dtype of the input with the index ``places[n]``. If this input is
    None, the output is an empty tensor.
    """

    def fake(*inputs: Any) -> Any:
        like = [inputs[place] for place in places]
        results = [like[0].new_empty(0) if tensor is None else tensor.new_empty(tensor.shape) for tensor in like]
        return tuple(results) if len(results) > 1 else results[0]

    return fake


def _result_type(hint: Any, outputs: list[str]) -> str:
    """Return the schema type of an op's result."""
    if hint is Tensor or hint is type(None):
        return "Tensor" if hint is Tensor else "()"
    types_of_outputs = get_args(hint)
    count = len(outputs) if types_of_outputs[-1] is Ellipsis else len(types_of_outputs)
    return f"({', '.join(['Tensor'] * count)})"


def _autograd_functions(
    hints: Mapping[str, Any],
    outputs: list[str],
    backward: Callable[..., Any],
    gradients: list[str],
    constants: list[str],
    needs: dict[str, list[str]],
    sizes: Mapping[str, tuple[str, int]],
) -> tuple[Callable[..., None], Callable[..., Any]]:
    """Return the two functions that `register_autograd` takes. See `define_op` for the arguments.

    The functions run in every call, so they are generated as source code.

    Args:
        hints: the annotations of the forward.
    """
    inputs = [name for name in hints if name != "return"]
    parameters = list(signature(backward).parameters)

    # A parameter of `backward` gets the gradient of an output, a bool (whether gradients are needed), or a saved value.
    differentiable = [name for name in outputs if name not in constants]
    upstream = dict(zip(differentiable, parameters, strict=False))
    flags = {f"need_{name}": [name] for name in inputs} | needs
    saved = [name for name in parameters[len(upstream) :] if name not in flags]
    unknown = {*saved, *constants}.difference(inputs, outputs, sizes) | {*gradients}.difference(inputs)
    if unknown:
        raise ValueError(f"define_op: names must be those of inputs or outputs, got {', '.join(sorted(unknown))}.")

    # Autograd saves tensors, and the context holds all other values.
    input_tensors = [name for name in inputs if _type_name(hints[name]) in ("Tensor", "Tensor?")]
    is_tensor = {name: name in outputs or name in input_tensors for name in saved}
    tensors = "".join(f"{name}, " for name in saved if is_tensor[name])
    others = "".join(f"{name}, " for name in saved if not is_tensor[name])

    # Autograd replaces missing gradients of outputs by zeros, unless `backward` accepts None or takes only one
    # gradient.
    backward_hints = get_type_hints(backward, include_extras=True)
    takes_none = any(_type_name(backward_hints[name]) == "Tensor?" for name in upstream.values())
    keeps_none = takes_none or len(upstream) == 1 < len(outputs)

    # Generate the function that runs after the forward. It unpacks only what it needs.
    setup = []
    if {*saved, *constants, *sizes} & {*inputs, *sizes}:
        setup.append(f"({', '.join(inputs)},) = _inputs")
    if {*saved, *constants} & {*outputs}:
        setup.append(f"({', '.join(outputs)},) = {'_output' if len(outputs) > 1 else '(_output,)'}")
    if keeps_none:
        setup.append("_ctx.set_materialize_grads(False)")
    if constants:
        setup.append(f"_ctx.mark_non_differentiable({', '.join(constants)})")
    for name, (tensor, dimension) in sizes.items():
        setup.append(f"{name} = {tensor}.shape[{dimension}]")
    if others:
        setup.append(f"_ctx.others = ({others})")
    if tensors:
        setup.append(f"_ctx.save_for_backward({tensors})")

    # Generate the function that runs in the backward. It reads the saved tensors only once, because each read
    # recomputes them under checkpointing. An input that is None must not get a gradient.
    need = {name: f"_need[{place}]" for place, name in enumerate(inputs)}
    arguments = [" or ".join(map(need.__getitem__, flags[name])) if name in flags else name for name in parameters]
    results = dict.fromkeys(inputs, "None")
    for name in gradients:
        is_optional = _type_name(hints[name]) == "Tensor?"
        results[name] = f"_d_{name} if {need[name]} else None" if is_optional else f"_d_{name}"
    differentiate = []
    if keeps_none:
        differentiate.append(f"if {' is None and '.join(upstream.values())} is None:")
        differentiate.append(f"    return {(None,) * len(inputs)}")
    if tensors:
        differentiate.append(f"({tensors}) = _ctx.saved_tensors")
    if others:
        differentiate.append(f"({others}) = _ctx.others")
    if any("_need[" in text for text in (*arguments, *results.values())):
        differentiate.append("_need = _ctx.needs_input_grad")
    differentiate.append(f"{', '.join(f'_d_{name}' for name in gradients)} = _backward({', '.join(arguments)})")
    differentiate.append(f"return ({', '.join(results.values())},)")

    d_outputs = ", ".join(upstream.get(name, f"_d_{name}") for name in outputs)
    source = [
        "def setup(_ctx, _inputs, _output):",
        *(f"    {line}" for line in setup or ["pass"]),
        f"def differentiate(_ctx, {d_outputs}):",
        *(f"    {line}" for line in differentiate),
    ]
    namespace: dict[str, Any] = {"_backward": backward}
    exec(compile("\n".join(source), f"<gradients of {', '.join(gradients)}>", "exec"), namespace)
    return namespace["setup"], namespace["differentiate"]


def _function(name: str, forward: Callable[..., Any], backward: Callable[..., Any]) -> Any:
    """Create an autograd function whose ``apply`` omits work that `torch.autograd.Function` does only for
    torch.func."""

    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise NotImplementedError(
            f"{name}: this op has no forward-mode derivative (jvp), got an input with a tangent. Use reverse mode, or "
            "run plain PyTorch: kernels.reference_backend(), and kernel=False in layers."
        )

    members = {"forward": staticmethod(forward), "backward": staticmethod(backward), "jvp": staticmethod(jvp)}
    return type(f"_{name}", (_SingleLevelFunction,), members)


def _no_derivative(name: str) -> tuple[Callable[..., Any], Callable[..., None]]:
    """Return ``backward`` and ``setup_context`` for an op without a derivative. The backward raises RuntimeError.

    Without these functions, autograd would treat the results of the op as constants. If the op computes first
    derivatives, for example, second derivatives would then silently lack terms.
    """

    def backward(ctx: Any, *d_outputs: Any) -> Any:
        raise RuntimeError(
            f"{name}: this op has no derivative, got a backward through its result. For second derivatives, run the "
            "forward in plain PyTorch: kernels.reference_backend(), and kernel=False in layers."
        )

    return backward, lambda ctx, inputs, output: None


def _autograd_kernel(op: Any, backward: Callable[..., Any], setup_context: Callable[..., None]) -> Callable[..., Any]:
    """Return the function that implements an op for the dispatch key Autograd.

    The parameters have the same meaning as in `register_autograd`.
    """
    defaults = [argument.default_value for argument in op._schema.arguments]
    call = op._op  # avoids a Python frame

    def run(*inputs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return call(*inputs)

    def forward(ctx: Any, *inputs: Any) -> Any:
        if torch._C._are_functorch_transforms_active():
            # An autograd function disables gradients in its forward, but outer levels of torch.func may need them.
            with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
                output = run(*inputs)
        else:
            output = run(*inputs)
        setup_context(ctx, (*inputs, *defaults[len(inputs) :]), output)
        return output

    # As for PyTorch's own ops, the dispatcher calls `differentiable` once per level of torch.func transforms, such as
    # grad. A function for a single level therefore suffices.
    function = _function(op._schema.name.partition("::")[2], forward, backward)

    def differentiable(*inputs: Any) -> Any:
        needed = forward_ad._current_level >= 0 or (
            torch.is_grad_enabled() and any(isinstance(value, Tensor) and value.requires_grad for value in inputs)
        )
        if not needed:
            return run(*inputs)
        if torch._C._are_functorch_transforms_active():
            with enable_single_level_autograd_function():
                return function.apply(*inputs)
        return function.apply(*inputs)

    return differentiable


def register_autograd(
    name: str,
    backward: Callable[..., Any],
    setup_context: Callable[..., None],
    implementation: Callable[..., Any] | None = None,
    library: torch.library.Library = LIBRARY,
) -> Callable[..., Any]:
    """Register the backward of an op, with less work per call than ``torch.library.register_autograd``.

    The op must not have keyword-only arguments or lists of tensors. In every call of the op, PyTorch's function looks
    up the default values of the arguments, and reads the whole schema once per argument. On the host, these look-ups
    take about as long as the rest of a forward. This function reads the default values only once.

    Args:
        name: name of an op in ``library``.
        backward, setup_context: as in ``torch.library.register_autograd``.
        implementation: the implementation of the op on every device; None if devices have different implementations.

    Returns:
        The op or, with ``implementation``, the result of `without_dispatcher`.
    """
    op = getattr(getattr(torch.ops, library.ns), name).default
    library.impl(name, _autograd_kernel(op, backward, setup_context), "Autograd")
    if implementation is None:
        return op  # type: ignore[no-any-return]

    def forward_alone(ctx: Any, *inputs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            output = implementation(*inputs)
        setup_context(ctx, inputs, output)
        return output

    return without_dispatcher(op, implementation, _function(name, forward_alone, backward).apply)
