"""LoRA adapters A_e and B_e for the matrix W_e of each routed expert e.

    y_e = W_e x + s · B_e A_e x          s as in `lora_layers`

The ops that compute the experts take A and B as arguments. Under tensor parallelism, the B of gate and up is sharded by
rows, and the A of down is sharded by columns.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from liger_models.adapters.lora_config import LoRAConfig
from liger_models.convert.weight_map import Expression
from liger_models.distributed.collectives import Group, sum_gradient
from liger_models.kernels.frozen.products import Weight, dense
from liger_models.kernels.matmul.row_linear import LowRank, low_rank_pair
from liger_models.layers.derived import derive
from liger_models.layers.layer import Layer
from liger_models.layers.linear import copy_into, local
from liger_models.layers.moe import MATRICES


class ExpertAdapter(Layer):
    """The adapter of a parameter that holds one matrix per expert: A [X, r, in] and B [X, out, r].

    The rows of B have the same order as the rows of the packed weight.

    Args:
        weight: the matrices, [X, out, in].
        name: the name of this parameter in transformers.
        expression: computes the weight from the parameter in transformers.
        config: settings of the adapters.
        exchanged: whether A and B are swapped in PEFT's files; see `CheckpointFormat.peft_exchanges`.
    """

    def __init__(
        self, weight: Weight, name: str, expression: Expression, config: LoRAConfig, *, exchanged: bool = False
    ) -> None:
        super().__init__()
        X, out, width = weight.shape

        # As for linear layers, adapters are fp32, because their updates are small.
        options: dict[str, Any] = {"device": weight.device, "dtype": torch.promote_types(weight.dtype, torch.float32)}
        self.name, self.expression, self.exchanged = name, expression, exchanged
        self.lora_A = nn.Parameter(torch.empty(X, config.r, width, **options))
        self.lora_B = nn.Parameter(torch.empty(X, out, config.r, **options))

    def sum_gradients(self, group: Group) -> bool:
        """Return True (nothing is left to sum), because `LoRAExperts` already sums the gradients."""
        return True


class LoRAExperts(Layer):
    """The adapters of a layer's routed experts, in the layer's submodule ``lora``.

    Args:
        adapters: maps the name of a parameter of the layer, "gate_up_weight" or "down_weight", to its adapter.
        active_share: the share of the layer's experts that a token passes through. It is used to count FLOPs.
        config: settings of the adapters.
    """

    active: bool = True
    """Whether the adapters are used in addition to the frozen weights; see `without_adapters`."""
    group: Group | None = None
    """The process group over which `apply_tp` has sharded the width of each expert; None without `apply_tp`."""

    def __init__(self, adapters: Mapping[str, ExpertAdapter], active_share: float, config: LoRAConfig) -> None:
        super().__init__()
        self.config, self.names, self.active_share = config, tuple(adapters), active_share
        for name, adapter in adapters.items():
            self.add_module(name, adapter)
        self.reset_adapters()

    def shard(self, group: Group) -> dict[str, int]:
        """Shard the adapters along the experts' width: the B of gate and up by rows, and the A of down by columns."""
        self.group = group
        dims = {"gate_up_weight.lora_B": 1, "down_weight.lora_A": 2}  # the dimension along which each tensor is sharded
        return {name: dim for name, dim in dims.items() if name.partition(".")[0] in self.names}

    def by_name(self) -> dict[str, ExpertAdapter]:
        """Map each adapted parameter's name in transformers to its adapter."""
        adapters = [cast(ExpertAdapter, self.get_submodule(name)) for name in self.names]
        return {adapter.name: adapter for adapter in adapters}

    @torch.no_grad()
    def reset_adapters(self) -> None:
        """Initialize A randomly and B to 0, so that the adapters have no effect.

        If the adapters are sharded, the first rank draws all values, and each rank gets its part of them.
        """
        for adapter in self.by_name().values():
            drawn = torch.empty(adapter.lora_A.shape, dtype=adapter.lora_A.dtype, device=adapter.lora_A.device)
            bound = drawn.shape[2] ** -0.5  # the same bound as for A [r, in] of a linear layer
            copy_into(adapter.lora_A, drawn.uniform_(-bound, bound))
            nn.init.zeros_(adapter.lora_B)

    @property
    def dropout(self) -> float:
        """The current probability with which an element of the adapters' input is dropped; 0 outside of training."""
        return self.config.lora_dropout if self.training and self.active else 0.0

    def low_ranks(self, dtype: torch.dtype) -> tuple[LowRank | None, LowRank | None]:
        """Return two pairs (A [X, r, in], s · B [X, out, r]) with the adapters of this rank's experts.

        The first pair is for gate and up, and the second for down. A pair is None if its matrices have no adapters, or
        if the adapters are switched off.
        """
        if not self.active:
            return None, None
        gate_up_A, gate_up_B, down_A, down_B = derive(self, dtype, lambda: self._factors(dtype))
        return low_rank_pair(gate_up_A, gate_up_B), low_rank_pair(down_A, down_B)

    def _factors(self, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
        """Return A and s · B for each name in `MATRICES`; both are None if these matrices have no adapter."""
        factors: list[Tensor | None] = []
        for name in MATRICES:
            if name not in self.names:
                factors += [None, None]
                continue
            adapter: Any = self.get_submodule(name)
            A, B = local(adapter.lora_A), local(adapter.lora_B)

            # If A is sharded, each rank computes only a part of the gradient of B, and vice versa.
            if self.group is not None and name == "gate_up_weight":
                A = sum_gradient(A, self.group)
            elif self.group is not None:
                B = sum_gradient(B, self.group)
            factors += [A.to(dtype), (B * self.config.scaling).to(dtype)]
        return tuple(factors)

    @torch.no_grad()
    def merged(self, name: str, weight: Weight) -> Tensor:
        """Merge the adapters of the parameter ``name`` into its ``weight``. Return [X, out, in] in the same dtype."""
        adapter: Any = self.get_submodule(name)
        wide = torch.promote_types(weight.dtype, torch.float32)
        B = (adapter.lora_B.to(wide) * self.config.scaling).split(1)

        # Merge one expert at a time, so that at most one expert has an fp32 copy.
        experts = zip(weight.split(1), B, adapter.lora_A.to(wide).split(1), strict=True)
        return torch.cat([torch.baddbmm(dense(W).to(wide), b, a).to(weight.dtype) for W, b, a in experts])
