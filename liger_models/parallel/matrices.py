"""Computations that need whole matrices of sharded parameters: one rank gathers a matrix, computes the result, and
sends shards of the result back.

The result for each matrix is computed only once, by one of the ranks that hold shards of the matrix. With HSDP, the
rank that computes the result may belong to any replica. If some ranks hold the whole matrix, for example the matrix of
an expert, one of these ranks computes the result, and no shards need to be gathered.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from liger_models.convert.sharded import Part
from liger_models.distributed.ranks import world_size
from liger_models.layers.linear import is_sharded
from liger_models.parallel.mesh import group_over

BUCKET = 2**26
"""Maximum number of elements that a rank gathers at a time, unless a single matrix has more elements."""


class Piece(NamedTuple):
    """The part of a `Unit` that one rank holds.

    Attributes:
        local: index that selects the piece's rows in the rank's shard. The leading dimensions of the shard are
            flattened.
        rows: index that selects the piece's rows in the unit.
        columns: the columns of the unit that the rank's shard contains. The piece has all of these columns.
        shape: number of rows and number of columns.
    """

    local: slice | Tensor
    rows: slice | Tensor
    columns: slice
    shape: tuple[int, int]

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.shape[0] * self.shape[1]


class Unit(NamedTuple):
    """Several matrices of one parameter, all of the same shape, that one rank processes together.

    Attributes:
        parameter: index of the parameter.
        shape: number of matrices, and number of rows and number of columns of each matrix.
        owner: the rank that computes the result.
        pieces: maps each rank that holds a piece to this piece.
        senders: the ranks that send their pieces to the owner. If several ranks have equal pieces, only one of them
            sends its piece.
    """

    parameter: int
    shape: tuple[int, int, int]
    owner: int
    pieces: dict[int, Piece]
    senders: list[int]


class Exchange:
    """Processes the units of all parameters that are sharded over the same ranks.

    The units are divided into buckets, which are processed one after the other. A rank gathers about `BUCKET` elements
    per bucket.

    All ranks of the group must create the exchange together.

    Args:
        group: the process group of these ranks; None for unsharded parameters.
        device: the device on which the ranks communicate and compute.
        parameters: for each parameter, its index, the parameter, and the rows of its matrices (`matrix_rows`).
    """

    def __init__(
        self, group: Any, device: torch.device, parameters: Sequence[tuple[int, Tensor, Sequence[Tensor]]]
    ) -> None:
        self.group, self.rank, self.ranks = group, 0, 1

        # Find the part of each parameter that each rank holds.
        mine: list[Any] = [Part.of(parameter) for _, parameter, _ in parameters]
        parts = [mine]
        if group is not None:
            self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
            parts = [[]] * self.ranks
            dist.all_gather_object(parts, mine, group)

        # Compute the candidates of each parameter. Equal layers have equal candidates, which are computed only once.
        computed: list[tuple[Any, Sequence[Tensor], list[_Candidate]]] = []
        of_parameters: list[tuple[int, list[_Candidate]]] = []
        for (number, parameter, rows), held in zip(parameters, zip(*parts, strict=True), strict=True):
            key = parameter.shape, held, [indices.shape for indices in rows]
            candidates = next((c for k, r, c in computed if k == key and all(map(torch.equal, r, rows))), None)
            if candidates is None:
                candidates = _candidates(parameter.shape, held, rows, device)
                computed.append((key, rows, candidates))
            of_parameters.append((number, candidates))

        # Choose owners, starting with the most expensive units. Of the possible owners, take the rank with the least
        # work so far. All ranks make the same choice. The index of a unit's bucket is the number of buckets that its
        # owner has filled already.
        of_parameters.sort(key=lambda entry: -sum(candidate.cost for candidate in entry[1]))
        loads, filled = [0] * self.ranks, [0] * self.ranks
        buckets: dict[int, list[Unit]] = defaultdict(list)
        for number, candidates in of_parameters:
            for candidate in sorted(candidates, key=lambda candidate: -candidate.cost):
                owner = min(candidate.owners, key=loads.__getitem__)
                senders = _senders(candidate.pieces, owner)
                unit = Unit(number, candidate.shape, owner, candidate.pieces, senders)
                buckets[filled[owner] // BUCKET].append(unit)
                loads[owner] += candidate.cost
                filled[owner] += math.prod(candidate.shape)
        self.buckets = [buckets[number] for number in sorted(buckets)]

    def run(
        self,
        active: Collection[int],
        read: Callable[[int], Tensor],
        compute: Callable[[list[Tensor]], list[Tensor]],
        write: Callable[[int, Tensor], None],
    ) -> None:
        """See `SharedMatrices.run`."""
        # A shard is read for its first unit and written after its last unit, which may be in a later bucket.
        buckets = [[unit for unit in bucket if unit.parameter in active] for bucket in self.buckets]
        left = Counter(unit.parameter for bucket in buckets for unit in bucket)
        shards: dict[int, Tensor] = {}
        for bucket in filter(None, buckets):
            for number in dict.fromkeys(unit.parameter for unit in bucket):
                if number not in shards:
                    shards[number] = read(number)
            self._scatter(bucket, compute(self._gather(bucket, shards)), shards)
            for unit in bucket:
                left[unit.parameter] -= 1
                if not left[unit.parameter]:
                    write(unit.parameter, shards.pop(unit.parameter))

    def _gather(self, bucket: list[Unit], shards: dict[int, Tensor]) -> list[Tensor]:
        """Send this rank's pieces of the bucket's units to the units' owners. Returns the units that this rank owns,
        each [k, n, c]."""
        sent: list[list[Tensor]] = [[] for _ in range(self.ranks)]
        for unit in bucket:
            if self.rank in unit.senders:
                sent[unit.owner].append(shards[unit.parameter][unit.pieces[self.rank].local].flatten())
        owned = [unit for unit in bucket if unit.owner == self.rank]
        received = self._send(sent, [(rank, unit.pieces[rank].size) for unit in owned for rank in unit.senders], shards)

        # The pieces from a sender arrive in the order of the units.
        wholes = []
        for unit in owned:
            k, n, c = unit.shape
            whole = shards[unit.parameter].new_empty(k * n, c)
            for rank in unit.senders:
                piece = unit.pieces[rank]
                whole[piece.rows, piece.columns] = received[rank].pop(0).view(piece.shape)
            wholes.append(whole.view(k, n, c))
        return wholes

    def _scatter(self, bucket: list[Unit], results: list[Tensor], shards: dict[int, Tensor]) -> None:
        """Send the results of a bucket to all ranks that hold pieces, and write this rank's pieces to its shards."""
        sent: list[list[Tensor]] = [[] for _ in range(self.ranks)]
        for unit, result in zip((unit for unit in bucket if unit.owner == self.rank), results, strict=True):
            for rank, piece in unit.pieces.items():
                sent[rank].append(result.flatten(0, 1)[piece.rows, piece.columns].flatten())
        held = [(unit, unit.pieces[self.rank]) for unit in bucket if self.rank in unit.pieces]
        received = self._send(sent, [(unit.owner, piece.size) for unit, piece in held], shards)
        for unit, piece in held:
            shards[unit.parameter][piece.local] = received[unit.owner].pop(0).view(piece.shape)

    def _send(
        self, sent: list[list[Tensor]], expected: list[tuple[int, int]], shards: dict[int, Tensor]
    ) -> list[list[Tensor]]:
        """Exchange tensors with all ranks.

        Args:
            sent: for each rank, the tensors that this rank sends to it.
            expected: the sender's rank and the number of elements for each tensor that this rank receives. Each
                sender's tensors are in the order in which it sends them.
            shards: tensors with the dtype and the device of the exchange.

        Returns:
            For each rank, the tensors that were received from it, flattened.
        """
        if self.group is None:
            return sent
        sizes: list[list[int]] = [[] for _ in range(self.ranks)]
        for rank, size in expected:
            sizes[rank].append(size)
        totals, like = [sum(pieces) for pieces in sizes], next(iter(shards.values()))
        out = torch.cat([like.new_empty(0), *(piece for pieces in sent for piece in pieces)])
        received = like.new_empty(sum(totals))
        counts = [sum(map(torch.numel, pieces)) for pieces in sent]
        dist.all_to_all_single(received, out, totals, counts, group=self.group)
        by_rank = zip(received.split(totals), sizes, strict=True)
        return [[*part.split(pieces)] if pieces else [] for part, pieces in by_rank]


