"""The Numba kernels against plain operations in float64, whatever the sizes and the number of threads."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("numba")

from xtuner.v1.data_proto.packed import SegmentLayout  # noqa: E402
from xtuner.v1.ops import cpu  # noqa: E402
from xtuner.v1.ops.attention import PackedAttention, reference_attention  # noqa: E402
from xtuner.v1.ops.jit import kernel  # noqa: E402
from xtuner.v1.ops.linear_logprob import linear_logprob  # noqa: E402
from xtuner.v1.ops.norm import add_rms_norm, reference_rms_norm, rms_norm  # noqa: E402
from xtuner.v1.ops.qkv import split_qkv  # noqa: E402
from xtuner.v1.ops.rotary import RotaryTable, rotary_table  # noqa: E402
from xtuner.v1.ops.swiglu import reference_swiglu, swiglu  # noqa: E402
from xtuner.v1.ops.threads import run_blocks  # noqa: E402

Function = Callable[..., Tensor | tuple[Tensor, ...]]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def run(function: Function, inputs: list[Tensor]) -> list[Tensor]:
    """Values, and gradients of a weighted sum of them."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    weights = [randn(*o.shape, seed=9).to(o.dtype) for o in outputs]
    return [*outputs, *torch.autograd.grad(outputs, inputs, weights)]


def compare(function: Function, reference: Function, inputs: list[Tensor], atol: float = 1e-5) -> None:
    exact = run(reference, [x.double() for x in inputs])
    for ours, theirs in zip(run(function, inputs), exact, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=atol)


def norm_case(rows: int, size: int) -> tuple[Function, Function, list[Tensor]]:
    inputs = [randn(rows, size), randn(size)]
    return lambda x, w: rms_norm(x, w, 1e-6), lambda x, w: reference_rms_norm(x, w, 1e-6), inputs


