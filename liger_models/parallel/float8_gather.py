"""FSDP2 with weights that are gathered in float8. Each rank rounds its own rows, and sends one byte per element.

A layer whose weight has a single scale (`convert_to_float8`, recipe "tensorwise") multiplies by the float8 codes of its
weight, which are the rounded weight values. Once a rank knows amax_l, the largest absolute value of the whole weight
W_l of layer l, the rank can compute the codes of its own rows. MAX is the largest float8 value, and q(W_l) are the
codes of the whole weight::

    amax_l = max over the ranks of max |W_l| over the rank's rows     one all-reduce for all layers, before the forward
    q(W_l) = all-gather of float8(W_l · MAX / amax_l)                 one byte for each number

The forward and the backward use the same codes, which the backward transposes. Losses and gradients are bitwise
identical to the results of gathering weights in bfloat16 and rounding them on every rank. A recipe with one scale per
row rounds a weight twice: by rows for the forward, and by columns for the backward. With such a recipe, the weights are
gathered in bfloat16, because the two codes of an element take as many bytes as the element in bfloat16.

The parameters themselves do not change, so optimizers and checkpoints work as they do without this module. FSDP2
calls the methods ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` of a parameter's local tensor if the tensor has
them. This module sets these methods as attributes of an ordinary tensor. A gathered parameter has a shape and a
gradient but no values: all its elements share the memory of a single NaN.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from liger_models.adapters.float8 import Float8Linear
from liger_models.common.uncompiled import uncompiled
from liger_models.kernels.float8.float8 import RECIPES, Float8, float8_dtype, round_known, tensor_scale


class _Weight:
    """A weight that is gathered in float8. FSDP2 calls `before` at the start of the all-gather, and `after` at its end.

    Args:
        linear: the layer of the weight.
        parameter: FSDP2's ``FSDPParam`` object for the layer's weight.
        dtype: dtype to which a weight is cast before it is rounded.
        amax: [1] fp32, the largest absolute value of the whole weight. `Float8Gather` updates it.
        inverse: [] fp32, the reciprocal of the scale. `Float8Gather` updates it.
    """

    def __init__(self, linear: Float8Linear, parameter: Any, dtype: torch.dtype, amax: Tensor, inverse: Tensor) -> None:
        self.linear, self.parameter, self.dtype, self.amax, self.inverse = linear, parameter, dtype, amax, inverse
        shape, device = linear.weight.shape, amax.device
        unknown = torch.full((), torch.nan, dtype=dtype, device=device).expand(shape)
        # The methods must be attached before FSDP2's first gather.
        self.attach()
        # Set the gathered parameter, because FSDP2 would allocate memory for all its values.
        parameter._unsharded_param = nn.Parameter(unknown, requires_grad=linear.weight.requires_grad)

    def attach(self) -> Tensor:
        """Return the tensor of this rank's rows. If it lacks FSDP2's extension methods, attach them first.

        The methods are lost when a module is moved to another device, because its tensors are replaced.
        """
        weight = self.linear.weight
        sharded = weight if isinstance(weight, DTensor) else self.parameter.sharded_param
        rows: Any = sharded._local_tensor
        if not hasattr(rows, "fsdp_pre_all_gather"):
            rows.fsdp_pre_all_gather, rows.fsdp_post_all_gather = self.before, self.after
        return rows  # type: ignore[no-any-return]

    @torch.no_grad()
    def before(
        self, mesh: DeviceMesh, size: torch.Size, stride: Any, module: nn.Module, policy: Any
    ) -> tuple[tuple[Tensor, ...], None]:
        """Return the codes of this rank's rows for FSDP2 to send. FSDP2 determines the signature."""
        rows = self.attach().detach().to(self.dtype)
        return (round_known(rows, float8_dtype(rows.device), self.amax).view(torch.uint8),), None

    @torch.no_grad()
    def after(self, gathered: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor) -> None:
        """Store the gathered codes in the layer. FSDP2 owns, frees and refills the memory of the codes."""
        # Later gathers write to the same memory, so one view of this memory serves all gathers.
        if self.linear.gathered is None:
            codes = gathered[0].view(float8_dtype(gathered[0].device))
            self.linear.gathered = Float8(nn.Parameter(codes, requires_grad=False), self.inverse)


class Float8Gather:
    """Forward pre-hook that computes the largest absolute value of each weight that is gathered in float8.

    Args:
        model: the model, which FSDP2 has sharded.
        mesh: the mesh of `apply_fsdp`. The rows of a weight are divided among the ranks along the mesh's last
            dimension.
        dtype: dtype of gathered parameters; None for the parameters' own dtype.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype | None) -> None:
        self.group = mesh.get_group(mesh.ndim - 1)
        found = [
            (parameter._module_info.module, parameter)
            for parameter in _parameters(model)
            if _is_eligible(parameter, mesh.size(-1))
        ]
        device = found[0][1].device if found else torch.device(mesh.device_type)
        # [2, weights, 4]: each value starts at a multiple of 16 bytes, because kernels are compiled for aligned
        # pointers.
        self.amax, self.inverse = torch.ones(2, len(found), 4, dtype=torch.float32, device=device)
        self.weights = [
            _Weight(linear, parameter, dtype or linear.weight.dtype, self.amax[at, :1], self.inverse[at, 0])
            for at, (linear, parameter) in enumerate(found)
        ]

    @torch.no_grad()
    def refresh(self) -> None:
        """Compute the largest absolute values of all weights with one all-reduce. All ranks must call this method."""
        if not self.weights:
            return
        rows = [weight.attach().detach() for weight in self.weights]
        largest = torch._foreach_norm(rows, torch.inf)
        # Rounding to `dtype` is monotonic, so the rounded maximum is the maximum of the rounded weights.
        amax = torch.stack([each.to(weight.dtype).float() for each, weight in zip(largest, self.weights, strict=True)])
        dist.all_reduce(amax, dist.ReduceOp.MAX, group=self.group)
        # Write in place without a new autograd version, because the backward of an earlier forward may still read
        # these tensors. In this case, the weights have not changed, so the written values are the same.
        self.amax.data[:, 0] = amax
        self.inverse.data[:, 0] = tensor_scale(amax, float8_dtype(amax.device)).reciprocal()

    @uncompiled
    def __call__(self, *_: Any) -> None:
        self.refresh()


def _parameters(model: nn.Module) -> Iterable[Any]:
    """Yield FSDP2's ``FSDPParam`` object for each parameter that FSDP2 has sharded."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)  # from torch 2.12
            for group in [state._fsdp_param_group] if groups is None else groups:
                yield from () if group is None else group.fsdp_params


def _is_eligible(parameter: Any, ranks: int) -> bool:
    """Return whether a parameter is a weight with a single scale and the same number of rows on every rank."""
    info = parameter._module_info
    linear, weight = info.module, parameter.sharded_param
    return (
        isinstance(linear, Float8Linear)
        and info.param_name == "weight"
        and not info.shared_modules
        and not RECIPES[linear.float8_recipe].by_row
        and parameter.fsdp_placement.dim == 0
        and weight.shape[0] % ranks == 0
    )
