"""What the ranks exchange that hold a part of a layer each, as ops on tensors and as differentiable functions.

A layer whose weights are cut over ranks begins with `enter` and ends with `leave`; in between each rank computes a part
of the sum over all of them::

    tokens between layers   enter                  its backward           leave                  its backward
    whole on every rank     nothing                sum over the ranks     sum over the ranks     nothing
    a part on each rank     gather tokens          sum, own tokens        sum, own tokens        gather tokens

Ranks have their tokens in order: of [..., T, C] the first rank has the first T / R.

Ranks that have whole weights and their own tokens exchange tokens for heads where tokens see each other: `to_heads`
before attention, `to_tokens` behind it.

Source: https://arxiv.org/abs/1909.08053 (tensor parallel), https://arxiv.org/abs/2205.05198 (sequence parallel),
https://arxiv.org/abs/2309.14509 (tokens for heads).
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .dispatch import LIBRARY

# Their names since torch 2.13, which warns of the others. PyTorch without distributed has neither.
_gather_into: Any = getattr(dist, "all_gather_single", getattr(dist, "all_gather_into_tensor", None))
reduce_into: Any = getattr(dist, "reduce_scatter_single", getattr(dist, "reduce_scatter_tensor", None))

_groups: dict[str, Any] = {}
"""Process groups by the names that the ops know them by."""


@dataclass(frozen=True)
class Ranks:
    """Ranks that hold a part of a layer each.

    Attributes:
        group: name of their process group, see `ranks_of`.
        size: how many they are, R.
        rank: the calling one, 0 to R - 1.
        sequence: between layers each has its own tokens only.
    """

    group: str
    size: int
    rank: int
    sequence: bool = False

    def own(self, tokens: int) -> slice:
        """The calling rank's part of so many tokens."""
        each = tokens // self.size
        return slice(each * self.rank, each * (self.rank + 1))


def ranks_of(group: Any, *, sequence: bool = False) -> Ranks:
    """The ranks of a ``torch.distributed.ProcessGroup``."""
    _groups[group.group_name] = group
    return Ranks(group.group_name, group.size(), dist.get_rank(group), sequence)


LIBRARY.define("all_reduce(Tensor x, str group) -> Tensor")
LIBRARY.define("all_gather(Tensor x, str group) -> Tensor")
LIBRARY.define("reduce_scatter(Tensor x, str group) -> Tensor")
LIBRARY.define("all_to_all(Tensor x, SymInt[] sent, SymInt[] received, str group) -> Tensor")


@torch.library.impl(LIBRARY, "all_reduce", "CompositeExplicitAutograd")
def _all_reduce(x: Tensor, group: str) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=_groups[group])
    return total


@torch.library.impl(LIBRARY, "all_gather", "CompositeExplicitAutograd")
def _all_gather(x: Tensor, group: str) -> Tensor:
    gathered = x.new_empty(_groups[group].size(), *x.shape)
    _gather_into(gathered.flatten(), x.contiguous().flatten(), group=_groups[group])
    return gathered


@torch.library.impl(LIBRARY, "reduce_scatter", "CompositeExplicitAutograd")
def _reduce_scatter(x: Tensor, group: str) -> Tensor:
    total = x.new_empty(x.shape[1:])
    reduce_into(total.view(-1), x.contiguous().view(-1), group=_groups[group])
    return total


@torch.library.impl(LIBRARY, "all_to_all", "CompositeExplicitAutograd")
def _all_to_all(x: Tensor, sent: list[int], received: list[int], group: str) -> Tensor:
    out = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=_groups[group])
    return out


