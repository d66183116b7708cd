"""The backends of op tests, and a fixture that shows outputs that no kernel wrote."""

import gc
import itertools
import os
import zlib
from collections import defaultdict
from unittest import mock

import pytest

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # NumPy's, for Triton's interpreter; its threads would wait in a busy loop
import numpy as np
import torch

from . import no_gpu  # noqa: F401
from .interpreter import speed_up_the_interpreter
from .oracle_version import count_of_skipped, skip_an_unknown_family

torch.set_num_threads(1)  # pytest-xdist spreads the work


def pytest_configure(config: pytest.Config) -> None:
    """Without ``-m gpu``, set the interpreter before our imports: Triton reads it when a kernel is defined."""
    if config.option.markexpr != "gpu":
        os.environ["TRITON_INTERPRET"] = "1"
        speed_up_the_interpreter()


GROUPS = {"two", "four", "two_with_kernels", "two_gpus", "four_gpus"}
"""Fixtures of tests/parallel that give the processes of a process group."""


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups and pytest the markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Add markers that follow from fixtures and parameters: ``interpreter``, ``distributed``, ``matrix``."""
    for item in items:
        parameters = getattr(item, "callspec", None)
        fixtures = set(getattr(item, "fixturenames", ()))
        if "two_with_kernels" in fixtures or (parameters and "interpreter" in parameters.params.values()):
            item.add_marker("interpreter")
        if fixtures & GROUPS:
            item.add_marker("distributed")
            item.add_marker(pytest.mark.xdist_group("process groups"))  # started once, by one worker
        elif parameters and isinstance(pair := parameters.params.get("pair"), tuple):
            item.add_marker(pytest.mark.xdist_group(pair[0]))  # models of a family are made once, by one worker
    for item in beyond_the_cases(items):
        item.add_marker("matrix")
    # Modules with process groups come first, which one worker runs, and quick ones last: a long one would end alone.
    groups = {item.path for item in items if item.get_closest_marker("distributed")}
    long = {item.path for item in items if item.get_closest_marker("compile") or item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path not in groups, item.path not in long))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """Give a worker whole modules, whose imports and fixtures the others then do not need, in the order of collection.

    Of ``--dist loadgroup``; groups of tests stay what they are. The scheduler of pytest-xdist looks at all tests that a
    worker has ever run after each test.
    """
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadGroupScheduling

    class ByModule(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            group = super()._split_scope(nodeid)
            return nodeid.partition("::")[0] if group == nodeid else group

        def _assign_work_unit(self, node) -> None:
            assigned = self.assigned_work.setdefault(node, {})
            for scope in [scope for scope, tests in assigned.items() if all(tests.values())]:
                del assigned[scope]
            super()._assign_work_unit(node)

    config.option.loadscopereorder = False
    return ByModule(config, log)


def beyond_the_cases(items: list[pytest.Item]) -> list[pytest.Item]:
    """The tests that only `make test-matrix` runs: all but n of each function that is marked ``cases(n)``."""
    functions = defaultdict(list)
    for item in items:
        cases = item.get_closest_marker("cases")
        if cases and not any(item.get_closest_marker(name) for name in ("gpu", "matrix")):
            functions[item.nodeid.partition("[")[0], cases.args[0]].append(item)
    for tests in functions.values():
        tests.sort(key=lambda item: zlib.crc32(item.name.encode()))
    return [item for (_, count), tests in functions.items() for item in tests[count:]]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup():
    """Skip families that the installed transformers does not have yet, because fixtures make their models."""
    try:
        return (yield)
    except ValueError as error:
        skip_an_unknown_family(error)
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    """Skip families that the installed transformers does not have yet."""
    try:
        return (yield)
    except ValueError as error:
        skip_an_unknown_family(error)
        raise


def pytest_terminal_summary(terminalreporter) -> None:
    """Report the number of tests without an oracle."""
    skipped = [str(report.longrepr) for report in terminalreporter.stats.get("skipped", [])]
    if count := count_of_skipped(skipped):
        terminalreporter.write_line(f"{count} tests skipped: the installed transformers is too old for them")


def pytest_collection_finish() -> None:
    """Exclude modules and tests from later garbage collections, and collect less often."""
    leave_out_of_collections()
    gc.set_threshold(10_000)


def leave_out_of_collections() -> None:
    """Exclude what there is now from later garbage collections, which many tests ask for. They would take seconds."""
    gc.collect()
    gc.freeze()


FINISHED = itertools.count(1)


def pytest_runtest_logfinish() -> None:
    """Every hundred tests, exclude the modules and models that the last ones have left, too."""
    if next(FINISHED) % 100 == 0:
        leave_out_of_collections()


BACKENDS = [
    pytest.param("reference", id="reference"),
    pytest.param("interpreter", id="interpreter"),
    pytest.param("gpu", id="gpu", marks=pytest.mark.gpu),
]


@pytest.fixture(autouse=True)
def _reference_unless_asked(request: pytest.FixtureRequest):
    """Tests use the interpreter only if they ask for it. Others use the reference backend on the CPU, as users do."""
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
    else:  # without devices, the call above records a stack trace, which takes longer
        torch.default_generator.manual_seed(0)


@pytest.fixture
def sums_without_order(monkeypatch):
    """Compute the interpreter's products in fp64, where the order of the sums leaves no trace in fp32.

    In NumPy's own order, the bits of a row depend on its place in the tile, with the kernels for CPUs without AVX-512.
    """
    matmul = np.matmul
    monkeypatch.setattr(np, "matmul", lambda a, b, dtype: matmul(a, b, dtype=np.float64).astype(dtype))


@pytest.fixture
def own_registry():
    """Hide the registrations of other tests, and remove those of the test at its end."""
    import examples.custom  # noqa: F401  its only registration, on import, must not be removed
    from liger_models.arch.auto import get_arch
    from liger_models.arch.registry import MODEL_CLASSES, built_in
    from liger_models.convert.format import FORMATS

    for name in built_in():  # or families that the test imports first would be removed, too
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
    """Run the test once per backend. The value is the device for tensors."""
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
    """As `backend`, but only the backends that run Triton kernels."""
    return _kernel_device(request.param)


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch):
    """Let `generate` use a paged cache on the CPU, too, with pages of 16 tokens."""
    from liger_models.generation import logits
    from liger_models.layers import paged_cache

    monkeypatch.setattr(logits, "PAGED_DEVICES", ("cpu", "cuda"))
    monkeypatch.setattr(paged_cache, "PAGE", 16)


@pytest.fixture(params=["pages", "cache", "no-cache"])
def use_cache(request: pytest.FixtureRequest):
    """The option of `generate`: with a paged cache, with an ordinary cache, and without a cache."""
    if request.param == "pages":
        request.getfixturevalue("small_pages")
    return request.param != "no-cache"


@pytest.fixture
def poisoned_empty(monkeypatch: pytest.MonkeyPatch):
    """Let `torch.empty` and its variants return NaN, which shows elements that no kernel writes."""
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        original = getattr(owner, name)

        def poisoned(*args, _original=original, **kwargs):
            out = _original(*args, **kwargs)
            return out.fill_(float("nan")) if out.is_floating_point() and out.device.type != "meta" else out

        monkeypatch.setattr(owner, name, poisoned)
