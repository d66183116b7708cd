"""Gated MLPs, whose gate and up projections are packed into one, and an MLP without a gate."""

import functools
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from liger_models.distributed.collectives import Group, sum_gradient
from liger_models.kernels.activation.gated_act import check_act, gated_act, gated_act_reference
from liger_models.kernels.activation.xielu import xielu, xielu_reference
from liger_models.kernels.dispatch import use_triton
from liger_models.kernels.float8.float8_gated_mlp import float8_gated_mlp
from liger_models.kernels.linear.act_linear import ACTIVATIONS as PLAIN_ACTIVATIONS
from liger_models.kernels.linear.act_linear import act_linear, act_reference
from liger_models.kernels.linear.gated_mlp import WORKSPACE_MIB, gated_mlp
from liger_models.kernels.norm.fused_norm import FusedNorm
from liger_models.layers.layer import Layer, sum_bytes
from liger_models.layers.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    check_divisible,
    local,
    local_or_none,
    row_parallel,
)
from liger_models.layers.norm import (
    add_norm,
    add_norm_linear,
    autocast_weights,
    call_linear,
    call_normed,
    float8_recipe,
    fused_norm,
    gathered_float8,
    is_fusible,
    is_plain,
    low_rank_of,
    row_order,
    weight_of,
)
from liger_models.layers.recompute import is_hooked, recomputes, repeats, run_for_backward, run_twice

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu2": "relu2",
}
"""Maps ``hidden_act`` of a config.json to the name that the kernels use for the activation."""


