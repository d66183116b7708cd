"""FSDP2 with weights that are gathered in float8: each rank rounds its own rows and sends one byte per element.

A layer whose weight has one scale (`convert_to_float8`, recipe "tensorwise") multiplies float8 codes. Given the largest
absolute value of the whole weight, each rank computes the codes of its own rows::

    amax_l = max over the ranks of max |W_l| over the rank's rows     one all-reduce for all layers, before the forward
    q(W_l) = all-gather of float8(W_l · MAX / amax_l)                 one byte for each number

The forward and the backward multiply the same codes, which the backward transposes. Losses and gradients are bitwise
identical to those with weights that are gathered in bfloat16 and then rounded by every rank. Recipes with one scale per
row round a weight twice: by rows for the forward, and by columns for the backward. The two codes of an element have as
many bytes as the element in bfloat16, so with these recipes the weights are gathered in bfloat16.

The parameters themselves do not change, so optimizers and checkpoints work as without this module. FSDP2 calls the
methods ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` of a parameter's local tensor if it has them. Here these
methods are attributes of an ordinary tensor. A gathered parameter has a shape and a gradient but no values: all its
elements share the memory of a single NaN.
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
    """A weight that is gathered in float8. The methods `before` and `after` are FSDP2's extension points.

    Args:
        linear: the layer.
        parameter: FSDP2's record of the layer's weight.
        dtype: dtype to which a weight is cast before it is rounded.
        amax: [1] fp32, the largest absolute value of the whole weight, which `Float8Gather` updates.
        inverse: [] fp32, the inverse of the scale.
    """

    def __init__(self, linear: Float8Linear, parameter: Any, dtype: torch.dtype, amax: Tensor, inverse: Tensor) -> None:
        self.linear, self.parameter, self.dtype, self.amax, self.inverse = linear, parameter, dtype, amax, inverse
        shape, device = linear.weight.shape, amax.device
        unknown = torch.full((), torch.nan, dtype=dtype, device=device).expand(shape)
        # FSDP2 looks for the methods before its first gather.
        self.attach()
        # FSDP2 would allocate memory for all values of the gathered parameter.
        parameter._unsharded_param = nn.Parameter(unknown, requires_grad=linear.weight.requires_grad)

    def attach(self) -> Tensor:
        """Attach FSDP2's extension methods to the rank's rows, unless they are already attached, and return the rows.

        Moving a module replaces its tensors by new ones without the methods.
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
        """Return the codes of the rank's rows, which FSDP2 sends. FSDP2 determines the signature."""
        rows = self.attach().detach().to(self.dtype)
        return (round_known(rows, float8_dtype(rows.device), self.amax).view(torch.uint8),), None

    @torch.no_grad()
    def after(self, gathered: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor) -> None:
        """Set the gathered codes in the layer. FSDP2 owns the memory of the codes, frees it and fills it again."""
        # Later gathers write into the same memory, so one view of it serves all of them.
        if self.linear.gathered is None:
            codes = gathered[0].view(float8_dtype(gathered[0].device))
            self.linear.gathered = Float8(nn.Parameter(codes, requires_grad=False), self.inverse)


class Float8Gather:
    """Forward pre-hook that computes the largest absolute value of each weight of a model that is gathered in float8.

    Args:
        model: the model, which FSDP2 has sharded.
        mesh: the mesh of `apply_fsdp`. The ranks of its last dimension share the rows of a weight.
        dtype: dtype of gathered parameters; None for their own.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype | None) -> None:
        self.group = mesh.get_group(mesh.ndim - 1)
        found = [
            (parameter._module_info.module, parameter)
            for parameter in _parameters(model)
            if _is_eligible(parameter, mesh.size(-1))
        ]
        device = found[0][1].device if found else torch.device(mesh.device_type)
        # [2, weights, 4]: each number is at the start of 16 bytes, because kernels are compiled for aligned pointers.
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
        # Write in place without a new version: the backward of an earlier forward may still read these tensors. The
        # weights, and so the values, are the same then.
        self.amax.data[:, 0] = amax
        self.inverse.data[:, 0] = tensor_scale(amax, float8_dtype(amax.device)).reciprocal()

    @uncompiled
    def __call__(self, *_: Any) -> None:
        self.refresh()


def _parameters(model: nn.Module) -> Iterable[Any]:
    """Return FSDP2's record of each parameter that FSDP2 has sharded."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)  # from torch 2.12
            for group in [state._fsdp_param_group] if groups is None else groups:
                yield from () if group is None else group.fsdp_params


def _is_eligible(parameter: Any, ranks: int) -> bool:
    """Return whether a parameter is the weight of a layer with one scale, with equally many rows on all ranks."""
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
