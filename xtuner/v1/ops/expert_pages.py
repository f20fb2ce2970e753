"""Which experts each token went through, in pages of a cache beside its keys and values."""

import torch
from torch import Tensor


def store_experts(chosen: Tensor, pages: Tensor, places: Tensor) -> None:
    """Put rows into pages: chosen int64 [T, C], pages int16 [N, PAGE, C], whose pages may lie any distance apart.

    places int64 [T]: page * PAGE + offset of each row; negative: the row is dropped.
    """
    if pages.is_cuda:
        # Not torch's operation: captured in a graph, it would keep to the number of pages of its capture.
        from .expert_pages_kernel import store_experts as by_triton

        return by_triton(chosen, pages, places)
    kept = places >= 0
    pages[places[kept] // pages.shape[1], places[kept] % pages.shape[1]] = chosen[kept].to(torch.int16)


def read_experts(pages: Tensor, places: Tensor) -> Tensor:
    """Rows int16 [T, C] from places int64 [T], none of them negative; arguments as of `store_experts`."""
    return pages[places // pages.shape[1], places % pages.shape[1]]