class SharedMatrices:
    """The matrices of a list of parameters. Each matrix is assigned to one rank, which computes its result.

    All ranks must create this object together, with the same parameters.

    Args:
        parameters: plain tensors, or DTensors of any mesh and placement, [N, K] or [X, N, K].
        rows: for each parameter, the rows of its matrices (`matrix_rows`).
    """

    def __init__(self, parameters: Sequence[Tensor], rows: Sequence[Sequence[Tensor]]) -> None:
        groups: dict[Any, Any] = {}
        members: dict[Any, list[tuple[int, Tensor, Sequence[Tensor]]]] = defaultdict(list)
        for number, (parameter, indices) in enumerate(zip(parameters, rows, strict=True)):
            # Parameters share an exchange if their meshes have the same ranks, even if the meshes have different
            # shapes.
            mesh: Any = parameter.device_mesh if is_sharded(parameter) else None  # type: ignore[attr-defined]
            ranks = () if mesh is None else tuple(sorted(mesh.mesh.flatten().tolist()))
            if ranks not in groups:
                groups[ranks] = None if mesh is None else _group(mesh)
            device = parameter.device if mesh is None else torch.device(mesh.device_type)
            members[ranks, device, parameter.dtype].append((number, parameter, indices))
        self.exchanges = [Exchange(groups[ranks], device, part) for (ranks, device, _), part in members.items()]

    def run(
        self,
        active: Collection[int],
        read: Callable[[int], Tensor],
        compute: Callable[[list[Tensor]], list[Tensor]],
        write: Callable[[int, Tensor], None],
    ) -> None:
        """Compute the results of whole matrices, one bucket of matrices at a time. All ranks must call this method.

        Args:
            active: indices of the parameters to process, the same on all ranks.
            read: function that takes a parameter's index and returns this rank's shard of the input, [rows, c]. The
                leading dimensions of the shard are flattened. The result is in new memory on the device of the mesh.
            compute: function that takes stacks [k, n, c] of whole matrices and returns results with the same shapes.
            write: function that takes a parameter's index and this rank's shard of the result, and stores the result.
        """
        for exchange in self.exchanges:
            exchange.run(active, read, compute, write)


