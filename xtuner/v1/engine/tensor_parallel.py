"""Tensor parallelism of dense layers by DTensor plans.

Between the matrices every rank holds other rows (sequence-parallel form, Korthikanti et al. 2022, arXiv 2205.05198):
rows are gathered in front of a matrix that is cut by columns, and summed and scattered behind one that is cut by
rows. Norms, residuals, embedding and head compute on a rank's own rows: nothing is computed twice, and embedding and
head need no cut. Those two are sharded by FSDP over all ranks, which a cut vocabulary would not improve on.
"""

from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from xtuner.v1.model.dense import DecoderModel
from xtuner.v1.model.row_order import RowOrder


def cut_layers(model: DecoderModel, mesh: DeviceMesh) -> None:
    """Cut every layer's matrices over `mesh`, in place; before FSDP, on the meta device.

    A layer then takes and gives the hidden states of this rank's rows; the rotary table and the attention context
    it is called with cover the rows of all ranks of the mesh, and this rank's heads.
    """
    size = mesh.size()
    model.drops_rows = False  # ranks would come to the last MLP with different numbers of rows
    for layer in model.layers:
        plan = {
            "self_attn.qkv_proj": ColwiseParallel(input_layouts=Shard(0)),
            "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(0)),
            "mlp.gate_up_proj": ColwiseParallel(input_layouts=Shard(0)),
            "mlp.down_proj": RowwiseParallel(output_layouts=Shard(0)),
        }
        parallelize_module(layer, mesh, plan, src_data_rank=None)
        attention: Any = layer.get_submodule("self_attn")
        attention.num_q //= size
        attention.num_kv //= size
    sections: dict[str, list[tuple[int, int]]] = {}
    for place in model.hf_params.values():
        sections.setdefault(place.param, []).append((place.start, place.end))
    for name, parts in sections.items():
        if len(parts) > 1:
            model.row_orders[name] = RowOrder(tuple(end - start for start, end in sorted(parts)), size)
