import pytest
import torch
import torch.distributed as dist


@pytest.fixture(autouse=True)
def one_process_group():
    """A group of this process alone, as the local launcher makes it."""
    torch.set_num_threads(1)
    own = not dist.is_initialized()
    if own:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if own:
        dist.destroy_process_group()
