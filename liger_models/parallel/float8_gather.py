"""FSDP2 with weights that are gathered in float8: each rank rounds its own rows, and sends one byte for a weight.

A layer with one scale for its weight (`convert_to_float8`, recipe "tensorwise") multiplies codes that do not depend on
who rounds them, given the largest absolute value of the whole weight::

    amax_l = max over the ranks of max |W_l| over the rank's rows     one all-reduce for all layers, before the forward
    q(W_l) = all-gather of float8(W_l · MAX / amax_l)                 one byte for a weight

The products take the codes, forward and backward; the backward transposes them. Losses and gradients are those of
weights gathered in bfloat16 and rounded by every rank, bit for bit. Recipes with a scale for each row round a weight in
two ways, by rows for the forward and by columns for the backward. Two codes have the bytes of bfloat16, so these
recipes gather that.

The parameters stay what they are, for optimizers and checkpoints: FSDP2 looks for the methods ``fsdp_pre_all_gather``
and ``fsdp_post_all_gather`` of a parameter's local tensor, and finds them as attributes of an ordinary tensor. A
gathered parameter has a shape and a gradient, but no values: they are NaN, without memory.
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
from liger_models.kernels.float8.float8 import RECIPES, Float8, float8_dtype, round_known, tensor_scale


class _Weight:
    """One weight and its place among the maxima of all; its methods are FSDP2's extension points."""

    def __init__(self, linear: Float8Linear, parameter: Any, dtype: torch.dtype, amax: Tensor, inverse: Tensor) -> None:
        self.linear, self.parameter, self.dtype, self.amax, self.inverse = linear, parameter, dtype, amax, inverse
        shape, device = linear.weight.shape, amax.device
        unknown = torch.full((), torch.nan, dtype=dtype, device=device).expand(shape)
        self.attach()  # FSDP2 looks for the methods before its first gather
        # FSDP2 would make it from a tensor that has memory for all values.
        parameter._unsharded_param = nn.Parameter(unknown, requires_grad=linear.weight.requires_grad)

    def attach(self) -> Tensor:
        """The rank's rows, whose gathers are these methods. New tensors of a module that was moved have none."""
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
        """What is sent: the codes of the rank's rows."""
        rows = self.attach().detach().to(self.dtype)
        return (round_known(rows, float8_dtype(rows.device), self.amax).view(torch.uint8),), None

    @torch.no_grad()
    def after(self, gathered: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor) -> None:
        """Take what was gathered. Its memory is FSDP2's, which frees it and fills it again."""
        if self.linear.gathered is None:
            codes = gathered[0].view(float8_dtype(gathered[0].device))
            self.linear.gathered = Float8(nn.Parameter(codes, requires_grad=False), self.inverse)


class Float8Gather:
    """Hook before a sharded model's forward: the maxima of the weights that are gathered in float8.

    Args:
        model: sharded.
        mesh: of `apply_fsdp`; the ranks of its last dimension share the rows of a weight.
        dtype: of gathered parameters; None for their own.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype | None) -> None:
        self.group = mesh.get_group(mesh.ndim - 1)
        found = [
            (parameter._module_info.module, parameter)
            for parameter in _parameters(model)
            if _is_eligible(parameter, mesh.size(-1))
        ]
        device = found[0][1].device if found else torch.device(mesh.device_type)
        # Each number has 16 bytes of its own, as kernels like their pointers.
        self.amax, self.inverse = torch.ones(2, len(found), 4, dtype=torch.float32, device=device)
        self.weights = [
            _Weight(linear, parameter, dtype or linear.weight.dtype, self.amax[at, :1], self.inverse[at, 0])
            for at, (linear, parameter) in enumerate(found)
        ]

    @torch.no_grad()
    def refresh(self) -> None:
        """Find the maxima, with one exchange; collective."""
        if not self.weights:
            return
        rows = [weight.attach().detach() for weight in self.weights]
        largest = torch._foreach_norm(rows, torch.inf)
        # Rounding keeps the order, so this is the largest of the rounded weights.
        amax = torch.stack([each.to(weight.dtype).float() for each, weight in zip(largest, self.weights, strict=True)])
        dist.all_reduce(amax, dist.ReduceOp.MAX, group=self.group)
        # The backward of another forward may still have to read them: they are the same then.
        self.amax.data[:, 0] = amax
        self.inverse.data[:, 0] = tensor_scale(amax, float8_dtype(amax.device)).reciprocal()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *_: Any) -> None:
        self.refresh()


def _parameters(model: nn.Module) -> Iterable[Any]:
    """What FSDP2 knows of each parameter that it has sharded."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)  # from torch 2.12
            for group in [state._fsdp_param_group] if groups is None else groups:
                yield from () if group is None else group.fsdp_params


def _is_eligible(parameter: Any, ranks: int) -> bool:
    """Whether it is the weight of a layer with one scale, sharded into equal numbers of whole rows."""
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
