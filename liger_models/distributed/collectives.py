"""Collectives for tensor, sequence, context and expert parallelism, as ops and as differentiable functions.

A layer with sharded weights begins with `copy_to_region` and ends with `reduce_from_region` (Megatron's f and g).
Between these two calls, each rank computes a partial sum. Between layers, the tokens are replicated on all ranks or,
with sequence parallelism, sharded. Which collectives run depends on whether the tokens are replicated or sharded::

                           copy_to_region                  reduce_from_region
    tokens                 forward       backward          forward          backward
    replicated             identity      all-reduce        all-reduce       identity
    sharded                all-gather    reduce-scatter    reduce-scatter   all-gather

Token shards are in rank order: rank 0 has the first T / R tokens of [..., T, C].

Under context parallelism, the weights are replicated and the tokens are sharded, but attention needs all tokens. Before
attention, `to_heads` exchanges token shards for head shards. After attention, `to_tokens` reverses the exchange.

Source: https://arxiv.org/abs/1909.08053 (tensor parallelism), https://arxiv.org/abs/2205.05198 (sequence parallelism),
https://arxiv.org/abs/2309.14509 (Ulysses: token shards exchanged for head shards).
"""

from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch import Tensor

from liger_models.common.ops import define_op

# PyTorch 2.13 renamed these functions and deprecated the old names. Builds of PyTorch without distributed support have
# neither name.
_gather_into: Any = getattr(dist, "all_gather_single", getattr(dist, "all_gather_into_tensor", None))
reduce_into: Any = getattr(dist, "reduce_scatter_single", getattr(dist, "reduce_scatter_tensor", None))

_groups: dict[str, Any] = {}
"""Maps the name of a process group to the process group. Ops take the name as an argument."""


@dataclass(frozen=True)
class Group:
    """A process group in which every rank holds a shard of a layer.

    Attributes:
        name: name of the process group. `group_of` registers it for the ops.
        size: number of ranks, R.
        rank: this process's rank in the group, 0 to R - 1.
        sequence_parallel: whether, between layers, each rank holds only its shard of the tokens (sequence parallelism).
    """

    name: str
    size: int
    rank: int
    sequence_parallel: bool = False

    @property
    def process_group(self) -> Any:
        """The group as a ``torch.distributed.ProcessGroup``."""
        return _groups[self.name]

    @property
    def members(self) -> list[int]:
        """The ranks that the group's members have in the default process group."""
        return dist.get_process_group_ranks(self.process_group)

    def local_slice(self, tokens: int) -> slice:
        """Return the slice that selects this rank's shard of a sequence of ``tokens`` tokens."""
        length = tokens // self.size
        return slice(length * self.rank, length * (self.rank + 1))


def group_of(group: Any, *, sequence_parallel: bool = False) -> Group:
    """Register a ``torch.distributed.ProcessGroup`` for use by the ops, and return it as a `Group`."""
    _groups[group.group_name] = group
    return Group(group.group_name, group.size(), dist.get_rank(group), sequence_parallel)


Sizes = Annotated[list[int], "SymInt[]"]


def _all_reduce(x: Tensor, group: str) -> Tensor:
    # The sum is written to a new tensor, because ops must not write to their inputs.
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=_groups[group])
    return total


def _all_gather(x: Tensor, group: str) -> Tensor:
    # The result is [R, ...]. The collective takes flat tensors, so both tensors are flattened.
    gathered = x.new_empty(_groups[group].size(), *x.shape)
    _gather_into(gathered.flatten(), x.contiguous().flatten(), group=_groups[group])
    return gathered


def _reduce_scatter(x: Tensor, group: str) -> Tensor:
    total = x.new_empty(x.shape[1:])
    reduce_into(total.view(-1), x.contiguous().view(-1), group=_groups[group])
    return total


def _all_to_all(x: Tensor, sent: Sizes, received: Sizes, group: str) -> Tensor:
    out = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=_groups[group])
    return out


ALL_REDUCE = define_op("all_reduce", _all_reduce, "x")
ALL_GATHER = define_op("all_gather", _all_gather, lambda x, group: x.new_empty(_groups[group].size(), *x.shape))
REDUCE_SCATTER = define_op("reduce_scatter", _reduce_scatter, lambda x, group: x.new_empty(x.shape[1:]))
ALL_TO_ALL = define_op(
    "all_to_all", _all_to_all, lambda x, sent, received, group: x.new_empty(sum(received), *x.shape[1:])
)


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """Return the sum of x over the ranks. This function is not differentiable."""
    return ALL_REDUCE(x, group.name)


def all_gather(x: Tensor, group: Group) -> Tensor:
    """Stack the tensors [...] of all ranks into [R, ...]. This function is not differentiable."""
    return ALL_GATHER(x, group.name)


def reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """Sum x [R, ...] over the ranks. Rank r gets element r [...] of the sum. This function is not differentiable."""
    return REDUCE_SCATTER(x, group.name)


def by_rank(x: Tensor, size: int) -> Tensor:
    """Split [..., T, C] into the ranks' token shards [R, ..., T / R, C]."""
    # [..., T, C] -> [..., R, T / R, C] -> [R, ..., T / R, C]
    parts: Tensor = x.unflatten(-2, (size, -1)).movedim(-3, 0)
    return parts


def in_order(x: Tensor) -> Tensor:
    """Concatenate token shards [R, ..., t, C] to [..., R · t, C]. This is the inverse of `by_rank`."""
    tokens: Tensor = x.movedim(0, -3).flatten(-3, -2)
    return tokens


def gather_rows(rows: Tensor, group: Group | None) -> Tensor:
    """With sequence parallelism, all-gather the rows [n, C] into [R · n, C]; otherwise return the rows unchanged."""
    return all_gather(rows, group).flatten(0, 1) if group is not None and group.sequence_parallel else rows


def sum_rows(rows: Tensor, group: Group | None) -> Tensor:
    """Sum the ranks' partial results for all rows. With sequence parallelism, return only this rank's rows of the sum.

    The function may overwrite ``rows``, so use it only inside ops.
    """
    if group is not None and group.sequence_parallel:
        # [R · n, C] -> [n, C]
        return reduce_scatter(rows.unflatten(0, (group.size, -1)), group)
    if group is not None:
        dist.all_reduce(rows, group=_groups[group.name])
    return rows


def rows_by_rank(tokens: Tensor, group: Group | None) -> Tensor:
    """Flatten tokens [..., T, C] to rows [N, C]. With sequence parallelism, the rows of rank 0's tokens come first,
    then the rows of rank 1's tokens, and so on.
    """
    tokens = tokens if group is None or not group.sequence_parallel else by_rank(tokens, group.size)
    return tokens.reshape(-1, tokens.shape[-1])


def rows_in_order(rows: Tensor, shape: torch.Size, group: Group | None) -> Tensor:
    """Reshape rows [N, C], as `rows_by_rank` returns them, to tokens [..., T, C].

    Args:
        shape: [..., t], the shape of this rank's tokens.
    """
    if group is None or not group.sequence_parallel:
        return rows.view(*shape, rows.shape[-1])
    # [R, ..., t, C] -> [..., R · t, C]
    return in_order(rows.view(group.size, *shape, rows.shape[-1])).contiguous()


def gathered_shape(shape: torch.Size, group: Group | None) -> tuple[int, ...]:
    """Return the shape of all ranks' tokens, given the shape [..., t] of this rank's tokens.

    The result is [..., R · t] with sequence parallelism, and ``shape`` itself otherwise.
    """
    return (*shape[:-1], shape[-1] * group.size) if group is not None and group.sequence_parallel else tuple(shape)


def ranks_from_op(group: str = "", size: int = 1, sequence: bool = False) -> Group | None:
    """Rebuild a `Group` from the arguments of an op. This is the inverse of `for_op`."""
    return Group(group, size, 0, sequence) if size > 1 else None


def for_op(group: Group | None) -> tuple[str, int, bool]:
    """Represent a `Group` by three arguments for an op: the group's name, its size, and ``sequence_parallel``."""
    return ("", 1, False) if group is None else (group.name, group.size, group.sequence_parallel)


def _same(x: Tensor) -> Tensor:
    """Return x as the output of an autograd function that leaves the values as they are and changes only the gradient.

    In a compiled graph, the result is a copy. If the result were a view of x, PyTorch would replace the result by
    another view of x, and the gradient would bypass the backward of the autograd function.
    """
    return x.clone() if torch.compiler.is_compiling() else x.view_as(x)


