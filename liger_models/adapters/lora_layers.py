"""Linear layers with a frozen weight W and low-rank adapters A and B (LoRA, rsLoRA, DoRA).

    y = W x + s · B A x          s = alpha / r (LoRA), alpha / sqrt(r) (rsLoRA)
    y = m · (W x + s · B A x) / ‖W + s · B A‖      for each row, with no gradient of the norm (DoRA)

DoRA also learns m, the magnitudes of the rows, and treats the norm in the denominator as a constant in the backward.

Each adapter belongs to one matrix of the Hugging Face checkpoint (q_proj, gate_proj, ...). A packed projection holds
several of these matrices, and the weight map says which rows of the projection belong to each matrix.

Under tensor parallelism, an adapter is sharded like its weight::

    weight by rows (q, k, v, gate, up)     B, m sharded by rows     A replicated
    weight by columns (o, down)            A sharded by columns     B, m replicated

If A is sharded, each rank's A x is a partial sum, and the layer's all-reduce sums B A x over the ranks. Each rank
computes only a part of a replicated tensor's gradient, and the parts are summed over the ranks.

The module `lora_experts` has the adapters of routed experts.

Source: https://arxiv.org/abs/2106.09685, https://arxiv.org/abs/2312.03732, https://arxiv.org/abs/2402.09353.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from liger_models.adapters.lora_config import LoRAConfig
from liger_models.adapters.lora_experts import LoRAExperts
from liger_models.common.errors import is_traced
from liger_models.convert.weight_map import Expression, Name
from liger_models.distributed.collectives import Group, all_reduce, sum_gradient
from liger_models.kernels.dispatch import HAS_TRITON, TRITON_DTYPES, use_triton
from liger_models.kernels.frozen.products import quantized_linear
from liger_models.kernels.frozen.weight import FrozenWeight
from liger_models.kernels.linear.low_rank_factors import MOST_ADAPTERS, find_rows, pack_factors
from liger_models.kernels.linear.low_rank_linear import low_rank_linear
from liger_models.kernels.matmul.batch_invariance import is_batch_invariant
from liger_models.layers.derived import derive
from liger_models.layers.frozen import freeze, frozen_format, frozen_parts
from liger_models.layers.frozen_linear import FrozenLinear
from liger_models.layers.layer import Layer
from liger_models.layers.linear import (
    ColumnParallelLinear,
    PartialLinear,
    ReplicatedLinear,
    RowParallelLinear,
    copy_into,
    is_sharded,
    local,
)
from liger_models.layers.lm_head import LigerLMHead
from liger_models.layers.norm import PLAIN_WEIGHTS

if TYPE_CHECKING:
    from typing_extensions import Self


class Adapter(Layer):
    """The adapter of one checkpoint matrix: A [r, C], B [O, r] and, with DoRA, the magnitudes m [O]."""

    def __init__(self, out_features: int, in_features: int, config: LoRAConfig, like: Tensor) -> None:
        super().__init__()
        # Adapters are fp32, because their updates are so small that rounding to bfloat16 would lose them.
        options: dict[str, Any] = {"device": like.device, "dtype": torch.promote_types(like.dtype, torch.float32)}
        self.lora_A = nn.Parameter(torch.empty(config.r, in_features, **options))
        self.lora_B = nn.Parameter(torch.empty(out_features, config.r, **options))
        self.lora_magnitude_vector = nn.Parameter(torch.empty(out_features, **options)) if config.use_dora else None

    def sum_gradients(self, group: Group) -> bool:
        """Return True (nothing is left to sum), because the layer with the adapter already sums the gradients."""
        return True


class Dropout(nn.Dropout):
    """Dropout that saves one byte per element for the backward on every device. `nn.Dropout` does so only on GPUs."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply dropout to x [...]."""
        return torch.native_dropout(x, self.p, True)[0] if self.training and self.p > 0 else x


