"""Backends that the op tests run on, and a net for outputs that no kernel wrote."""

import dataclasses
import gc
import os
from contextlib import suppress
from unittest import mock

import numpy as np
import pytest
import torch

torch.set_num_threads(1)  # pytest-xdist spreads the work


def pytest_configure(config: pytest.Config) -> None:
    """Without ``-m gpu`` kernels run on the CPU. Triton reads this when a kernel is defined, so before our imports."""
    if config.option.markexpr != "gpu":
        os.environ["TRITON_INTERPRET"] = "1"
        speed_up_the_interpreter()


def speed_up_the_interpreter() -> None:
    """Halve the interpreter's time, which goes into Python objects around the arrays: what is equal is made once.

    Its rounding to float8 is replaced by PyTorch's, because it loses carries. Products of bfloat16 are computed in
    float32, because it multiplies the bits as integers.

    Each launch patches ``triton.language``. The interpreter patches it again whenever one function of a kernel calls
    another. Only the first call into a module needs that: Triton's own functions find the language under other names.
    """
    with suppress(ImportError):
        from triton.language import core, semantic
        from triton.runtime import interpreter

        make_block, make_tensor, np_dtype = core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype
        implementation = semantic.TritonSemantic
        broadcast, constant = implementation.broadcast_impl_value, implementation.scalar_constant
        promote = implementation.binary_op_type_checking_impl
        patched, blocks, dtypes, constants = set(), {}, {}, {}

        def call(self, *args, **kwargs):
            if self.fn.__module__ not in patched:
                patched.add(self.fn.__module__)
                interpreter._patch_lang(self.fn)
            return self.rewrite()(*args, **kwargs)

        def block(self, element_ty, shape):
            key = element_ty.name, *(size.value if isinstance(size, core.constexpr) else size for size in shape)
            if key not in blocks:
                make_block(self, element_ty, shape)
                blocks[key] = {**vars(self), "of_tensor": vars(core.tensor(None, self))}
            vars(self).update(blocks[key])

        def tensor(self, handle, type):
            if not hasattr(type, "of_tensor"):
                make_tensor(self, None, type)
                type.of_tensor = vars(self).copy()
            vars(self).update(type.of_tensor, handle=handle, type=type)

        def same_shape(self, lhs, rhs):
            return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(self, lhs, rhs)

        def same_type(self, lhs, rhs, lhs_ptr=False, rhs_ptr=False, arithmetic=True, divides=False):
            if not divides and isinstance(lhs, core.tensor) and isinstance(rhs, core.tensor):
                scalar = lhs.type.scalar
                if scalar is rhs.type.scalar and lhs.shape is rhs.shape and not scalar.is_ptr():
                    return lhs, rhs
            return promote(self, lhs, rhs, lhs_ptr, rhs_ptr, arithmetic, divides)

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
            dtype = getattr(torch, FLOAT8.get(target.name, ""), None)
            if dtype is None or source.name != "fp32":
                return convert(src, source, target, rounding)
            return torch.from_numpy(np.ascontiguousarray(src)).to(dtype).view(torch.uint8).numpy()

        def dot(self, a, b, *rest, multiply=interpreter.InterpreterBuilder.create_dot):
            a, b = (self.cast_impl(x, core.float32) if x.dtype.scalar == core.bfloat16 else x for x in (a, b))
            return multiply(self, a, b, *rest)

        interpreter._convert_float = float8
        interpreter.InterpreterBuilder.create_dot = dot
        interpreter.InterpretedFunction.__call__ = call
        core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype = block, tensor, array_dtype
        implementation.broadcast_impl_value, implementation.binary_op_type_checking_impl = same_shape, same_type
        implementation.scalar_constant = scalar
        options = interpreter.interpreter_builder.options
        # What it finds nobody reads without `debug`.
        interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)


FLOAT8 = {"fp8e4nv": "float8_e4m3fn", "fp8e5": "float8_e5m2"}
"""Triton's names of the formats -> PyTorch's."""

