from functools import cache

import pytest

from ..copies import Copies


@pytest.fixture(scope="session")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture
def reasons(monkeypatch):
    """What `fallback_reason` returned in each call of ``generate``: None where the engine has run."""
    from liger_models.hf import generate

    found = []
    original = generate.fallback_reason
    monkeypatch.setattr(generate, "fallback_reason", lambda *x: found.append(original(*x)) or found[-1])
    return found


@pytest.fixture
def hf(request, root):
    """(architecture, variant, the model in transformers, the same through `liger_models.hf`)."""
    return *request.param, *_models(*request.param, root).make()


@cache  # loading takes several times as long as copying
def _models(arch, variant, root):
    from liger_models.hf.auto import model_class

    from ..arch.families import hf_model, make_folder  # not before pytest_configure: it defines kernels

    folder = make_folder(arch, variant, root)
    return Copies((hf_model(folder), model_class(arch).from_pretrained(folder)))