class LinearAdapters(nn.ModuleDict):
    """The adapters of a linear layer. The layer's weight [O, C] may consist of several checkpoint matrices.

    The keys of this `nn.ModuleDict` are the last components of the checkpoint matrices' names, such as ``q_proj``.

    Args:
        linear: the layer.
        expression: computes the weight of the layer from the checkpoint's matrices.
        names: the checkpoint names of the matrices that get an adapter.
        config: settings of the adapters.
    """

    active: bool = True
    """Whether the adapters are used in addition to the frozen weight; see `without_adapters`."""
    group: Group | None = None
    """Process group over which gradients of replicated tensors are summed; None if they need not be summed."""
    sharded_dim: int | None = None
    """Dimension along which `apply_tp` has sharded the weight; None if the weight is replicated."""

    def __init__(self, linear: nn.Linear, expression: Expression, names: Sequence[str], config: LoRAConfig) -> None:
        # To find the rows of each matrix, unpack the indices of the weight's rows.
        places = expression.unpack(torch.arange(linear.out_features, device="cpu"))
        sizes = {name: len(indices) for name, indices in places.items()}
        super().__init__(
            {short_name(name): Adapter(sizes[name], linear.in_features, config, linear.weight) for name in names}
        )
        self.config, self.expression = config, expression
        self.sizes = sizes
        """Maps the name of each checkpoint matrix in the weight to the matrix's number of rows."""
        self.rows = {name: find_rows(indices, linear.out_features) for name, indices in places.items()}
        """Maps the name of each checkpoint matrix to the matrix's rows in the packed weight; None if `Rows` cannot
        describe them."""

    def by_name(self) -> dict[str, Adapter]:
        """Map each adapted checkpoint matrix's name to its adapter. `factors` concatenates adapters in this order."""
        return {name: cast(Adapter, self[short_name(name)]) for name in self.sizes if short_name(name) in self}

    def shard_rows(self, group: Group) -> dict[str, int]:
        """Shard B and m by rows, because the weight is sharded by rows."""
        self.group, self.sharded_dim = group, 0
        return {f"lora.{name}": 0 for name, _ in self.named_parameters() if not name.endswith("lora_A")}

    def shard_columns(self, group: Group) -> dict[str, int]:
        """Shard A by columns, because the weight is sharded by columns."""
        self.group, self.sharded_dim = group, 1
        return {f"lora.{name}": 1 for name, _ in self.named_parameters() if name.endswith("lora_A")}

    @torch.no_grad()
    def reset(self, row_norms: Mapping[str, Tensor]) -> None:
        """Draw A from a uniform distribution, set B to 0, and set m (the magnitudes) to the norms of the weight's rows.

        Args:
            row_norms: for DoRA, maps the name of each checkpoint matrix to the norms of its rows.
        """
        for name, adapter in self.by_name().items():
            drawn = torch.empty(adapter.lora_A.shape, dtype=adapter.lora_A.dtype, device=adapter.lora_A.device)
            copy_into(adapter.lora_A, nn.init.kaiming_uniform_(drawn, a=5**0.5))
            nn.init.zeros_(adapter.lora_B)
            if adapter.lora_magnitude_vector is not None:
                copy_into(adapter.lora_magnitude_vector, row_norms[name])

    def factors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return A [R, C] and s · B [O, R] of all adapters, concatenated, where R is r times the number of adapters.

        The rows of B have the order of the packed weight's rows. Each adapter has its own columns in B. These columns
        are 0 in all rows outside of the adapter's matrix, so the product of B and A x computes all adapters at once.
        """
        adapters = self.by_name()
        if self._takes_kernel(adapters, dtype):
            As = [adapter.lora_A for adapter in adapters.values()]
            Bs = [adapter.lora_B for adapter in adapters.values()]
            rows: Any = [self.rows[name] for name in adapters]
            return pack_factors(As, Bs, rows, sum(self.sizes.values()), self.config.scaling, dtype)

        r, R = self.config.r, self.config.r * len(adapters)
        A = torch.cat([local(adapter.lora_A) for adapter in adapters.values()])  # [R, C]

        # For each matrix, make a block [rows, R] that has B in the r columns of the matrix's adapter and zeros
        # elsewhere.
        blocks, column = {}, 0
        for name, size in self.sizes.items():
            if name in adapters:
                B = local(adapters[name].lora_B) * self.config.scaling
                blocks[name] = F.pad(B, (column, R - column - r))
                column += r
            else:
                blocks[name] = A.new_zeros(size, R)

        group = self._active_group()
        if group is not None and self.sharded_dim != 1:
            A = sum_gradient(A, group)  # each rank has only a part of the rows of B, or of the tokens
        return A.to(dtype), self._pack(blocks).to(dtype)

    def _takes_kernel(self, adapters: Mapping[str, Adapter], dtype: torch.dtype) -> bool:
        """Return whether `pack_factors` supports the adapters."""
        if len(adapters) > MOST_ADAPTERS or is_traced() or not HAS_TRITON:
            return False
        if any(self.rows[name] is None for name in adapters):
            return False
        matrices = [matrix for adapter in adapters.values() for matrix in (adapter.lora_A, adapter.lora_B)]
        like = matrices[0]
        for matrix in matrices:
            if type(matrix) is not nn.Parameter or matrix.dtype != like.dtype:  # such as DTensors and fake tensors
                return False
        return like.dtype in TRITON_DTYPES and dtype in TRITON_DTYPES and use_triton(like)

    def dora_scale(self, W: Tensor, A: Tensor, B: Tensor) -> Tensor:
        """Return the factors by which DoRA multiplies the rows of the adapted weight, [O] fp32. The factor is 1 for
        rows without an adapter.

        Args:
            W: this rank's part of the frozen weight [O, C], dense.
            A, B: the result of `factors`.
        """
        with torch.no_grad():
            # Compute in fp32, because rounding to bf16 would lose the small change of the norm.
            W, A, B = (factor.to(torch.promote_types(factor.dtype, torch.float32)) for factor in (W, A, B))

            # Compute each row's ‖W + B A‖², [O], as ‖W‖² + 2 W·B A + ‖B A‖², so that W + B A is never in memory.
            cross = ((W @ A.T) * B).sum(1) * 2
            squares = row_norms(W).square() + cross + ((B @ (A @ A.T)) * B).sum(1)
            group = self._active_group()
            if group is not None and self.sharded_dim == 1:
                squares = all_reduce(squares, group)
            norms = squares.clamp_min(0).sqrt()

        # Compute m / ‖W + B A‖ in the packed order of the rows.
        adapters, magnitudes = self.by_name(), {}
        for name, size in self.sizes.items():
            magnitude = adapters[name].lora_magnitude_vector if name in adapters else None
            magnitudes[name] = norms.new_zeros(size) if magnitude is None else local(magnitude).to(norms.dtype)
        scale = self._pack(magnitudes) / norms
        if len(adapters) == len(self.sizes):
            return scale

        has_adapter = {name: norms.new_full((size,), float(name in adapters)) for name, size in self.sizes.items()}
        return torch.where(self._pack(has_adapter) > 0, scale, 1.0)

    def _active_group(self) -> Group | None:
        """Return ``self.group``, or None if the parameters currently are whole tensors instead of shards."""
        return self.group if is_sharded(next(self.parameters())) else None

    def _pack(self, rows: Mapping[str, Tensor]) -> Tensor:
        """Arrange the rows of checkpoint matrices in the order of the packed weight's rows.

        If the weight is sharded by rows, return only this rank's rows.

        Args:
            rows: maps the name of each checkpoint matrix to all rows of the matrix, or to this rank's rows of it.
        """
        group = self._active_group()
        missing = {name: self.sizes[name] - len(part) for name, part in rows.items()}
        sharded = any(missing.values())
        # There are three cases:
        # - Nothing is sharded, or this rank's rows of a single matrix are given: pack the given rows.
        # - This rank's rows of several matrices are given: pad them with zeros, and keep this rank's packed rows.
        # - Whole matrices are given, and the weight is sharded. Each rank computes only a part of the gradients, so the
        #   gradients are summed over the ranks. Keep this rank's packed rows, or all rows if the weight is sharded by
        #   columns.
        if group is None or (sharded and isinstance(self.expression, Name)):
            return self.expression.pack(rows)

        # Pack whole matrices, which have zeros in the rows of other ranks, and keep this rank's rows of the result.
        whole = {}
        for name, part in rows.items():
            before = group.rank * len(part) if missing[name] else 0
            whole[name] = F.pad(part, (*(0, 0) * (part.dim() - 1), before, missing[name] - before))
        packed = self.expression.pack(whole)

        # If every rank has all rows, the gradients are summed over the ranks.
        packed = packed if sharded else sum_gradient(packed, group)
        return packed.chunk(group.size)[group.rank] if self.sharded_dim == 0 else packed


def _is_transformed() -> bool:
    """Return whether a ``torch.func`` transform or forward-mode differentiation is active, which ops do not support."""
    return not torch.compiler.is_compiling() and (is_traced() or forward_ad._current_level >= 0)


def takes_adapters(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether `low_rank_linear` supports x [..., C] and a weight in ``dtype``."""
    return (
        not (torch.is_autocast_enabled(x.device.type) or is_batch_invariant())
        and not (torch.is_grad_enabled() and _is_transformed())
        and x.dtype in TRITON_DTYPES
        and dtype == x.dtype
        and use_triton(x)
    )