class _CopyToRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, sequence: bool) -> Tensor:
        ctx.group, ctx.sequence = group, sequence
        return in_order(all_gather(x, group)) if sequence else _same(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        group = ctx.group
        return reduce_scatter(by_rank(dy, group.size), group) if ctx.sequence else all_reduce(dy, group), None, None


class _ReduceFromRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return reduce_scatter(by_rank(x, group.size), group) if group.sequence_parallel else all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return in_order(all_gather(dy, ctx.group)) if ctx.group.sequence_parallel else dy, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return all_reduce(dy, ctx.group), None


class _LocalTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return by_rank(x, group.size)[group.rank].clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return in_order(all_gather(dy, ctx.group)), None


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return in_order(all_gather(x, group))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return by_rank(dy, ctx.group.size)[ctx.group.rank], None


class _GatherChannels(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return all_gather(x, group).movedim(0, -2).flatten(-2)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return reduce_scatter(dy.unflatten(-1, (ctx.group.size, -1)).movedim(-2, 0), ctx.group), None


class _GatherVocab(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, V: int) -> Tensor:
        ctx.group, ctx.vocab_shard = group, x.shape[-1]
        longest = -(-V // group.size)  # the shards of the last ranks may be shorter
        gathered = all_gather(torch.nn.functional.pad(x, (0, longest - x.shape[-1])), group)
        return gathered.movedim(0, -2).flatten(-2)[..., :V]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        start = -(-dy.shape[-1] // ctx.group.size) * ctx.group.rank
        return dy[..., start : start + ctx.vocab_shard], None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: Group) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return ALL_TO_ALL(x, sent, received, group.name)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return ALL_TO_ALL(dy, ctx.received, ctx.sent, ctx.group.name), None, None, None


class _DivideGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, divisor: float) -> Tensor:
        ctx.divisor = divisor
        return _same(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return dy / ctx.divisor, None


def copy_to_region(x: Tensor, group: Group | None) -> Tensor:
    """Call this at the beginning of a layer in which each rank computes a partial sum. The module's docstring has a
    table of the collectives.

    If ``group`` is None, x is returned unchanged.
    """
    return x if group is None else _CopyToRegion.apply(x, group, group.sequence_parallel)


def reduce_from_region(x: Tensor, group: Group | None) -> Tensor:
    """Call this at the end of a layer, to add up the ranks' partial sums. The module's docstring has a table of the
    collectives.

    If ``group`` is None, x is returned unchanged.
    """
    return x if group is None else _ReduceFromRegion.apply(x, group)


def sum_gradient(x: Tensor, group: Group) -> Tensor:
    """Return a replicated tensor unchanged, and sum the tensor's gradient over the ranks."""
    return _CopyToRegion.apply(x, group, False)  # type: ignore[no-any-return]


def sum_over(x: Tensor, group: Group) -> Tensor:
    """Sum x over the ranks. The backward also sums the gradients, because each rank uses the sum differently."""
    return _Sum.apply(x, group)  # type: ignore[no-any-return]


def local_tokens(x: Tensor, group: Group) -> Tensor:
    """Return this rank's shard of replicated tokens: [..., T, C] -> [..., T / R, C]."""
    return _LocalTokens.apply(x, group)  # type: ignore[no-any-return]


def gather_tokens(x: Tensor, group: Group) -> Tensor:
    """All-gather token shards: [..., T / R, C] -> [..., T, C].

    All ranks must use the result in the same way. The gradient on each rank is then already complete, so the backward
    does not sum the gradients over the ranks.
    """
    return _GatherTokens.apply(x, group)  # type: ignore[no-any-return]


def gather_channels(x: Tensor, group: Group) -> Tensor:
    """All-gather the channels of all ranks: [..., C / R] -> [..., C].

    The backward sums the gradients over the ranks, because each rank uses the result differently.
    """
    return _GatherChannels.apply(x, group)  # type: ignore[no-any-return]


def gather_vocab(x: Tensor, group: Group, V: int) -> Tensor:
    """All-gather vocabulary shards into [..., V]. The shards have the sizes of the chunks that ``torch.chunk`` returns.

    All ranks must use the result in the same way. The gradient on each rank is then already complete, so the backward
    does not sum the gradients over the ranks.
    """
    return _GatherVocab.apply(x, group, V)  # type: ignore[no-any-return]


def all_to_all(x: Tensor, sent: list[int], received: list[int], group: Group) -> Tensor:
    """Exchange rows between ranks: [Σ sent, ...] ordered by receiver -> [Σ received, ...] ordered by sender."""
    return _AllToAll.apply(x, sent, received, group)  # type: ignore[no-any-return]


def to_heads(x: Tensor, group: Group) -> Tensor:
    """Exchange this rank's token shard [B, T / R, C] for its head shard [B, T, C / R], which has all tokens."""
    counts = [1] * group.size
    shards = x.unflatten(-1, (group.size, -1)).movedim(-2, 0)  # [R, B, T / R, C / R]
    return in_order(all_to_all(shards, counts, counts, group))


def to_tokens(x: Tensor, group: Group) -> Tensor:
    """Exchange this rank's head shard [B, T, C / R] for its token shard [B, T / R, C]. This inverts `to_heads`."""
    counts = [1] * group.size
    return all_to_all(by_rank(x, group.size), counts, counts, group).movedim(0, -2).flatten(-2)


def divide_gradient(x: Tensor, divisor: float) -> Tensor:
    """Return x unchanged, and divide its gradient by ``divisor``."""
    return _DivideGradient.apply(x, divisor)  # type: ignore[no-any-return]