class MLPConfig(Protocol):
    """The fields of a configuration that a gated MLP reads; ``mlp_bias`` and ``hidden_act`` are optional."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...


class GatedMLP(Layer):
    """``down(act(gate(x)) · up(x))``, where one projection with interleaved rows computes gate and up.

    Args:
        hidden_size: C.
        intermediate_size: F.
        act: "silu", "gelu" or "gelu_tanh".
        bias: whether all three projections have biases.
        kernel: False runs plain PyTorch instead of a kernel.

    Raises:
        ValueError: the activation is unknown.
    """

    linears = ("gate_up_proj", "down_proj")

    def __init__(
        self, hidden_size: int, intermediate_size: int, *, act: str = "silu", bias: bool = False, kernel: bool = True
    ) -> None:
        super().__init__()
        check_act("GatedMLP", act)
        self.gate_up_proj = nn.Linear(hidden_size, 2 * intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)
        self.act, self.kernel = act, kernel
        self.multipliers = (1.0, 1.0)
        """The multiplier of the gate before its activation, and the multiplier of the result."""
        self.parts = intermediate_size
        """The width between the projections, which tensor parallelism divides among its ranks."""
        self.recompute = False
        """Whether the backward recomputes gate and up (checkpointing policies "selective" and "full")."""
        self.gate_up_8bit = False
        """Whether gate and up are saved in 8 bits; see `Decoder.set_gate_up_8bit`."""

    def set_policy(self, policy: str) -> None:
        """Set ``recompute`` to False if the checkpointing policy is "none", and otherwise to True."""
        self.recompute = policy != "none"

    def recomputed_share(self, policy: str) -> float:
        """Return which fraction of the MLP the backward repeats: 0 for the policy "none", else 2 / 3 (gate and up)."""
        return 0.0 if policy == "none" else 2 / 3

    @property
    def _is_fused(self) -> bool:
        """Whether `gated_mlp` can compute the whole MLP."""
        return self.kernel and self.multipliers == (1.0, 1.0)

    def workspace(self, tokens: int, size: int) -> int | None:
        """See `Layer.workspace`. `gated_mlp` needs three tensors of the size of gate and up of a chunk."""
        return 3 * WORKSPACE_MIB * 2**20 + sum_bytes(self) if self._is_fused else None

    def set_gate_up_8bit(self, enabled: bool) -> bool:
        """Choose whether gate and up are saved in 8 bits; see `Layer.set_gate_up_8bit`."""
        if not self._is_fused:
            return False
        self.gate_up_8bit = enabled
        return True

    def can_shard(self, size: int) -> bool:
        """Whether the intermediate size is divisible by ``size``."""
        return self.parts % size == 0

    def shard(self, group: Group) -> dict[str, int]:
        """Keep 1 / R of the rows of gate and up on each of R ranks; see `Layer.shard`.

        Raises:
            ValueError: the rows cannot be divided equally.
        """
        check_divisible("GatedMLP", "intermediate_size", self.parts, group)
        self.gate_up_proj = ColumnParallelLinear.of(self.gate_up_proj, group)
        self.down_proj = RowParallelLinear.of(self.down_proj, group)
        return {"gate_up_proj.weight": 0, "gate_up_proj.bias": 0, "down_proj.weight": 1}

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., C] to [..., C]."""
        act, (gate_scale, scale) = gated_act if self.kernel else gated_act_reference, self.multipliers
        y = call_linear(self.down_proj, act(call_linear(self.gate_up_proj, x), self.act, gate_scale))
        return y if scale == 1.0 else y * scale

    def _fuses(self, x: Tensor) -> bool:
        """Whether `gated_mlp` or `float8_gated_mlp` computes the whole MLP."""
        linears = self.gate_up_proj, self.down_proj
        fusible = is_fusible(*linears) or float8_recipe(*linears) is not None
        plain = self.multipliers == (1.0, 1.0) and row_order(linears[0]) is None
        return self.kernel and plain and fusible and use_triton(x)

    def add_norm(self, norm: nn.Module | None, x: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Add ``x`` to ``residual``, and apply the MLP to the normalized sum. Return the output and the
        sum, both [..., C].

        Without a norm, the MLP is applied to the sum. The backward recomputes the normalized activations and the gated
        product. If ``recompute`` is True, the backward also recomputes the gate and up projection.
        """
        fused = None
        if self._fuses(residual) and not self._must_be_called():
            fused = FusedNorm(None) if norm is None else fused_norm(norm)
        # Nothing is fused if no kernel computes this MLP, or if the MLP, the norm or a projection must be called as a
        # module.
        if fused is None:
            if recomputes(self):
                residual, _ = add_norm(None, x, residual)  # only the sum is saved
                return run_twice(self._of_sum, norm, residual), residual
            return call_normed(self, norm, x, residual)
        return self._fused(fused, x, residual)

    def _must_be_called(self) -> bool:
        """Whether the MLP must be called as a module, because it has hooks or a derived class replaces its forward."""
        return is_hooked(self) or type(self).forward not in (GatedMLP.forward, TiledMLP.forward)

    def _fused(self, fused: FusedNorm, x: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the result of `add_norm` in one op."""
        # If the intermediate size is sharded, the op returns this rank's partial sum. The bias is added to the sum over
        # all ranks.
        up_proj, down_proj = self.gate_up_proj, self.down_proj
        partial = row_parallel(down_proj)
        gate_up, down = weight_of(up_proj, residual), weight_of(down_proj, residual)
        gate_up_bias, down_bias = autocast_weights(
            residual,
            local_or_none(up_proj.bias),
            None if partial else local_or_none(down_proj.bias),
        )
        recipe = float8_recipe(up_proj, down_proj)
        options: dict[str, Any] = {"act": self.act, "recompute": self.recompute}
        # In float8, the op also gets the weights that FSDP has gathered in float8, if there are any.
        if recipe:
            if self.gate_up_8bit and not self.recompute and torch.is_grad_enabled():
                raise ValueError(
                    "set_gate_up_8bit: an MLP with float8 products saves gate and up in full, got both. Leave out "
                    "convert_to_float8, or call set_gate_up_8bit(False)."
                )
            assert isinstance(gate_up, Tensor)
            assert isinstance(down, Tensor)
            mlp = functools.partial(
                float8_gated_mlp, x, residual, fused, gate_up, down, gate_up_bias, down_bias, recipe=recipe, **options,
                gathered=(gathered_float8(up_proj), gathered_float8(down_proj)),
            )  # fmt: skip
        else:
            mlp = functools.partial(
                gated_mlp, x, residual, fused.weight, gate_up, down, gate_up_bias, down_bias, **options,
                eps=fused.eps, weight_offset=fused.weight_offset, scale_in_fp32=fused.scale_in_fp32, norm=fused.kind,
                norm_bias=fused.bias, gate_up_8bit=self.gate_up_8bit, ranks=partial.group if partial else None,
                gate_up_low_rank=low_rank_of(up_proj, gate_up.dtype),
                down_low_rank=low_rank_of(down_proj, down.dtype),
            )  # fmt: skip
        y, residual = run_for_backward(mlp) if repeats() else mlp()
        return (partial.sum(y) if partial else y), residual

    def _of_sum(self, norm: nn.Module | None, residual: Tensor) -> Tensor:
        y: Tensor = self(residual if norm is None else norm(residual))
        return y


class LigerXIELU(Layer):
    """The parameters of xIELU: two trained coefficients, and two constants that come from the checkpoint.

    The constants are β and ε, and the coefficients are ``softplus(alphas[0])`` and ``β + softplus(alphas[1])``. In a
    new layer, both coefficients are 0.8, β is 0.5, and ε is −1e-6.

    Source: https://arxiv.org/abs/2411.13010.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alphas = nn.Parameter(torch.empty(2))
        self.constants = nn.Parameter(torch.empty(2), requires_grad=False)
        self.group: Group | None = None
        """Process group over which the gradients are all-reduced, because the group's ranks have different inputs; None
        if the gradients are not all-reduced.
        """
        self.draw(0.0)

    def draw(self, std: float) -> bool:
        """Set the coefficients and constants to the values of a new layer."""
        with torch.no_grad():
            self.alphas.copy_(torch.tensor([0.8, 0.3], dtype=torch.float32, device="cpu").expm1().log())
            self.constants.copy_(torch.tensor([0.5, -1e-6], dtype=torch.float32, device="cpu"))
        return True

    def sum_gradients(self, group: Group) -> bool:
        """Make the backward all-reduce the gradients over ``group``, whose ranks have different inputs."""
        self.group = group
        return True

    def shard(self, group: Group) -> dict[str, int]:
        """Replicate the coefficients. Each rank applies them to its own columns of the activation's input."""
        self.group = group
        return {}

    def coefficients(self) -> Tensor:
        """Return the argument ``coefficients`` of `xielu`: the two coefficients, then β and ε. The result is [4] fp32,
        or fp64 for parameters in fp64."""
        alphas, constants = local(self.alphas), local(self.constants)
        alphas = alphas if self.group is None else sum_gradient(alphas, self.group)
        wide = torch.promote_types(alphas.dtype, torch.float32)
        p, n = nn.functional.softplus(alphas.to(wide)).split(1)
        constants = constants.to(wide)
        return torch.cat([p, n + constants[:1], constants])


class LigerMLP(Layer):
    """``fc2(act(fc1(x)))``. The backward recomputes the activation from its input, which is saved.

    Args:
        hidden_size: C.
        intermediate_size: F.
        out_size: width of the result; None for C.
        act: "gelu", "gelu_tanh", "quick_gelu", "relu2" (the square of ReLU) or "xielu" (which has trained
            coefficients).
        bias: whether both layers have biases.
        kernel: False runs plain PyTorch instead of a kernel.

    Raises:
        ValueError: the activation is unknown.
    """

    linears = ("fc1", "fc2")

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        out_size: int | None = None,
        *,
        act: str,
        bias: bool = True,
        kernel: bool = True,
    ) -> None:
        super().__init__()
        if act not in (*PLAIN_ACTIVATIONS, "xielu"):
            raise ValueError(f"LigerMLP: act must be one of {', '.join(PLAIN_ACTIVATIONS)}, xielu, got {act!r}.")
        self.fc1 = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.fc2 = nn.Linear(intermediate_size, hidden_size if out_size is None else out_size, bias=bias)
        self.act, self.kernel = act, kernel
        self.xielu = LigerXIELU() if act == "xielu" else None
        self.parts = intermediate_size
        """The width between the projections, which tensor parallelism divides among its ranks."""
        self.recompute = False
        """Whether the backward also recomputes ``fc1`` (checkpointing policies "selective" and "full")."""

    def set_policy(self, policy: str) -> None:
        """Set ``recompute`` to False if the checkpointing policy is "none", and otherwise to True."""
        self.recompute = policy != "none"

    def recomputed_share(self, policy: str) -> float:
        """Return which fraction of the MLP the backward repeats: 0 for the policy "none", else 1 / 2 (``fc1``)."""
        return 0.0 if policy == "none" else 1 / 2

    def can_shard(self, size: int) -> bool:
        """Whether the intermediate size is divisible by ``size``."""
        return self.parts % size == 0

    def shard(self, group: Group) -> dict[str, int]:
        """Keep 1 / R of the width between the two layers on each of R ranks; see `Layer.shard`.

        Raises:
            ValueError: the width cannot be divided equally.
        """
        check_divisible("LigerMLP", "intermediate_size", self.parts, group)
        self.fc1 = ColumnParallelLinear.of(self.fc1, group)
        self.fc2 = RowParallelLinear.of(self.fc2, group)
        return {"fc1.weight": 0, "fc1.bias": 0, "fc2.weight": 1}

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., C] to [..., out]."""
        return self._second(self.fc1(x))

    def _second(self, hidden: Tensor) -> Tensor:
        """Map the output of the first layer, [..., F], to [..., out]."""
        coefficients = None if self.xielu is None else self.xielu.coefficients()
        if not (self.kernel and is_plain(self.fc2)):
            if coefficients is None:
                a = act_reference(hidden, self.act)
            else:
                a = (xielu if self.kernel else xielu_reference)(hidden, coefficients)
            y: Tensor = self.fc2(a)
            return y
        partial = row_parallel(self.fc2)
        bias = None if partial else local_or_none(self.fc2.bias)
        weight, bias = autocast_weights(hidden, local(self.fc2.weight), bias)
        assert weight is not None
        y = act_linear(hidden, weight, bias, self.act, coefficients)
        return partial.sum(y) if partial else y

    def add_norm(self, norm: nn.Module | None, x: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Add ``x`` to ``residual``, and apply the MLP to the normalized sum. Return the output and the
        sum, both [..., C].

        The backward recomputes the normalized activations. If ``recompute`` is True, the only saved activation is the
        sum of ``x`` and ``residual``, and the backward also recomputes ``fc1``.
        """
        if recomputes(self):
            residual, _ = add_norm(None, x, residual)  # only the sum is saved
            return run_twice(self._of_sum, norm, residual), residual
        return self._add_norm(norm, x, residual)

    def _add_norm(self, norm: nn.Module | None, x: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor]:
        if is_hooked(self) or self.overrides_forward:
            return call_normed(self, norm, x, residual)
        hidden, residual = add_norm_linear(norm, self.fc1, x, residual)
        return self._second(hidden), residual

    def _of_sum(self, norm: nn.Module | None, residual: Tensor) -> Tensor:
        return self._add_norm(norm, None, residual)[0]


