"""Which part of the data a rank gets: out of the process group, a `DeviceMesh`, or what the caller says.

Ranks of a tensor, pipeline or context-parallel group compute on the same samples; only data-parallel ranks divide them:

    mesh ("dp" 2, "tp" 2)      rank   0  1  2  3
                               data   0  0  1  1     of 2
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed
from torch.distributed.device_mesh import DeviceMesh

from headrace.errors import UsageError

#: Dimensions that data are divided over where none are named.
DATA_DIMS = ("dp", "dp_replicate", "dp_shard")


def data_rank(
    rank: int | None,
    world: int | None,
    mesh: DeviceMesh | None = None,
    mesh_dims: str | Sequence[str] | None = None,
) -> tuple[int, int]:
    """(rank, number of ranks) of those that divide the data among them.

    `mesh_dims`: names of the dimensions of `mesh` that do; none of them: all ranks get the same. By default those of
    `DATA_DIMS` that the mesh has. `UsageError` where `rank` and `world` are not both given, or a mesh besides; where
    the mesh has no such dimension; where this process is none of the mesh's.
    """
    if (rank is None) != (world is None):
        raise UsageError("rank and world belong together", expected="both or none")
    if mesh is None:
        if mesh_dims is not None:
            raise UsageError("mesh_dims are dimensions of a mesh, and none is given", expected="mesh=")
        return (rank, world) if rank is not None and world is not None else _from_process_group()
    if not isinstance(mesh, DeviceMesh):
        raise UsageError("mesh is no DeviceMesh", found=type(mesh).__name__)
    if rank is not None:
        raise UsageError("rank and world are given, and a mesh that says them", expected="one of the two")
    names = list(mesh.mesh_dim_names or ())
    wanted = _data_dims(names, mesh_dims)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise UsageError("this rank is not in the mesh", where=f"rank {torch.distributed.get_rank()}", found=str(mesh))
    part, parts = 0, 1
    for dim, name in enumerate(names):
        if name in wanted:
            part, parts = part * mesh.size(dim) + coordinate[dim], parts * mesh.size(dim)
    return part, parts


def _data_dims(names: list[str], mesh_dims: str | Sequence[str] | None) -> list[str]:
    there = ", ".join(names) or "none that has a name"
    if mesh_dims is None:
        wanted = [name for name in names if name in DATA_DIMS]
        if not wanted:
            raise UsageError(
                "the mesh has no dimension that is known to divide the data",
                expected=" or ".join(DATA_DIMS),
                found=there,
                next_step="name those that do: mesh_dims=",
            )
        return wanted
    wanted = [mesh_dims] if isinstance(mesh_dims, str) else list(mesh_dims)
    unknown = [name for name in wanted if name not in names]
    if unknown or len(set(wanted)) < len(wanted):
        raise UsageError(
            f"the mesh has no dimension {unknown[0]!r}" if unknown else "a dimension of the mesh is named twice",
            where="mesh_dims",
            expected=f"of {there}",
            found=", ".join(map(str, wanted)),
        )
    return wanted


def _from_process_group() -> tuple[int, int]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1