@torch.library.register_fake("liger_models::all_reduce", lib=LIBRARY)
def _all_reduce_fake(x: Tensor, group: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.register_fake("liger_models::all_gather", lib=LIBRARY)
def _all_gather_fake(x: Tensor, group: str) -> Tensor:
    return x.new_empty(_groups[group].size(), *x.shape)


@torch.library.register_fake("liger_models::reduce_scatter", lib=LIBRARY)
def _reduce_scatter_fake(x: Tensor, group: str) -> Tensor:
    return x.new_empty(x.shape[1:])


@torch.library.register_fake("liger_models::all_to_all", lib=LIBRARY)
def _all_to_all_fake(x: Tensor, sent: list[int], received: list[int], group: str) -> Tensor:
    return x.new_empty(sum(received), *x.shape[1:])


def all_reduce(x: Tensor, ranks: Ranks) -> Tensor:
    """The sum over the ranks; not differentiable."""
    total: Tensor = torch.ops.liger_models.all_reduce(x, ranks.group)
    return total


def all_gather(x: Tensor, ranks: Ranks) -> Tensor:
    """[R, ...], the tensor of each rank; not differentiable."""
    gathered: Tensor = torch.ops.liger_models.all_gather(x, ranks.group)
    return gathered


def reduce_scatter(x: Tensor, ranks: Ranks) -> Tensor:
    """x [R, ...] summed over the ranks, of which each gets its own [...]; not differentiable."""
    total: Tensor = torch.ops.liger_models.reduce_scatter(x, ranks.group)
    return total


def by_rank(x: Tensor, size: int) -> Tensor:
    """[..., T, C] -> [R, ..., T / R, C]: the tokens of each rank."""
    parts: Tensor = x.unflatten(-2, (size, -1)).movedim(-3, 0)
    return parts


def in_order(x: Tensor) -> Tensor:
    """[R, ..., t, C] -> [..., R · t, C]: all tokens."""
    tokens: Tensor = x.movedim(0, -3).flatten(-3, -2)
    return tokens


def gather_rows(rows: Tensor, ranks: Ranks | None) -> Tensor:
    """[n, C] of each rank -> [R · n, C], where the ranks have tokens of their own; else these rows themselves."""
    return all_gather(rows, ranks).flatten(0, 1) if ranks is not None and ranks.sequence else rows


def sum_rows(rows: Tensor, ranks: Ranks | None) -> Tensor:
    """A part of a sum for each row -> the sum over the ranks, of the own rows where each has its own tokens.

    For use inside of ops: ``rows`` is overwritten.
    """
    if ranks is not None and ranks.sequence:
        return reduce_scatter(rows.unflatten(0, (ranks.size, -1)), ranks)
    if ranks is not None:
        dist.all_reduce(rows, group=_groups[ranks.group])
    return rows


def rows_by_rank(tokens: Tensor, ranks: Ranks | None) -> Tensor:
    """[..., T, C] -> [N, C], the tokens of the first rank first where each has its own."""
    tokens = tokens if ranks is None or not ranks.sequence else by_rank(tokens, ranks.size)
    return tokens.reshape(-1, tokens.shape[-1])


def rows_in_order(rows: Tensor, shape: torch.Size, ranks: Ranks | None) -> Tensor:
    """The reverse; ``shape`` [..., t] is that of the own tokens."""
    if ranks is None or not ranks.sequence:
        return rows.view(*shape, rows.shape[-1])
    return in_order(rows.view(ranks.size, *shape, rows.shape[-1])).contiguous()


def all_tokens_shape(shape: torch.Size, ranks: Ranks | None) -> tuple[int, ...]:
    """[..., t] of the own tokens -> [..., T] of all, where each rank has its own."""
    return (*shape[:-1], shape[-1] * ranks.size) if ranks is not None and ranks.sequence else tuple(shape)


def ranks_again(group: str = "", size: int = 1, sequence: bool = False) -> Ranks | None:
    """What an op is told of `Ranks`, as such again."""
    return Ranks(group, size, 0, sequence) if size > 1 else None


def for_op(ranks: Ranks | None) -> tuple[str, int, bool]:
    """What an op is told of `Ranks`."""
    return ("", 1, False) if ranks is None else (ranks.group, ranks.size, ranks.sequence)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, ranks, sequence):
        ctx.ranks, ctx.sequence = ranks, sequence
        return in_order(all_gather(x, ranks)) if sequence else x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        ranks = ctx.ranks
        return reduce_scatter(by_rank(dy, ranks.size), ranks) if ctx.sequence else all_reduce(dy, ranks), None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, ranks):
        ctx.ranks = ranks
        return reduce_scatter(by_rank(x, ranks.size), ranks) if ranks.sequence else all_reduce(x, ranks)

    @staticmethod
    def backward(ctx, dy):
        return in_order(all_gather(dy, ctx.ranks)) if ctx.ranks.sequence else dy, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, ranks):
        ctx.ranks = ranks
        return all_reduce(x, ranks)

    @staticmethod
    def backward(ctx, dy):
        return all_reduce(dy, ctx.ranks), None


