"""A projection of a model whose matrices are separate linear layers, which PEFT may adapt.

The linear layers share the memory of one joined weight, so a fused op can read all of them as one matrix, and PEFT can
read and write each of them::

    gate_up_proj   rows of gate and up in turn; gate_proj.weight is rows 0, 2, 4, ... of the joined weight
    qkv_proj       all rows of q, then k, then v; the outputs are moved to the order of the packed rows

If PEFT has wrapped a linear layer in its ``lora.Linear``, the adapters are passed to the ops of `LoRALinear`. PEFT's
parameters get the gradients. Whatever the ops cannot compute (DoRA, wrappers of other methods, hooks), PEFT computes.
"""

import sys
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from liger_models.adapters.lora_layers import Dropout, add_low_rank, short_name, takes_adapters
from liger_models.common.errors import is_traced
from liger_models.convert.weight_map import Expression
from liger_models.kernels.linear.low_rank_linear import low_rank_linear
from liger_models.kernels.matmul.row_linear import inference_linear
from liger_models.layers.derived import derive
from liger_models.layers.layer import Layer
from liger_models.layers.norm import PLAIN_WEIGHTS
from liger_models.layers.recompute import is_hooked


class Term(NamedTuple):
    """An active adapter of a linear layer, which adds ``scaling · B A dropout(x)`` to the layer's output.

    Attributes:
        name: name of the adapter.
        A, B: [r, C] and [rows, r], parameters of PEFT.
        scaling: the number that B A is multiplied by.
        dropout: probability that an element of x is dropped. It is 0 outside of training.
    """

    name: str
    A: Tensor
    B: Tensor
    scaling: float
    dropout: float


class CannotFuse(Exception):
    """Raised if a layer must be computed part by part. The message is the reason, or empty without adapters."""


