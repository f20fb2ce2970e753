"""Which rank does what: one numbering of all ranks, and the groups that are cut from it."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from xtuner.v1.config import FSDPConfig


@dataclass(frozen=True, slots=True)
class MeshSizes:
    """How many ranks each kind of parallelism has. Their product, `ep` aside, is the number of ranks."""

    replicate: int
    """Copies of the whole sharded model (HSDP)."""
    shard: int
    """Ranks with different packs that share out the parameters."""
    sp: int
    """Ranks that share out the rows of a pack, and the heads in attention."""
    tp: int
    """Ranks that share out every matrix of a layer."""
    ep: int = 1
    """Ranks that share out the experts of a layer; these are taken from shard x sp."""

    @classmethod
    def of(cls, cfg: FSDPConfig, sp_size: int, world_size: int, where: str = "fsdp_cfg") -> "MeshSizes":
        """The sizes on `world_size` ranks.

        Raises:
            ValueError: they do not fit, with the numbers; `where` names `cfg`.
        """
        tp, ep, of_pack = cfg.tp_size, cfg.ep_size, sp_size * cfg.tp_size
        if world_size % of_pack:
            raise ValueError(
                f"{where}.tp_size={tp} x sp_size={sp_size} does not divide num_workers={world_size}; use a multiple of "
                f"{of_pack} workers."
            )
        ranks = world_size // tp
        sharded = cfg.hsdp_sharding_size or ranks
        if ranks % sharded:
            of_tp = f" / tp_size={tp}" if tp > 1 else ""
            raise ValueError(
                f"{where}.hsdp_sharding_size={sharded} does not divide num_workers={world_size}{of_tp}; use a divisor "
                f"of {ranks} or None."
            )
        if sharded % sp_size:
            raise ValueError(
                f"{where}.hsdp_sharding_size={sharded} is no multiple of sp_size={sp_size}: the ranks of a pack must "
                "lie within one copy of the model."
            )
        if ep > 1 and tp > 1:
            raise ValueError(f"{where}: ep_size={ep} needs tp_size=1, not {tp}.")
        if ranks % ep:
            raise ValueError(f"{where}.ep_size={ep} does not divide num_workers={world_size}; use a divisor of it.")
        return cls(replicate=ranks // sharded, shard=sharded // sp_size, sp=sp_size, tp=tp, ep=ep)

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.data * self.pack

    @property
    def data(self) -> int:
        """Groups of ranks that get packs of their own."""
        return self.replicate * self.shard

    @property
    def pack(self) -> int:
        """Ranks that work on one pack together."""
        return self.sp * self.tp


class ParallelMesh:
    """The ranks as an array [replicate, shard, sp, tp], the last one running fastest, and views of it.

    tp is innermost because it talks most: rows are gathered and scattered around every matrix. sp comes next (two
    exchanges of heads a layer), then shard (weights once or twice a layer and forward), then replicate (gradients
    once a step).

    Meshes for FSDP and DTensor (one dimension is left out where its size is 1, the sharded one aside):

    - `layers`: (replicate, shard x sp). FSDP of a layer's parameters: gathers weights, sums gradients.
    - `root`: (replicate, shard x sp x tp). FSDP of embedding, final norm and head. They are not cut by tensor
      parallelism: every rank computes other rows with them.
    - `tp`: (tp), of one root with `layers`. Columns or rows of a layer's matrices; None without.
    - `expert_shard` and `ep`, where expert shard x ep = shard x sp. Experts are cut over the second and sharded by FSDP
      over the first; None without.

    Process groups (None: the group of this rank alone, or nothing to be done):

    - `data_group`: ranks with this rank's place in a pack, and other packs: sums of losses, counts and metrics.
    - `sp_group`: ranks that exchange rows for heads around attention.
    - `tp_group`: ranks that hold pieces of the same matrices; norms inside layers sum their gradients over it.
    - `pack_group`: sp x tp, the ranks of one pack: log-probs of all its rows are collected over it.

    Gradients are sums over the ranks of `layers` or `root`, never means: the parts of one pack and of different
    packs add up alike.
    """

    def __init__(self, sizes: MeshSizes, device_type: str, prefix: str = "default") -> None:
        self.sizes, self._device_type, self._prefix = sizes, device_type, prefix
        self._views: dict[tuple[tuple[str, int], ...], DeviceMesh] = {}
        if sizes.world != dist.get_world_size():
            raise ValueError(f"a mesh of {sizes.world} ranks for a process group of {dist.get_world_size()}.")
        r, s, sp, tp = sizes.replicate, sizes.shard, sizes.sp, sizes.tp
        whole = self._view("shard", replicate=r, shard=s * sp, tp=tp)
        self.tp = whole[self._name("tp")] if tp > 1 else None
        self.layers = self._part(whole, "replicate", "shard") if tp > 1 else whole
        self.root = self._view("shard", replicate=r, shard=s * sp * tp)
        self.ep = self.expert_shard = None
        if sizes.ep > 1:
            experts = self._view("expert_shard", expert_shard=s * sp // sizes.ep, ep=sizes.ep)
            self.ep, self.expert_shard = experts[self._name("ep")], experts[self._name("expert_shard")]
        batch = self._view("data", data=r * s, sp=sp, tp=tp) if sizes.pack > 1 else None
        packs = self._view("data", data=r * s, pack=sp * tp) if sizes.pack > 1 else None
        self.data_group = batch.get_group(self._name("data")) if batch is not None else dist.group.WORLD
        self.sp_group = batch.get_group(self._name("sp")) if batch is not None and sp > 1 else None
        self.tp_group = self.tp.get_group() if self.tp is not None else None
        self.pack_group = packs.get_group(self._name("pack")) if packs is not None else None
        rank = dist.get_rank()
        self.data_rank, self.pack_rank = rank // sizes.pack, rank % sizes.pack
        self.sp_rank, self.tp_rank = self.pack_rank // tp, self.pack_rank % tp

    def _name(self, dim: str) -> str:
        return f"{self._prefix}.{dim}"

    def _view(self, always: str, **dims: int) -> DeviceMesh:
        """The ranks, in order, as an array of these dimensions; those of size 1 are left out, `always` aside."""
        kept = tuple((self._name(dim), size) for dim, size in dims.items() if size > 1 or dim == always)
        if kept not in self._views:
            names, shape = zip(*kept, strict=True)
            self._views[kept] = init_device_mesh(self._device_type, shape, mesh_dim_names=names)
        return self._views[kept]

    def _part(self, mesh: DeviceMesh, *dims: str) -> DeviceMesh:
        names = mesh.mesh_dim_names or ()
        return mesh[tuple(name for name in names if name in {self._name(dim) for dim in dims})]


def build_mesh(cfg: FSDPConfig, sp_size: int, device: torch.device) -> ParallelMesh:
    """The mesh of all ranks of the process group."""
    return ParallelMesh(MeshSizes.of(cfg, sp_size, dist.get_world_size()), device.type, cfg.mesh_prefix)
