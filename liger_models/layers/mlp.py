"""Gated MLPs on the packed gate and up projection, and the plain MLP of vision towers."""

import functools
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from liger_models.kernels.act_linear import act_linear, act_reference
from liger_models.kernels.collectives import Ranks
from liger_models.kernels.dispatch import use_triton
from liger_models.kernels.gated_act import gated_act, gated_act_reference
from liger_models.kernels.gated_mlp import gated_mlp

from .norm import LigerRMSNorm, Norm, add_norm, autocast_weights, is_plain
from .recompute import recomputes, repeats
from .tensor_parallel import ColumnParallelLinear, RowParallelLinear, check_parts, own, own_or_none

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "quick_gelu": "quick_gelu",
}
"""``hidden_act`` of a config.json -> the kernels' name for it."""


class MLPConfig(Protocol):
    """What a gated MLP reads of a configuration; ``mlp_bias`` is optional."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...


class GatedMLP(nn.Module):
    """``down(act(gate(x)) · up(x))`` with gate and up in one projection, their rows interleaved.

    Args:
        hidden_size: C.
        intermediate_size: F.
        act: "silu", "gelu" or "gelu_tanh".
        bias: biases in all three projections.
        kernel: False for plain torch.
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int, *, act: str = "silu", bias: bool = False, kernel: bool = True
    ) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(hidden_size, 2 * intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)
        self.act, self.kernel = act, kernel
        self.parts = intermediate_size
        """What R ranks must divide to have equal parts."""
        self.recompute = False
        """True makes gate and up again in the backward (checkpointing policies "selective" and "full")."""

    def cut(self, ranks: Ranks) -> dict[str, int]:
        """Keep 1 / R of the gates and ups: see `layers.tensor_parallel`.

        Raises:
            ValueError: there is no equal part of them.
        """
        check_parts("GatedMLP", "intermediate_size", self.parts, ranks)
        self.gate_up_proj = ColumnParallelLinear.of(self.gate_up_proj, ranks)
        self.down_proj = RowParallelLinear.of(self.down_proj, ranks)
        return {"gate_up_proj.weight": 0, "gate_up_proj.bias": 0, "down_proj.weight": 1}

    def forward(self, x: Tensor) -> Tensor:
        """x [..., C] -> [..., C]."""
        act = gated_act if self.kernel else gated_act_reference
        y: Tensor = self.down_proj(act(self.gate_up_proj(x), self.act))
        return y

    def add_norm(self, norm: Norm | None, x: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor]:
        """``residual = residual + x; mlp(norm(residual))``: ``(y, residual)``, each [..., C].

        Without a norm, the MLP takes the sum itself. The normed activations and the gated product are recomputed in the
        backward; with ``recompute`` the gate and up projection too.
        """
        fused = self.kernel and is_plain(self.gate_up_proj, self.down_proj)
        if norm is not None:
            fused = fused and isinstance(norm, LigerRMSNorm) and norm.kernel and is_plain(norm)
        if not (fused and use_triton(residual)):
            if recomputes(self):
                residual, _ = add_norm(None, x, residual)  # the sum is all that is kept
                return checkpoint(self._behind, norm, residual, use_reentrant=False), residual
            normed, residual = add_norm(norm, x, residual)
            return self(normed), residual
        gate_up, down, gate_up_bias, down_bias = autocast_weights(
            residual, own(self.gate_up_proj.weight), own(self.down_proj.weight), own_or_none(self.gate_up_proj.bias),
            None if isinstance(self.down_proj, RowParallelLinear) else own_or_none(self.down_proj.bias),
        )  # fmt: skip
        assert gate_up is not None
        assert down is not None
        options: dict[str, Any] = {"act": self.act, "recompute": self.recompute}
        norm_weight = None
        if isinstance(norm, LigerRMSNorm):
            options |= {"eps": norm.eps, "weight_offset": norm.offset, "scale_in_fp32": norm.scale_in_fp32}
            norm_weight = norm.own_weight()
        tensors = (x, residual, norm_weight, gate_up, down, gate_up_bias, down_bias)
        partial = self.down_proj if isinstance(self.down_proj, RowParallelLinear) else None
        mlp = functools.partial(gated_mlp, *tensors, **options, ranks=partial.ranks if partial else None)
        if repeats():
            # The repetition ends in this call if nothing is saved behind it. Else what is behind it needs the numbers.
            y, residual = mlp(result=False)
            with torch.no_grad():
                y.data.copy_(mlp()[0])  # autograd lets nobody write into one of several results
        else:
            y, residual = mlp()
        return (partial.sum(y) if partial else y), residual

    def _behind(self, norm: Norm | None, residual: Tensor) -> Tensor:
        y: Tensor = self(residual if norm is None else norm(residual))
        return y