GROUPS = {"two", "four", "two_with_kernels", "two_gpus", "four_gpus"}
"""Fixtures of tests/parallel: processes of a process group."""


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups and pytest the markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Markers that follow from fixtures and their parameters: ``interpreter`` and ``distributed``."""
    for item in items:
        parameters = getattr(item, "callspec", None)
        fixtures = set(getattr(item, "fixturenames", ()))
        if "two_with_kernels" in fixtures or (parameters and "interpreter" in parameters.params.values()):
            item.add_marker("interpreter")
        if fixtures & GROUPS:
            item.add_marker("distributed")
            item.add_marker(pytest.mark.xdist_group("process groups"))  # started once, by one worker


def pytest_collection_finish() -> None:
    """Leave modules and tests out of every later collection of garbage, and collect less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)


BACKENDS = [
    pytest.param("reference", id="reference"),
    pytest.param("interpreter", id="interpreter"),
    pytest.param("gpu", id="gpu", marks=pytest.mark.gpu),
]


@pytest.fixture(autouse=True)
def _reference_unless_asked(request: pytest.FixtureRequest):
    """The interpreter is for tests that ask for it: all others run the reference backend on the CPU, as users do."""
    from liger_models.kernels import dispatch

    if {"backend", "kernel_device"} & set(request.fixturenames) or request.node.get_closest_marker("gpu"):
        yield
    else:
        with dispatch.reference_backend():
            yield


@pytest.fixture(autouse=True)
def _leave_the_gpu_to_the_other_workers(request: pytest.FixtureRequest):
    yield
    if request.node.get_closest_marker("gpu"):
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def _same_random_numbers_in_every_run():
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # for devices that are not there, the above notes the stack that it was called from, which takes longer
        torch.default_generator.manual_seed(0)


@pytest.fixture
def own_registry():
    """What the test registers is forgotten behind it, and what other tests have registered is not there."""
    import examples.custom  # noqa: F401  registers once, when it is first imported: not inside of what is forgotten
    from liger_models.arch.auto import get_arch
    from liger_models.arch.registry import MODEL_CLASSES, built_in
    from liger_models.convert.format import FORMATS

    for name in built_in():  # a family that the test imported first would be forgotten, too
        get_arch(name)

    def custom(value):
        return not getattr(value, "__module__", "").startswith("liger_models.")

    with mock.patch.dict(MODEL_CLASSES), mock.patch.dict(FORMATS):
        for name in [name for name, model_class in MODEL_CLASSES.items() if custom(model_class)]:
            del MODEL_CLASSES[name]
        for cls in [cls for cls in FORMATS if custom(cls)]:
            del FORMATS[cls]
        yield


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest):
    """Run the test once per backend; the value is the device to put tensors on."""
    from liger_models.kernels import dispatch

    if request.param == "reference":
        with dispatch.reference_backend():
            yield "cpu"
    else:
        yield _kernel_device(request.param)


def _kernel_device(backend: str) -> str:
    if backend == "interpreter":
        from liger_models.kernels import dispatch

        assert dispatch.INTERPRET, "kernels were defined before TRITON_INTERPRET was set: import them later"
        return "cpu"
    assert torch.cuda.is_available(), "a gpu test was asked for on a machine without a GPU"
    assert "TRITON_INTERPRET" not in os.environ, "gpu tests run by themselves: pytest -m gpu"
    return "cuda"


@pytest.fixture(params=BACKENDS[1:])
def kernel_device(request: pytest.FixtureRequest):
    """As `backend`, but only where Triton kernels run."""
    return _kernel_device(request.param)


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch):
    """`generate` decodes on a paged cache on the CPU, too, in pages of 16 tokens."""
    from liger_models.generation import logits
    from liger_models.layers import paged_cache

    monkeypatch.setattr(logits, "PAGED_DEVICES", ("cpu", "cuda"))
    monkeypatch.setattr(paged_cache, "PAGE", 16)


@pytest.fixture(params=["pages", "cache", "no-cache"])
def use_cache(request: pytest.FixtureRequest):
    """The option of `generate`: on a paged cache, on the other one, and without any."""
    if request.param == "pages":
        request.getfixturevalue("small_pages")
    return request.param != "no-cache"


@pytest.fixture
def poisoned_empty(monkeypatch: pytest.MonkeyPatch):
    """`torch.empty` and its kin return NaN, so an element that no kernel writes shows."""
    for place, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        original = getattr(place, name)

        def poisoned(*args, _original=original, **kwargs):
            out = _original(*args, **kwargs)
            return out.fill_(float("nan")) if out.is_floating_point() and out.device.type != "meta" else out

        monkeypatch.setattr(place, name, poisoned)
