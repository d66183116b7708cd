from functools import cache

import pytest
import torch

from ..copies import Copies


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture
def pair(request, root):
    """(architecture, variant, the model in transformers, the same in this package)."""
    return *request.param, *_models(*request.param, root).make()


@cache  # loading takes several times as long as copying
def _models(arch, variant, root):
    from .families import hf_model, load, make_folder  # not before pytest_configure: it defines kernels

    folder = make_folder(arch, variant, root)
    return Copies((hf_model(folder), load(arch, folder)))


@pytest.fixture
def fresh_dynamo():
    """All models share one forward, and Dynamo counts its recompilations."""
    torch._dynamo.reset()
