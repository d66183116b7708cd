"""A faster interpreter of Triton, which spends most of its time on Python objects around arrays."""

import dataclasses
import inspect
from contextlib import suppress

import numpy as np
import torch

FLOAT8 = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}
"""Name of a format in Triton -> dtype of PyTorch."""
WIDER = {"fp32": torch.float32, "fp16": torch.float16}
"""Formats that can represent every float8 number."""


def speed_up_the_interpreter() -> None:
    """Remove three quarters of the interpreter's time: equal objects are made once and compared by identity.

    Operators on tensors call NumPy directly. All bits of a result are those of the interpreter.

    PyTorch converts to and from float8, because the interpreter loses carries. Products of bfloat16 are computed in
    float32, because the interpreter multiplies their bits as integers.

    Each launch patches ``triton.language``, and the interpreter patches it again for every call between functions of a
    kernel. Only the first call into a module needs that, because Triton's own functions use other names of the
    language.
    """
    with suppress(ImportError):
        from triton.language import core, semantic
        from triton.runtime import interpreter

        make_block, make_tensor, np_dtype = core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype
        implementation = semantic.TritonSemantic
        broadcast, constant, cast = (
            getattr(implementation, name) for name in ("broadcast_impl_value", "scalar_constant", "cast")
        )
        promote = implementation.binary_op_type_checking_impl
        unwrap_any, equal = core._unwrap_if_constexpr, core.dtype.__eq__
        patched, blocks, dtypes, constants = set(), {}, {}, {}
        shapes, sizes_of, common, expanded, builtins, block_types = {}, {}, {}, {}, {}, {}
        new_handle, whole = object.__new__, slice(None)
        ints = {id(dtype): (-(2 ** (n - 1)), 2 ** (n - 1) - 1) for n, dtype in ((32, core.int32), (64, core.int64))}
        floats = {id(core.float32), id(core.float64)}
        plain = {int, bool, float, str, type(None), core.tensor, core.dtype, core.block_type, core.pointer_type}

        def call(self, *args, **kwargs):
            if self.fn.__module__ not in patched:
                patched.add(self.fn.__module__)
                interpreter._patch_lang(self.fn)
            return self.rewrite()(*args, **kwargs)

        def interpret(member):
            member = getattr(member, "__wrapped__", member)  # the wrapper asks only for `_semantic`

            def interpreted(*args, **kwargs):
                kwargs["_semantic"] = interpreter.interpreter_semantic
                return member(*args, **kwargs)

            return interpreted

        def patch(obj, name, member, builder, scope):
            scope.set_attr(obj, name, interpret(member))

        def patch_builtins(package, builder, scope):
            """Patch the functions of a module or class, which are the same for every launch."""
            if package not in builtins:
                members = [(name, x) for name, x in inspect.getmembers(package) if core.is_builtin(x)]
                fast = operators if package is core.tensor else {}
                builtins[package] = [(name, x, fast.get(name) or interpret(x)) for name, x in members]
            for name, member, interpreted in builtins[package]:
                if getattr(package, name) is member:  # not patched yet by the launch around this one
                    scope.set_attr(package, name, interpreted)

        def erf(x):
            """erf of a whole array. The interpreter calls ``math.erf`` for each number."""
            return torch.from_numpy(np.array(x, np.float64)).erf().numpy().astype(x.dtype)

        def unwrap(value):
            value_type = type(value)
            if value_type is core.constexpr:
                return value.value
            return value if value_type in plain else unwrap_any(value)

        def same_dtype(self, other):
            return self is other or equal(self, other)

        def once(shape):
            """The one object for all equal shapes, whose identity gives the sizes."""
            key = tuple((type(size), unwrap(size)) for size in shape)
            if key not in shapes:
                shapes[key] = shape
                sizes_of[id(shape)] = tuple(size for _, size in key)
            return shapes[key]

        def block(self, element_ty, shape):
            sizes = sizes_of.get(id(shape)) or tuple(map(unwrap, shape))
            key = element_ty.name, sizes
            if key not in blocks:
                make_block(self, element_ty, shape)
                self.shape = once(self.shape)
                blocks[key] = vars(self)
            self.__dict__ = blocks[key]

        def tensor(self, handle, type):
            members = vars(type).get("of_tensor")
            if members is None:
                make_tensor(self, None, type)
                self.shape = once(self.shape)
                members = type.of_tensor = self.shape, self.numel, self.dtype
            self.handle, self.type = handle, type
            self.shape, self.numel, self.dtype = members

        def too_wide(data, dtype):
            return data.itemsize > 1 and not dtype.is_ptr() and 8 * data.itemsize > dtype.primitive_bitwidth

        def make_handle(self, data, dtype, attr=None):
            if too_wide(data, dtype):
                raise ValueError(f"numbers of {data.itemsize} bytes are too wide for {dtype}")
            self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr

        def array_handle(data, dtype):
            handle = new_handle(interpreter.TensorHandle)
            handle.data = data.astype(array_dtype(dtype)) if too_wide(data, dtype) else data
            handle.dtype, handle.attr = dtype, {}
            return handle

        def binary_op(self, lhs, rhs, operate):
            return array_handle(operate(lhs.data, rhs.data), lhs.dtype.scalar)

        def divide(x, y):
            """The quotient of integers, rounded toward zero."""
            return (x - np.fmod(x, y)) // y

        def common_shape(lhs, rhs):
            """The shape to which both are broadcast, or None to leave an error to the interpreter."""
            sizes = [sizes_of[id(x.shape)] for x in (lhs, rhs)]
            with suppress(ValueError):
                return core.block_type(core.int1, list(np.broadcast_shapes(*sizes))).shape

        def spread(x, shape):
            sizes, handle = sizes_of[id(shape)], x.handle
            if sizes_of[id(x.shape)] == sizes:
                return x
            if x.type.is_block():
                data = np.broadcast_to(handle.data, sizes)
            else:
                data = np.full(sizes, handle.data, array_dtype(handle.dtype))
            handle = interpreter.TensorHandle(data, handle.dtype.scalar)
            return core.tensor(handle, core.block_type(x.type.scalar, shape))

        def same_shape(self, lhs, rhs):
            if lhs.shape is rhs.shape:
                return lhs, rhs
            shape = broadcast_shape(lhs, rhs)
            return broadcast(self, lhs, rhs) if shape is None else (spread(lhs, shape), spread(rhs, shape))

        def fast_operator(operate, slow, types, *, reverse=False, compares=False):
            """An operator on tensors of one of the types, and on numbers that the type represents; ``slow`` on others.

            NumPy broadcasts the operands. The interpreter would first copy them to equal shapes.
            """
            ids = {id(dtype) for dtype in types}

            def operator(self, other):
                dtype, other_type = self.dtype, type(other)
                if other_type is core.constexpr:
                    other = other.value
                    other_type = type(other)
                if id(dtype) not in ids:
                    return slow(self, other)
                if other_type is not core.tensor:
                    if not (id(dtype) in floats and (other_type is float or other_type is int)) and not (
                        other_type is int and id(dtype) in ints and ints[id(dtype)][0] <= other <= ints[id(dtype)][1]
                    ):
                        return slow(self, other)
                    other = scalar(interpreter.interpreter_semantic, other, dtype)
                elif other.dtype is not dtype:
                    if id(dtype) not in ints or id(other.dtype) not in ints:
                        return slow(self, other)
                    dtype = core.int64
                shape = broadcast_shape(self, other)
                if shape is None:
                    return slow(self, other)
                left, right = (other, self) if reverse else (self, other)
                handle = array_handle(operate(left.handle.data, right.handle.data), dtype)
                return core.tensor(handle, block_of(core.int1 if compares else dtype, shape))

            return operator

        def advance(slow):
            """The sum of pointers and offsets."""

            def add(self, other):
                dtype = self.dtype
                if type(dtype) is core.pointer_type and type(other) is core.tensor and id(other.dtype) in ints:
                    shape = broadcast_shape(self, other)
                    if shape is not None:
                        handle = interpreter.interpreter_builder.create_addptr(self.handle, other.handle)
                        return core.tensor(handle, self.type if shape is self.shape else block_of(dtype, shape))
                return slow(self, other)

            return add

        def fast_index(slow):
            """A block with further axes of size 1, as in ``x[:, None]``."""

            def index(self, slices):
                if type(slices) is not tuple or not self.shape:
                    return slow(self, slices)
                if not all(part is None or (type(part) is slice and part == whole) for part in slices):
                    return slow(self, slices)
                data = self.handle.data[slices]
                if data.shape not in expanded:
                    expanded[data.shape] = core.block_type(core.int1, list(data.shape)).shape
                handle = array_handle(data, self.handle.dtype.scalar)
                return core.tensor(handle, block_of(self.dtype, expanded[data.shape]))

            return index

        def broadcast_shape(lhs, rhs):
            """The shape to which both are broadcast, of no sizes for scalars; None if there is none."""
            left, right = lhs.shape, rhs.shape
            if left is right or not right:
                return left
            if not left:
                return right
            key = id(left), id(right)
            if key not in common:
                common[key] = common_shape(lhs, rhs)
            return common[key]

        def block_of(dtype, shape):
            key = dtype.name, id(shape)
            if key not in block_types:
                block_types[key] = core.block_type(dtype, shape) if shape else dtype
            return block_types[key]

        def same_type(self, lhs, rhs, lhs_ptr=False, rhs_ptr=False, arithmetic=True, divides=False):
            if isinstance(lhs, core.tensor) and isinstance(rhs, core.tensor):
                left, right = lhs.type.scalar, rhs.type.scalar
                equal_types = left is right and not divides and not left.is_ptr()
                if equal_types or (lhs_ptr and left.is_ptr() and right.is_int()):
                    return same_shape(self, lhs, rhs)
            return promote(self, lhs, rhs, lhs_ptr, rhs_ptr, arithmetic, divides)

        def cast_unless_equal(self, value, dtype, rounding=None):
            return value if value.type.scalar is dtype.scalar else cast(self, value, dtype, rounding)

        def scalar(self, value, dtype):
            key = value, type(value), dtype.name
            if key not in constants:
                constants[key] = constant(self, value, dtype).handle
            return core.tensor(constants[key], dtype)

        def array_dtype(type):
            name = type.scalar.name
            if name not in dtypes:
                dtypes[name] = np_dtype(type)
            return dtypes[name]

        def float8(src, source, target, rounding, convert=interpreter._convert_float):
            if target.name in FLOAT8 and source.name == "fp32":
                return torch.from_numpy(np.ascontiguousarray(src)).to(FLOAT8[target.name]).view(torch.uint8).numpy()
            if source.name in FLOAT8 and target.name in WIDER:
                return torch.from_numpy(np.array(src)).view(FLOAT8[source.name]).to(WIDER[target.name]).numpy()
            return convert(src, source, target, rounding)

        def dot(self, a, b, *rest, multiply=interpreter.InterpreterBuilder.create_dot):
            a, b = (self.cast_impl(x, core.float32) if x.dtype.scalar == core.bfloat16 else x for x in (a, b))
            return multiply(self, a, b, *rest)

        numbers = [core.int32, core.int64, core.float16, core.float32, core.float64]
        operations = {
            "add": (np.add, numbers),
            "sub": (np.subtract, numbers),
            "mul": (np.multiply, numbers),
            "truediv": (np.divide, [core.float32, core.float64]),
            "floordiv": (divide, [core.int32, core.int64]),
            "mod": (np.fmod, [core.int32, core.int64]),
            "and": (np.bitwise_and, [core.int1, core.int32, core.int64]),
            "or": (np.bitwise_or, [core.int1, core.int32, core.int64]),
        }
        comparisons = {
            "lt": np.less,
            "le": np.less_equal,
            "gt": np.greater,
            "ge": np.greater_equal,
            "eq": np.equal,
            "ne": np.not_equal,
        }
        operators = {}
        for key, (operate, types) in operations.items():
            for name, reverse in ((f"__{key}__", False), (f"__r{key}__", True)):
                slow = interpret(getattr(core.tensor, name))
                slow = advance(slow) if name == "__add__" else slow
                operators[name] = fast_operator(operate, slow, types, reverse=reverse)
        for key, operate in comparisons.items():
            slow = interpret(getattr(core.tensor, f"__{key}__"))
            operators[f"__{key}__"] = fast_operator(operate, slow, numbers, compares=True)
        operators["__getitem__"] = fast_index(interpret(core.tensor.__getitem__))

        interpreter.np_erf_fp32 = interpreter.np_erf_fp64 = erf
        interpreter._patch_builtin = patch_builtins
        interpreter._convert_float, interpreter._patch_attr, interpreter._get_np_dtype = float8, patch, array_dtype
        interpreter.InterpreterBuilder.create_dot, interpreter.InterpreterBuilder.binary_op = dot, binary_op
        interpreter.TensorHandle.__init__ = make_handle
        interpreter.InterpretedFunction.__call__ = call
        core._unwrap_if_constexpr, core.dtype.__eq__ = unwrap, same_dtype
        core.block_type.__init__, core.tensor.__init__ = block, tensor
        implementation.broadcast_impl_value, implementation.binary_op_type_checking_impl = same_shape, same_type
        implementation.cast, implementation.scalar_constant = cast_unless_equal, scalar
        options = interpreter.interpreter_builder.options
        # Without `debug` nobody reads the overflows that it finds.
        interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