class LigerSwiGLUMLP(GatedMLP):
    """``down(silu(gate(x)) · up(x))`` with the sizes of a configuration.

    Args:
        config: a configuration with ``hidden_size`` and ``intermediate_size``, and optionally ``mlp_bias``,
            ``hidden_act`` and ``mlp_multipliers``. The field ``mlp_multipliers`` (Falcon-H1) has two values: the
            multiplier of the gate before its activation, and the multiplier of the result.
        intermediate_size: F; None for the configuration's ``intermediate_size``.
        kernel: False runs plain PyTorch instead of a kernel.

    Raises:
        ValueError: the configuration's ``hidden_act`` is neither "silu" nor "swish".
    """

    def __init__(self, config: MLPConfig, intermediate_size: int | None = None, *, kernel: bool = True) -> None:
        act = _configured_act("LigerSwiGLUMLP", config, "silu", ("silu", "swish"))
        super().__init__(*_sizes(config, intermediate_size), act=act, bias=_has_bias(config), kernel=kernel)
        gate, result = getattr(config, "mlp_multipliers", (1.0, 1.0))
        self.multipliers = float(gate), float(result)


class LigerGEGLUMLP(GatedMLP):
    """``down(gelu(gate(x)) · up(x))``, with the tanh approximation of GELU unless ``hidden_act`` is "gelu".

    Args:
        config, intermediate_size, kernel: as in `LigerSwiGLUMLP`.

    Raises:
        ValueError: the configuration's ``hidden_act`` is not "gelu", "gelu_pytorch_tanh" or "gelu_new".
    """

    def __init__(self, config: MLPConfig, intermediate_size: int | None = None, *, kernel: bool = True) -> None:
        act = _configured_act("LigerGEGLUMLP", config, "gelu_pytorch_tanh", ("gelu", "gelu_pytorch_tanh", "gelu_new"))
        super().__init__(*_sizes(config, intermediate_size), act=act, bias=_has_bias(config), kernel=kernel)


