"""Functions that find the dimension of a device mesh for each kind of parallelism."""

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from liger_models.distributed.collectives import Group, group_of
from liger_models.distributed.groups import ParallelGroups
from liger_models.distributed.ranks import world_size


def own_dimension(where: str, mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return a mesh's dimension ``name``, or the mesh itself if it has only one dimension.

    Args:
        where: name of the calling function, for errors.
        mesh: the mesh.
        name: name of the dimension.

    Raises:
        ValueError: the mesh has several dimensions, but none with this name.
    """
    if mesh.ndim == 1:
        return mesh
    if name not in (mesh.mesh_dim_names or ()):
        raise ValueError(
            f'{where}: mesh must have one dimension, or one called "{name}", got {mesh}. Create it with '
            f'mesh_dim_names=("dp", "{name}"), or take one of its dimensions: mesh["{name}"].'
        )
    return mesh[name]


def data_mesh(mesh: DeviceMesh, groups: ParallelGroups, experts: Group | None) -> tuple[DeviceMesh, DeviceMesh | None]:
    """Return the mesh over which `apply_fsdp` shards, and the mesh over which it shards experts after `apply_ep`.

    The dimension of `apply_tp` is left out, because its ranks hold different shards. The dimensions of `apply_cp` and
    `apply_ep` are merged with the data-parallel dimension, because the ranks along these dimensions hold the same
    weights, except for the experts.

    Args:
        mesh: the mesh of all ranks, with or without the dimension of `apply_tp`.
        groups: the process groups of the model.
        experts: the group over which the model's experts are sharded, or None.

    Returns:
        Two meshes: the mesh over which parameters are sharded, with one dimension, or with two dimensions for HSDP;
        and the mesh of the ranks that hold the same experts, or None.

    Raises:
        ValueError: the mesh does not have the dimensions that the model needs.
    """
    if mesh.ndim != 1 and mesh.mesh_dim_names is None:
        raise ValueError(
            f"apply_fsdp: mesh must have one dimension, or two with names, got {mesh}. Name its dimensions by "
            "mesh_dim_names."
        )
    # Tensor-parallel ranks hold different shards of the same layers.
    mesh = _without(mesh, _dimension(mesh, "tp", groups.tensor))
    ranks = set(mesh.mesh.flatten().tolist())
    if groups.tensor is not None and len(ranks.intersection(groups.tensor.members)) != 1:
        raise ValueError(
            "apply_fsdp: mesh must not have the ranks over which apply_tp has sharded the model, except in a separate "
            f'dimension, got {mesh}. Pass the mesh of all ranks, or mesh["dp"] of it.'
        )
    if groups.context is not None and not ranks.issuperset(groups.context.members):
        raise ValueError(
            "apply_fsdp: mesh must have all ranks over which apply_cp has distributed the tokens, because the "
            f"gradients are averaged over these ranks, too, got {mesh}. Pass the mesh of all ranks, or leave it out."
        )

    # Context-parallel and expert-parallel ranks hold the same weights except for the experts.
    cp, ep = _dimension(mesh, "cp", groups.context), _dimension(mesh, "ep", experts)
    if experts is not None and (mesh.ndim != 2 or ep is None):
        raise ValueError(
            f"apply_fsdp: mesh must have two dimensions after apply_ep, one of them the {experts and experts.size} "
            f'ranks that share the experts, got {mesh}. Pass the mesh whose mesh["ep"] apply_ep got; its other '
            "dimension may be of size 1."
        )
    experts_mesh = None if experts is None else _without(mesh, ep)
    if cp or ep:
        # Only the last two dimensions can be merged. A dimension before them is over HSDP's replicas.
        dimensions = mesh.mesh_dim_names or ()
        if mesh.size() != world_size() or (cp or ep) not in dimensions[-2:]:
            raise ValueError(
                "apply_fsdp: mesh must have all ranks, and its last or last but one dimension must be the ranks of "
                f'apply_cp or apply_ep, got {mesh}. Create it with mesh_dim_names=("dp", "{cp or ep}").'
            )
        mesh = DeviceMesh(mesh.device_type, mesh.mesh.flatten(-2), mesh_dim_names=(*dimensions[:-2], "data"))
    if mesh.ndim > 2:
        raise ValueError(
            "apply_fsdp: mesh must have one dimension, or two with names, besides those of apply_tp, apply_cp and "
            f"apply_ep, got {mesh}. Pass only the dimensions of the data-parallel ranks."
        )
    return mesh, experts_mesh


def replicas(mesh: DeviceMesh, tensor: Group | None) -> frozenset[int]:
    """Return the ranks that hold replicas of the calling rank's weights: one rank from each tensor-parallel group.

    Args:
        mesh: a mesh, or some dimensions of a larger mesh. The result covers all dimensions of the larger mesh.
        tensor: the tensor-parallel group of `apply_tp`, whose ranks hold different shards; or None.
    """
    root = mesh._get_root_mesh()
    ranks, coordinate = root.mesh, root.get_coordinate()
    for dim in range(root.ndim):
        # Along the tensor-parallel dimension of the mesh, this rank's neighbors are the members of the group. Of this
        # dimension, keep only this rank's coordinate.
        if tensor is not None and coordinate is not None:
            along = root.mesh.movedim(dim, -1)[tuple(place for i, place in enumerate(coordinate) if i != dim)]
            if along.tolist() == tensor.members:
                ranks = root.mesh.select(dim, coordinate[dim])
    return frozenset(ranks.flatten().tolist())


def group_over(mesh: DeviceMesh) -> Group:
    """Return a group of all ranks in a mesh. If the mesh has several dimensions, all its ranks must call this
    function."""
    if mesh.ndim == 1:
        return group_of(mesh.get_group())
    return group_of(dist.new_group(mesh.mesh.flatten().tolist(), use_local_synchronization=True))


def _dimension(mesh: DeviceMesh, name: str, group: Group | None) -> str | None:
    """Return the name of the mesh dimension along which the ranks of ``group`` lie, or None if there is no such
    dimension.

    ``group`` is None if the parallelism covers only one rank. The result is then ``name`` if the mesh has a dimension
    of this name with size 1, and otherwise None.
    """
    for index, dimension in enumerate(mesh.mesh_dim_names or () if mesh.ndim > 1 else ()):
        ranks = dist.get_process_group_ranks(mesh.get_group(index))
        if ranks == group.members if group is not None else (dimension == name and len(ranks) == 1):
            return dimension
    return None


def _without(mesh: DeviceMesh, name: str | None) -> DeviceMesh:
    """Return a mesh without its dimension ``name``."""
    rest = tuple(dimension for dimension in mesh.mesh_dim_names or () if dimension != name)
    return mesh if name is None else mesh[rest]
