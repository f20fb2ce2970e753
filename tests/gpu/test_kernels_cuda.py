"""Triton kernels against float64, and a dense model's gradients on the GPU against the CPU's."""

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

TYPES = [(torch.float32, 2e-6), (torch.bfloat16, 6e-3)]


def _error(got, want):
    return float(((got.double() - want.double()).norm() / want.double().norm()).detach())


def _compare(function, reference, inputs, tolerance):
    """Values and gradients of all inputs."""
    mine = [t.detach().clone().requires_grad_() for t in inputs]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    got, want = function(*mine), reference(*exact)
    got, want = (x if isinstance(x, tuple) else (x,) for x in (got, want))
    seeds = [torch.randn(w.shape, device="cuda", dtype=torch.float64) for w in want]
    sum((g * s.to(g.dtype)).sum() for g, s in zip(got, seeds, strict=True)).backward()
    sum((w * s).sum() for w, s in zip(want, seeds, strict=True)).backward()
    pairs = [*zip(got, want, strict=True), *((m.grad, e.grad) for m, e in zip(mine, exact, strict=True))]
    errors = [_error(g, w) for g, w in pairs]
    assert max(errors) < tolerance, errors


def _random(dtype, *shapes):
    return [torch.randn(shape, device="cuda").to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype,tolerance", TYPES)
@pytest.mark.parametrize("rows,width", [(1, 8), (333, 96), (5000, 1024), (700, 2560)])
def test_norms(dtype, tolerance, rows, width):
    from xtuner.v1.ops.norm import add_rms_norm, reference_rms_norm, rms_norm

    x, residual, weight = _random(dtype, (rows, width), (rows, width), (width,))
    _compare(
        lambda x, w: rms_norm(x, w, 1e-6), lambda x, w: reference_rms_norm(x, w, 1e-6), [x, weight], tolerance
    )  # fmt: skip
    _compare(
        lambda x, r, w: add_rms_norm(x, r, w, 1e-6), lambda x, r, w: (x + r, reference_rms_norm(x + r, w, 1e-6)),
        [x, residual, weight], tolerance,
    )  # fmt: skip


@pytest.mark.parametrize("dtype,tolerance", TYPES)
@pytest.mark.parametrize("rows,inner", [(1, 8), (700, 3072), (33, 1000)])
def test_swiglu(dtype, tolerance, rows, inner):
    from xtuner.v1.ops.swiglu import reference_swiglu, swiglu

    _compare(swiglu, reference_swiglu, _random(dtype, (rows, 2 * inner)), tolerance)


@pytest.mark.parametrize("dtype,tolerance", TYPES)
@pytest.mark.parametrize("dim", [32, 64, 96, 128])
@pytest.mark.parametrize("normed", [True, False])
def test_split_qkv(dtype, tolerance, dim, normed):
    from xtuner.v1.ops.qkv import reference_split_qkv, split_qkv
    from xtuner.v1.ops.rotary import rotary_table

    table = rotary_table(torch.arange(999, device="cuda") % 300, torch.rand(dim // 2, device="cuda"))
    inputs = _random(dtype, (999, 8 * dim), *([(dim,), (dim,)] if normed else []))
    _compare(
        lambda x, *w: split_qkv(x, 4, 2, table, *w), lambda x, *w: _exact_split(reference_split_qkv, x, table, w),
        inputs, tolerance,
    )  # fmt: skip


@pytest.mark.parametrize("rows", [1, 37, 256, 3000])
@pytest.mark.parametrize("dim, normed", [(128, True), (96, False)])
def test_keys_and_values_go_to_pages_as_they_are_made(rows, dim, normed):
    """To the bit what is split first and stored then; few rows and many are cut into programs in different ways."""
    from xtuner.v1.ops.paged_attention import NewRows, store_rows
    from xtuner.v1.ops.qkv import split_qkv, split_qkv_into
    from xtuner.v1.ops.rotary import rotary_table

    table = rotary_table(torch.arange(rows, device="cuda") % 300, torch.rand(dim // 2, device="cuda"))
    qkv, *weights = _random(torch.bfloat16, (rows, 8 * dim), (dim,), (dim,))
    weights = weights if normed else [None, None]
    places = torch.randperm(64 * 50, device="cuda")[:rows]
    places[::5] = -1
    pages = []
    for _ in range(2):
        pool = torch.full((50, 64 * 4 * dim + 64), 7.0, device="cuda", dtype=torch.bfloat16)
        keys, values = (pool[:, i * 128 * dim : (i + 1) * 128 * dim].unflatten(1, (2, 64, dim)) for i in range(2))
        pages.append((pool, NewRows(keys, values, places)))
    q = split_qkv_into(qkv, 4, 2, table, *weights, 1e-6, pages[0][1])
    expected, k, v = split_qkv(qkv, 4, 2, table, *weights, 1e-6)
    store_rows(k, v, pages[1][1])
    assert torch.equal(q, expected) and torch.equal(pages[0][0], pages[1][0])


def _exact_split(reference, x, table, weights):
    from xtuner.v1.ops.rotary import RotaryTable

    q, k, v = x.view(x.shape[0], 8, -1).split((4, 2, 2), 1)
    exact = RotaryTable(table.cos.double(), table.sin.double())
    parts = []
    for part, weight in zip((q, k), weights or (None, None), strict=True):
        if weight is not None:
            part = torch.nn.functional.rms_norm(part, part.shape[-1:], weight, 1e-6)
        first, second = part.chunk(2, -1)
        parts.append(
            torch.cat((first * exact.cos - second * exact.sin, second * exact.cos + first * exact.sin), -1)
        )  # fmt: skip
    return *parts, v


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("heads,dims", [((16, 8), (128, 128)), ((6, 2), (192, 128)), ((3, 1), (64, 64))])
@pytest.mark.parametrize("kind", ["plain", "window", "sinks", "shared", "shared and sinks"])
def test_paged_attention(dtype, tolerance, splits, heads, dims, kind):
    from xtuner.v1.ops.paged_kernels import NewRows, SharedPages, paged_attention, store_rows

    (num_q, num_kv), (dim, dim_v), page = heads, dims, 64
    lengths = [1, 64, 65, 300, 0, 500, 260, 257]
    tables = torch.zeros(len(lengths), 8, dtype=torch.int32, device="cuda")
    order = torch.randperm(80)
    tables[:] = order[:64].view(8, 8)
    if "shared" in kind:
        tables[6, :4] = tables[7, :4] = tables[5, :4]
    keys = torch.full((80, num_kv, page, dim), float("nan"), device="cuda", dtype=dtype)
    values = torch.full((80, num_kv, page, dim_v), float("nan"), device="cuda", dtype=dtype)
    for row, length in enumerate(lengths):
        position = torch.arange(length, device="cuda")
        places = tables[row].long()[position // page] * page + position % page
        rows = _random(dtype, (length, num_kv, dim), (length, num_kv, dim_v))
        store_rows(*rows, NewRows(keys, values, places))
    q, sinks = _random(dtype, (len(lengths), num_q, dim), (num_q,))
    window = 100 if kind == "window" else None
    sinks = sinks if "sinks" in kind else None
    shared = None
    if "shared" in kind:
        members = torch.full((4, 8), -1, dtype=torch.int32, device="cuda")
        members[0, :3] = torch.tensor([5, 7, 6], dtype=torch.int32, device="cuda")
        pages = torch.tensor([0, 0, 0, 0, 0, 4, 4, 4], dtype=torch.int32, device="cuda")
        shared = SharedPages(members, pages)
    out = paged_attention(
        q, keys, values, tables, torch.tensor(lengths, dtype=torch.int32, device="cuda"), dim**-0.5, splits, window,
        sinks, shared,
    )  # fmt: skip
    for row, length in enumerate(lengths):
        if length == 0:
            assert not out[row].any()
            continue
        seen = torch.arange(max(0, length - (window or length)), length, device="cuda")
        where = tables[row].long()[seen // page], slice(None), seen % page
        k, v = (t[where].double().repeat_interleave(num_q // num_kv, 1) for t in (keys, values))
        scores = torch.einsum("hd,lhd->hl", q[row].double(), k) * dim**-0.5
        if sinks is not None:
            scores = torch.cat((scores, sinks.double()[:, None]), 1)
        weights = scores.softmax(-1)[:, :length]
        assert _error(out[row], torch.einsum("hl,lhd->hd", weights[:, : len(seen)], v)) < tolerance


def test_drawn_tokens_are_those_of_the_cumulative_distribution():
    from xtuner.v1.ops.sampling_kernels import draw_tokens

    batch, vocab = 300, 10_007
    logits = torch.randn(batch, vocab, device="cuda") * 4
    uniform, temperature = torch.rand(batch, device="cuda"), 0.5 + torch.rand(batch, device="cuda")
    uniform[:2] = torch.tensor([0.0, 1 - 2**-24])
    greedy, forbid = torch.rand(batch, device="cuda") < 0.3, torch.rand(batch, device="cuda") < 0.5
    stop_ids = logits.topk(2).indices
    tokens, logprobs, *_ = draw_tokens(logits, uniform, 1 / temperature, greedy, stop_ids, forbid)
    allowed = logits.double().clone()
    allowed[forbid.nonzero(), stop_ids[forbid]] = -torch.inf
    scaled = torch.where(greedy[:, None], allowed, allowed * (1 / temperature).double()[:, None])
    probs = scaled.softmax(-1)
    reached = probs.cumsum(-1)
    rows = torch.arange(batch, device="cuda")
    below, above = reached[rows, tokens] - probs[rows, tokens], reached[rows, tokens]
    drawn = ~greedy
    assert (below[drawn] <= uniform[drawn] + 1e-6).all() and (above[drawn] >= uniform[drawn] - 1e-6).all()
    assert (tokens[greedy] == allowed.argmax(-1)[greedy]).all()
    assert not (tokens[:, None] == stop_ids)[forbid].any()
    plain = torch.where(greedy[:, None], logits.double(), scaled).log_softmax(-1)[rows, tokens]
    assert (logprobs - plain).abs().max() < 1e-4


def test_random_numbers_are_the_hosts():
    from xtuner.v1.ops.sampling_kernels import uniform_numbers
    from xtuner.v1.rl.rollout.backends.native.sampler import uniform

    seeds = torch.randint(-(2**63), 2**63 - 1, (1000,))
    positions = torch.randint(0, 100_000, (1000,), dtype=torch.int32)
    got = uniform_numbers(seeds.cuda(), positions.cuda()).cpu().numpy()
    assert (got == uniform(seeds.numpy(), positions.numpy())).all()


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 5e-2)])
def test_a_dense_models_gradients_equal_the_cpus(dtype, tolerance):
    from xtuner.v1.data_proto import SegmentLayout
    from xtuner.v1.model.config import DenseModelConfig, MHAConfig
    from xtuner.v1.ops.attention import PackedAttention

    config = DenseModelConfig(
        model_type="qwen3", vocab_size=256, max_position_embeddings=512, num_hidden_layers=3, hidden_size=128,
        intermediate_size=192,
        attention=MHAConfig(num_attention_heads=4, num_key_value_heads=2, head_dim=32, qk_norm=True),
    )  # fmt: skip
    layout = SegmentLayout([100, 60, 33], [-1] * 3)
    ids = torch.randint(0, 256, (193,), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(n) for n in layout.lengths])
    grads = []
    for device, kind in (("cpu", torch.float32), ("cuda", dtype)):
        model = config.build(device, kind)
        model.init_weights(0, std=0.1)
        rows, scale = torch.arange(192, device=device), torch.ones(192, device=device)
        logprobs, _ = model(
            ids.to(device), positions.to(device), PackedAttention(layout, device), rows, ids[1:].to(device), scale, 64
        )  # fmt: skip
        (logprobs * torch.linspace(-1, 1, 192, device=device)).sum().backward()
        grads.append({name: p.grad.cpu() for name, p in model.named_parameters()})
    errors = {name: _error(grads[1][name], want) for name, want in grads[0].items()}
    assert max(errors.values()) < tolerance, errors
