"""Linear layers with low-rank adapters (LoRA, rsLoRA, DoRA): a frozen weight W and two small trained matrices A, B.

    y = W x + s · B A x          s = alpha / r (LoRA), alpha / sqrt(r) (rsLoRA)
    y_e = W_e x + s · B_e A_e x      for the matrices of each routed expert e
    y = m · (W x + s · B A x) / ‖W + s · B A‖      row by row; the norm has no gradient (DoRA)

An adapter belongs to one matrix of the Hugging Face checkpoint (q_proj, gate_proj, ...). A packed projection holds
several of these matrices; the weight map says which rows belong to which.

Over ranks (tensor parallelism) an adapter is sharded as its weight is. Where the weight's rows are, B and m are sharded
by rows; where its columns are, A is sharded by columns, A x is a partial sum, and the layer's own all-reduce sums
B A x. Each rank then computes a part of the gradients of whatever is replicated, and they are summed::

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
from liger_models.kernels.frozen.weight import FrozenWeight, Weight, dense, quantized_linear
from liger_models.kernels.linear.low_rank_linear import low_rank_linear
from liger_models.kernels.matmul.batch_invariance import is_batch_invariant
from liger_models.kernels.matmul.row_linear import LowRank, low_rank_pair
from liger_models.layers.derived import derive
from liger_models.layers.frozen import FrozenLinear, freeze, frozen_format, frozen_parts
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
"""``target_parameters`` for all routed experts."""


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """Which matrices have adapters, and of which kind. Names and defaults are PEFT's, except for ``target_modules``.

    Args:
        r: rank of the adapters.
        lora_alpha: the adapter's output is multiplied by ``lora_alpha / r``.
        lora_dropout: probability of dropping an element of the adapter's input in training. Adapters of one packed
            projection drop the same elements.
        target_modules: a list of names in the Hugging Face checkpoint, or of their endings, such as "q_proj". A string
            is a regular expression that must match a whole name. "all-linear" means all linear layers of the blocks.
            A name in a list with ``experts`` before its last part, such as "experts.down_proj", means routed experts.
        target_parameters: names of parameters that hold the matrices of all routed experts of a layer, or endings of
            these names, as transformers has them: "experts.gate_up_proj", "experts.down_proj". Each expert has an A and
            a B of its own for gate and up together, and for down.
        use_rslora: multiply by ``lora_alpha / sqrt(r)`` instead.
        use_dora: also learn the norm of each row of the adapted matrices.

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
        """Return True: the layer that has the adapter sums its gradients."""
        return True


class Dropout(nn.Dropout):
    """`nn.Dropout` that saves a byte for each element on every device; the other does so on GPUs alone."""

    def forward(self, x: Tensor) -> Tensor:
        """x [...] -> [...]."""
        return torch.native_dropout(x, self.p, True)[0] if self.training and self.p > 0 else x