class _OwnTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, ranks):
        ctx.ranks = ranks
        return by_rank(x, ranks.size)[ranks.rank].clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx, dy):
        return in_order(all_gather(dy, ctx.ranks)), None


class _AllTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, ranks):
        ctx.ranks = ranks
        return in_order(all_gather(x, ranks))

    @staticmethod
    def backward(ctx, dy):
        return by_rank(dy, ctx.ranks.size)[ctx.ranks.rank], None


class _AllWords(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, ranks, V):
        ctx.ranks, ctx.words = ranks, x.shape[-1]
        each = -(-V // ranks.size)
        gathered = all_gather(torch.nn.functional.pad(x, (0, each - x.shape[-1])), ranks)
        return gathered.movedim(0, -2).flatten(-2)[..., :V]

    @staticmethod
    def backward(ctx, dy):
        start = -(-dy.shape[-1] // ctx.ranks.size) * ctx.ranks.rank
        return dy[..., start : start + ctx.words], None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, sent, received, ranks):
        ctx.sent, ctx.received, ctx.ranks = sent, received, ranks
        return torch.ops.liger_models.all_to_all(x, sent, received, ranks.group)

    @staticmethod
    def backward(ctx, dy):
        dx = torch.ops.liger_models.all_to_all(dy, ctx.received, ctx.sent, ctx.ranks.group)
        return dx, None, None, None


class _DivideGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, divisor):
        ctx.divisor = divisor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        return dy / ctx.divisor, None


def enter(x: Tensor, ranks: Ranks | None) -> Tensor:
    """Tokens, for a layer that computes a part of its result on each rank; without ranks the tensor itself."""
    return x if ranks is None else _Enter.apply(x, ranks, ranks.sequence)


def leave(x: Tensor, ranks: Ranks | None) -> Tensor:
    """The sum of such parts; without ranks the tensor itself."""
    return x if ranks is None else _Leave.apply(x, ranks)


def sum_gradient(x: Tensor, ranks: Ranks) -> Tensor:
    """The tensor itself, the same on all ranks, whose gradient is the sum of theirs."""
    return _Enter.apply(x, ranks, False)  # type: ignore[no-any-return]


def sum_over(x: Tensor, ranks: Ranks) -> Tensor:
    """The sum over the ranks, of which each makes something else: so that their gradients are summed, too."""
    return _Sum.apply(x, ranks)  # type: ignore[no-any-return]


def own_tokens(x: Tensor, ranks: Ranks) -> Tensor:
    """[..., T, C], the same on all ranks -> [..., T / R, C]."""
    return _OwnTokens.apply(x, ranks)  # type: ignore[no-any-return]


def all_tokens(x: Tensor, ranks: Ranks) -> Tensor:
    """[..., T / R, C] -> [..., T, C], of which all ranks make the same."""
    return _AllTokens.apply(x, ranks)  # type: ignore[no-any-return]


def all_words(x: Tensor, ranks: Ranks, V: int) -> Tensor:
    """A rank's columns of [..., V], as ``torch.chunk`` cuts them -> all of them, of which all ranks make the same."""
    return _AllWords.apply(x, ranks, V)  # type: ignore[no-any-return]


def all_to_all(x: Tensor, sent: list[int], received: list[int], ranks: Ranks) -> Tensor:
    """Rows [Σ sent, ...] for each rank in turn -> [Σ received, ...], those from each rank in turn."""
    return _AllToAll.apply(x, sent, received, ranks)  # type: ignore[no-any-return]


def to_heads(x: Tensor, ranks: Ranks) -> Tensor:
    """[B, T / R, C] of the own tokens -> [B, T, C / R] of all: each rank gets the columns that are its own."""
    each = [1] * ranks.size
    return in_order(all_to_all(x.unflatten(-1, (ranks.size, -1)).movedim(-2, 0), each, each, ranks))


def to_tokens(x: Tensor, ranks: Ranks) -> Tensor:
    """The reverse: [B, T, C / R] -> [B, T / R, C]."""
    each = [1] * ranks.size
    return all_to_all(by_rank(x, ranks.size), each, each, ranks).movedim(0, -2).flatten(-2)


def divide_gradient(x: Tensor, divisor: float) -> Tensor:
    """The tensor itself, its gradient divided."""
    return _DivideGradient.apply(x, divisor)  # type: ignore[no-any-return]
