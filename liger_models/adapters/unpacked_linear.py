"""A projection whose matrices are separate linear layers, which PEFT may adapt.

The linear layers share the memory of one joined weight. A fused op can therefore read the weights of all linear layers
as one matrix, and PEFT can read and write the weight of each layer. For example, the joined weight of gate_up_proj has
the same row order as the packed weight, but the joined weight of qkv_proj does not::

    gate_up_proj   rows of gate and up alternate; gate_proj.weight is rows 0, 2, 4, ... of the joined weight
    qkv_proj       all rows of q, then k, then v; the outputs are moved to the order of the packed rows

If PEFT has wrapped a linear layer in its ``lora.Linear``, the adapters are passed to the ops of `LoRALinear`, and
PEFT's parameters get the gradients. If the ops cannot compute a layer (DoRA, wrappers of other methods, hooks), PEFT
itself computes it.
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
        A, B: PEFT's parameters, [r, C] and [rows, r].
        scaling: the number by which B A is multiplied.
        dropout: probability with which an element of x is dropped. It is 0 outside of training.
    """

    name: str
    A: Tensor
    B: Tensor
    scaling: float
    dropout: float


class CannotFuse(Exception):
    """Raised if fused ops cannot compute a layer, so that PEFT itself must compute the layer.

    A warning shows the message of this exception as the reason. An empty message causes no warning.
    """