class LinearAdapters(nn.ModuleDict):
    """The adapters of a linear layer with a weight [O, C], by the last part of their matrices' names in the checkpoint.

    Args:
        linear: the layer.
        expression: its weight in terms of the checkpoint's matrices.
        names: the checkpoint's names of the matrices that have an adapter.
        config: of the adapters.
    """

    active: bool = True
    """False computes with the frozen weight alone; see `without_adapters`."""
    group: Group | None = None
    """The ranks over which gradients of replicated adapters are summed; None if each computes them in full."""
    sharded_dim: int | None = None
    """The dimension along which `apply_tp` has sharded the weight; None for a weight that every rank has."""

    def __init__(self, linear: nn.Linear, expression: Expression, names: Sequence[str], config: LoRAConfig) -> None:
        rows = expression.unpack(torch.empty(linear.out_features, device="meta"))
        sizes = {name: len(part) for name, part in rows.items()}
        super().__init__(
            {short_name(name): Adapter(sizes[name], linear.in_features, config, linear.weight) for name in names}
        )
        self.config, self.expression = config, expression
        self.sizes = sizes
        """Name of each of the checkpoint's matrices in the weight -> its number of rows."""

    def by_name(self) -> dict[str, Adapter]:
        """The checkpoint's names of the matrices -> their adapters, in the order that `factors` concatenates them."""
        return {name: cast(Adapter, self[short_name(name)]) for name in self.sizes if short_name(name) in self}

    def shard_rows(self, group: Group) -> dict[str, int]:
        """Follow a weight whose rows are sharded: shard B and m by rows."""
        self.group, self.sharded_dim = group, 0
        return {f"lora.{name}": 0 for name, _ in self.named_parameters() if not name.endswith("lora_A")}

    def shard_columns(self, group: Group) -> dict[str, int]:
        """Follow a weight whose columns are sharded: shard A by columns."""
        self.group, self.sharded_dim = group, 1
        return {f"lora.{name}": 1 for name, _ in self.named_parameters() if name.endswith("lora_A")}

    @torch.no_grad()
    def reset(self, row_norms: Mapping[str, Tensor]) -> None:
        """Draw A, and set B to 0 and m to the norms of the weight's rows.

        Args:
            row_norms: name of each of the checkpoint's matrices -> the norms of its rows, for DoRA.
        """
        for name, adapter in self.by_name().items():
            drawn = torch.empty(adapter.lora_A.shape, dtype=adapter.lora_A.dtype, device=adapter.lora_A.device)
            _copy_into(adapter.lora_A, nn.init.kaiming_uniform_(drawn, a=5**0.5))
            nn.init.zeros_(adapter.lora_B)
            if adapter.lora_magnitude_vector is not None:
                _copy_into(adapter.lora_magnitude_vector, row_norms[name])

    def factors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A [R, C] and s · B [O, R] of all adapters, concatenated: R is r times the number of adapters.

        B is zero outside an adapter's own rows, and its rows have the packed order of the weight. So one small product
        computes all adapters.
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
            A = sum_gradient(A, group)  # each rank's rows of B, or tokens, give a part of the gradient
        return A.to(dtype), self._pack(blocks).to(dtype)

    def scale(self, W: Tensor, A: Tensor, B: Tensor) -> Tensor:
        """DoRA's factor of each row [O], in fp32; 1 for rows without an adapter.

        Args:
            W: this rank's frozen weight [O, C], dense.
            A, B: as of `factors`.
        """
        with torch.no_grad():
            W, A, B = (factor.to(torch.promote_types(factor.dtype, torch.float32)) for factor in (W, A, B))
            # ‖W + B A‖² row by row, without W + B A in memory.
            cross = ((W @ A.T) * B).sum(1) * 2
            squares = row_norms(W).square() + cross + ((B @ (A @ A.T)) * B).sum(1)
            group = self._active_group()
            if group is not None and self.sharded_dim == 1:
                squares = all_reduce(squares, group)
            norms = squares.clamp_min(0).sqrt()

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
        """`group`, unless whole tensors have taken the place of the shards."""
        return self.group if is_sharded(next(self.parameters())) else None

    def _pack(self, rows: Mapping[str, Tensor]) -> Tensor:
        """Rows in the order of the weight; where its rows are sharded, the rows of this rank.

        Args:
            rows: name of each of the checkpoint's matrices -> all of its rows, or this rank's.
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
        packed = packed if sharded else sum_gradient(packed, group)
        return packed.chunk(group.size)[group.rank] if self.sharded_dim == 0 else packed


class LoRALinear(nn.Linear, Layer):
    """A linear layer with a frozen weight [O, C] and adapters for some of the checkpoint's matrices that it holds."""

    lora: LinearAdapters
    dropout: Dropout
    adapted = ("weight",)
    plain_class: ClassVar[type[nn.Linear]] = nn.Linear
    """The class of the layer when its adapters are merged."""
    parallel_kinds: ClassVar[dict[type, type[PartialLinear]]] = {}
    """Kind of parallel layer -> the class that `PartialLinear.of` converts the layer into."""

    @classmethod
    def around(cls, linear: nn.Linear, expression: Expression, names: Sequence[str], config: LoRAConfig) -> "Self":
        """A layer with the parameters of ``linear`` and new adapters for the checkpoint's matrices ``names``."""
        layer: Self = with_class(linear, cls)
        layer.dropout = Dropout(config.lora_dropout)
        layer.lora = LinearAdapters(linear, expression, names, config)
        layer.reset_adapters()
        return layer

    def without_adapters(self, weight: Tensor | None = None) -> nn.Linear:
        """The layer without its adapters.

        Args:
            weight: its weight, dense. Default: the frozen weight as it is.
        """
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
        """Draw A, set B to 0 and m to the norms of the weight's rows, so that the layer computes what it did before.

        Sharded adapters take the numbers that the first rank draws.
        """
        norms: dict[str, Tensor] = {}
        if self.lora.config.use_dora:
            frozen = frozen_parts(self).get("weight")
            weight = self.dense_weight() if frozen is None else frozen.whole(self.weight).dense()
            packed: Any = row_norms(weight.to(torch.promote_types(weight.dtype, torch.float32)))
            norms = self.lora.expression.unpack(packed.full_tensor() if is_sharded(packed) else packed)
        self.lora.reset(norms)

    def dense_weight(self) -> Tensor:
        """The weight [O, C], dequantized if it is in fewer bits: then this rank's slice of it after `apply_tp`."""
        frozen = self.frozen_weight
        return self.weight if frozen is None else frozen.dense()

    def derived(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
        """A, s · B, and DoRA's factor of each row or None. Decoding computes them once, not for every token."""
        return derive(self, dtype, lambda: self._derived(dtype))

    def _derived(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
        A, B = self.lora.factors(dtype)
        return A, B, self.lora.scale(local(self.dense_weight()), A, B) if self.lora.config.use_dora else None

    @property
    def is_low_rank(self) -> bool:
        """Whether the layer computes ``W x + b + s · B A x``, as fused ops do.

        DoRA, dropout and weights that are sharded by others than `apply_tp` need more than that.
        """
        if self.lora.config.use_dora or (self.training and self.dropout.p > 0):
            return False
        if type(self) in (LoRAColumnParallelLinear, LoRARowParallelLinear):
            return True
        return type(self) is LoRALinear and (type(self.weight) in PLAIN_WEIGHTS or frozen_format(self) is not None)

    @property
    def frozen_weight(self) -> FrozenWeight | None:
        """The weight as fused ops take it if it is in fewer bits, also if it is a tensor of torchao's; else None."""
        frozen = frozen_parts(self).get("weight")
        if frozen is not None:
            return frozen.join(self.weight)
        return None if type(self.weight) in PLAIN_WEIGHTS else FrozenWeight.of(self.weight)

    def store(self) -> None:
        """Store a tensor of torchao's as parameters that can be sharded; no other weight changes."""
        weight = None if frozen_parts(self) else self.frozen_weight
        if weight is not None:
            freeze(self, "weight", weight)

    def low_rank(self, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """A [R, C] and s · B [O, R] in ``dtype``, for a layer that `is_low_rank`; None while they are switched off."""
        return self.derived(dtype)[:2] if self.lora.active else None

    def forward(self, x: Tensor) -> Tensor:
        """x [..., C] -> [..., O]."""
        return self.product(x, self.bias)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """The forward with this rank's shard of the weight, and of the bias if it is to be added."""
        if not self.lora.active:
            return self.base_product(x, bias)

        A, B, scale = self.derived(x.dtype)
        # One kernel in decoding.
        if self._fuses(x):
            frozen = self.frozen_weight
            return low_rank_linear(x, self.weight if frozen is None else frozen.to(x.dtype), bias, (A, B))
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
        """Whether `low_rank_linear`, which has no backward, computes the layer."""
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
        """The weight [O, C] of a plain linear layer with the adapters merged in, or without them."""
        return self.merged() if merge else self.dense_weight().detach()

    @torch.no_grad()
    def merged(self) -> Tensor:
        """The weight [O, C] of a plain linear layer that computes the same, in the frozen weight's dtype."""
        weight = self.dense_weight()
        wide = torch.promote_types(weight.dtype, torch.float32)
        A, B, scale = self._derived(wide)
        total = torch.addmm(weight.to(wide), B, A)
        return (total if scale is None else total * scale[:, None]).to(weight.dtype)


class LoRAColumnParallelLinear(LoRALinear, ColumnParallelLinear):
    """`ColumnParallelLinear` with adapters. Ranks whose generators agree drop the same elements."""

    def shard(self, group: Group) -> dict[str, int]:
        """Shard B and m by rows, if a shard of the weight is made of successive rows of each of its matrices."""
        dims = self.lora.shard_rows(group)
        ranks = torch.arange(group.size, device="cpu")
        # The rank that owns each row of the packed weight, and so each row of each matrix.
        rank_of_row = ranks.repeat_interleave(self.out_features // group.size)
        rank_of_rows = self.lora.expression.unpack(rank_of_row).values()
        successive = all(rows.equal(ranks.repeat_interleave(len(rows) // group.size)) for rows in rank_of_rows)
        return dims if successive else {}

    forward = ColumnParallelLinear.forward


class LoRARowParallelLinear(LoRALinear, RowParallelLinear):
    """`RowParallelLinear` with adapters. Each rank drops elements of its own part of the adapters' input."""

    def shard(self, group: Group) -> dict[str, int]:
        """Shard A by columns."""
        return self.lora.shard_columns(group)

    forward = RowParallelLinear.forward


class LoRAReplicatedLinear(LoRALinear, ReplicatedLinear):
    """`ReplicatedLinear` with adapters. With dropout, ranks that have the same tokens must draw the same."""

    def shard(self, group: Group) -> dict[str, int]:
        """Shard nothing, and sum the gradients if each rank has tokens of its own."""
        self.lora.group = self.group if self.group is not None and self.group.sequence_parallel else None
        return {}

    forward = ReplicatedLinear.forward


LoRALinear.parallel_kinds = {
    ColumnParallelLinear: LoRAColumnParallelLinear,
    RowParallelLinear: LoRARowParallelLinear,
    ReplicatedLinear: LoRAReplicatedLinear,
}


class LoRALMHead(LoRALinear, LigerLMHead):
    """`LigerLMHead` with an adapter that its fused loss includes: input and weight gain r columns, A x and s · B."""

    forward = LigerLMHead.forward
    plain_class = LigerLMHead

    def shard(self, group: Group) -> dict[str, int]:
        """Keep 1 / R of the vocabulary, and of the rows of B and m."""
        return LigerLMHead.shard(self, group) | self.lora.shard_rows(group)

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [..., C + r] and the weight [V, C + r], whose product is the logits."""
        if not self.lora.active:
            return super().operands(x)

        A, B, scale = self.derived(x.dtype)
        weight = torch.cat([local(self.weight).to(x.dtype), B], 1)  # [V, C + r]
        if scale is not None:
            weight = weight * scale.to(x.dtype)[:, None]
        return torch.cat([x, F.linear(self.dropout(x), A).to(x.dtype)], -1), weight


ADAPTED: dict[type[nn.Linear], type[LoRALinear]] = {
    nn.Linear: LoRALinear,
    FrozenLinear: LoRALinear,
    LigerLMHead: LoRALMHead,
}
"""The linear layers that can have adapters -> what they become. Subclasses compute something else and cannot."""


class ExpertAdapter(Layer):
    """The trained tensors of one of the two matrices of each expert: A [X, r, in] and B [X, out, r].

    The rows of B have the packed order of the weight.

    Args:
        weight: [X, out, in].
        name: of the parameter of transformers' model that holds the matrices.
        expression: the weight in terms of that parameter.
        config: of the adapters.
    """

    def __init__(self, weight: Weight, name: str, expression: Expression, config: LoRAConfig) -> None:
        super().__init__()
        X, out, width = weight.shape
        options: dict[str, Any] = {"device": weight.device, "dtype": torch.promote_types(weight.dtype, torch.float32)}
        self.name, self.expression = name, expression
        self.lora_A = nn.Parameter(torch.empty(X, config.r, width, **options))
        self.lora_B = nn.Parameter(torch.empty(X, out, config.r, **options))

    def sum_gradients(self, group: Group) -> bool:
        """Return True: `LoRAExperts` sums its gradients."""
        return True


class LoRAExperts(Layer):
    """The adapters of the routed experts of a layer, as its submodule ``lora``. The layer's ops take A and B.

    Args:
        adapters: name of the layer's parameter -> its adapter; "gate_up_weight", "down_weight" or both.
        active_share: as of the layer.
        config: of the adapters.
    """

    active: bool = True
    """False computes with the frozen weights alone; see `without_adapters`."""
    group: Group | None = None
    """The ranks that share the width of each expert (`apply_tp`)."""

    def __init__(self, adapters: Mapping[str, ExpertAdapter], active_share: float, config: LoRAConfig) -> None:
        super().__init__()
        self.config, self.names, self.active_share = config, tuple(adapters), active_share
        for name, adapter in adapters.items():
            self.add_module(name, adapter)
        self.reset_adapters()

    def shard(self, group: Group) -> dict[str, int]:
        """Keep the rows of gate and up, and the columns of down, that the experts' weights keep."""
        self.group = group
        dims = {"gate_up_weight.lora_B": 1, "down_weight.lora_A": 2}
        return {name: dim for name, dim in dims.items() if name.partition(".")[0] in self.names}

    def by_name(self) -> dict[str, ExpertAdapter]:
        """The names of transformers' parameters -> their adapters."""
        adapters = [cast(ExpertAdapter, self.get_submodule(name)) for name in self.names]
        return {adapter.name: adapter for adapter in adapters}

    @torch.no_grad()
    def reset_adapters(self) -> None:
        """Draw A and set B to 0, so that the experts compute what they did before.

        Sharded adapters take the numbers that the first rank draws.
        """
        for adapter in self.by_name().values():
            drawn = torch.empty(adapter.lora_A.shape, dtype=adapter.lora_A.dtype, device=adapter.lora_A.device)
            bound = drawn.shape[2] ** -0.5  # as for the adapter [r, in] of a linear layer
            _copy_into(adapter.lora_A, drawn.uniform_(-bound, bound))
            nn.init.zeros_(adapter.lora_B)

    @property
    def dropout(self) -> float:
        """Probability of dropping an element of the adapters' input now: 0 outside of training."""
        return self.config.lora_dropout if self.training and self.active else 0.0

    def low_ranks(self, dtype: torch.dtype) -> tuple[LowRank | None, LowRank | None]:
        """A [X, r, in] and s · B [X, out, r] in ``dtype`` of gate and up, and of down; X are this rank's experts.

        None for what has no adapters, and while they are switched off.
        """

        if not self.active:
            return None, None
        gate_up_A, gate_up_B, down_A, down_B = derive(self, dtype, lambda: self._factors(dtype))
        return low_rank_pair(gate_up_A, gate_up_B), low_rank_pair(down_A, down_B)

    def _factors(self, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
        factors: list[Tensor | None] = []
        for name in MATRICES:
            if name not in self.names:
                factors += [None, None]
                continue
            adapter: Any = self.get_submodule(name)
            A, B = local(adapter.lora_A), local(adapter.lora_B)
            # The other of the two is sharded, so each rank computes a part of the gradient of this one.
            if self.group is not None and name == "gate_up_weight":
                A = sum_gradient(A, self.group)
            elif self.group is not None:
                B = sum_gradient(B, self.group)
            factors += [A.to(dtype), (B * self.config.scaling).to(dtype)]
        return tuple(factors)

    @torch.no_grad()
    def merged(self, name: str, weight: Weight) -> Tensor:
        """The parameter ``name`` of the layer, weight [X, out, in], with its adapters added, in its dtype."""
        adapter: Any = self.get_submodule(name)
        wide = torch.promote_types(weight.dtype, torch.float32)
        B = (adapter.lora_B.to(wide) * self.config.scaling).split(1)
        experts = zip(weight.split(1), B, adapter.lora_A.to(wide).split(1), strict=True)
        return torch.cat([torch.baddbmm(dense(W).to(wide), b, a).to(weight.dtype) for W, b, a in experts])


def adapted_layers(model: nn.Module) -> dict[str, LoRALinear | LoRAExperts]:
    """The modules of a model that hold adapters, by their path."""
    return {path: module for path, module in model.named_modules() if isinstance(module, LoRALinear | LoRAExperts)}


def adapters_of(layer: LoRALinear | LoRAExperts) -> LinearAdapters | LoRAExperts:
    """The adapters of a layer."""
    return layer.lora if isinstance(layer, LoRALinear) else layer


def adapter_config(model: nn.Module) -> LoRAConfig | None:
    """The config of a model's adapters; None if it has none, or if they are merged."""
    return next((adapters_of(layer).config for layer in adapted_layers(model).values()), None)


def with_class(module: nn.Module, cls: type[nn.Module]) -> Any:
    """A module of another class with the same parameters, submodules and attributes, which are shared, not copied."""
    converted = cls.__new__(cls)
    members = {"_parameters": dict(module._parameters), "_modules": dict(module._modules)}
    converted.__dict__ = {**module.__dict__, **members}
    return converted


def short_name(name: str) -> str:
    """``q_proj`` for ``model.layers.0.self_attn.q_proj.weight``."""
    return name.removesuffix(".weight").rpartition(".")[2]


def _copy_into(parameter: Tensor, values: Tensor) -> None:
    if is_sharded(parameter):
        from torch.distributed.tensor import distribute_tensor  # slow to import

        sharded: Any = parameter
        values = distribute_tensor(values.to(parameter.dtype), sharded.device_mesh, sharded.placements)
    parameter.copy_(values)


def row_norms(weight: Tensor) -> Tensor:
    """The norm of each row of a matrix [O, C]: [O]."""
    norms: Tensor = torch.linalg.vector_norm(weight, dim=1)
    return norms
