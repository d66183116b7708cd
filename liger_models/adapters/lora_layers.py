"""Linear layers with low-rank adapters (LoRA, rsLoRA, DoRA): a frozen weight W and two small trained matrices A, B.

    y = W x + s · B A x          s = alpha / r (LoRA), alpha / sqrt(r) (rsLoRA)
    y_e = W_e x + s · B_e A_e x      for the matrices of each routed expert e
    y = m · (W x + s · B A x) / ‖W + s · B A‖      row by row; the norm has no gradient (DoRA)

An adapter belongs to one matrix of the Hugging Face checkpoint (q_proj, gate_proj, ...). A packed projection holds
several of these matrices, and the weight map gives the rows of each.

Under tensor parallelism an adapter is sharded along with its weight. If the weight is sharded by rows, so are B and m.
If the weight is sharded by columns, so is A: A x is then a partial sum, and the layer's own all-reduce sums B A x. Each
rank computes a part of the gradients of replicated tensors, and the parts are summed::

    weight by rows (q, k, v, gate, up)     B, m sharded     A replicated
    weight by columns (o, down)            A sharded        B, m replicated

Source: https://arxiv.org/abs/2106.09685, https://arxiv.org/abs/2312.03732, https://arxiv.org/abs/2402.09353.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from liger_models.convert.weight_map import Expression, Name
from liger_models.distributed.collectives import Group, all_reduce, sum_gradient
from liger_models.kernels.dispatch import TRITON_DTYPES, use_triton
from liger_models.kernels.frozen.products import Weight, dense, quantized_linear
from liger_models.kernels.frozen.weight import FrozenWeight
from liger_models.kernels.linear.low_rank_linear import low_rank_linear
from liger_models.kernels.matmul.batch_invariance import is_batch_invariant
from liger_models.kernels.matmul.row_linear import LowRank, low_rank_pair
from liger_models.layers.derived import derive
from liger_models.layers.frozen import freeze, frozen_format, frozen_parts
from liger_models.layers.frozen_linear import FrozenLinear
from liger_models.layers.layer import Layer
from liger_models.layers.linear import (
    ColumnParallelLinear,
    PartialLinear,
    ReplicatedLinear,
    RowParallelLinear,
    is_sharded,
    local,
)
from liger_models.layers.lm_head import LigerLMHead
from liger_models.layers.moe import MATRICES
from liger_models.layers.norm import PLAIN_WEIGHTS

if TYPE_CHECKING:
    from typing_extensions import Self


EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
"""Value of ``target_parameters`` for all routed experts."""


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """The matrices that get adapters, and the form of the adapters.

    Names and defaults are the same as in PEFT, except for the default of ``target_modules``.

    Args:
        r: rank of the adapters.
        lora_alpha: numerator of the factor ``lora_alpha / r`` of an adapter's output.
        lora_dropout: probability of dropping an element of the adapter's input in training. Adapters of one packed
            projection drop the same elements.
        target_modules: a list of names in the Hugging Face checkpoint, or of their endings, such as "q_proj". A string
            is a regular expression that must match a whole name. "all-linear" means all linear layers of the blocks.
            A name in a list with ``experts`` before its last part, such as "experts.down_proj", means routed experts.
        target_parameters: transformers' names of parameters with the matrices of all routed experts of a layer, or
            endings of these names: "experts.gate_up_proj", "experts.down_proj". Each expert has its own A and B for
            gate and up together, and another A and B for down.
        use_rslora: whether the factor is ``lora_alpha / sqrt(r)``.
        use_dora: whether to learn also the norm of each row of the adapted matrices.

    Raises:
        ValueError: a value is out of range or of another type.
    """

    r: int = 8
    lora_alpha: float = 8
    lora_dropout: float = 0.0
    target_modules: Sequence[str] | str = "all-linear"
    target_parameters: Sequence[str] = ()
    use_rslora: bool = False
    use_dora: bool = False

    def __post_init__(self) -> None:
        r: Any = self.r
        if type(r) is bool or not isinstance(r, Integral) or r < 1:
            raise ValueError(f"LoRAConfig: r must be an integer of at least 1, got {r!r}.")
        for name in ("lora_alpha", "lora_dropout"):
            value = getattr(self, name)
            if type(value) is bool or not isinstance(value, Real) or not math.isfinite(value):
                raise ValueError(f"LoRAConfig: {name} must be a finite number, got {value!r}.")
        if not 0 <= self.lora_dropout < 1:
            raise ValueError(f"LoRAConfig: lora_dropout must be in [0, 1), got {self.lora_dropout}.")
        for name in ("use_rslora", "use_dora"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"LoRAConfig: {name} must be True or False, got {getattr(self, name)!r}.")
        for name in ("target_modules", "target_parameters"):
            names = getattr(self, name)
            if name == "target_modules" and isinstance(names, str):
                continue
            if isinstance(names, str) or not (isinstance(names, Collection) and all(isinstance(n, str) for n in names)):
                raise ValueError(f"LoRAConfig: {name} must be a list of names, got {names!r}.")

    @property
    def scaling(self) -> float:
        """The factor s of B A."""
        return self.lora_alpha / (self.r**0.5 if self.use_rslora else self.r)


class Adapter(Layer):
    """The trained tensors of one matrix of the checkpoint: A [r, C], B [O, r] and, with DoRA, magnitudes m [O]."""

    def __init__(self, out_features: int, in_features: int, config: LoRAConfig, like: Tensor) -> None:
        super().__init__()
        # Updates of an adapter are small: bfloat16 would round them away.
        options: dict[str, Any] = {"device": like.device, "dtype": torch.promote_types(like.dtype, torch.float32)}
        self.lora_A = nn.Parameter(torch.empty(config.r, in_features, **options))
        self.lora_B = nn.Parameter(torch.empty(out_features, config.r, **options))
        self.lora_magnitude_vector = nn.Parameter(torch.empty(out_features, **options)) if config.use_dora else None

    def sum_gradients(self, group: Group) -> bool:
        """Return True, because the layer with the adapter sums the gradients."""
        return True


class Dropout(nn.Dropout):
    """Dropout that saves one byte per element on every device. `nn.Dropout` does so only on GPUs."""

    def forward(self, x: Tensor) -> Tensor:
        """x [...] -> [...]."""
        return torch.native_dropout(x, self.p, True)[0] if self.training and self.p > 0 else x


class LinearAdapters(nn.ModuleDict):
    """The adapters of a linear layer with a weight [O, C]. Keys are the last parts of names in the checkpoint.

    Args:
        linear: the layer.
        expression: its weight in terms of the checkpoint's matrices.
        names: the checkpoint's names of the matrices that have an adapter.
        config: settings of the adapters.
    """

    active: bool = True
    """False computes with the frozen weight alone; see `without_adapters`."""
    group: Group | None = None
    """The ranks over which gradients of replicated adapters are summed; None if each rank computes whole gradients."""
    sharded_dim: int | None = None
    """The dimension along which `apply_tp` has sharded the weight; None for a replicated weight."""

    def __init__(self, linear: nn.Linear, expression: Expression, names: Sequence[str], config: LoRAConfig) -> None:
        # The number of rows of each matrix, by unpacking a vector of as many elements.
        rows = expression.unpack(torch.empty(linear.out_features, device="meta"))
        sizes = {name: len(part) for name, part in rows.items()}
        super().__init__(
            {short_name(name): Adapter(sizes[name], linear.in_features, config, linear.weight) for name in names}
        )
        self.config, self.expression = config, expression
        self.sizes = sizes
        """Name of each of the checkpoint's matrices in the weight -> its number of rows."""

    def by_name(self) -> dict[str, Adapter]:
        """Name of a matrix in the checkpoint -> its adapter, in the order in which `factors` concatenates adapters."""
        return {name: cast(Adapter, self[short_name(name)]) for name in self.sizes if short_name(name) in self}

    def shard_rows(self, group: Group) -> dict[str, int]:
        """Shard B and m by rows, for a weight that is sharded by rows."""
        self.group, self.sharded_dim = group, 0
        return {f"lora.{name}": 0 for name, _ in self.named_parameters() if not name.endswith("lora_A")}

    def shard_columns(self, group: Group) -> dict[str, int]:
        """Shard A by columns, for a weight that is sharded by columns."""
        self.group, self.sharded_dim = group, 1
        return {f"lora.{name}": 1 for name, _ in self.named_parameters() if name.endswith("lora_A")}

    @torch.no_grad()
    def reset(self, row_norms: Mapping[str, Tensor]) -> None:
        """Draw A, and set B to 0 and m to the norms of the weight's rows.

        Args:
            row_norms: for DoRA, name of a matrix in the checkpoint -> norms of its rows.
        """
        for name, adapter in self.by_name().items():
            drawn = torch.empty(adapter.lora_A.shape, dtype=adapter.lora_A.dtype, device=adapter.lora_A.device)
            _copy_into(adapter.lora_A, nn.init.kaiming_uniform_(drawn, a=5**0.5))
            nn.init.zeros_(adapter.lora_B)
            if adapter.lora_magnitude_vector is not None:
                _copy_into(adapter.lora_magnitude_vector, row_norms[name])

    def factors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A [R, C] and s · B [O, R] of all adapters, concatenated: R is r times the number of adapters.

        An adapter's columns of B are zero outside of its own rows, and the rows have the packed order of the weight. So
        one small product computes all adapters.
        """
        adapters = self.by_name()
        r, R = self.config.r, self.config.r * len(adapters)
        A = torch.cat([local(adapter.lora_A) for adapter in adapters.values()])  # [R, C]

        # The rows of each matrix, [rows, R]: its own B in its own r columns.
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
            A = sum_gradient(A, group)  # each rank has a part of the rows of B, or of the tokens
        return A.to(dtype), self._pack(blocks).to(dtype)

    def scale(self, W: Tensor, A: Tensor, B: Tensor) -> Tensor:
        """DoRA's factor of each row [O], in fp32. It is 1 for rows without an adapter.

        Args:
            W: this rank's frozen weight [O, C], dense.
            A, B: the result of `factors`.
        """
        with torch.no_grad():
            # In fp32: bf16 would lose the small change of the norm.
            W, A, B = (factor.to(torch.promote_types(factor.dtype, torch.float32)) for factor in (W, A, B))

            # ‖W + B A‖² of each row [O], as ‖W‖² + 2 W·B A + ‖B A‖², so that W + B A is never in memory.
            cross = ((W @ A.T) * B).sum(1) * 2
            squares = row_norms(W).square() + cross + ((B @ (A @ A.T)) * B).sum(1)
            group = self._active_group()
            if group is not None and self.sharded_dim == 1:
                squares = all_reduce(squares, group)
            norms = squares.clamp_min(0).sqrt()

        # The factors m / ‖W + B A‖ in the order of the packed rows.
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
        """`group`, or None while whole tensors replace the shards."""
        return self.group if is_sharded(next(self.parameters())) else None

    def _pack(self, rows: Mapping[str, Tensor]) -> Tensor:
        """Put rows into the order of the weight, or into the order of this rank's rows if rows are sharded.

        Args:
            rows: name of a matrix in the checkpoint -> all of its rows, or this rank's rows.
        """
        group = self._active_group()
        missing = {name: self.sizes[name] - len(part) for name, part in rows.items()}
        sharded = any(missing.values())
        if group is None or (sharded and isinstance(self.expression, Name)):
            return self.expression.pack(rows)

        # Pack whole matrices, with zeros for the rows of other ranks, and keep this rank's rows of the result.
        whole = {}
        for name, part in rows.items():
            before = group.rank * len(part) if missing[name] else 0
            whole[name] = F.pad(part, (*(0, 0) * (part.dim() - 1), before, missing[name] - before))
        packed = self.expression.pack(whole)

        # Rows that every rank has get a gradient from each rank.
        packed = packed if sharded else sum_gradient(packed, group)
        return packed.chunk(group.size)[group.rank] if self.sharded_dim == 0 else packed


class LoRALinear(nn.Linear, Layer):
    """A linear layer with a frozen weight [O, C] and adapters for some of the matrices in it."""

    lora: LinearAdapters
    dropout: Dropout
    adapted = ("weight",)
    plain_class: ClassVar[type[nn.Linear]] = nn.Linear
    """The class of the layer after its adapters are merged."""
    parallel_kinds: ClassVar[dict[type, type[PartialLinear]]] = {}
    """Class of a parallel layer -> its class with adapters, into which `PartialLinear.of` converts this layer."""

    @classmethod
    def around(cls, linear: nn.Linear, expression: Expression, names: Sequence[str], config: LoRAConfig) -> "Self":
        """Make a layer with the parameters of ``linear`` and new adapters for the checkpoint's matrices ``names``."""
        layer: Self = with_class(linear, cls)
        layer.dropout = Dropout(config.lora_dropout)
        layer.lora = LinearAdapters(linear, expression, names, config)
        layer.reset_adapters()
        return layer

    def without_adapters(self, weight: Tensor | None = None) -> nn.Linear:
        """Make the layer without its adapters.

        Args:
            weight: the dense weight of the new layer. Default: the frozen weight as it is.
        """
        # A weight in fewer bits stays as it is, unless a dense one replaces it.
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
        """Draw A, set B to 0, and set m to the norms of the weight's rows, so that adapters change no result.

        Sharded adapters get the numbers that the first rank draws.
        """
        norms: dict[str, Tensor] = {}
        if self.lora.config.use_dora:
            frozen = frozen_parts(self).get("weight")
            weight = self.dense_weight() if frozen is None else frozen.whole(self.weight).dense()
            packed: Any = row_norms(weight.to(torch.promote_types(weight.dtype, torch.float32)))
            norms = self.lora.expression.unpack(packed.full_tensor() if is_sharded(packed) else packed)
        self.lora.reset(norms)

    def dense_weight(self) -> Tensor:
        """The weight [O, C]. A weight in fewer bits is dequantized; after `apply_tp`, only this rank's slice of it."""
        frozen = self.frozen_weight
        return self.weight if frozen is None else frozen.dense()

    def derived(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
        """A, s · B, and DoRA's factor of each row or None. Decoding computes them once for all tokens."""
        return derive(self, dtype, lambda: self._derived(dtype))

    def _derived(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
        A, B = self.lora.factors(dtype)
        return A, B, self.lora.scale(local(self.dense_weight()), A, B) if self.lora.config.use_dora else None

    @property
    def is_low_rank(self) -> bool:
        """Whether the layer computes ``W x + b + s · B A x``, as fused ops do.

        DoRA, dropout, and weights that anything but `apply_tp` has sharded need further operations.
        """
        if self.lora.config.use_dora or (self.training and self.dropout.p > 0):
            return False

        # Parallel layers multiply local weights. Of other layers, the weight must be one that fused ops know.
        if type(self) in (LoRAColumnParallelLinear, LoRARowParallelLinear):
            return True
        return type(self) is LoRALinear and (type(self.weight) in PLAIN_WEIGHTS or frozen_format(self) is not None)

    @property
    def frozen_weight(self) -> FrozenWeight | None:
        """A weight in fewer bits, also one of torchao, in the form that fused ops take; None for a dense weight."""
        frozen = frozen_parts(self).get("weight")
        if frozen is not None:
            return frozen.join(self.weight)
        return None if type(self.weight) in PLAIN_WEIGHTS else FrozenWeight.of(self.weight)

    def store(self) -> None:
        """Convert a torchao weight to parameters that can be sharded. Other weights do not change."""
        weight = None if frozen_parts(self) else self.frozen_weight
        if weight is not None:
            freeze(self, "weight", weight)

    def low_rank(self, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """A [R, C] and s · B [O, R] in ``dtype``, for a layer that `is_low_rank`; None while adapters are off."""
        return self.derived(dtype)[:2] if self.lora.active else None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., C] -> [..., O]."""
        return self.product(x, self.bias)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The forward with this rank's shard of the weight, and with ``bias`` if it is not None."""
        if not self.lora.active:
            return self.base_product(x, bias)

        # Decoding needs a single kernel.
        A, B, scale = self.derived(x.dtype)
        if self._fuses(x):
            frozen = self.frozen_weight
            return low_rank_linear(x, self.weight if frozen is None else frozen.to(x.dtype), bias, (A, B))

        # The frozen product, and the adapters' term through their rank [..., R].
        y = self.base_product(x, bias if scale is None else None)
        low = F.linear(self.dropout(x), A).to(y.dtype)
        if is_batch_invariant():
            y = y + F.linear(low, B.to(y.dtype))
        else:
            y = torch.addmm(y.flatten(0, -2), low.flatten(0, -2), B.T.to(y.dtype)).view_as(y)
        if scale is not None:  # DoRA scales the product before the bias is added
            y = y * scale.to(y.dtype)
            y = y if bias is None else y + bias.to(y.dtype)
        return y

    def _fuses(self, x: Tensor) -> bool:
        """Whether `low_rank_linear` computes the layer. It has no backward."""
        return (
            not (torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type) or is_batch_invariant())
            and self.is_low_rank
            and not is_sharded(self.weight)
            and x.dtype in TRITON_DTYPES
            and (self.weight.dtype == x.dtype or frozen_format(self) is not None)
            and use_triton(x)
        )

    def base_product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """``x @ Wᵀ + bias`` with the frozen weight."""
        frozen = self.frozen_weight
        return F.linear(x, local(self.weight), bias) if frozen is None else quantized_linear(x, frozen, bias)

    @torch.no_grad()
    def adapted_weight(self, name: str, *, merge: bool) -> Tensor:
        """The dense weight [O, C] with the adapters merged in, or without them."""
        return self.merged() if merge else self.dense_weight().detach()

    @torch.no_grad()
    def merged(self) -> Tensor:
        """The weight [O, C] with the adapters merged in, in the dtype of the frozen weight."""
        weight = self.dense_weight()
        wide = torch.promote_types(weight.dtype, torch.float32)
        A, B, scale = self._derived(wide)  # fp32: bf16 would round small updates away
        total = torch.addmm(weight.to(wide), B, A)
        return (total if scale is None else total * scale[:, None]).to(weight.dtype)


class LoRAColumnParallelLinear(LoRALinear, ColumnParallelLinear):
    """`ColumnParallelLinear` with adapters. Ranks with equal random generators drop the same elements."""

    def shard(self, group: Group) -> dict[str, int]:
        """Shard B and m by rows, if a shard of the weight consists of successive rows of each matrix."""
        dims = self.lora.shard_rows(group)
        ranks = torch.arange(group.size, device="cpu")

        # The rank of each row of the packed weight, and from it the rank of each row of each matrix.
        rank_of_row = ranks.repeat_interleave(self.out_features // group.size)
        rank_of_rows = self.lora.expression.unpack(rank_of_row).values()
        successive = all(rows.equal(ranks.repeat_interleave(len(rows) // group.size)) for rows in rank_of_rows)
        return dims if successive else {}

    forward = ColumnParallelLinear.forward


class LoRARowParallelLinear(LoRALinear, RowParallelLinear):
    """`RowParallelLinear` with adapters. Each rank drops elements in its own columns of the adapters' input."""

    def shard(self, group: Group) -> dict[str, int]:
        """Shard A by columns."""
        return self.lora.shard_columns(group)

    forward = RowParallelLinear.forward


class LoRAReplicatedLinear(LoRALinear, ReplicatedLinear):
    """`ReplicatedLinear` with adapters. With dropout, ranks with the same tokens must draw the same numbers."""

    def shard(self, group: Group) -> dict[str, int]:
        """Shard nothing, but sum the gradients if each rank has its own tokens."""
        self.lora.group = self.group if self.group is not None and self.group.sequence_parallel else None
        return {}

    forward = ReplicatedLinear.forward


LoRALinear.parallel_kinds = {
    ColumnParallelLinear: LoRAColumnParallelLinear,
    RowParallelLinear: LoRARowParallelLinear,
    ReplicatedLinear: LoRAReplicatedLinear,
}


class LoRALMHead(LoRALinear, LigerLMHead):
    """`LigerLMHead` with an adapter in its fused loss: A x and s · B are r further columns of input and weight."""

    forward = LigerLMHead.forward
    plain_class = LigerLMHead

    def shard(self, group: Group) -> dict[str, int]:
        """Shard the vocabulary, and with it the rows of B and m."""
        return LigerLMHead.shard(self, group) | self.lora.shard_rows(group)

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The extended input [..., C + r] and weight [V, C + r], whose product is the logits."""
        if not self.lora.active:
            return super().operands(x)

        A, B, scale = self.derived(x.dtype)
        # One product of wider operands, so that the loss needs no second pass over the vocabulary.
        weight = torch.cat([local(self.weight).to(x.dtype), B], 1)  # [V, C + r]
        if scale is not None:
            weight = weight * scale.to(x.dtype)[:, None]
        return torch.cat([x, F.linear(self.dropout(x), A).to(x.dtype)], -1), weight


ADAPTED: dict[type[nn.Linear], type[LoRALinear]] = {
    nn.Linear: LoRALinear,
    FrozenLinear: LoRALinear,
    LigerLMHead: LoRALMHead,
}
"""Class of a linear layer -> its class with adapters. Other subclasses of `nn.Linear` cannot have adapters."""


class ExpertAdapter(Layer):
    """The adapter of one parameter with a matrix for each expert: A [X, r, in] and B [X, out, r].

    The rows of B have the packed order of the weight.

    Args:
        weight: the matrices, [X, out, in].
        name: name of the parameter in transformers that holds the matrices.
        expression: the weight in terms of that parameter.
        config: settings of the adapters.
    """

    def __init__(self, weight: Weight, name: str, expression: Expression, config: LoRAConfig) -> None:
        super().__init__()
        X, out, width = weight.shape

        # As for linear layers, fp32 for small updates.
        options: dict[str, Any] = {"device": weight.device, "dtype": torch.promote_types(weight.dtype, torch.float32)}
        self.name, self.expression = name, expression
        self.lora_A = nn.Parameter(torch.empty(X, config.r, width, **options))
        self.lora_B = nn.Parameter(torch.empty(X, out, config.r, **options))

    def sum_gradients(self, group: Group) -> bool:
        """Return True, because `LoRAExperts` sums the gradients."""
        return True


class LoRAExperts(Layer):
    """The adapters of a layer's routed experts, in its submodule ``lora``. The ops of the layer take A and B.

    Args:
        adapters: name of a parameter of the layer, "gate_up_weight" or "down_weight" -> its adapter.
        active_share: ``active_share`` of the layer.
        config: settings of the adapters.
    """

    active: bool = True
    """False computes with the frozen weights alone; see `without_adapters`."""
    group: Group | None = None
    """The ranks over which `apply_tp` has divided the width of each expert."""

    def __init__(self, adapters: Mapping[str, ExpertAdapter], active_share: float, config: LoRAConfig) -> None:
        super().__init__()
        self.config, self.names, self.active_share = config, tuple(adapters), active_share
        for name, adapter in adapters.items():
            self.add_module(name, adapter)
        self.reset_adapters()

    def shard(self, group: Group) -> dict[str, int]:
        """Shard the rows of gate and up, and the columns of down, like the weights of the experts."""
        self.group = group
        dims = {"gate_up_weight.lora_B": 1, "down_weight.lora_A": 2}  # the sharded dimension of each
        return {name: dim for name, dim in dims.items() if name.partition(".")[0] in self.names}

    def by_name(self) -> dict[str, ExpertAdapter]:
        """Name of a parameter in transformers -> its adapter."""
        adapters = [cast(ExpertAdapter, self.get_submodule(name)) for name in self.names]
        return {adapter.name: adapter for adapter in adapters}

    @torch.no_grad()
    def reset_adapters(self) -> None:
        """Draw A and set B to 0, so that adapters change no result.

        Sharded adapters get the numbers that the first rank draws.
        """
        for adapter in self.by_name().values():
            drawn = torch.empty(adapter.lora_A.shape, dtype=adapter.lora_A.dtype, device=adapter.lora_A.device)
            bound = drawn.shape[2] ** -0.5  # as for the adapter [r, in] of a linear layer
            _copy_into(adapter.lora_A, drawn.uniform_(-bound, bound))
            nn.init.zeros_(adapter.lora_B)

    @property
    def dropout(self) -> float:
        """Current probability of dropping an element of the adapters' input. It is 0 outside of training."""
        return self.config.lora_dropout if self.training and self.active else 0.0

    def low_ranks(self, dtype: torch.dtype) -> tuple[LowRank | None, LowRank | None]:
        """A [X, r, in] and s · B [X, out, r] in ``dtype`` for gate and up, and for down. X is this rank's experts.

        A pair is None without adapters, or while they are switched off.
        """

        if not self.active:
            return None, None
        gate_up_A, gate_up_B, down_A, down_B = derive(self, dtype, lambda: self._factors(dtype))
        return low_rank_pair(gate_up_A, gate_up_B), low_rank_pair(down_A, down_B)

    def _factors(self, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
        """A and s · B of each matrix of `MATRICES`, or None and None."""
        factors: list[Tensor | None] = []
        for name in MATRICES:
            if name not in self.names:
                factors += [None, None]
                continue
            adapter: Any = self.get_submodule(name)
            A, B = local(adapter.lora_A), local(adapter.lora_B)

            # One of A and B is sharded, so each rank computes a part of the gradient of the other.
            if self.group is not None and name == "gate_up_weight":
                A = sum_gradient(A, self.group)
            elif self.group is not None:
                B = sum_gradient(B, self.group)
            factors += [A.to(dtype), (B * self.config.scaling).to(dtype)]
        return tuple(factors)

    @torch.no_grad()
    def merged(self, name: str, weight: Weight) -> Tensor:
        """The weight [X, out, in] of the parameter ``name`` with its adapters merged in, in its own dtype."""
        adapter: Any = self.get_submodule(name)
        wide = torch.promote_types(weight.dtype, torch.float32)
        B = (adapter.lora_B.to(wide) * self.config.scaling).split(1)

        # One expert at a time, because the wide copies need memory.
        experts = zip(weight.split(1), B, adapter.lora_A.to(wide).split(1), strict=True)
        return torch.cat([torch.baddbmm(dense(W).to(wide), b, a).to(weight.dtype) for W, b, a in experts])


def adapted_layers(model: nn.Module) -> dict[str, LoRALinear | LoRAExperts]:
    """Path -> module of a model that holds adapters."""
    return {path: module for path, module in model.named_modules() if isinstance(module, LoRALinear | LoRAExperts)}


def adapters_of(layer: LoRALinear | LoRAExperts) -> LinearAdapters | LoRAExperts:
    """The adapters of a layer."""
    return layer.lora if isinstance(layer, LoRALinear) else layer


def adapter_config(model: nn.Module) -> LoRAConfig | None:
    """The config of a model's adapters; None for a model without adapters, or with merged ones."""
    return next((adapters_of(layer).config for layer in adapted_layers(model).values()), None)


def with_class(module: nn.Module, cls: type[nn.Module]) -> Any:
    """Make a module of another class that shares the parameters, submodules and attributes of ``module``."""
    # Not by `cls(...)`, which would allocate new parameters. The two dicts are copied, so that a parameter added to one
    # module is not added to the other.
    converted = cls.__new__(cls)
    members = {"_parameters": dict(module._parameters), "_modules": dict(module._modules)}
    converted.__dict__ = {**module.__dict__, **members}
    return converted


def short_name(name: str) -> str:
    """``q_proj`` for ``model.layers.0.self_attn.q_proj.weight``."""
    return name.removesuffix(".weight").rpartition(".")[2]


def _copy_into(parameter: Tensor, values: Tensor) -> None:
    """Copy whole values into a parameter, or the first rank's values into its shards."""
    if is_sharded(parameter):
        from torch.distributed.tensor import distribute_tensor  # slow to import

        sharded: Any = parameter
        values = distribute_tensor(values.to(parameter.dtype), sharded.device_mesh, sharded.placements)
    parameter.copy_(values)


def row_norms(weight: Tensor) -> Tensor:
    """The norms [O] of the rows of a matrix [O, C]."""
    norms: Tensor = torch.linalg.vector_norm(weight, dim=1)
    return norms