def add_low_rank(y: Tensor, x: Tensor, A: Tensor, B: Tensor) -> Tensor:
    """Return y [..., O] plus the low-rank term ``B A x``, where x is [..., C], A is [R, C] and B is [O, R]."""
    low = F.linear(x, A).to(y.dtype)  # [..., R]
    if is_batch_invariant():
        return y + F.linear(low, B.to(y.dtype))
    return torch.addmm(y.flatten(0, -2), low.flatten(0, -2), B.T.to(y.dtype)).view_as(y)


class LoRALinear(nn.Linear, Layer):
    """A linear layer with a frozen weight [O, C], and adapters for some or all of the matrices packed in the weight."""

    lora: LinearAdapters
    dropout: Dropout
    adapted = ("weight",)
    plain_class: ClassVar[type[nn.Linear]] = nn.Linear
    """The class of the layer without adapters."""
    parallel_kinds: ClassVar[dict[type, type[PartialLinear]]] = {}
    """Maps a class of parallel layers to its counterpart with adapters. `PartialLinear.of` creates the counterpart.
    """

    @classmethod
    def around(cls, linear: nn.Linear, expression: Expression, names: Sequence[str], config: LoRAConfig) -> "Self":
        """Make a layer with the parameters of ``linear``, and new adapters for the checkpoint matrices ``names``."""
        layer: Self = with_class(linear, cls)
        layer.dropout = Dropout(config.lora_dropout)
        layer.lora = LinearAdapters(linear, expression, names, config)
        layer.reset_adapters()
        return layer

    def without_adapters(self, weight: Tensor | None = None) -> nn.Linear:
        """Make a layer without the adapters.

        Args:
            weight: the dense weight of the new layer; None keeps the frozen weight.
        """
        # A quantized weight keeps its format, unless a dense weight replaces it.
        stored = "weight" in frozen_parts(self)
        linear: nn.Linear = with_class(self, FrozenLinear if stored and weight is None else self.plain_class)
        del linear.lora, linear.dropout
        if weight is not None:
            if stored:
                del linear.stored
            linear.weight = nn.Parameter(weight, requires_grad=False)
        return linear

    @torch.no_grad()
    def reset_adapters(self) -> None:
        """Initialize A randomly, B to 0, and m to the norms of the weight's rows, so that the adapters have no effect.

        If the adapters are sharded, the first rank draws all values, and each rank gets its part of them.
        """
        norms: dict[str, Tensor] = {}
        if self.lora.config.use_dora:
            frozen = frozen_parts(self).get("weight")
            weight = self.dense_weight() if frozen is None else frozen.whole(self.weight).dense()
            packed: Any = row_norms(weight.to(torch.promote_types(weight.dtype, torch.float32)))
            norms = self.lora.expression.unpack(packed.full_tensor() if is_sharded(packed) else packed)
        self.lora.reset(norms)

    def dense_weight(self) -> Tensor:
        """Return the weight [O, C], dequantized if necessary. After `apply_tp`, the result is this rank's slice."""
        frozen = self.frozen_weight
        return self.weight if frozen is None else frozen.dense()

    def derived(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return A, s · B, and `dora_scale` (None without DoRA).

        Decoding computes these tensors once for all tokens.
        """
        return derive(self, dtype, lambda: self._derived(dtype))

    def _derived(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
        A, B = self.lora.factors(dtype)
        return A, B, self.lora.dora_scale(local(self.dense_weight()), A, B) if self.lora.config.use_dora else None

    @property
    def is_low_rank(self) -> bool:
        """Whether the layer computes just ``W x + b + s · B A x``, so that fused ops can compute it.

        The value is False with DoRA, in training with dropout, and if anything other than `apply_tp` has sharded the
        weight.
        """
        if self.lora.config.use_dora or (self.training and self.dropout.p > 0):
            return False

        # Parallel layers use local shards. In all other layers, the weight must have a type that fused ops support.
        if type(self) in (LoRAColumnParallelLinear, LoRARowParallelLinear):
            return True
        return type(self) is LoRALinear and (type(self.weight) in PLAIN_WEIGHTS or frozen_format(self) is not None)

    @property
    def frozen_weight(self) -> FrozenWeight | None:
        """The quantized weight (possibly torchao's) in the form that fused ops take; None if the weight is dense."""
        frozen = frozen_parts(self).get("weight")
        if frozen is not None:
            return frozen.join(self.weight)
        return None if type(self.weight) in PLAIN_WEIGHTS else FrozenWeight.of(self.weight)

    def freeze_weight(self) -> None:
        """Convert a torchao weight to parameters that can be sharded. Other weights are not changed."""
        weight = None if frozen_parts(self) else self.frozen_weight
        if weight is not None:
            freeze(self, "weight", weight)

    def low_rank(self, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """Return A [R, C] and s · B [O, R] in ``dtype``; None if adapters are switched off. Requires `is_low_rank`."""
        return self.derived(dtype)[:2] if self.lora.active else None

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., C] to [..., O]."""
        return self.product(x, self.bias)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Compute the forward with this rank's shard of the weight, and add ``bias`` if it is not None."""
        if not self.lora.active:
            return self.base_product(x, bias)

        A, B, scale = self.derived(x.dtype)
        if self._fuses(x):
            frozen = self.frozen_weight
            return low_rank_linear(x, self.weight if frozen is None else frozen.to(x.dtype), bias, (A, B))

        # Compute the product with the frozen weight, and then add the term of the adapters.
        y = self.base_product(x, bias if scale is None else None)
        y = add_low_rank(y, self.dropout(x), A, B)
        if scale is not None:  # DoRA scales the product before the bias is added
            y = y * scale.to(y.dtype)
            y = y if bias is None else y + bias.to(y.dtype)
        return y

    def _fuses(self, x: Tensor) -> bool:
        """Whether `low_rank_linear` computes the layer."""
        return (
            self.is_low_rank
            and not is_sharded(self.weight)
            and takes_adapters(x, x.dtype if frozen_format(self) is not None else self.weight.dtype)
        )

    def base_product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Compute ``x @ Wᵀ + bias`` with the frozen weight."""
        frozen = self.frozen_weight
        return F.linear(x, local(self.weight), bias) if frozen is None else quantized_linear(x, frozen, bias)

    @torch.no_grad()
    def adapted_weight(self, name: str, *, merge: bool) -> Tensor:
        """Return the dense weight [O, C], with the adapters merged into it if ``merge`` is True."""
        return self.merged() if merge else self.dense_weight().detach()

    @torch.no_grad()
    def merged(self) -> Tensor:
        """Return the weight [O, C] with merged adapters, in the dtype of the frozen weight."""
        weight = self.dense_weight()
        wide = torch.promote_types(weight.dtype, torch.float32)
        A, B, scale = self._derived(wide)  # in fp32, because rounding to bf16 would lose small updates
        total = torch.addmm(weight.to(wide), B, A)
        return (total if scale is None else total * scale[:, None]).to(weight.dtype)


class LoRAColumnParallelLinear(LoRALinear, ColumnParallelLinear):
    """`ColumnParallelLinear` with adapters.

    With dropout, ranks need equal random states, so that all ranks drop the same elements.
    """

    def shard(self, group: Group) -> dict[str, int]:
        """Shard B and m by rows if each rank holds consecutive rows of each matrix; otherwise, shard nothing."""
        dims = self.lora.shard_rows(group)
        ranks = torch.arange(group.size, device="cpu")

        # `rank_of_row` is the rank that holds each row of the packed weight. Unpacking it gives the rank that holds
        # each row of each matrix. For example, if there are 2 ranks and two matrices are packed as a0 b0 a1 b1, the
        # packed rows are on the ranks 0 0 1 1, so the rows of each matrix are on the ranks 0 1.
        rank_of_row = ranks.repeat_interleave(self.out_features // group.size)
        rank_of_rows = self.lora.expression.unpack(rank_of_row).values()
        successive = all(rows.equal(ranks.repeat_interleave(len(rows) // group.size)) for rows in rank_of_rows)
        return dims if successive else {}

    forward = ColumnParallelLinear.forward


class LoRARowParallelLinear(LoRALinear, RowParallelLinear):
    """`RowParallelLinear` with adapters. With dropout, each rank drops elements in its own columns of the input."""

    def shard(self, group: Group) -> dict[str, int]:
        """Shard A by columns."""
        return self.lora.shard_columns(group)

    forward = RowParallelLinear.forward


class LoRAReplicatedLinear(LoRALinear, ReplicatedLinear):
    """`ReplicatedLinear` with adapters. With dropout, ranks that have the same tokens must drop the same elements."""

    def shard(self, group: Group) -> dict[str, int]:
        """Shard nothing, but sum the gradients over the ranks if the ranks have different tokens."""
        self.lora.group = self.group if self.group is not None and self.group.sequence_parallel else None
        return {}

    forward = ReplicatedLinear.forward


LoRALinear.parallel_kinds = {
    ColumnParallelLinear: LoRAColumnParallelLinear,
    RowParallelLinear: LoRARowParallelLinear,
    ReplicatedLinear: LoRAReplicatedLinear,
}


class LoRALMHead(LoRALinear, LigerLMHead):
    """`LigerLMHead` with an adapter.

    The fused loss computes the adapter as part of the head: A x becomes r extra columns of the input, and s · B becomes
    r extra columns of the weight.
    """

    forward = LigerLMHead.forward
    plain_class = LigerLMHead

    def shard(self, group: Group) -> dict[str, int]:
        """Shard the weight, B and m along the vocabulary."""
        return LigerLMHead.shard(self, group) | self.lora.shard_rows(group)

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the extended input [..., C + r] and the extended weight [V, C + r]. Their product is the logits."""
        if not self.lora.active:
            return super().operands(x)

        A, B, scale = self.derived(x.dtype)
        # With these wider operands, one product computes the logits. The loss therefore needs no second pass over the
        # vocabulary.
        weight = torch.cat([local(self.weight).to(x.dtype), B], 1)  # [V, C + r]
        if scale is not None:
            weight = weight * scale.to(x.dtype)[:, None]
        return self.with_bias(torch.cat([x, F.linear(self.dropout(x), A).to(x.dtype)], -1), weight)


ADAPTED: dict[type[nn.Linear], type[LoRALinear]] = {
    nn.Linear: LoRALinear,
    FrozenLinear: LoRALinear,
    LigerLMHead: LoRALMHead,
}
"""Maps a class of linear layers to the class with adapters. Other subclasses of `nn.Linear` can't have adapters."""


def adapted_layers(model: nn.Module) -> dict[str, LoRALinear | LoRAExperts]:
    """Return all modules of a model that hold adapters, as a dict from paths to modules."""
    return {path: module for path, module in model.named_modules() if isinstance(module, LoRALinear | LoRAExperts)}


def adapters_of(layer: LoRALinear | LoRAExperts) -> LinearAdapters | LoRAExperts:
    """Return the module that holds the adapters of a layer."""
    return layer.lora if isinstance(layer, LoRALinear) else layer


def adapter_config(model: nn.Module) -> LoRAConfig | None:
    """Return the config of a model's adapters; None if the model has no adapters, or if they have been merged."""
    return next((adapters_of(layer).config for layer in adapted_layers(model).values()), None)


def with_class(module: nn.Module, cls: type[nn.Module]) -> Any:
    """Make a module of class ``cls`` with the same parameters, submodules and attributes as ``module``."""
    # `cls(...)` is not called, because it would allocate new parameters. The dicts of parameters and of submodules are
    # copied, so that a parameter that is later added to one module is not added to the other.
    converted = cls.__new__(cls)
    members = {"_parameters": dict(module._parameters), "_modules": dict(module._modules)}
    converted.__dict__ = {**module.__dict__, **members}
    return converted


def short_name(name: str) -> str:
    """Return the last part of a name, such as ``q_proj`` for ``model.layers.0.self_attn.q_proj.weight``."""
    return name.removesuffix(".weight").rpartition(".")[2]


def row_norms(weight: Tensor) -> Tensor:
    """Return the norms [O] of the rows of a matrix [O, C]."""
    norms: Tensor = torch.linalg.vector_norm(weight, dim=1)
    return norms
