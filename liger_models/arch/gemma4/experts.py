"""The mixture of experts of Gemma 4 (26B-A4B), whose router has its own input and norm."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from liger_models.arch.gemma4.config import Gemma4TextConfig
from liger_models.distributed.collectives import Group
from liger_models.kernels.moe.routing import Routing
from liger_models.kernels.options import KernelOptions
from liger_models.layers.layer import Layer
from liger_models.layers.linear import ReplicatedLinear, replicated
from liger_models.layers.moe import LigerMoE
from liger_models.layers.norm import LigerRMSNorm, add_norm_linear


class Gemma4Router(Layer):
    """Computes logits from the normalized residual stream, chooses experts by the logits, and multiplies the routing
    weight of each expert by a learned factor.

    Args:
        config: sizes and constants of the model.
        norm: function that returns a Gemma 4 norm of a given width.
    """

    def __init__(self, config: Gemma4TextConfig, norm: partial[LigerRMSNorm]) -> None:
        super().__init__()
        assert config.num_experts is not None
        self.norm = norm(config.hidden_size)
        self.proj = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.per_expert_scale = nn.Parameter(torch.ones(config.num_experts))

    def draw(self, std: float) -> bool:
        """Set the factors of all experts to 1. The norm and the projection initialize themselves."""
        nn.init.ones_(self.per_expert_scale)
        return True

    def shard(self, group: Group) -> dict[str, int]:
        """Replicate the projection."""
        self.proj = ReplicatedLinear.of(self.proj, group)
        self.groups = replace(self.groups, tensor=group)
        return {}

    def sum_gradients(self, group: Group) -> bool:
        """Do nothing and return True, because the backward already sums the gradients of the experts' factors over the
        ranks."""
        return True

    def forward(
        self, x: Tensor, route: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """For x [B, T, C] with N tokens, return the routing weights [N, K], the chosen experts [N, K] and the logits
        [N, X]."""
        # The norm of the stream is fused with the projection. The logits are scaled before the softmax.
        logits, _ = add_norm_linear(self.norm, self.proj, None, x)
        weights, experts, logits = route(logits.flatten(0, -2) * x.shape[-1] ** -0.5)
        # The routing weight of each expert is multiplied by a learned factor.
        return weights * replicated(self.per_expert_scale, self.groups.tensor)[experts], experts, logits


class Gemma4Experts(LigerMoE):
    """`LigerMoE` with a `Gemma4Router`, whose input differs from the input of the experts.

    Args:
        config: sizes and constants of the model.
        norm: function that returns a Gemma 4 norm of a given width.
        kernels: which parts of the model run on fused kernels.
    """

    replayable = False
    """False, because the norm after the experts needs their output, which a recomputed block would compute again."""

    def __init__(self, config: Gemma4TextConfig, norm: partial[LigerRMSNorm], kernels: KernelOptions) -> None:
        X, K, width = config.num_experts, config.top_k_experts, config.moe_intermediate_size
        assert X is not None
        assert K is not None
        assert width is not None
        routing = Routing(K, normalize=True)
        super().__init__(config.hidden_size, width, X, routing, act="gelu_tanh", kernel=kernels.swiglu)
        self.gate = Gemma4Router(config, norm)

    def forward(self, x: Tensor, experts: Tensor | None = None, stream: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Run the experts on x [B, T, C]. The router reads ``stream`` [B, T, C]. Return the output [B, T, C], and the
        router logits [N, X] of the N tokens."""
        return self._mix(x, *self.gate(x if stream is None else stream, partial(self._route, experts=experts)))