class _Candidate(NamedTuple):
    """A unit that has no owner yet. ``owners`` lists the ranks that may become the owner."""

    shape: tuple[int, int, int]
    owners: tuple[int, ...]
    pieces: dict[int, Piece]

    @property
    def cost(self) -> int:
        """Number of multiplications in a Newton-Schulz step for a wide ``X``: ``A = X Xᵀ``, ``A A`` and ``(A A) X``."""
        k, *sizes = self.shape
        small, large = sorted(sizes)
        return k * small**2 * (2 * large + small)


def _group(mesh: Any) -> Any:
    """Return a process group that contains all ranks of a mesh."""
    if mesh.ndim > 1 and mesh.size() == world_size():
        return dist.group.WORLD
    return group_over(mesh).process_group


def _candidates(
    shape: Sequence[int], parts: Sequence[Part], rows: Sequence[Tensor], device: torch.device
) -> list[_Candidate]:
    """Divide a parameter into units. A unit of several matrices has at most about `BUCKET` elements. If there are
    enough matrices, every possible owner can get a unit.

    Args:
        shape: shape of the parameter.
        parts: for each rank, the part of the parameter that the rank holds.
        rows: the rows of the parameter's matrices (`matrix_rows`).
        device: device of the indices in the pieces.
    """
    # Number all rows of the parameter. `held` contains, for each rank, the numbers of its rows.
    numbers = torch.arange(math.prod(shape[:-1]), device="cpu").view(*shape[:-1])
    held = [
        numbers[
            tuple(slice(start, start + size) for start, size in zip(part.offset, part.shape[:-1], strict=False))
        ].flatten()
        for part in parts
    ]
    columns = shape[-1]
    candidates = []
    for indices in rows:  # [matrices, n]
        # For each matrix and rank, count the rows of which the rank has some columns, and the rows of which it has all
        # columns, [matrices, ranks] each.
        shares = zip(held, parts, strict=True)
        some = torch.stack([torch.isin(indices, ids).sum(1) * min(part.shape[-1], 1) for ids, part in shares], 1)
        full = some * torch.tensor([part.shape[-1] == columns for part in parts], device="cpu")

        # A matrix is processed by a rank that holds all of it or, if there is no such rank, by a rank that holds a
        # part.
        groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for matrix, whole in enumerate(full == indices.shape[1]):
            owners = whole if whole.any() else some[matrix]
            groups[tuple(owners.nonzero().flatten().tolist())].append(matrix)
        for ranks, matrices in groups.items():
            k, n = len(matrices), indices.shape[1]
            chunks = min(k, max(len(ranks), -(-k * n * columns // BUCKET)))
            for chunk in indices[matrices].tensor_split(chunks):
                pieces = {
                    rank: piece
                    for rank, (ids, part) in enumerate(zip(held, parts, strict=True))
                    if (piece := _piece(chunk.flatten(), ids, part, device)) is not None
                }
                candidates.append(_Candidate((len(chunk), n, columns), ranks, pieces))
    return candidates


def _piece(rows: Tensor, ids: Tensor, part: Part, device: torch.device) -> Piece | None:
    """Return the piece of a unit that a shard holds, or None if the shard holds no part of the unit.

    Args:
        rows: indices of the unit's rows in the parameter.
        ids: indices of the shard's rows in the parameter, in ascending order.
        part: the shard.
        device: device of the indices in the piece.
    """
    if not ids.numel() or not part.shape[-1]:
        return None
    at = torch.searchsorted(ids, rows).clamp(max=len(ids) - 1)
    present = (ids[at] == rows).nonzero().flatten()
    if not present.numel():
        return None
    columns = slice(part.offset[-1], part.offset[-1] + part.shape[-1])
    return Piece(_index(at[present], device), _index(present, device), columns, (len(present), part.shape[-1]))


def _index(rows: Tensor, device: torch.device) -> slice | Tensor:
    """Return an index that selects the given rows. If the rows are evenly spaced, the index is a slice, because
    indexing with a slice copies nothing. Otherwise, it is a tensor.
    """
    first, last = int(rows[0]), int(rows[-1])
    step = int(rows[1]) - first if len(rows) > 1 else 1
    if step > 0 and bool((rows.diff() == step).all()):
        return slice(first, last + 1, step)
    return rows.to(device)


def _senders(pieces: dict[int, Piece], owner: int) -> list[int]:
    """Return the ranks that send their pieces. If several ranks have equal pieces (replicas), only one of them sends.

    The senders are the ranks of the owner's replica of the model. If the owner is number i among the ranks with the
    same piece, the sender of every other piece is also number i among the ranks that have that piece.
    """
    equal: dict[Any, list[int]] = defaultdict(list)
    for rank, piece in pieces.items():
        rows = piece.rows
        key = tuple(rows.tolist()) if isinstance(rows, Tensor) else (rows.start, rows.stop, rows.step)
        equal[key, piece.columns.start].append(rank)
    position = next((ranks.index(owner) for ranks in equal.values() if owner in ranks), 0)
    return sorted(ranks[position % len(ranks)] for ranks in equal.values())