class LigerMLP(nn.Module):
    """``fc2(act(fc1(x)))``, keeping only the activation's input.

    Args:
        hidden_size: C.
        intermediate_size: F.
        out_size: width of the result; None for C.
        act: "gelu", "gelu_tanh" or "quick_gelu".
        kernel: False for plain torch.
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int, out_size: int | None = None, *, act: str, kernel: bool = True
    ) -> None:
        super().__init__()
        self.fc1 = nn.Linear(hidden_size, intermediate_size)
        self.fc2 = nn.Linear(intermediate_size, hidden_size if out_size is None else out_size)
        self.act, self.kernel = act, kernel
        self.parts = intermediate_size
        """What R ranks must divide to have equal parts."""
        self.recompute = False
        """True makes all of it again in the backward (checkpointing policies "selective" and "full")."""

    def cut(self, ranks: Ranks) -> dict[str, int]:
        """Keep 1 / R of the width between the two layers: see `layers.tensor_parallel`.

        Raises:
            ValueError: there is no equal part of it.
        """
        check_parts("LigerMLP", "intermediate_size", self.parts, ranks)
        self.fc1 = ColumnParallelLinear.of(self.fc1, ranks)
        self.fc2 = RowParallelLinear.of(self.fc2, ranks)
        return {"fc1.weight": 0, "fc1.bias": 0, "fc2.weight": 1}

    def forward(self, x: Tensor) -> Tensor:
        """x [..., C] -> [..., out]."""
        hidden = self.fc1(x)
        if not (self.kernel and is_plain(self.fc2)):
            y: Tensor = self.fc2(act_reference(hidden, self.act))
            return y
        partial = self.fc2 if isinstance(self.fc2, RowParallelLinear) else None
        bias = None if partial else own_or_none(self.fc2.bias)
        weight, bias = autocast_weights(hidden, own(self.fc2.weight), bias)
        assert weight is not None
        y = act_linear(hidden, weight, bias, self.act)
        return partial.sum(y) if partial else y

    def add_norm(self, norm: Norm | None, x: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor]:
        """``residual = residual + x; mlp(norm(residual))``: ``(y, residual)``, each [..., C]."""
        if recomputes(self):
            residual, _ = add_norm(None, x, residual)  # the sum is all that is kept
            return checkpoint(self._behind, norm, residual, use_reentrant=False), residual
        normed, residual = add_norm(norm, x, residual)
        return self(normed), residual

    def _behind(self, norm: Norm | None, residual: Tensor) -> Tensor:
        y: Tensor = self(residual if norm is None else norm(residual))
        return y


class LigerSwiGLUMLP(GatedMLP):
    """``down(silu(gate(x)) · up(x))`` with the sizes of a configuration (``hidden_size``, ``intermediate_size``)."""

    def __init__(self, config: MLPConfig, *, kernel: bool = True) -> None:
        bias = bool(getattr(config, "mlp_bias", False))
        super().__init__(config.hidden_size, config.intermediate_size, act="silu", bias=bias, kernel=kernel)


class LigerGEGLUMLP(GatedMLP):
    """``down(gelu(gate(x)) · up(x))``, GELU by its tanh approximation unless ``hidden_act`` is "gelu"."""

    def __init__(self, config: MLPConfig, *, kernel: bool = True) -> None:
        bias = bool(getattr(config, "mlp_bias", False))
        act = ACTIVATIONS.get(getattr(config, "hidden_act", "gelu_pytorch_tanh"), "gelu_tanh")
        super().__init__(config.hidden_size, config.intermediate_size, act=act, bias=bias, kernel=kernel)