class TiledMLP(GatedMLP):
    """A gated MLP that saves only its input, and whose kernels process long inputs in chunks."""

    def set_policy(self, policy: str) -> None:
        """Make the backward recompute gate and up under every checkpointing policy."""
        self.recompute = True

    def recomputed_share(self, policy: str) -> float:
        """Return which fraction of the MLP the backward repeats: 2 / 3 (gate and up) for every policy."""
        return 2 / 3

    def set_gate_up_8bit(self, enabled: bool) -> bool:
        """Return False, because gate and up are never saved."""
        return False

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., C] to [..., C]."""
        if self._fuses(x):
            return self._fused(FusedNorm(None), None, x)[0]
        if not recomputes(self):
            return super().forward(x)
        y: Tensor = run_twice(super().forward, x)
        return y


class LigerTiledSwiGLUMLP(TiledMLP, LigerSwiGLUMLP):
    """`LigerSwiGLUMLP` that saves only its input, and whose kernels process long inputs in chunks.

    Args:
        config, kernel: as in `LigerSwiGLUMLP`.
        num_shards: ignored, because `gated_mlp` chooses the chunks; accepted for compatibility with Liger-Kernel.

    Raises:
        ValueError: as in `LigerSwiGLUMLP`.
    """

    def __init__(self, config: MLPConfig, num_shards: int | None = None, *, kernel: bool = True) -> None:
        super().__init__(config, kernel=kernel)
        self.recompute = True


class LigerTiledGEGLUMLP(TiledMLP, LigerGEGLUMLP):
    """`LigerGEGLUMLP` that saves only its input, and whose kernels process long inputs in chunks.

    Args:
        config, kernel: as in `LigerGEGLUMLP`.
        num_shards: ignored, because `gated_mlp` chooses the chunks; accepted for compatibility with Liger-Kernel.

    Raises:
        ValueError: as in `LigerGEGLUMLP`.
    """

    def __init__(self, config: MLPConfig, num_shards: int | None = None, *, kernel: bool = True) -> None:
        super().__init__(config, kernel=kernel)
        self.recompute = True


def _configured_act(name: str, config: MLPConfig, default: str, allowed: tuple[str, ...]) -> str:
    """Return the name that kernels use for the config's activation (``hidden_act``) or, if the config names none, for
    ``default``."""
    hidden_act = getattr(config, "hidden_act", default)
    if hidden_act not in allowed:
        raise ValueError(f"{name}: hidden_act must be one of {allowed}, got {hidden_act!r}.")
    return ACTIVATIONS[hidden_act]


def _sizes(config: MLPConfig, intermediate_size: int | None) -> tuple[int, int]:
    return config.hidden_size, config.intermediate_size if intermediate_size is None else intermediate_size


def _has_bias(config: MLPConfig) -> bool:
    return bool(getattr(config, "mlp_bias", False))
