"""Mixture of experts, in which a router sends each token through a few of many gated MLPs."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from liger_models.distributed.collectives import (
    Group,
    copy_to_region,
    divide_gradient,
    gather_tokens,
    reduce_from_region,
    sum_gradient,
)
from liger_models.kernels.dispatch import use_triton
from liger_models.kernels.frozen.products import Weight, dense
from liger_models.kernels.moe.expert_act import check_expert_act, inputs_of
from liger_models.kernels.moe.expert_parallel import moe_mlp_over
from liger_models.kernels.moe.experts import moe_mlp, moe_mlp_reference
from liger_models.kernels.moe.routing import route, route_reference
from liger_models.layers.frozen import frozen_parts
from liger_models.layers.layer import Layer
from liger_models.layers.linear import ReplicatedLinear, check_divisible, local, local_or_none
from liger_models.layers.mlp import GatedMLP
from liger_models.layers.norm import Norm, add_norm, autocast_weights, call_linear
from liger_models.layers.recompute import run_twice

MATRICES = ("gate_up_weight", "down_weight")
"""The parameters of `LigerMoE` that hold the experts' matrices."""


class LigerMoE(Layer):
    """``Σ_e w_e · down_e(act(gate_e(x)) · up_e(x))`` over the ``top_k`` experts e that the router selects per token.

    Args:
        hidden_size: C.
        intermediate_size: F, the width of one expert.
        num_experts: X.
        top_k: K.
        normalize: whether to divide the K routing weights of a token by their sum.
        round_weights: whether to round the routing weights to the dtype of the router logits instead of keeping them in
            fp32.
        act: "silu", "gelu", "gelu_tanh", "clamped_swiglu" or "relu2", as in `liger_models.kernels.moe.moe_mlp`. With
            "relu2", experts have no gate.
        limit: the limit to which "clamped_swiglu" clamps gate and up.
        bias: whether the router and both projections of each expert have biases.
        router_jitter: in training, the input is multiplied by uniform noise between 1 − router_jitter and 1 +
            router_jitter.
        kernel: False for plain torch.

    Raises:
        ValueError: ``top_k`` is below 1 or above ``num_experts``, or the activation is unknown.

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
        limit: float = 0.0,
        bias: bool = False,
        router_jitter: float = 0.0,
        kernel: bool = True,
    ) -> None:
        super().__init__()
        check_expert_act("LigerMoE", act, limit)
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"LigerMoE: top_k ({top_k}) must be 1 to num_experts ({num_experts}). Check config.json.")
        # The router maps [N, C] to logits [N, X].
        self.gate: nn.Module = nn.Linear(hidden_size, num_experts, bias=bias)
        # The matrices of all experts are stacked, so that one grouped product computes them.
        rows = inputs_of(act) * intermediate_size
        self.gate_up_weight = nn.Parameter(torch.empty(num_experts, rows, hidden_size))
        self.down_weight = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))
        self.gate_up_bias = nn.Parameter(torch.empty(num_experts, rows)) if bias else None
        self.down_bias = nn.Parameter(torch.empty(num_experts, hidden_size)) if bias else None
        self.top_k, self.normalize, self.round_weights = top_k, normalize, round_weights
        self.act, self.limit, self.router_jitter, self.kernel = act, limit, router_jitter, kernel
        self.replayable = False  # a second forward could select other experts
        self.recompute = False
        """Whether the backward recomputes gate and up (checkpointing policies "selective" and "full")."""
        self.lora: Any = None
        """The adapters of the experts (`liger_models.adapters.lora_layers.LoRAExperts`), or None."""
        self.stored: Any = None
        """The tensors, except the codes, of frozen, quantized matrices; see `liger_models.layers.frozen`."""
        self.reset_parameters()

    @property
    def router(self) -> nn.Module:  # type: ignore[override]
        """The module that routes tokens to experts."""
        return self.gate

    @property
    def active_share(self) -> float:  # type: ignore[override]
        """Fraction of the experts that a token passes through."""
        return self.top_k / len(self.down_weight)

    @property
    def adapted(self) -> tuple[str, ...]:  # type: ignore[override]
        """See `Layer.adapted`."""
        names: tuple[str, ...] = () if self.lora is None else self.lora.names
        return names

    def adapted_weight(self, name: str, *, merge: bool) -> Tensor:
        """See `Layer.adapted_weight`."""
        weight = self.matrices(name) if name in frozen_parts(self) else getattr(self, name).detach()
        return self.lora.merged(name, weight) if merge else dense(weight)

    def matrices(self, name: str) -> Weight:
        """Return the matrices in the parameter ``name`` in the form that ops take; only this rank's part if sharded."""
        frozen, parameter = frozen_parts(self).get(name), getattr(self, name)
        return local(parameter) if frozen is None else frozen.join(parameter)

    def shape_of(self, name: str) -> torch.Size:
        """Return the shape ``[X, O, C]`` of the matrices in the parameter ``name`` over all ranks."""
        shape: torch.Size = frozen_parts(self).get(name, getattr(self, name)).shape
        return shape

    def set_policy(self, policy: str) -> None:
        """Recompute gate and up in the backward unless the policy is "none"."""
        self.recompute = policy != "none"

    def recomputed_share(self, policy: str) -> float:
        """The recomputed share of the layer: two thirds, which are gate and up, or one half if there is no gate."""
        inputs = inputs_of(self.act)
        return 0.0 if policy == "none" else inputs / (inputs + 1)

    def can_shard(self, size: int) -> bool:
        """Whether ``size`` divides the intermediate size of an expert."""
        return self.shape_of("down_weight")[2] % size == 0

    def shard(self, group: Group) -> dict[str, int]:
        """On each of R ranks, keep 1 / R of the width of each expert; see `liger_models.parallel.apply_tp`.

        Raises:
            ValueError: the width is not a multiple of the number of ranks, or ``router_jitter`` is not 0, so that noise
                would differ between ranks.
        """
        check_divisible("LigerMoE", "intermediate_size", self.shape_of("down_weight")[2], group)
        if self.router_jitter != 0:
            raise ValueError(
                f"LigerMoE: router_jitter must be 0 with apply_tp, got {self.router_jitter}. Set router_jitter_noise=0."
            )
        if isinstance(self.gate, nn.Linear):  # any other router shards itself
            self.gate = ReplicatedLinear.of(self.gate, group)
        self.groups = replace(self.groups, tensor=group)
        # Each rank has its part of the width of all experts. The bias of down is replicated.
        biased = {} if self.gate_up_bias is None else {"gate_up_bias": 1}
        return {"gate_up_weight": 1, "down_weight": 2, **biased}

    def shard_experts(self, group: Group) -> dict[str, int]:
        """On each of R ranks, keep 1 / R of the experts; see `liger_models.parallel.apply_ep`.

        Raises:
            ValueError: the number of experts is not a multiple of the number of ranks.
        """
        check_divisible("LigerMoE", "num_experts", self.down_weight.shape[0], group)
        self.groups = replace(self.groups, expert=group)
        # Each rank has some of the experts, with all their parameters and adapters.
        biased = {} if self.gate_up_bias is None else {"gate_up_bias": 0, "down_bias": 0}
        adapters = {} if self.lora is None else {f"lora.{name}": 0 for name, _ in self.lora.named_parameters()}
        return {"gate_up_weight": 0, "down_weight": 0, **biased, **adapters}

    def sum_gradients(self, group: Group) -> bool:
        """Return True, because `forward` already sums the gradient of the replicated bias."""
        return True

    def draw(self, std: float) -> bool:
        """Initialize the experts' weights from a normal distribution with ``std``."""
        self.reset_parameters(std)
        return True

    def reset_parameters(self, std: float = 0.02) -> None:
        """Draw the experts' weights from a normal distribution with ``std``, and set their biases to 0.

        The router is initialized separately.
        """
        nn.init.normal_(self.gate_up_weight, std=std)
        nn.init.normal_(self.down_weight, std=std)
        for bias in (self.gate_up_bias, self.down_bias):
            if bias is not None:
                nn.init.zeros_(bias)

    def extra_repr(self) -> str:
        """Return sizes and constants for ``print(model)``."""
        X, C, F = self.shape_of("down_weight")
        return f"{C}, {F}, num_experts={X}, top_k={self.top_k}, normalize={self.normalize}, act={self.act}"

    def add_norm(
        self, norm: Norm, x: Tensor | None, residual: Tensor, experts: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Add ``x`` to ``residual`` and apply the layer to ``norm(residual)``.

        Returns ``(y, residual, router_logits)``. If ``experts`` [..., K] are given, they replace the router's choice.
        """
        normed, residual = add_norm(norm, x, residual)
        y, router_logits = self(normed, experts)
        return y, residual, router_logits

    def forward(self, x: Tensor, experts: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Map x [..., C] to ``(y [..., C], router_logits [N, X])`` for N tokens; ``experts`` is [..., K] or None."""
        if self.training and self.router_jitter:
            # The noisy input is also the input of the experts.
            x = x * torch.empty_like(x).uniform_(1 - self.router_jitter, 1 + self.router_jitter)
        return self._mix(x, *self._route(call_linear(self.gate, x.reshape(-1, x.shape[-1])), experts))

    def choose(self, router_logits: Tensor) -> Tensor:
        """See `Layer.choose`."""
        return self._route(router_logits)[1]

    def _route(self, logits: Tensor, experts: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``(weights [N, K], experts [N, K], logits [N, X])``; ``experts`` replace the router's choice.

        Routing is never recomputed, because the backward must use the same experts as the forward.
        """
        experts = None if experts is None else experts.flatten(0, -2)
        choose = route if self.kernel and use_triton(logits) else route_reference
        return *choose(logits, self.top_k, self.normalize, self.round_weights, experts), logits

    def _mix(self, x: Tensor, weights: Tensor, experts: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weighted sum of the experts' outputs for x, [..., C], and all tokens' router logits [N, X]."""
        rows = x.reshape(-1, x.shape[-1])
        # Collect the operands of the ops: this rank's part of the parameters in autocast's dtype, and A and B of
        # adapters.
        fused = self.kernel and use_triton(rows)
        group, expert = self.groups.tensor, self.groups.expert

        down_bias = local_or_none(self.down_bias)
        if group is not None and down_bias is not None:  # only one rank adds the bias, and all ranks get its gradient
            down_bias = sum_gradient(down_bias, group) * (group.rank == 0)
        frozen_or_dense: list[Any] = [self.matrices(name) for name in MATRICES]
        matrices = autocast_weights(x, *frozen_or_dense, local_or_none(self.gate_up_bias), down_bias)
        low_ranks: Any = (None, None)
        if self.lora is not None:
            assert matrices[0] is not None
            low_ranks = self.lora.low_ranks(matrices[0].dtype)

        if group is not None:
            x = copy_to_region(x, group)
            rows = x.reshape(-1, x.shape[-1])
            weights, experts, logits = self._of_all_tokens(weights, experts, logits, x.shape[:-1], group)
        if expert is not None:
            # FSDP averages gradients over ranks, but the gradients of the experts are sums over ranks, so they must be
            # divided by the number of ranks. To this end the gradient of the result is divided, and the gradients of
            # rows and routing weights are multiplied by the same number. These tensors have fewer bytes than the
            # experts' weights.
            rows, weights = (divide_gradient(x, 1 / expert.size) for x in (rows, weights))

        # Run the experts distributed over ranks, on fused kernels, or in plain torch.
        gate_up_weight, down_weight, *biases = matrices
        assert gate_up_weight is not None
        assert down_weight is not None
        inputs = rows, weights, experts, gate_up_weight, down_weight
        dropout = 0.0 if self.lora is None else self.lora.dropout
        options: dict[str, Any] = {"act": self.act, "limit": self.limit, "dropout": dropout}
        others = *biases, *low_ranks
        if expert is not None:
            y = moe_mlp_over(*inputs, expert, *others, recompute=self.recompute, **options)
            y = divide_gradient(y, expert.size)
        elif fused:
            y = moe_mlp(*inputs, *others, recompute=self.recompute, **options)
        elif self.recompute and torch.is_grad_enabled():
            y = run_twice(partial(moe_mlp_reference, **options), *inputs, *others)
        else:
            y = moe_mlp_reference(*inputs, *others, **options)
        return reduce_from_region(y.view(x.shape), group), logits

    def _of_all_tokens(
        self, weights: Tensor, experts: Tensor, logits: Tensor, shape: torch.Size, group: Group
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the router's results for all tokens, gathered if ranks have different tokens.

        ``shape`` is [B, T], the shape of all tokens.
        """
        if not group.sequence_parallel:
            return sum_gradient(weights, group), experts, logits
        # Tokens are gathered along the second dimension of [B, T / R].
        weights, experts, logits = (x.unflatten(0, (*shape[:-1], -1)) for x in (weights, experts, logits))
        weights, experts, logits = (
            copy_to_region(weights, group),
            gather_tokens(experts, group),
            gather_tokens(logits, group),
        )
        # The logits are an output of the model, and FSDP2 warns about outputs that are views.
        return weights.flatten(0, -2), experts.flatten(0, -2), logits.flatten(0, -2).clone()


class LigerSharedExpertMoE(Layer):
    """`LigerMoE` plus a shared expert for all tokens: ``experts(x) + sigmoid(g · x) · shared_expert(x)``.

    The routed experts are a separate layer, because expert parallelism distributes only them.

    Args:
        hidden_size, intermediate_size, num_experts, top_k: as in `LigerMoE`.
        shared_size: width of the shared expert.
        act, kernel: as in `LigerMoE`; they apply to all experts.
        options: further options of `LigerMoE`.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        *,
        shared_size: int,
        act: str = "silu",
        kernel: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        self.experts = LigerMoE(
            hidden_size, intermediate_size, num_experts, top_k, act=act, kernel=kernel, **options
        )  # fmt: skip
        self.shared_expert = GatedMLP(hidden_size, shared_size, act=act, kernel=kernel)
        self.shared_expert_gate = nn.Linear(hidden_size, 1, bias=False)

    def shard(self, group: Group) -> dict[str, int]:
        """Replicate the gate of the shared expert. The routed experts and the shared expert shard themselves."""
        self.shared_expert_gate = ReplicatedLinear.of(self.shared_expert_gate, group)
        return {}

    def add_norm(
        self, norm: Norm, x: Tensor | None, residual: Tensor, experts: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `LigerMoE.add_norm`."""
        normed, residual = add_norm(norm, x, residual)
        y, router_logits = self(normed, experts)
        return y, residual, router_logits

    def forward(self, x: Tensor, experts: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Map x [..., C] to ``(y [..., C], router_logits [N, X])`` for N tokens; ``experts`` is [..., K] or None."""
        y, router_logits = self.experts(x, experts)
        shared, _ = self.shared_expert.add_norm(None, None, x)
        return y + self.shared_expert_gate(x).sigmoid() * shared, router_logits
