"""Weights and moments on their way to the host and back. On a CPU the same code moves between two places in memory."""

import pytest
import torch

from xtuner.v1.config import AdamWConfig
from xtuner.v1.engine import save_train_state
from xtuner.v1.engine.host_memory import HostCopy, PinnedBuffer
from xtuner.v1.engine.parking import Parking

from .helpers import make_engine, make_samples, packs_of, weights

CPU = torch.device("cpu")


def test_tensors_give_their_memory_back_and_return_as_the_same_objects():
    base = torch.arange(12.0)
    odd, empty = torch.randn(7), torch.empty(0)
    view = base.view(3, 4)[1:]
    values = base.clone(), odd.clone()
    copy = HostCopy([view, base, odd, empty], CPU)
    assert copy.num_bytes == 12 * 4 + 7 * 4
    addresses = []
    for _ in range(2):
        copy.park()
        assert base.untyped_storage().nbytes() == odd.untyped_storage().nbytes() == 0
        addresses.append(copy._buffer.bytes.data_ptr())
        copy.park()  # already there
        copy.restore()
        copy.ready()
        assert torch.equal(base, values[0]) and torch.equal(odd, values[1])
        assert torch.equal(view, values[0].view(3, 4)[1:])
    assert addresses[0] == addresses[1]
    assert copy.seconds() == {}


def test_what_did_not_change_is_not_copied_again():
    tensor = torch.ones(5)
    copy = HostCopy([tensor], CPU)
    copy.park(changed=False)  # the host has never had it
    copy.restore()
    assert torch.equal(tensor, torch.ones(5))
    tensor.fill_(2)
    copy.park(changed=False)
    copy.restore()
    assert torch.equal(tensor, torch.ones(5))
    tensor.fill_(3)
    copy.park()
    copy.restore()
    assert torch.equal(tensor, torch.full((5,), 3.0))


def test_parts_of_a_buffer_do_not_touch():
    _, parts = PinnedBuffer.of_sizes([3, 0, 300, 8], CPU)
    for i, part in enumerate(parts):
        part.fill_(i + 1)
    assert [part.numel() for part in parts] == [3, 0, 300, 8]
    assert all((part == i + 1).all() and part.data_ptr() % 8 == 0 for i, part in enumerate(parts) if part.numel())


def _step(engine, seed):
    pack = packs_of(make_samples(6, seed=seed))[0][0][0]
    logprobs, _ = engine.forward(pack)
    engine.backward(-(pack.advantages * logprobs).sum())
    engine.step()


@pytest.mark.parametrize("moment_dtype", ["float32", "bfloat16"])
def test_parking_between_steps_changes_no_bit(tmp_path, moment_dtype):
    cfg = AdamWConfig(lr=1e-2, moment_dtype=moment_dtype)
    fsdp = {"reshard_after_forward": False}  # a forward alone leaves gathered weights, which must not stay behind
    plain, parked = (make_engine(tmp_path, optim_cfg=cfg, fsdp=fsdp) for _ in range(2))
    parking = parked.parking
    pack = packs_of(make_samples(6))[0][0][0]
    for seed in range(3):
        _step(plain, seed)
        parked.logprobs(pack)
        parking.park()
        storages = [p.to_local().untyped_storage() for p in parked.model.parameters()]
        moments = [
            t.untyped_storage() for p in parked.model.parameters() for t in parked.optimizer.moments_of(p).values()
        ]
        assert len(moments) == (2 * len(storages) if seed else 0)
        assert sum(s.nbytes() for s in storages + moments) == 0
        with pytest.raises(RuntimeError, match=r"parked on the host: call onload\(\)"):
            parked.forward(pack)
        with pytest.raises(RuntimeError, match=r"parked on the host: call onload\(\)"):
            next(parked.weight_buckets(1 << 30))
        with pytest.raises(RuntimeError, match=r"parked on the host: call onload\(\)"):
            save_train_state(parked, tmp_path / "never")
        parking.restore(moments=False)
        parked.logprobs(pack)
        if seed:
            with pytest.raises(RuntimeError, match=r"moments are parked on the host: call onload\(\)"):
                parked.step()
        parking.park()
        parking.restore()
        _step(parked, seed)
    for name, tensor in weights(plain).items():
        assert torch.equal(weights(parked)[name], tensor), name


def test_frozen_weights_go_to_the_host_once_until_they_are_loaded_anew(tmp_path):
    engine = make_engine(tmp_path, optim_cfg=None)
    assert not any(p.requires_grad for p in engine.model.parameters())
    parking = Parking(engine.model, None, CPU)
    parameter = next(engine.model.parameters()).to_local()
    for written, expected in ((1.0, 1.0), (2.0, 1.0)):
        parameter.fill_(written)
        parking.park()
        parking.restore()
        assert (parameter == expected).all()
    parameter.fill_(3.0)
    parking.frozen_changed()
    parking.park()
    parking.restore()
    assert (parameter == 3.0).all()


def test_on_a_cpu_the_engine_stays_where_it_is(tmp_path):
    engine = make_engine(tmp_path)
    engine.offload()
    _step(engine, 0)
    engine.onload()
    assert engine.parking.rates() == {}
