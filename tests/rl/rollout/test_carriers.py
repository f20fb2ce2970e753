"""Weights on their way to a server's process: the real protocol, with a thread in place of the process."""

import asyncio
import base64
import inspect
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from tests.engines.host_window import HostWindow
from xtuner.v1.data_proto import WeightBucket
from xtuner.v1.rl.rollout.backends.carriers import FolderCarrier, MemoryCarrier, carrier_for
from xtuner.v1.rl.rollout.backends.engine_side.xtuner_vllm import _loads_in_place
from xtuner.v1.rl.rollout.backends.engine_side.xtuner_weights import BrokenUpdateError, take_update
from xtuner.v1.rl.rollout.backends.lmdeploy_weights import BucketCarrier, rebuild_arguments
from xtuner.v1.rl.rollout.backends.server import ServerRefused
from xtuner.v1.rl.weight_update import WeightUpdateError

CPU = torch.device("cpu")


class Server:
    """Takes updates as engines do, in a thread."""

    def __init__(self, home):
        self.home = self.sockets = home
        self.model_path = home
        self.weights = {}
        self.ends = []

    async def load(self, folder, version): ...

    async def outlive(self, work): ...

    async def take(self, address, version):
        try:
            await asyncio.to_thread(take_update, address, CPU, self.read)
        except Exception as error:
            self.ends.append(error)
            raise

    def read(self, update):
        for bucket in update:
            self.weights |= {name: tensor.clone() for name, tensor in bucket}
        self.ends.append("read")


def weights(count=7):
    generator = torch.Generator().manual_seed(0)
    dtypes = [torch.float32, torch.bfloat16]
    return {f"w{i}": torch.randn(3 + i, 5, generator=generator).to(dtypes[i % 2]) for i in range(count)}


def one_each(tensors, **more):
    return [WeightBucket({name: tensor}, **more) for name, tensor in tensors.items()]


def bring(server, buckets):
    async def run():
        await asyncio.wait_for(MemoryCarrier(server, "host").bring(buckets, 3), 20)

    asyncio.run(run())


def test_every_bit_arrives_through_two_buffers(tmp_path):
    server, sent = Server(tmp_path), weights()
    bring(server, one_each(sent))
    assert server.weights.keys() == sent.keys()
    for name, tensor in sent.items():
        assert server.weights[name].dtype == tensor.dtype and torch.equal(server.weights[name], tensor)
    bring(server, one_each(sent, dtype=torch.bfloat16))
    assert all(torch.equal(server.weights[name], tensor.to(torch.bfloat16)) for name, tensor in sent.items())


def test_tensors_and_buckets_without_elements_arrive_too(tmp_path):
    server, some = Server(tmp_path), {"a": torch.ones(3), "none": torch.zeros(0, 4), "scalar": torch.tensor(2.5)}
    bring(server, [WeightBucket({}), WeightBucket({"empty": torch.zeros(2, 0)}), WeightBucket(some), WeightBucket({})])
    assert {name: tuple(t.shape) for name, t in server.weights.items()} == {
        "empty": (2, 0), "a": (3,), "none": (0, 4), "scalar": (),
    }  # fmt: skip


def test_a_server_that_cannot_load_ends_the_update_with_its_words(tmp_path):
    server = Server(tmp_path)

    def read(update):
        for bucket in update:
            raise KeyError(bucket[0][0])

    server.read = read
    left = iter(one_each(weights()))
    with pytest.raises(WeightUpdateError, match="the other process refused the update: KeyError: 'w0'"):
        bring(server, left)
    assert not list(left)  # gathering is collective: it goes to its end


def test_an_update_that_breaks_off_ends_for_the_loader_as_a_whole_one_and_is_an_error_after_that(tmp_path):
    server = Server(tmp_path)

    def breaks():
        yield from one_each(weights(4))
        raise WeightUpdateError("3 missing")

    with pytest.raises(WeightUpdateError, match="^3 missing$"):
        bring(server, breaks())
    assert server.ends[0] == "read" and isinstance(server.ends[1], BrokenUpdateError)
    assert "the update broke off: the sender broke down" in str(server.ends[1])
    bring(server, one_each(weights()))
    assert len(server.weights) == 7


class Buckets:
    """Takes buckets as LMDeploy does, which remembers the memory until another is named."""

    def __init__(self):
        self.weights, self.ends, self.server = {}, 0, self

    async def ready_for_weights(self): ...

    async def has_weights(self):
        self.ends += 1

    def last_lines(self):
        return "the last lines"

    async def change(self, path, body, timeout):
        message = ForkingPickler.loads(base64.b64decode(body["serialized_named_tensors"]))
        if "flattened_tensor" in message:
            rebuild, args = message["flattened_tensor"]
            self.flat = rebuild(*args[:6], "the device")
        for entry in message["metadata"]:
            if entry.name == "unheard of":
                raise ServerRefused("the server, its update", 500, "KeyError")
            self.weights[entry.name] = self.flat[entry.start_idx : entry.end_idx].view(entry.shape).clone()


