"""What the tests of every family with images check of one batch: policies, frozen parts, one graph, and the kernels."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from liger_models import KernelOptions
from liger_models.base.causal_lm import CausalLM
from liger_models.layers.layer import CHECKPOINTING_POLICIES

from .families import LIMIT, assert_same_gradients, error, fp64_twin, gradients_of, is_tower, load, make_folder


class Waits(TorchDispatchMode):
    """Collects the operations for whose results the host waits, if the tensors are on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name in ("_local_scalar_dense", "masked_select", "nonzero") or name.startswith(("_unique", "unique")):
            self.names.append(name)
        return function(*args, **(kwargs or {}))


def assert_policies_and_frozen_parts(model: CausalLM, ids: Tensor, **batch: Tensor) -> None:
    """Every policy has the same gradients, and so has the tower, or the rest of the model, if it alone is trained.

    The host never waits for the device in the backward.
    """
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    run = lambda: model(ids, **batch).loss.backward()
    loss = model(ids, **batch).loss
    with Waits() as waits:
        loss.backward()
    assert not waits.names
    every = gradients_of(model)
    for policy in CHECKPOINTING_POLICIES[1:]:
        model.zero_grad()
        model.set_checkpointing(policy)
        run()
        assert all(torch.equal(gradient, every[name]) for name, gradient in gradients_of(model).items())
    for tower in (True, False):
        model.zero_grad()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in trained and is_tower(name) != tower)
        run()
        left = gradients_of(model)
        assert {is_tower(name) for name in left} == {not tower}
        for name, gradient in left.items():
            torch.testing.assert_close(gradient, every[name])


def assert_one_graph(model: CausalLM, compiled: Any, ids: Tensor, **batch: Tensor) -> None:
    """``compiled``, which must not break its graph, has the gradients of the model."""
    gradients = []
    for each in (model, compiled):
        model.zero_grad()
        each(ids, **batch).loss.backward()
        gradients.append(gradients_of(model))
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=name)


def assert_kernels_match(pair: tuple[Any, ...], loss: Tensor, device: str, root: Path, **batch: Tensor) -> None:
    """With all kernels, and with the fewest, loss and gradients are those of transformers, whose backward has run."""
    arch, variant, theirs, _ = pair
    inputs = {name: tensor.to(device) for name, tensor in batch.items()}
    off = KernelOptions(rms_norm=False, layer_norm=False, rope=False, swiglu=False, fused_linear_cross_entropy=False)
    for kernels in (None, off):
        ours = load(arch, make_folder(arch, variant, root), kernels=kernels, device=device)
        got = ours(**inputs)
        assert error(got.loss, loss) <= LIMIT
        got.loss.backward()
        assert_same_gradients(ours, theirs, twin=partial(fp64_twin, ours, **batch))
