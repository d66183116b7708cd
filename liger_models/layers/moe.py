"""Mixture of experts: a router sends each token through a few of many MLPs, which are called experts."""

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from liger_models.distributed.collectives import (
    Group,
    all_reduce,
    copy_to_region,
    divide_gradient,
    gather_tokens,
    reduce_from_region,
    sum_gradient,
)
from liger_models.distributed.ranks import is_distributed
from liger_models.kernels.dispatch import use_triton
from liger_models.kernels.frozen.products import Weight, dense
from liger_models.kernels.matmul.batch_invariance import is_batch_invariant
from liger_models.kernels.matmul.row_linear import MOST_ROWS, wide_inference_linear
from liger_models.kernels.matmul.wide_linear import wide_linear, wide_linear_reference
from liger_models.kernels.moe.expert_act import check_expert_act, inputs_of
from liger_models.kernels.moe.expert_parallel import moe_mlp_over
from liger_models.kernels.moe.experts import copies_per_chunk, copy_bytes, moe_mlp, moe_mlp_reference
from liger_models.kernels.moe.routing import Routing, route, route_reference
from liger_models.kernels.options import KernelOptions
from liger_models.layers.frozen import frozen_parts
from liger_models.layers.layer import Layer, sum_bytes
from liger_models.layers.linear import ReplicatedLinear, check_divisible, is_sharded, local, local_or_none, replicated
from liger_models.layers.mlp import GatedMLP
from liger_models.layers.norm import Norm, add_norm, autocast_weights, call_linear
from liger_models.layers.recompute import (
    earlier_choice,
    is_hooked,
    keep_choice,
    recomputes,
    repeats,
    run_for_backward,
    run_twice,
)

if TYPE_CHECKING:
    from typing_extensions import Self

MATRICES = ("gate_up_weight", "down_weight")
"""The parameters of `LigerMoE` that hold the experts' matrices."""


class CorrectionBias(Layer):
    """A bias for each expert. The router chooses experts by the sum of score and bias, but computes the routing weights
    from the score alone.

    The biases balance the load of the experts. They are in fp32 whatever the dtype of the model is. They get no
    gradient, so an optimizer does not change them; see `update_correction_biases`.

    Args:
        num_experts: X.

    Source: https://arxiv.org/abs/2408.15664.
    """

    wide = ("bias",)

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(num_experts, dtype=torch.float32), requires_grad=False)

    def draw(self, std: float) -> bool:
        """Set the bias to 0."""
        nn.init.zeros_(self.bias)
        return True

    def sum_gradients(self, group: Group) -> bool:
        """Do nothing and return True, because the bias has no gradient."""
        return True

    def forward(self) -> Tensor:
        """Return the bias [X] of all experts, in fp32."""
        whole, bias = self.bias.detach(), local(self.bias).detach()
        if bias.shape != whole.shape:  # FSDP, applied without `apply_fsdp`, has sharded the bias and not gathered it
            bias = whole.full_tensor()  # type: ignore[attr-defined]
        return bias.clone() if is_hooked(self) else bias  # FSDP sets hooks, and frees the gathered parameter