class RowOrder:
    """The permutation of rows from the joined order to the packed order.

    In the joined order, one matrix follows the other. The packed order is the order of rows in the packed weight.

    Args:
        rows: [O] int64. Row i of the joined matrices is row ``rows[i]`` of the packed weight.
    """

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows
        order = rows.argsort()  # row i of the packed weight is row order[i] of the joined matrices
        self.order = order

        # Divide the packed rows into runs of consecutive joined rows.
        starts = F.pad((order.diff() != 1).nonzero()[:, 0] + 1, (1, 0))  # [runs]
        lengths = F.pad(starts, (0, 1), value=len(order)).diff()  # [runs]
        first_rows = order[starts]  # [runs]

        # If the packed weight is regular, as for q, k and v, the outputs are moved with `split` and `cat` instead of
        # an index. A regular weight consists of groups, and all groups have the same number of rows of each matrix.
        counts = [count for count in range(len(starts), 0, -1) if len(starts) % count == 0]
        self.groups: int = next((count for count in counts if self._is_regular(first_rows, lengths, count)), 0)
        """Number of groups in the packed weight, if each group has one run of rows of each matrix; otherwise 0."""
        self.lengths: list[int] = lengths[: len(lengths) // self.groups].tolist() if self.groups else []
        """The number of rows of each matrix in a group."""

    @staticmethod
    def _is_regular(first_rows: Tensor, lengths: Tensor, groups: int) -> bool:
        """Whether the packed rows repeat a regular pattern: ``groups`` groups, each with a run of rows of every matrix.

        All groups have the same run lengths. ``first_rows`` and ``lengths`` hold, for each run, its first row in the
        joined order and its length.
        """
        first_rows, lengths = first_rows.view(groups, -1), lengths.view(groups, -1)  # [groups, matrices]
        group_lengths = lengths[0]
        starts = F.pad((groups * group_lengths).cumsum(0)[:-1], (1, 0))  # the first joined row of each matrix
        expected = starts + torch.arange(groups, device="cpu")[:, None] * group_lengths  # [groups, matrices]
        return bool((first_rows == expected).all() and (lengths == group_lengths).all())

    def __call__(self, y: Tensor) -> Tensor:
        """Move outputs y [..., O] from the joined to the packed order."""
        moved: Tensor = _Moved.apply(y, self)  # type: ignore[no-untyped-call]
        return moved

    def to_packed(self, y: Tensor) -> Tensor:
        """Move y [..., O] from the joined to the packed order, without autograd."""
        if not self.groups:
            return y.index_select(-1, self.order.to(y.device))
        outputs = y.split([self.groups * length for length in self.lengths], -1)  # one per matrix
        return torch.cat([output.unflatten(-1, (self.groups, -1)) for output in outputs], -1).flatten(-2)

    def to_joined(self, y: Tensor) -> Tensor:
        """Move y [..., O] from the packed to the joined order, without autograd."""
        if not self.groups:
            return y.index_select(-1, self.rows.to(y.device))
        outputs = y.unflatten(-1, (self.groups, -1)).split(self.lengths, -1)  # one per matrix, by group
        return torch.cat([output.flatten(-2) for output in outputs], -1)


class _Moved(torch.autograd.Function):
    """The autograd function with `RowOrder.to_packed` as its forward and `RowOrder.to_joined` as its backward."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, order: RowOrder) -> Tensor:
        ctx.order = order
        return order.to_packed(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return ctx.order.to_joined(dy), None


class UnpackedLinear(Layer):
    """A projection from [C] to [O], with one linear layer per matrix of the checkpoint.

    Fused ops read its attributes `weight`, `bias`, `is_low_rank` and `low_rank`, which a `LoRALinear` also has. The
    outputs of such an op are in the order of the joined weight, one matrix after the other. `row_order` moves them to
    the order of the rows of the packed weight.

    Args:
        packed: the projection.
        weight: the `Expression` that computes the projection's weight from the checkpoint's matrices.
        bias: the `Expression` that computes the projection's bias from the checkpoint's vectors; None if there is no
            bias.
        said: reasons why PEFT itself computes some layers. A warning has already been issued for each of these reasons.
            All layers of the model share this set.
    """

    def __init__(self, packed: nn.Linear, weight: Expression, bias: Expression | None, said: set[str]) -> None:
        super().__init__()
        self.weight_expression, self.bias_expression, self.said = weight, bias, said
        self.in_features, self.out_features = packed.in_features, packed.out_features

        # If the rows of each matrix are evenly spaced in the packed weight, they form a slice. Otherwise, the joined
        # weight has one matrix after the other.
        rows = list(weight.unpack(torch.arange(packed.out_features, device="cpu")).values())
        slices = [_as_slice(indices) for indices in rows]
        self.row_order: RowOrder | None = None
        """Moves outputs from the joined to the packed order; None if both orders are the same."""
        if None in slices:
            self.row_order = RowOrder(torch.cat(rows))
            ends = torch.tensor([len(indices) for indices in rows], device="cpu").cumsum(0).tolist()
            slices = [slice(end - len(indices), end, 1) for end, indices in zip(ends, rows, strict=True)]
        self.slices: list[slice] = slices  # type: ignore[assignment]
        """For each matrix, the slice of its rows in the joined weight."""

        # Make the matrices. If they are ordinary tensors, they are views of the joined weight.
        matrices = [*weight.unpack(packed.weight.detach()).values()]
        self.joined: Tensor | None = None
        """The joined weight [O, C]. The weights of the linear layers are views of it, unless they have been moved."""
        if type(packed.weight) in PLAIN_WEIGHTS:
            self.joined = packed.weight.detach() if self.row_order is None else torch.cat(matrices)
            matrices = [self.joined[matrix_rows] for matrix_rows in self.slices]

        # Make a linear layer for each matrix. If there is only one matrix, its weight stays the same parameter.
        self.names = [short_name(name) for name in weight.names()]
        biases = [None] * len(rows) if bias is None else [*bias.unpack(packed.bias.detach()).values()]
        is_single = len(rows) == 1 and self.row_order is None
        for name, matrix, vector in zip(self.names, matrices, biases, strict=True):
            linear = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False, device="meta").train(packed.training)
            linear.weight = packed.weight if is_single else nn.Parameter(matrix, packed.weight.requires_grad)
            if vector is not None:
                linear.bias = nn.Parameter(_copy(vector), packed.bias.requires_grad)
            self.add_module(name, linear)

    # The weight

    def bases(self) -> list[nn.Linear]:
        """Return the linear layers that hold the matrices, without PEFT's wrappers around them."""
        layers: list[Any] = [*self.children()]
        return [getattr(layer, "base_layer", layer) for layer in layers]

    def _join(self) -> Tensor | None:
        """Return the joined weight [O, C]. If the matrices no longer share memory, join them again.

        The result is None if the matrices cannot share memory: their dtypes or devices differ, or one of them is not an
        ordinary tensor.
        """
        weights = [base.weight for base in self.bases()]
        first = weights[0]
        if any(type(w) not in PLAIN_WEIGHTS or w.dtype != first.dtype or w.device != first.device for w in weights):
            return None
        if len(weights) == 1 and self.row_order is None:
            return first.detach()
        # Copy the rows if weights can't be moved (in a compiled graph), or if tensors do not have memory of their own.
        if is_traced() or first.is_meta or type(first.data) is not Tensor:
            return self._pack_rows([weight.detach() for weight in weights])
        joined = self.joined
        if joined is None or joined.dtype != first.dtype or joined.device != first.device or not self._shares(joined):
            joined = first.new_empty(self.out_features, self.in_features)
            with torch.no_grad():
                for weight, rows in zip(weights, self.slices, strict=True):
                    joined[rows] = weight.data
                    weight.data = joined[rows]
            self.joined = joined
        return joined

    def _shares(self, joined: Tensor) -> bool:
        """Whether the weights of all linear layers are views of ``joined``."""
        start, row_bytes = joined.data_ptr(), joined.element_size() * self.in_features
        return all(
            base.weight.data_ptr() == start + row_bytes * rows.start
            and base.weight.stride() == (self.in_features * rows.step, 1)
            for base, rows in zip(self.bases(), self.slices, strict=True)
        )

    @property
    def weight(self) -> Tensor:
        """The joined weight [O, C]; an empty tensor if the matrices cannot share memory."""
        joined = self._join()
        return torch.empty(0, device="cpu") if joined is None else joined

    @property
    def bias(self) -> Tensor | None:
        """The bias [O] in the joined order, or None."""
        return None if self.bias_expression is None else self._pack_rows([base.bias for base in self.bases()])

    def _pack_rows(self, matrices: list[Tensor]) -> Tensor:
        """Arrange the rows of the matrices, or the elements of their biases, in the joined order."""
        if self.row_order is not None:
            return torch.cat(matrices)
        return self.weight_expression.pack(dict(zip(self.weight_expression.names(), matrices, strict=True)))

    # The adapters

    def _terms(self) -> list[list[Term]]:
        """Return the active adapters of each linear layer. Raises CannotFuse if PEFT must compute one of the layers."""
        return [[*_terms_of(layer)] for layer in self._modules.values()]

    def _weight_and_terms(self) -> tuple[Tensor, list[list[Term]]]:
        """Return the joined weight and the active adapters. Raises CannotFuse if PEFT must compute the layer."""
        terms = self._terms()
        if len({term.dropout for layer_terms in terms for term in layer_terms}) > 1:
            raise CannotFuse("adapters have different dropouts")
        joined = self._join()
        if joined is None:
            raise CannotFuse("weights have different dtypes, or are quantized")
        return joined, terms

    @property
    def is_low_rank(self) -> bool:
        """Whether the layer computes just ``W x + b + s · B A x``, so that fused ops can compute it."""
        try:
            _, terms = self._weight_and_terms()
        except CannotFuse:
            return False
        return not any(term.dropout for layer_terms in terms for term in layer_terms)

    def low_rank(self, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        """Return A [R, C] and s · B [O, R] in ``dtype``; None without active adapters. Needs `is_low_rank`."""
        return self._low_rank(self._terms(), dtype)

    def _low_rank(self, terms: list[list[Term]], dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
        if not any(terms):
            return None
        key = dtype, *(term.name for layer_terms in terms for term in layer_terms)
        return derive(self, key, lambda: self._factors(terms, dtype))

    def _factors(self, terms: list[list[Term]], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return A [R, C] and s · B [O, R] of all adapters, concatenated, in the joined order of rows."""
        A = torch.cat([term.A.to(dtype) for layer_terms in terms for term in layer_terms])
        blocks, column, R = [], 0, len(A)
        for layer_terms, base in zip(terms, self.bases(), strict=True):
            # Extend a layer's s · B, [rows, r], to R columns, which are 0 for the adapters of other layers.
            if layer_terms:
                B = torch.cat([(term.B * term.scaling).to(dtype) for term in layer_terms], 1)
                blocks.append(F.pad(B, (column, R - column - B.shape[1])))  # [rows, R]
                column += B.shape[1]
            else:
                blocks.append(A.new_zeros(base.out_features, R))
        return A, self._pack_rows(blocks)

    # The forward

    def forward(self, x: Tensor) -> Tensor:
        """Map x [..., C] to [..., O] in the order of the packed rows."""
        try:
            weight, terms = self._weight_and_terms()
        except CannotFuse as error:
            self._warn(str(error))
            return self._separately(x)
        y = self._product(x, weight, terms)
        return y if self.row_order is None else self.row_order(y)

    def _product(self, x: Tensor, weight: Tensor, terms: list[list[Term]]) -> Tensor:
        bias, low_rank = self.bias, self._low_rank(terms, x.dtype)
        if low_rank is None:
            return inference_linear(x, weight, bias)
        dropout = next(term.dropout for layer_terms in terms for term in layer_terms)  # the same in all terms
        if dropout == 0 and takes_adapters(x, weight.dtype):
            return low_rank_linear(x, weight, bias, low_rank)
        return add_low_rank(F.linear(x, weight, bias), Dropout(dropout)(x), *low_rank)

    def _separately(self, x: Tensor) -> Tensor:
        """Call each linear layer (or PEFT's wrapper of it), and arrange the outputs in the packed order."""
        # The expression that packs the rows of the weight also packs the outputs of a token; `vmap` applies it to all
        # tokens.
        names = self.weight_expression.names()
        outputs = {name: layer(x).flatten(0, -2) for name, layer in zip(names, self.children(), strict=True)}
        packed = torch.vmap(self.weight_expression.pack)(outputs)  # [tokens, O]
        y: Tensor = packed.unflatten(0, x.shape[:-1])
        return y

    def _warn(self, reason: str) -> None:
        """Warn, once for each reason, that PEFT computes layers itself, without fused ops."""
        if reason and reason not in self.said and not is_traced():
            self.said.add(reason)
            warnings.warn(f"PEFT computes some projections itself, without fused ops: {reason}.", stacklevel=2)

    def packed(self) -> nn.Linear:
        """Pack the linear layers, which must have no adapters, into one linear layer with new parameters."""
        bases = self.bases()
        names = self.weight_expression.names()
        # If the joined and the packed order are the same, the joined weight is the packed weight. Otherwise, copy the
        # rows.
        weight = None if self.row_order is not None else self._join()
        if weight is None:
            matrices = {name: base.weight.detach() for name, base in zip(names, bases, strict=True)}
            weight = _copy(self.weight_expression.pack(matrices))
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta").train(self.training)
        if len(bases) == 1 and weight.data_ptr() == bases[0].weight.data_ptr():
            linear.weight = bases[0].weight
        else:
            linear.weight = nn.Parameter(weight, bases[0].weight.requires_grad)
        if self.bias_expression is not None:
            biases = zip(self.bias_expression.names(), bases, strict=True)
            bias = _copy(self.bias_expression.pack({name: base.bias.detach() for name, base in biases}))
            linear.bias = nn.Parameter(bias, bases[0].bias.requires_grad)
        return linear


def _terms_of(layer: Any) -> Iterator[Term]:
    """Yield the active adapters of a linear layer, which PEFT may have wrapped.

    Raises CannotFuse if PEFT must compute the layer.
    """
    # The layer, or the layer inside of PEFT's wrapper, must be an ordinary linear layer with a frozen weight.
    lora = sys.modules.get("peft.tuners.lora.layer")
    is_wrapped = lora is not None and type(layer) is lora.Linear
    base = layer.base_layer if is_wrapped else layer
    if type(base) is not nn.Linear:
        raise CannotFuse(f"a layer is a {type(base).__name__}")
    if is_hooked(layer) or (is_wrapped and is_hooked(base)):
        raise CannotFuse("layers have hooks, as for adapter_names, aLoRA and offloading")
    if base.weight.requires_grad and torch.is_grad_enabled():
        raise CannotFuse("weights below adapters are trained" if is_wrapped else "")

    # Adapters that are merged into the weight or switched off add nothing.
    if not is_wrapped:
        return
    if layer.disable_adapters and layer.merged:
        raise CannotFuse("merged adapters are switched off")
    if layer.disable_adapters or layer.merged:
        return

    for adapter in layer.active_adapters:
        if adapter not in layer.lora_A:
            continue
        if adapter in layer.lora_variant or layer.lora_bias[adapter] or layer.fan_in_fan_out:
            variant = layer.lora_variant.get(adapter)
            reason = "lora_bias" if variant is None else type(variant).__name__.removesuffix("LinearVariant")
            raise CannotFuse(f"the adapter {adapter} has {reason}")
        A, B, dropout = layer.lora_A[adapter], layer.lora_B[adapter], layer.lora_dropout[adapter]
        if type(A) is not nn.Linear or type(B) is not nn.Linear or is_hooked(A) or is_hooked(B) or is_hooked(dropout):
            raise CannotFuse(f"the adapter {adapter} has hooks or other layers")
        if type(A.weight) not in PLAIN_WEIGHTS or type(B.weight) not in PLAIN_WEIGHTS:
            raise CannotFuse(f"the adapter {adapter} is sharded or quantized")
        p = dropout.p if isinstance(dropout, nn.Dropout) and dropout.training else 0.0
        yield Term(adapter, A.weight, B.weight, layer.scaling[adapter], p)


def _as_slice(indices: Tensor) -> slice | None:
    """Return the slice that selects the indices [n]; None if they do not increase in equal steps."""
    first, step = int(indices[0]), int(indices[1] - indices[0]) if len(indices) > 1 else 1
    if step < 1 or not indices.equal(torch.arange(first, first + step * len(indices), step, device="cpu")):
        return None
    return slice(first, int(indices[-1]) + 1, step)


def _copy(values: Tensor) -> Tensor:
    return values.detach().clone(memory_format=torch.contiguous_format)