def test_lmdeploy_gets_tensors_of_all_types_and_sizes():
    engine = Buckets()
    sent = weights() | {"none": torch.zeros(0, 4), "scalar": torch.tensor(2.5), "large": torch.randn(700)}
    buckets = [WeightBucket(sent | {"empty": torch.zeros(2, 0)}), WeightBucket({}), WeightBucket({"e": torch.zeros(0)})]
    large = {"twice": torch.arange(3000.0), "half": torch.arange(5).half()}
    asyncio.run(BucketCarrier(engine, HostWindow).bring([*buckets, WeightBucket(large)], 3))
    assert engine.ends == 1 and engine.weights.keys() == sent.keys() | large.keys() | {"empty", "e"}
    for name, tensor in (sent | large).items():
        assert engine.weights[name].dtype == tensor.dtype and torch.equal(engine.weights[name], tensor), name


def test_what_rebuilds_memory_of_the_gpu_is_in_torch_s_order():
    """It can be opened on a GPU alone; here it is that every value goes where its name says."""
    handle = bytes(range(64))
    values = rebuild_arguments(4096, torch.bfloat16, (handle, 1024, 1 << 21), b"\x02c", b"/torch_1", 7)
    bound = inspect.signature(rebuild_cuda_tensor).bind(*values).arguments
    assert bound["storage_handle"] == b"\x02c" + handle and bound["dtype"] == torch.bfloat16
    assert (bound["tensor_offset"], bound["tensor_size"], bound["tensor_stride"]) == (512, torch.Size([2048]), (1,))
    assert (bound["storage_offset_bytes"], bound["storage_size_bytes"]) == (0, 1 << 21)
    assert (bound["ref_counter_handle"], bound["ref_counter_offset"]) == (b"/torch_1", 7)
    assert bound["event_sync_required"] is False and bound["requires_grad"] is False
    assert list(bound).index("storage_device") == 6  # which LMDeploy replaces


def test_an_update_that_lmdeploy_refuses_in_the_middle_has_not_ended():
    engine = Buckets()
    carrier = BucketCarrier(engine, HostWindow)
    with pytest.raises(WeightUpdateError, match="did not reach the engine: .*: HTTP 500: KeyError the last lines"):
        asyncio.run(carrier.bring(one_each({"a": torch.ones(3), "unheard of": torch.ones(3), "b": torch.ones(3)}), 3))
    assert engine.ends == 0 and "b" not in engine.weights and not carrier.can_repeat()


def test_a_server_that_does_not_ask_for_the_weights_has_not_taken_them(tmp_path):
    server = Server(tmp_path)

    async def refuses(address, version):
        raise RuntimeError("no such route")

    async def ignores(address, version): ...

    for take, text in ((refuses, "no such route"), (ignores, "answered before it asked for the weights")):
        server.take = take
        with pytest.raises(RuntimeError, match=text):
            bring(server, one_each(weights()))


def test_nothing_is_kept_of_what_came_through_memory(tmp_path):
    carrier = MemoryCarrier(Server(tmp_path), "host")
    assert carrier.can_repeat()
    asyncio.run(carrier.bring(one_each(weights()), 1))
    assert not carrier.can_repeat()


def test_the_device_chooses_unless_the_user_does(tmp_path):
    kinds = {"cpu": FolderCarrier, "cuda": MemoryCarrier}
    for device, kind in kinds.items():
        assert type(carrier_for(Server(tmp_path), None, device)) is kind
        assert type(carrier_for(Server(tmp_path), "ipc", device)) is MemoryCarrier
        assert type(carrier_for(Server(tmp_path), "folder", device)) is FolderCarrier


class UnquantizedLinearMethod: ...


class Fp8LinearMethod: ...


class Attention(nn.Module):
    def process_weights_after_loading(self, dtype): ...


class MLAAttention(Attention): ...


def test_vllm_s_layers_that_keep_more_than_their_weights_are_not_loaded_in_place():
    def layer(method):
        made = nn.Linear(2, 2)
        made.quant_method = method
        return made

    for plain in (nn.Linear(2, 2), layer(None), layer(UnquantizedLinearMethod()), Attention()):
        assert _loads_in_place(plain)
    for other in (layer(Fp8LinearMethod()), layer(SimpleNamespace()), MLAAttention()):
        assert not _loads_in_place(other)