class RowOrder:
    """The order of the rows of a packed weight, relative to the order in which its matrices are joined.

    Args:
        rows: [O] int64. Row i of the joined matrices is row ``rows[i]`` of the packed weight.
    """

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows
        order = rows.argsort()  # row i of the packed weight is row order[i] of the joined matrices
        self.order = order

        # The order is regular if the packed weight consists of groups, each of which has the same number of consecutive
        # rows of every part. `lengths` then has the numbers of rows in a group, [parts].
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), (order.diff() != 1).nonzero()[:, 0] + 1])
        lengths = torch.cat([starts, torch.tensor([len(order)])]).diff()
        first = order[starts]
        groups = next(
            (n for n in range(len(starts), 0, -1) if len(starts) % n == 0 and self._repeats(first, lengths, n)), 0
        )
        self.groups: int = groups
        self.lengths: list[int] = lengths[: len(lengths) // groups].tolist() if groups else []

    @staticmethod
    def _repeats(first: Tensor, lengths: Tensor, groups: int) -> bool:
        """Whether the runs of rows, with their first rows and lengths, form ``groups`` groups of the same shape."""
        first, lengths = first.view(groups, -1), lengths.view(groups, -1)
        size = lengths[0]
        starts = F.pad((groups * size).cumsum(0)[:-1], (1, 0))  # the first joined row of each part
        return bool((first == starts + torch.arange(groups)[:, None] * size).all() and (lengths == size).all())

    def __call__(self, y: Tensor) -> Tensor:
        """Move outputs y [..., O] from the joined to the packed order."""
        moved: Tensor = _Moved.apply(y, self)  # type: ignore[no-untyped-call]
        return moved

    def to_packed(self, y: Tensor) -> Tensor:
        """Move y [..., O] from the joined to the packed order, without autograd."""
        if not self.groups:
            return y.index_select(-1, self.order.to(y.device))
        parts = y.split([self.groups * length for length in self.lengths], -1)
        return torch.cat([part.unflatten(-1, (self.groups, -1)) for part in parts], -1).flatten(-2)

    def to_joined(self, y: Tensor) -> Tensor:
        """Move y [..., O] from the packed to the joined order, without autograd."""
        if not self.groups:
            return y.index_select(-1, self.rows.to(y.device))
        parts = y.unflatten(-1, (self.groups, -1)).split(self.lengths, -1)
        return torch.cat([part.flatten(-2) for part in parts], -1)


class _Moved(torch.autograd.Function):
    """`RowOrder.to_packed`, whose backward is `RowOrder.to_joined`."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, order: RowOrder) -> Tensor:
        ctx.order = order
        return order.to_packed(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return ctx.order.to_joined(dy), None


class UnpackedLinear(Layer):
    """A projection from [C] to [O], with one linear layer per matrix of the checkpoint.

    Fused ops use the attributes `weight`, `bias`, `is_low_rank` and `low_rank`, as of a `LoRALinear`. The outputs of
    such an op are in the joined order, and `row_order` moves them to the packed order.

    Args:
        packed: the projection.
        weight: its weight as an expression over the checkpoint's matrices.
        bias: its bias as an expression over the checkpoint's vectors; None for a projection without bias.
        said: the reasons for which a warning was already issued that PEFT computes a layer. All layers of the model
            share this set.
    """

    def __init__(self, packed: nn.Linear, weight: Expression, bias: Expression | None, said: set[str]) -> None:
        super().__init__()
        self.weight_expression, self.bias_expression, self.said = weight, bias, said
        self.in_features, self.out_features = packed.in_features, packed.out_features

        # The rows of each matrix in the packed weight are a slice if they are evenly spaced. Otherwise, the joined
        # weight has one matrix after the other.
        rows = list(weight.unpack(torch.arange(packed.out_features, device="cpu")).values())
        slices = [_as_slice(numbers) for numbers in rows]
        self.row_order: RowOrder | None = None
        """Moves outputs from the joined to the packed order; None if these are the same."""
        if None in slices:
            self.row_order = RowOrder(torch.cat(rows))
            ends = torch.tensor([len(numbers) for numbers in rows]).cumsum(0).tolist()
            slices = [slice(end - len(numbers), end, 1) for end, numbers in zip(ends, rows, strict=True)]
        self.slices: list[slice] = slices  # type: ignore[assignment]
        """The rows of each matrix in the joined weight."""

        # The parts, which share the memory of the joined weight.
        matrices = [*weight.unpack(packed.weight.detach()).values()]
        self.joined: Tensor | None = None
        """The joined weight [O, C], unless its parts have been moved apart."""
        if type(packed.weight) in PLAIN_WEIGHTS:
            self.joined = packed.weight.detach() if self.row_order is None else torch.cat(matrices)
            matrices = [self.joined[part] for part in self.slices]
        self.names = [short_name(name) for name in weight.names()]
        biases = [None] * len(rows) if bias is None else [*bias.unpack(packed.bias.detach()).values()]
        for name, matrix, vector in zip(self.names, matrices, biases, strict=True):
            part = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False, device="meta").train(packed.training)
            same = len(rows) == 1 and self.row_order is None
            part.weight = packed.weight if same else nn.Parameter(matrix, packed.weight.requires_grad)
            if vector is not None:
                part.bias = nn.Parameter(_copy(vector), packed.bias.requires_grad)
            self.add_module(name, part)

    # The weight

    def bases(self) -> list[nn.Linear]:
        """Return the linear layers that hold the matrices, below PEFT's wrappers."""
        parts: list[Any] = [*self.children()]
        return [getattr(part, "base_layer", part) for part in parts]

    def _join(self) -> Tensor | None:
        """Return the joined weight [O, C]. If its parts were moved apart, they are joined again.

        None if the parts cannot share memory, because their dtypes or devices differ or one is not an ordinary tensor.
        """
        weights = [base.weight for base in self.bases()]
        first = weights[0]
        if any(type(w) not in PLAIN_WEIGHTS or w.dtype != first.dtype or w.device != first.device for w in weights):
            return None
        if len(weights) == 1 and self.row_order is None:
            return first.detach()
        if is_traced() or first.is_meta or type(first.data) is not Tensor:
            return self._pack_rows([weight.detach() for weight in weights])
        joined = self.joined
        if joined is None or joined.dtype != first.dtype or joined.device != first.device or not self._shares(joined):
            joined = first.new_empty(self.out_features, self.in_features)
            with torch.no_grad():
                for weight, part in zip(weights, self.slices, strict=True):
                    joined[part] = weight.data
                    weight.data = joined[part]
            self.joined = joined
        return joined

    def _shares(self, joined: Tensor) -> bool:
        """Whether all parts are views of ``joined``."""
        start, size = joined.data_ptr(), joined.element_size() * self.in_features
        return all(
            base.weight.data_ptr() == start + size * part.start
            and base.weight.stride() == (self.in_features * part.step, 1)
            for base, part in zip(self.bases(), self.slices, strict=True)
        )

    @property
    def weight(self) -> Tensor:
        """The joined weight [O, C]."""
        joined = self._join()
        return torch.empty(0) if joined is None else joined

    @property
    def bias(self) -> Tensor | None:
        """The bias [O] in the joined order, or None."""
        return None if self.bias_expression is None else self._pack_rows([base.bias for base in self.bases()])

    def _pack_rows(self, parts: list[Tensor]) -> Tensor:
        """Arrange the rows of the matrices, or numbers per row, in the joined order."""
        if self.row_order is not None:
            return torch.cat(parts)
        return self.weight_expression.pack(dict(zip(self.weight_expression.names(), parts, strict=True)))

    # The adapters

    def _terms(self) -> list[list[Term]]:
        """Return the active adapters of each part. Raises CannotFuse if PEFT must compute a part."""
        return [[*_terms(part)] for part in self._modules.values()]

    def _find(self) -> tuple[Tensor, list[list[Term]]]:
        """Return the joined weight and the active adapters. Raises CannotFuse if PEFT must compute the layer."""
        terms = self._terms()
        if len({term.dropout for part in terms for term in part}) > 1:
            raise CannotFuse("adapters have different dropouts")
        joined = self._join()
        if joined is None:
            raise CannotFuse("weights have different dtypes, or are quantized")
        return joined, terms

    @property
    def is_low_rank(self) -> bool:
        """Whether the layer is just ``W x + b + s · B A x``, which fused ops can compute."""
        try:
            _, terms = self._find()
        except CannotFuse:
            return False
        return not any(term.dropout for part in terms for term in part)

    def low_rank(self, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """Return A [R, C] and s · B [O, R] in ``dtype``, or None without active adapters; requires `is_low_rank`."""
        return self._low_rank(self._terms(), dtype)

    def _low_rank(self, terms: list[list[Term]], dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        if not any(terms):
            return None
        key = dtype, *(term.name for part in terms for term in part)
        return derive(self, key, lambda: self._factors(terms, dtype))

    def _factors(self, terms: list[list[Term]], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the concatenated A [R, C] and s · B [O, R] of all adapters, in the joined order of rows."""
        A = torch.cat([term.A.to(dtype) for part in terms for term in part])
        blocks, column, R = [], 0, len(A)
        for part, base in zip(terms, self.bases(), strict=True):
            # Place B of a part's adapters, [rows, r], among R columns that are 0 for the adapters of other parts.
            if part:
                B = torch.cat([(term.B * term.scaling).to(dtype) for term in part], 1)
                blocks.append(F.pad(B, (column, R - column - B.shape[1])))
                column += B.shape[1]
            else:
                blocks.append(A.new_zeros(base.out_features, R))
        return A, self._pack_rows(blocks)

    # The forward

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., C] to [..., O] in the order of the packed rows."""
        try:
            weight, terms = self._find()
        except CannotFuse as error:
            self._say(str(error))
            return self._separately(x)
        y = self._product(x, weight, terms)
        return y if self.row_order is None else self.row_order(y)

    def _product(self, x: Tensor, weight: Tensor, terms: list[list[Term]]) -> Tensor:
        bias, low_rank = self.bias, self._low_rank(terms, x.dtype)
        if low_rank is None:
            return inference_linear(x, weight, bias)
        dropout = next(term.dropout for part in terms for term in part)
        if dropout == 0 and takes_adapters(x, weight.dtype):
            return low_rank_linear(x, weight, bias, low_rank)
        return add_low_rank(F.linear(x, weight, bias), Dropout(dropout)(x), *low_rank)

    def _separately(self, x: Tensor) -> Tensor:
        """Call each part, and pack the outputs."""
        # The expression that packs the rows of the weight also packs the outputs of a token; `vmap` applies it to all
        # tokens.
        names = self.weight_expression.names()
        outputs = {name: part(x).flatten(0, -2) for name, part in zip(names, self.children(), strict=True)}
        packed = torch.vmap(self.weight_expression.pack)(outputs)  # [tokens, O]
        y: Tensor = packed.unflatten(0, x.shape[:-1])
        return y

    def _say(self, reason: str) -> None:
        """Warn that PEFT computes a layer, once for each reason."""
        if reason and reason not in self.said and not is_traced():
            self.said.add(reason)
            warnings.warn(f"PEFT computes some projections itself, without fused ops: {reason}.", stacklevel=2)

    def packed(self) -> nn.Linear:
        """Pack the parts, which must have no adapters, into one linear layer with new parameters."""
        parts = self.bases()
        names = self.weight_expression.names()
        joined = None if self.row_order is not None else self._join()
        if joined is None:
            weights = {name: part.weight.detach() for name, part in zip(names, parts, strict=True)}
            joined = _copy(self.weight_expression.pack(weights))
        linear = nn.Linear(joined.shape[1], joined.shape[0], bias=False, device="meta").train(self.training)
        linear.weight = (
            parts[0].weight
            if len(parts) == 1 and joined.data_ptr() == parts[0].weight.data_ptr()
            else (nn.Parameter(joined, parts[0].weight.requires_grad))
        )
        if self.bias_expression is not None:
            biases = zip(self.bias_expression.names(), parts, strict=True)
            bias = _copy(self.bias_expression.pack({name: part.bias.detach() for name, part in biases}))
            linear.bias = nn.Parameter(bias, parts[0].bias.requires_grad)
        return linear


def _terms(part: Any) -> Iterator[Term]:
    """Yield the active adapters of a part. Raises CannotFuse if PEFT must compute the part."""
    # Without PEFT, and below its wrapper, there is an ordinary linear layer whose weight is frozen.
    lora = sys.modules.get("peft.tuners.lora.layer")
    wrapped = lora is not None and type(part) is lora.Linear
    base = part.base_layer if wrapped else part
    if type(base) is not nn.Linear:
        raise CannotFuse(f"a layer is a {type(base if wrapped else part).__name__}")
    if is_hooked(part) or (wrapped and is_hooked(base)):
        raise CannotFuse("layers have hooks, as for adapter_names, aLoRA and offloading")
    if base.weight.requires_grad and torch.is_grad_enabled():
        raise CannotFuse("weights below adapters are trained" if wrapped else "")
    if not wrapped or (part.merged and not part.disable_adapters):
        return
    if part.disable_adapters:
        if part.merged:
            raise CannotFuse("merged adapters are switched off")
        return

    for adapter in part.active_adapters:
        if adapter not in part.lora_A:
            continue
        if adapter in part.lora_variant or part.lora_bias[adapter] or part.fan_in_fan_out:
            variant = part.lora_variant.get(adapter)
            reason = "lora_bias" if variant is None else type(variant).__name__.removesuffix("LinearVariant")
            raise CannotFuse(f"the adapter {adapter} has {reason}")
        A, B, dropout = part.lora_A[adapter], part.lora_B[adapter], part.lora_dropout[adapter]
        if type(A) is not nn.Linear or type(B) is not nn.Linear or is_hooked(A) or is_hooked(B) or is_hooked(dropout):
            raise CannotFuse(f"the adapter {adapter} has hooks or other layers")
        if type(A.weight) not in PLAIN_WEIGHTS or type(B.weight) not in PLAIN_WEIGHTS:
            raise CannotFuse(f"the adapter {adapter} is sharded or quantized")
        p = dropout.p if isinstance(dropout, nn.Dropout) and dropout.training else 0.0
        yield Term(adapter, A.weight, B.weight, part.scaling[adapter], p)


def _as_slice(numbers: Tensor) -> slice | None:
    """Return the slice that selects evenly spaced, rising numbers [n]; None for other numbers."""
    first, step = int(numbers[0]), int(numbers[1] - numbers[0]) if len(numbers) > 1 else 1
    if step < 1 or not numbers.equal(torch.arange(first, first + step * len(numbers), step)):
        return None
    return slice(first, int(numbers[-1]) + 1, step)


def _copy(values: Tensor) -> Tensor:
    return values.detach().clone(memory_format=torch.contiguous_format)