def add_norm_case(rows: int, size: int) -> tuple[Function, Function, list[Tensor]]:
    def reference(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return x + residual, reference_rms_norm(x + residual, weight, 1e-6)

    inputs = [randn(rows, size), randn(rows, size, seed=1), randn(size)]
    return lambda x, r, w: add_rms_norm(x, r, w, 1e-6), reference, inputs


def swiglu_case(rows: int, size: int) -> tuple[Function, Function, list[Tensor]]:
    return swiglu, reference_swiglu, [3 * randn(rows, 2 * size)]


def qkv_case(rows: int, num_q: int, num_kv: int, dim: int, norm: bool) -> tuple[Function, Function, list[Tensor]]:
    table = rotary_table(torch.arange(rows) % 50, 10 ** -torch.linspace(0, 2, dim // 2))
    exact_table = RotaryTable(table.cos.double(), table.sin.double())

    def reference(qkv: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        q, k, v = qkv.view(rows, num_q + 2 * num_kv, dim).split((num_q, num_kv, num_kv), dim=1)
        if weights:
            q, k = (reference_rms_norm(x, w, 1e-6) for x, w in zip((q, k), weights, strict=True))
        halves = [x.chunk(2, -1) for x in (q, k)]
        cos, sin = exact_table.cos, exact_table.sin
        return *(torch.cat((a * cos - b * sin, b * cos + a * sin), -1) for a, b in halves), v.clone()

    inputs = [randn(rows, (num_q + 2 * num_kv) * dim), *([randn(dim), randn(dim, seed=1)] if norm else [])]
    return lambda qkv, *weights: split_qkv(qkv, num_q, num_kv, table, *weights), reference, inputs


def attention_case(layout: SegmentLayout, num_q: int, num_kv: int, dim: int, v_dim: int):
    rows = sum(layout.lengths)
    inputs = [randn(rows, num_q, dim), randn(rows, num_kv, dim), randn(rows, num_kv, v_dim)]
    context = PackedAttention(layout, "cpu")
    return (
        lambda q, k, v: context.attend(0, q, k, v, 0.3),
        lambda q, k, v: reference_attention(layout, q, k, v, 0.3),
        inputs,
    )


def logprob_case(rows: int, vocab: int, chunk: int, entropy: bool) -> tuple[Function, Function, list[Tensor]]:
    labels = torch.arange(rows) * 7 % vocab
    inv_temperature = torch.linspace(0.5, 1.5, rows)

    def function(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        out = linear_logprob(hidden, weight, labels, inv_temperature, chunk, entropy)
        return out if entropy else out[:1]

    def reference(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        log_p = ((hidden @ weight.t()) * inv_temperature.double()[:, None]).log_softmax(-1)
        chosen = log_p.gather(1, labels[:, None]).squeeze(1)
        return (chosen, -(log_p.exp() * log_p).sum(-1)) if entropy else (chosen,)

    return function, reference, [randn(rows, 12), randn(vocab, 12)]


LAYOUTS = {
    "one row": SegmentLayout([1], [-1]),
    "plain": SegmentLayout([5, 1, 9, 40, 3], [-1] * 5),
    "shared": SegmentLayout([6, 4, 9, 1, 3, 2, 5], [-1, 0, 0, 0, -1, 4, -1]),
    # The user of the first prefix comes after another group, and lengths are far apart.
    "mixed": SegmentLayout([30, 12, 2, 60, 5, 70], [-1, -1, 1, 0, 1, 0]),
    "long": SegmentLayout([150, 20, 90, 200], [-1, 0, 0, -1]),
}


@pytest.mark.parametrize("rows, size", [(0, 16), (1, 128), (3, 5), (130, 33), (200, 128)])
@pytest.mark.parametrize("case", [norm_case, add_norm_case, swiglu_case])
def test_rows(case: Callable, rows: int, size: int) -> None:
    compare(*case(rows, size), atol=3e-5)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("rows, num_q, num_kv, dim", [(0, 4, 2, 32), (1, 3, 1, 64), (130, 4, 2, 32), (70, 2, 2, 128)])
def test_split_qkv(rows: int, num_q: int, num_kv: int, dim: int, norm: bool) -> None:
    compare(*qkv_case(rows, num_q, num_kv, dim, norm), atol=3e-5)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("num_q, num_kv, dim, v_dim", [(2, 2, 8, 8), (4, 2, 32, 32), (3, 1, 40, 24), (80, 2, 16, 16)])
def test_attention(name: str, num_q: int, num_kv: int, dim: int, v_dim: int) -> None:
    compare(*attention_case(LAYOUTS[name], num_q, num_kv, dim, v_dim), atol=2e-5)


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("rows, vocab, chunk", [(0, 20, 4), (1, 7, 1), (70, 384, 100), (70, 385, 32)])
def test_logprobs(rows: int, vocab: int, chunk: int, entropy: bool) -> None:
    compare(*logprob_case(rows, vocab, chunk, entropy))


def test_logprobs_have_a_second_backward() -> None:
    """The gradient of one chunk takes the place of its logits."""
    function, _, inputs = logprob_case(9, 20, 100, False)
    hidden = inputs[0].requires_grad_()
    out = function(hidden, inputs[1])[0].sum()
    first = torch.autograd.grad(out, hidden, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(out, hidden)[0], first)


def test_a_shared_prompt_gives_what_copies_of_it_give() -> None:
    shared = SegmentLayout([6, 4, 9, 1], [-1, 0, 0, 0])
    copies = SegmentLayout([10, 15, 7], [-1] * 3)
    rows = torch.tensor([*range(10), *range(6), *range(10, 19), *range(6), 19])
    function, _, inputs = attention_case(shared, 4, 2, 32, 32)
    out, *grads = run(function, inputs)
    context = PackedAttention(copies, "cpu")
    leaves = [x.detach().requires_grad_() for x in inputs]
    copied = context.attend(0, *(x[rows] for x in leaves), 0.3)
    torch.testing.assert_close(copied, out[rows], rtol=0, atol=1e-6)
    # Every row of the prompt stands three times among the copies: there its outputs count once.
    weights = randn(*out.shape, seed=9)[rows]
    weights[10:16] = weights[25:31] = 0
    for ours, theirs in zip(torch.autograd.grad(copied, leaves, weights), grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


CASES = {
    "norm": norm_case(500, 48),
    "norm behind an addition": add_norm_case(500, 48),
    "gate": swiglu_case(500, 48),
    "split": qkv_case(500, 4, 2, 32, True),
    "attention": attention_case(LAYOUTS["mixed"], 4, 2, 32, 32),
    "logprobs": logprob_case(500, 48, 600, True),
}


@pytest.mark.parametrize("name", CASES)
def test_threads_change_no_bit(name: str, threads: Callable[[int], None]) -> None:
    """A sum over rows whose parts depend on who computes them would."""
    function, _, inputs = CASES[name]
    if name == "logprobs":  # the library's products may depend on threads: one row at a time goes in, weights do not
        inputs = [torch.eye(12).repeat(42, 1)[:500], inputs[1]]
    threads(1)
    expected = run(function, inputs)
    for count in (2, 3):
        threads(count)
        pairs = list(zip(run(function, inputs), expected, strict=True))
        for ours, theirs in pairs[:-1] if name == "logprobs" else pairs:
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", CASES)
def test_without_numba_torch_does_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, _, inputs = CASES[name]
    expected = run(function, inputs)
    monkeypatch.setattr(cpu, "cpu_kernels_available", lambda: False)
    if name == "attention":
        function = attention_case(LAYOUTS["mixed"], 4, 2, 32, 32)[0]
    for ours, theirs in zip(run(function, inputs), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_nan_in_one_sample_stays_there() -> None:
    layout = LAYOUTS["mixed"]
    function, _, inputs = attention_case(layout, 4, 2, 32, 32)
    clean = function(*inputs)
    last = layout.lengths[-1]
    for tensor in inputs:
        tensor[-last:] = float("nan")
    q = inputs[0].requires_grad_()
    out = function(q, *inputs[1:])
    assert torch.equal(out[:-last], clean[:-last]) and out[-last:].isnan().all()
    assert torch.autograd.grad(out[:-last].sum(), q)[0][:-last].isfinite().all()


def test_strided_and_expanded_inputs() -> None:
    layout = LAYOUTS["shared"]
    parts = randn(sum(layout.lengths), 8, 32).split((4, 2, 2), dim=1)
    out = PackedAttention(layout, "cpu").attend(0, *parts, scale=0.5)
    torch.testing.assert_close(out, reference_attention(layout, *parts, scale=0.5), rtol=0, atol=1e-6)
    x = randn(6, 40)[:, ::2].requires_grad_()
    out = rms_norm(x, torch.ones(20), 1e-6)
    torch.testing.assert_close(out, reference_rms_norm(x, torch.ones(20), 1e-6))
    out.sum().backward()  # an expanded gradient


def test_kernels_leave_the_memory_of_weights_resizable() -> None:
    """FSDP frees gathered weights by resizing them."""
    weight = torch.ones(32)
    rms_norm(randn(3, 32), weight, 1e-6)
    split_qkv(randn(3, 4 * 32), 2, 1, rotary_table(torch.arange(3), torch.ones(16)), weight, weight)
    assert weight.untyped_storage().resizable()


def test_bfloat16_is_computed_in_float32_and_rounded_once() -> None:
    x, weight = randn(3, 64).bfloat16(), randn(64).bfloat16()
    assert torch.equal(swiglu(x), swiglu(x.float()).bfloat16())
    assert torch.equal(rms_norm(x, weight, 1e-6), rms_norm(x.float(), weight.float(), 1e-6).bfloat16())
    whole, normed = add_rms_norm(x, 2 * x, weight, 1e-6)
    assert torch.equal(whole, x + 2 * x) and torch.equal(normed, rms_norm(whole, weight, 1e-6))
    table = rotary_table(torch.arange(3), torch.ones(16))
    heads = split_qkv(x.repeat(1, 2), 2, 1, table, weight[:32], weight[32:])
    exact = split_qkv(x.repeat(1, 2).float(), 2, 1, table, weight[:32].float(), weight[32:].float())
    for ours, theirs in zip(heads, exact, strict=True):
        assert torch.equal(ours, theirs.bfloat16())
    context = PackedAttention(SegmentLayout([2, 1], [-1, 0]), "cpu")
    assert torch.equal(
        context.attend(0, *heads, 0.3), context.attend(0, *(h.float() for h in heads), 0.3).bfloat16()
    )


@kernel
def _fill_block(block, out, scratch):
    memory = np.empty(scratch, np.uint8)
    out[block] = block + 0 * memory.size


@kernel
def _fill(out, scratch, threads):
    run_blocks(_fill_block, out.size, threads, (out, scratch))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_block_runs_once_and_one_without_memory_is_an_error(threads: int) -> None:
    out = np.zeros(100, np.int64)
    _fill(out, 8, threads)
    assert (out == np.arange(100)).all()
    with pytest.raises(MemoryError):
        _fill(out, 1 << 60, threads)
