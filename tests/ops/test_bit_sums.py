"""Checksums against whole numbers of Python, and what they see."""

import pytest
import torch

from xtuner.v1.ops.bit_sums import bit_sums

TYPES = [torch.float32, torch.bfloat16, torch.float16]


def exact(tensor):
    size = tensor.element_size()
    raw = tensor.contiguous().view(-1).view(torch.uint8).tolist()
    bits = [int.from_bytes(bytes(raw[i : i + size]), "little") for i in range(0, len(raw), size)]
    total = sum(b * (2 * i + 1) for i, b in enumerate(bits)) % 2**64
    return total - 2**64 if total >= 2**63 else total


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(5, 7), (1,), (0, 3), ()])
def test_the_sum_is_the_one_that_is_promised(dtype, shape):
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert bit_sums([tensor]).tolist() == [exact(tensor)]


def test_several_parts_make_the_same_sum_as_one(monkeypatch):
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr("xtuner.v1.ops.bit_sums._CHUNK", 37)
    assert bit_sums([tensor]).tolist() == [exact(tensor)]


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
