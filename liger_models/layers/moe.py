"""Mixture of experts: a router and gated MLPs of which each token passes through a few."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from liger_models.kernels.collectives import Ranks, all_tokens, divide_gradient, enter, leave, sum_gradient
from liger_models.kernels.dispatch import check, use_triton
from liger_models.kernels.gated_act import check_act
from liger_models.kernels.moe import moe_mlp, moe_mlp_over, moe_mlp_reference, route, route_reference

from .norm import autocast_weights
from .tensor_parallel import WholeLinear, check_parts, own


class LigerMoE(nn.Module):
    """``Σ_k w_k · down_e(act(gate_e(x)) · up_e(x))`` over the ``top_k`` experts e that the router gives a token.

    Args:
        hidden_size: C.
        intermediate_size: F, of one expert.
        num_experts: X.
        top_k: K.
        normalize: divide the K routing weights of a token by their sum.
        round_weights: round the routing weights to the dtype of the router's logits; otherwise they stay in fp32.
        act: "silu", "gelu" or "gelu_tanh".
        router_jitter: in training the input is multiplied by noise, uniform in 1 ± router_jitter.
        kernel: False for plain torch.

    Raises:
        ValueError: a top_k that is not in 1 to num_experts, or an unknown activation.

    Source: https://arxiv.org/abs/2401.04088.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        *,
        normalize: bool,
        round_weights: bool = False,
        act: str = "silu",
        router_jitter: float = 0.0,
        kernel: bool = True,
    ) -> None:
        super().__init__()
        check_act("LigerMoE", act)
        check(
            1 <= top_k <= num_experts,
            f"LigerMoE: top_k ({top_k}) must be 1 to num_experts ({num_experts}). Check config.json.",
        )
        self.gate = nn.Linear(hidden_size, num_experts, bias=False)
        self.gate_up_weight = nn.Parameter(torch.empty(num_experts, 2 * intermediate_size, hidden_size))
        self.down_weight = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))
        self.top_k, self.normalize, self.round_weights = top_k, normalize, round_weights
        self.act, self.router_jitter, self.kernel = act, router_jitter, kernel
        self.recompute = False
        """True makes gate and up again in the backward (checkpointing policies "selective" and "full")."""
        self.ranks: Ranks | None = None
        """Those that have a part of each expert."""
        self.expert_ranks: Ranks | None = None
        """Those that have some of the experts each, and tokens of their own."""
        self.reset_parameters()

    def cut(self, ranks: Ranks) -> dict[str, int]:
        """Keep 1 / R of each expert's gates and ups: see `layers.tensor_parallel`.

        Raises:
            ValueError: there is no equal part of them, or the router's noise would differ between ranks.
        """
        check_parts("LigerMoE", "intermediate_size", self.down_weight.shape[2], ranks)
        check(
            self.router_jitter == 0,
            f"LigerMoE: router_jitter must be 0 over ranks, got {self.router_jitter}. Set router_jitter_noise=0.",
        )
        self.gate = WholeLinear.of(self.gate, ranks)
        self.ranks = ranks
        return {"gate_up_weight": 1, "down_weight": 2}

    def cut_experts(self, ranks: Ranks) -> dict[str, int]:
        """Keep 1 / R of the experts: see `liger_models.parallel.apply_ep`.

        Raises:
            ValueError: there is no equal part of them.
        """
        check_parts("LigerMoE", "num_experts", self.down_weight.shape[0], ranks)
        self.expert_ranks = ranks
        return {"gate_up_weight": 0, "down_weight": 0}

    def reset_parameters(self, std: float = 0.02) -> None:
        """Draw the experts' weights anew, normal with ``std``; the router is a linear layer and draws its own."""
        nn.init.normal_(self.gate_up_weight, std=std)
        nn.init.normal_(self.down_weight, std=std)

    def extra_repr(self) -> str:
        """Sizes and constants, for ``print(model)``."""
        X, C, F = self.down_weight.shape
        return f"{C}, {F}, num_experts={X}, top_k={self.top_k}, normalize={self.normalize}, act={self.act}"

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [..., C] -> ``(y [..., C], router_logits [N, X])``, N being the number of tokens."""
        if self.training and self.router_jitter:
            x = x * torch.empty_like(x).uniform_(1 - self.router_jitter, 1 + self.router_jitter)
        rows = x.reshape(-1, x.shape[-1])
        logits: Tensor = self.gate(rows)
        fused = self.kernel and use_triton(rows)
        # Outside of what is recomputed: the backward must not choose other experts.
        choose = route if fused else route_reference
        weights, experts = choose(logits, self.top_k, self.normalize, self.round_weights)
        gate_up_weight, down_weight = autocast_weights(x, own(self.gate_up_weight), own(self.down_weight))
        assert gate_up_weight is not None
        assert down_weight is not None
        ranks = self.ranks
        if ranks is not None:
            x = enter(x, ranks)
            rows = x.reshape(-1, x.shape[-1])
            weights, experts, logits = self._of_all_tokens(weights, experts, logits, x.shape[:-1], ranks)
        inputs = rows, weights, experts, gate_up_weight, down_weight
        if self.expert_ranks is not None:
            # FSDP averages gradients over the ranks; these are their sum already.
            R = self.expert_ranks.size
            gate_up_weight, down_weight = divide_gradient(gate_up_weight, R), divide_gradient(down_weight, R)
            y = moe_mlp_over(
                rows, weights, experts, gate_up_weight, down_weight, self.expert_ranks,
                act=self.act, recompute=self.recompute,
            )  # fmt: skip
        elif fused:
            y = moe_mlp(*inputs, act=self.act, recompute=self.recompute)
        elif self.recompute and torch.is_grad_enabled():
            y = checkpoint(moe_mlp_reference, *inputs, act=self.act, use_reentrant=False)
        else:
            y = moe_mlp_reference(*inputs, act=self.act)
        return leave(y.view(x.shape), ranks), logits

    def _of_all_tokens(
        self, weights: Tensor, experts: Tensor, logits: Tensor, shape: torch.Size, ranks: Ranks
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The router's results, those of the own tokens together where each rank has its own; [B, T] is ``shape``."""
        if not ranks.sequence:
            return sum_gradient(weights, ranks), experts, logits
        weights, experts, logits = (each.unflatten(0, (*shape[:-1], -1)) for each in (weights, experts, logits))
        weights, experts, logits = enter(weights, ranks), all_tokens(experts, ranks), all_tokens(logits, ranks)
        return weights.flatten(0, -2), experts.flatten(0, -2), logits.flatten(0, -2)
