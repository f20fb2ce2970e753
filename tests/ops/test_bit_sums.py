"""Checksums against whole numbers of Python, and what they see."""

import pytest
import torch

from xtuner.v1.ops.bit_sums import bit_sums, prepared_bit_sums, reference_bit_sum
from xtuner.v1.ops.cpu import cpu_kernels_available

TYPES = [torch.float32, torch.bfloat16, torch.float16]


def exact(tensor, places=True):
    size = tensor.element_size()
    raw = tensor.contiguous().view(-1).view(torch.uint8).tolist()
    bits = [int.from_bytes(bytes(raw[i : i + size]), "little", signed=True) for i in range(0, len(raw), size)]
    total = sum(b * (2 * i + 1 if places else 1) for i, b in enumerate(bits)) % 2**64
    return total - 2**64 if total >= 2**63 else total


@pytest.fixture(params=["kernel", "torch"])
def sums(request):
    """int of one tensor, by the kernel for CPUs and by torch's operations."""
    if request.param == "torch":
        return lambda *args, **kwargs: int(reference_bit_sum(*args, **kwargs))
    return lambda tensor, *args, **kwargs: bit_sums([tensor], *args, **kwargs).item()


@pytest.mark.parametrize("places", [True, False])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(5, 7), (1,), (0, 3), (), (1, 9), (3, 4, 5)])
def test_the_sum_is_the_one_that_is_promised(dtype, shape, places, sums):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert sums(tensor, places=places) == exact(tensor, places)


@pytest.mark.parametrize("places", [True, False])
def test_several_parts_make_the_same_sum_as_one(places, monkeypatch):
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr("xtuner.v1.ops.bit_sums._CHUNK", 37)
    assert reference_bit_sum(tensor, places=places) == exact(tensor, places)


@pytest.mark.parametrize("dtype", TYPES)
def test_columns_parts_and_steps_are_read_along_rows(dtype, sums):
    tensor = torch.randn(30, 24, generator=torch.Generator().manual_seed(4)).to(dtype)
    columns = tensor.t()
    parts = [columns, tensor[3:9], columns[2:7], columns[:, 2:9], columns[2:7, 1:4], tensor[2:7, 1:4]]
    parts += [tensor[::2], tensor[:, 1::3], columns[:1], columns[:, :1], columns[:0]]
    parts += [tensor.view(6, 5, 24).transpose(0, 1), tensor[:1].expand(5, 24), tensor[:, :1].expand(30, 7)]
    parts += [columns[:, :1].expand(24, 3), tensor[0, 0].expand(4, 6)]
    for part in parts:
        assert sums(part) == exact(part)
        assert sums(part, torch.bfloat16) == exact(part.bfloat16())


def test_without_places_any_order_is_the_same_and_a_bit_is_not(sums):
    tensor = torch.randn(31, 17, generator=torch.Generator().manual_seed(5))
    flipped = tensor.clone()
    flipped.view(torch.int32)[5, 5] ^= 1
    assert sums(tensor.t().flip(1).contiguous(), places=False) == sums(tensor, places=False)
    assert sums(flipped, places=False) != sums(tensor, places=False)


@pytest.mark.parametrize("places", [True, False])
def test_large_tensors_count_as_rounded_too(places, monkeypatch):
    monkeypatch.setattr("xtuner.v1.ops.cpu_bit_sums._CHUNK", 64)
    tensor = torch.randn(30, 24, generator=torch.Generator().manual_seed(4))
    for part in (tensor, tensor.t(), -tensor.abs()):
        assert bit_sums([part], torch.bfloat16, places).item() == exact(part.bfloat16(), places)


@pytest.mark.skipif(not cpu_kernels_available(), reason="torch refuses it in its own words")
@pytest.mark.parametrize("left", [0, 1000])
@pytest.mark.parametrize("counted", [None, torch.bfloat16])
def test_a_tensor_without_memory_is_refused(left, counted):
    tensor = torch.ones(1200)
    parts = [tensor, tensor[10:], tensor[10:1150].view(60, 19).t(), tensor.view(6, 20, 10).transpose(0, 1)]
    assert bit_sums(parts, counted).numel() == 4
    tensor.untyped_storage().resize_(left)
    for part in parts:
        with pytest.raises(RuntimeError, match="Tensor of shape .* has no memory"):
            bit_sums([part], counted)


def test_what_was_prepared_sums_what_is_there_by_then():
    tensors = [torch.randn(8, 3), torch.randn(5)]
    run = prepared_bit_sums(tensors)
    before = run()
    tensors[1][2] += 1
    assert torch.equal(run(), bit_sums(tensors)) and not torch.equal(run(), before)
    assert prepared_bit_sums([])().tolist() == []


def test_wide_values_count_as_rounded_and_strides_do_not_count():
    tensor = torch.randn(12, 9, generator=torch.Generator().manual_seed(2))
    assert torch.equal(bit_sums([tensor], torch.bfloat16), bit_sums([tensor.bfloat16()]))
    assert not torch.equal(bit_sums([tensor], torch.bfloat16), bit_sums([tensor]))
    assert torch.equal(bit_sums([tensor.t().contiguous().t()]), bit_sums([tensor]))


@pytest.mark.parametrize("dtype", TYPES)
def test_a_bit_a_sign_two_places_two_rows_and_a_lost_half_are_seen(dtype):
    tensor = torch.randn(64, 32, generator=torch.Generator().manual_seed(3)).to(dtype)
    others = {name: tensor.clone() for name in ("bit", "signs", "places", "rows", "half", "transposed")}
    integers = others["bit"].view(torch.int32 if dtype == torch.float32 else torch.int16)
    integers[63, 31] ^= 1
    # Far apart, and opposite in the highest bit: what a sum modulo 2^32 would miss.
    others["signs"].view(-1)[[0, 1024]] *= -1
    others["places"].view(-1)[[0, 1]] = tensor.view(-1)[[1, 0]]
    others["rows"][[3, 50]] = tensor[[50, 3]]
    others["half"][32:] = 0
    others["transposed"] = tensor.t().contiguous()
    sums = bit_sums([tensor, *others.values()]).tolist()
    assert len(set(sums)) == len(sums)