class WideRouter(Layer):
    """A linear layer without bias that computes its results in fp32 from weights and inputs of any dtype.

    Args:
        hidden_size: C.
        num_experts: X.
        kernel: False runs plain PyTorch instead of a kernel.
    """

    def __init__(self, hidden_size: int, num_experts: int, *, kernel: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        self.kernel = kernel
        self.draw(0.02)

    def draw(self, std: float) -> bool:
        """Initialize the weight from a normal distribution with ``std``."""
        nn.init.normal_(self.weight, std=std)
        return True

    def shard(self, group: Group) -> dict[str, int]:
        """Replicate the weight."""
        self.groups = replace(self.groups, tensor=group)
        return {}

    def sum_gradients(self, group: Group) -> bool:
        """Do nothing and return True, because the forward already sums the gradient of the weight."""
        return True

    def extra_repr(self) -> str:
        """Return the sizes for ``print(model)``."""
        return f"{self.weight.shape[1]}, {self.weight.shape[0]}"

    def forward(self, x: Tensor) -> Tensor:
        """Map x [N, C] to logits [N, X] in fp32."""
        weight = replicated(self.weight, self.groups.tensor)
        if self.kernel and (is_batch_invariant() or len(x) <= MOST_ROWS):
            return wide_inference_linear(x, weight)
        with torch.autocast(x.device.type, enabled=False):
            return (wide_linear if self.kernel else wide_linear_reference)(x, weight)


class Fp32Router(WideRouter):
    """A `WideRouter` whose weight is also in fp32, whatever the dtype of the model."""

    wide = ("weight",)


class LigerMoE(Layer):
    """``Σ_e w_e · down_e(act(gate_e(x)) · up_e(x))`` over the ``top_k`` experts ``e`` that the router selects for a
    token.

    Args:
        hidden_size: C.
        intermediate_size: F, the width of one expert.
        num_experts: X.
        routing: how the router chooses the K experts of a token and computes the routing weights.
        correction_bias: whether the router has a `CorrectionBias`.
        fp32_router: whether the router computes its logits in fp32, whatever the dtype of the model.
        fp32_router_weight: whether the weight of an ``fp32_router`` is also in fp32.
        weights_input: whether the routing weight multiplies the input of an expert instead of its output. This is
            possible only if each token has one expert.
        act: "silu", "gelu", "gelu_tanh", "clamped_swiglu" or "relu2", as in `liger_models.kernels.moe.moe_mlp`. Experts
            with "relu2" have no gate.
        limit: the limit to which "clamped_swiglu" clamps gate and up.
        bias: whether the router and both projections of each expert have biases.
        router_jitter: in training, the input is multiplied by uniform noise between 1 − router_jitter and 1 +
            router_jitter.
        kernel: False runs plain PyTorch instead of a kernel.

    Raises:
        ValueError: ``routing`` does not fit ``num_experts``, ``weights_input`` is set although tokens have several
            experts, or the activation is unknown.

    Source: https://arxiv.org/abs/2401.04088.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        routing: Routing,
        *,
        correction_bias: bool = False,
        fp32_router: bool = False,
        fp32_router_weight: bool = False,
        weights_input: bool = False,
        act: str = "silu",
        limit: float = 0.0,
        bias: bool = False,
        router_jitter: float = 0.0,
        kernel: bool = True,
    ) -> None:
        super().__init__()
        check_expert_act("LigerMoE", act, limit)
        routing.check("LigerMoE", num_experts)
        if weights_input and routing.top_k != 1:
            raise ValueError(
                f"LigerMoE: top_k must be 1 if routing weights multiply the input of experts, got {routing.top_k}."
            )
        # The router maps [N, C] to logits [N, X].
        self.gate: nn.Module
        if fp32_router:
            self.gate = (Fp32Router if fp32_router_weight else WideRouter)(hidden_size, num_experts, kernel=kernel)
        else:
            self.gate = nn.Linear(hidden_size, num_experts, bias=bias)
        self.correction = CorrectionBias(num_experts) if correction_bias else None
        # The matrices of all experts are stacked, so that one grouped product applies them all.
        rows = inputs_of(act) * intermediate_size
        self.gate_up_weight = nn.Parameter(torch.empty(num_experts, rows, hidden_size))
        self.down_weight = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))
        self.gate_up_bias = nn.Parameter(torch.empty(num_experts, rows)) if bias else None
        self.down_bias = nn.Parameter(torch.empty(num_experts, hidden_size)) if bias else None
        self.routing, self.weights_input = routing, weights_input
        self.act, self.limit, self.router_jitter, self.kernel = act, limit, router_jitter, kernel
        self.recompute = False
        """Whether the backward recomputes gate and up (checkpointing policies "selective" and "full")."""
        self.lora: Any = None
        """The adapters of the experts (`liger_models.adapters.lora_experts.LoRAExperts`), or None."""
        self.stored: Any = None
        """The tensors of frozen, quantized matrices, except the codes; see `liger_models.layers.frozen`.
        """
        self.reset_parameters()

    @property
    def router(self) -> nn.Module:  # type: ignore[override]
        """The module that computes the router logits."""
        return self.gate

    @property
    def top_k(self) -> int:  # type: ignore[override]
        """Number of experts that a token passes through."""
        return self.routing.top_k

    @property
    def num_experts(self) -> int:  # type: ignore[override]
        """Number of experts on all ranks together."""
        return len(self.down_weight)

    @property
    def active_share(self) -> float:  # type: ignore[override]
        """Fraction of the experts that a token passes through."""
        return self.top_k / self.num_experts

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
        """Return the experts' matrices that the parameter ``name`` holds, as a dense tensor or a `FrozenWeight`. If the
        parameter is sharded, return this rank's part."""
        frozen, parameter = frozen_parts(self).get(name), getattr(self, name)
        return local(parameter) if frozen is None else frozen.join(parameter)

    def shape_of(self, name: str) -> torch.Size:
        """Return the global (unsharded) shape ``[X, O, C]`` of the matrices in the parameter ``name``."""
        shape: torch.Size = frozen_parts(self).get(name, getattr(self, name)).shape
        return shape

    def set_policy(self, policy: str) -> None:
        """Make the backward recompute gate and up unless the checkpointing policy is "none"."""
        self.recompute = policy != "none"

    def recomputed_share(self, policy: str) -> float:
        """Return which fraction of the layer the backward repeats. For the policy "none", the fraction is 0. For all
        other policies, it is 2 / 3, or 1 / 2 if the experts have no gate."""
        inputs = inputs_of(self.act)
        return 0.0 if policy == "none" else inputs / (inputs + 1)

    def workspace(self, tokens: int, size: int) -> int | None:
        """See `Layer.workspace`. `moe_mlp` does not use chunks with dropout, or if ranks exchange tokens."""
        dropout = 0.0 if self.lora is None else self.lora.dropout
        if not self.kernel or self.groups.expert is not None or dropout > 0:
            return None
        shape, sums = self.shape_of("gate_up_weight"), sum_bytes(self)
        copies = min(copies_per_chunk(shape, self.act, size, sums), tokens * self.top_k)
        return copies * copy_bytes(shape, self.act, size) + sums

    def can_shard(self, size: int) -> bool:
        """Whether the intermediate size of an expert is divisible by ``size``."""
        return self.shape_of("down_weight")[2] % size == 0

    def shard(self, group: Group) -> dict[str, int]:
        """Keep 1 / R of the width of each expert on each of R ranks; see `liger_models.parallel.apply_tp`.

        Raises:
            ValueError: the width is not a multiple of the number of ranks, or ``router_jitter`` is not 0, because its
                noise would differ between ranks.
        """
        check_divisible("LigerMoE", "intermediate_size", self.shape_of("down_weight")[2], group)
        if self.router_jitter != 0:
            raise ValueError(
                f"LigerMoE: router_jitter must be 0 with apply_tp, got {self.router_jitter}. Set router_jitter_noise=0 "
                "(input_jitter_noise=0 for Phi-3.5-MoE)."
            )
        if isinstance(self.gate, nn.Linear):  # any other router shards itself
            self.gate = ReplicatedLinear.of(self.gate, group)
        self.groups = replace(self.groups, tensor=group)
        # Each rank has its part of the width of all experts. The bias of down is replicated.
        biased = {} if self.gate_up_bias is None else {"gate_up_bias": 1}
        return {"gate_up_weight": 1, "down_weight": 2, **biased}

    def shard_experts(self, group: Group) -> dict[str, int]:
        """Keep 1 / R of the experts on each of R ranks; see `liger_models.parallel.apply_ep`.

        Raises:
            ValueError: the number of experts is not a multiple of the number of ranks.
        """
        check_divisible("LigerMoE", "num_experts", self.num_experts, group)
        self.groups = replace(self.groups, expert=group)
        self.replayable = False  # the outputs of the experts would have to be exchanged again
        # Each rank has some of the experts, with all parameters and adapters of these experts.
        biased = {} if self.gate_up_bias is None else {"gate_up_bias": 0, "down_bias": 0}
        adapters = {} if self.lora is None else {f"lora.{name}": 0 for name, _ in self.lora.named_parameters()}
        return {"gate_up_weight": 0, "down_weight": 0, **biased, **adapters}

    def sum_gradients(self, group: Group) -> bool:
        """Do nothing and return True, because `forward` already sums the gradient of the replicated ``down_bias``."""
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
        return f"{C}, {F}, num_experts={X}, {self.routing}, act={self.act}"

    def add_norm(
        self, norm: Norm, x: Tensor | None, residual: Tensor, experts: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Add ``x`` to ``residual``, and apply the layer to the normalized sum. Return the output, the sum and the
        router logits. If ``experts`` [..., K] are given, they replace the router's choice.
        """
        normed, residual = add_norm(norm, x, residual)
        y, router_logits = self(normed, experts)
        return y, residual, router_logits

    def forward(self, x: Tensor, experts: Tensor | None = None, addend: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the output [..., C] for x [..., C], and the router logits [N, X] of the N tokens. If ``experts`` [...,
        K] are given, they replace the router's choice.

        If ``addend`` [..., C] is not None, it is added to the output.
        """
        if self.training and self.router_jitter:
            # Both the router and the experts get the noisy input.
            x = x * torch.empty_like(x).uniform_(1 - self.router_jitter, 1 + self.router_jitter)
        return self._mix(x, *self._route(call_linear(self.gate, x.reshape(-1, x.shape[-1])), experts), addend)

    def choose(self, router_logits: Tensor) -> Tensor:
        """See `Layer.choose`."""
        return self._route(router_logits)[1]

    def _route(self, logits: Tensor, experts: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``(weights [N, K], experts [N, K], logits [N, X])``. If ``experts`` are given, they replace the
        router's choice.

        If the block is recomputed, the router chooses the experts of the first run again.
        """
        earlier = earlier_choice()
        if earlier is not None:
            experts = earlier
        elif experts is not None:
            experts = experts.flatten(0, -2)
        choose = route if self.kernel and use_triton(logits) else route_reference
        bias = None if self.correction is None else self.correction()
        weights, chosen = choose(logits, self.routing, bias, experts)
        keep_choice(chosen)
        return weights, chosen, logits

    def _mix(
        self, x: Tensor, weights: Tensor, experts: Tensor, logits: Tensor, addend: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the weighted sum of the experts' outputs for x, [..., C], and the router logits of all tokens, [N, X].

        If ``addend`` [..., C] is not None, it is added to the sum.
        """
        rows = x.reshape(-1, x.shape[-1])
        # Collect the inputs of the ops: this rank's part of the parameters in autocast's dtype, and the matrices A and
        # B of the adapters.
        fused = self.kernel and use_triton(rows)
        group, expert = self.groups.tensor, self.groups.expert

        down_bias = local_or_none(self.down_bias)
        if group is not None and down_bias is not None:  # only one rank adds the bias, but all ranks get its gradient
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
            # divided by the number of ranks. To divide them, the gradient of the result is divided by the number of
            # ranks, and the gradients of the rows and of the routing weights are multiplied by the number of ranks.
            # Dividing the gradients of the experts' weights themselves would take longer, because they have more bytes.
            rows, weights = (divide_gradient(x, 1 / expert.size) for x in (rows, weights))

        if self.weights_input:
            rows, weights = rows * weights.to(rows.dtype), torch.ones_like(weights)

        # Run the experts: distributed over ranks, in fused kernels on one rank, or in plain PyTorch.
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
            if addend is not None and group is None:
                options["addend"], addend = addend.reshape(rows.shape), None
            run = partial(moe_mlp, *inputs, *others, recompute=self.recompute, **options)
            # With dropout, a second call would drop other elements.
            y = run_for_backward(run) if self.recompute and repeats() and dropout == 0 else run()
        elif recomputes(self):
            y = run_twice(partial(moe_mlp_reference, **options), *inputs, *others)
        else:
            y = moe_mlp_reference(*inputs, *others, **options)
        y = reduce_from_region(y.view(x.shape), group)
        return y if addend is None else y + addend, logits

    def _of_all_tokens(
        self, weights: Tensor, experts: Tensor, logits: Tensor, shape: torch.Size, group: Group
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the router's results for all tokens. If the ranks have different tokens, the results of all ranks are
        gathered.

        ``shape`` is the shape (B, T) of this rank's tokens.
        """
        if not group.sequence_parallel:
            return sum_gradient(weights, group), experts, logits
        # Tokens [B, T / R] are gathered along the second dimension.
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

    If ``gated`` is False, the result is ``experts(x) + shared_expert(x)``.

    The routed experts are a separate layer, because expert parallelism distributes only the routed experts.

    Args:
        hidden_size, intermediate_size, num_experts, routing: as in `LigerMoE`.
        shared_size: width of the shared expert.
        shared_bias: whether the projections of the shared expert have biases.
        gated: whether the output of the shared expert is multiplied by a gate.
        act, kernel: as in `LigerMoE`, for the routed experts and for the shared expert.
        options: further options of `LigerMoE`.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        routing: Routing,
        *,
        shared_size: int,
        shared_bias: bool = False,
        gated: bool = True,
        act: str = "silu",
        kernel: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        self.experts = LigerMoE(
            hidden_size, intermediate_size, num_experts, routing, act=act, kernel=kernel, **options
        )  # fmt: skip
        self.shared_expert = GatedMLP(hidden_size, shared_size, act=act, bias=shared_bias, kernel=kernel)
        self.shared_expert_gate = nn.Linear(hidden_size, 1, bias=False) if gated else None

    @classmethod
    def from_config(cls, config: Any, kernels: KernelOptions, **options: Any) -> "Self":
        """Build the layer as in DeepSeek: by default, the router computes in fp32, and the shared expert has no gate.

        Args:
            config: config with ``moe_intermediate_size``, ``n_routed_experts``, ``n_shared_experts`` and ``routing``.
            kernels: which parts run on fused kernels.
            options: further arguments of the class.
        """
        return cls(
            config.hidden_size,
            config.moe_intermediate_size,
            config.n_routed_experts,
            config.routing,
            shared_size=config.n_shared_experts * config.moe_intermediate_size,
            **{"gated": False, "fp32_router": True, "kernel": kernels.swiglu, **options},
        )

    def shard(self, group: Group) -> dict[str, int]:
        """Replicate the gate of the shared expert. The routed experts and the shared expert shard themselves."""
        if self.shared_expert_gate is not None:
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
        """Return the output [..., C] for x [..., C], and the router logits [N, X] of the N tokens. If ``experts`` [...,
        K] are given, they replace the router's choice."""
        if torch.is_grad_enabled():
            # The routed experts run last, because a recomputation of the block then stops before their products.
            shared = self._shared(x)
            y, router_logits = self.experts(x, experts)
            return y + shared, router_logits
        # Without gradients, the kernel that sums the experts' outputs adds the output of the shared expert.
        out: tuple[Tensor, Tensor] = self.experts(x, experts, self._shared(x))
        return out

    def _shared(self, x: Tensor) -> Tensor:
        """Return the output of the shared expert for x, [..., C]."""
        shared, _ = self.shared_expert.add_norm(None, None, x)
        gate = self.shared_expert_gate
        return shared if gate is None else call_linear(gate, x).sigmoid() * shared


@torch.no_grad()
def update_correction_biases(model: Any, experts: Tensor, rate: float = 1e-3) -> None:
    """Increase the `CorrectionBias` of experts that got fewer tokens than the mean, and decrease it for experts that
    got more.

    Call this function after the backward of a step, on all ranks. In each layer, the bias of expert ``e`` changes by
    ``rate · sign(mean(load) − load_e)``, where ``load_e`` is the number of tokens that expert ``e`` received from all
    ranks.

    Args:
        model: a model with routed experts.
        experts: [N, L, K] integers, the experts of the step's N tokens in each of L layers, as `Decoder.choose_experts`
            returns them. Leave out padding.
        rate: the amount by which each bias changes.

    Raises:
        ValueError: the shape of ``experts`` does not fit the model's routers.

    Source: https://arxiv.org/abs/2408.15664.
    """
    routers = [layer for layer in model.routers if isinstance(layer, LigerMoE)]
    if experts.dim() != 3 or experts.shape[1] != len(routers):
        raise ValueError(
            f"update_correction_biases: experts must be [tokens, {len(routers)}, experts of a token], got "
            f"{list(experts.shape)}. Pass model.choose_experts(out.router_logits)."
        )
    for layer, chosen in zip(routers, experts.unbind(1), strict=True):
        if layer.correction is None:
            continue
        # FSDP has gathered the bias for `choose_experts`. Free the gathered bias, because a change of the gathered bias
        # would be lost.
        getattr(layer.correction, "reshard", lambda: None)()
        bias: Any = layer.correction.bias
        load = torch.bincount(chosen.flatten().long(), minlength=bias.numel()).float()
        if model.groups.balance is not None:
            load = all_reduce(load, model.groups.balance)
        elif is_distributed():  # DistributedDataParallel, and FSDP without `apply_fsdp`, set no group
            torch.distributed.all_reduce(load)
        change = (rate * (load.mean() - load).sign()).to(bias.device)
        if is_sharded(bias):
            from torch.distributed.tensor import distribute_tensor  # slow to import

            # Every rank has computed the change for all experts, and keeps only its own rows.
            change = distribute_tensor(change, bias.device_mesh, bias.placements, src_data_rank=None)
        bias.add_(change)
