"""Recomputation: the same bits from less memory."""

import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from xtuner.v1.data_proto import SegmentLayout
from xtuner.v1.ops.attention import PackedAttention
from xtuner.v1.ops.recompute import recomputable, selective

from . import test_expert_parallel as experts
from .helpers import gradients, make_engine, make_samples, packs_of


class Allocations(TorchDispatchMode):
    """Remembers all memory that operations return, without keeping it."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.seen[StorageWeakRef(storage)] = storage.nbytes()
        return out

    def alive(self) -> int:
        """Bytes of what still exists."""
        gc.collect()
        return sum(size for memory, size in self.seen.items() if not memory.expired())


POLICIES = {
    "none": dict(recompute_ratio=0.0),
    "selective": dict(fsdp={"recompute": "selective"}, recompute_ratio=1.0),
    "mixed": dict(fsdp={"recompute": "mixed"}, recompute_ratio=0.5),
    "full": dict(recompute_ratio=1.0),
}


def _loss(engine, pack):
    logprobs, _ = engine.forward(pack)
    return -(pack.advantages * logprobs).sum()


@pytest.fixture(params=["padded", "long"])
def pack(request):
    """Short segments, whose attention is done with all scores in memory on a CPU, and one for torch's attention."""
    samples = make_samples(24)
    if request.param == "long":
        samples[0].input_ids, samples[0].labels = samples[0].input_ids * 40, samples[0].labels * 40
        samples[0].advantages = samples[0].advantages * 40
        samples = samples[:1]
    return packs_of(samples, length=4096)[0][0][0]


def test_policies_order_what_is_kept_and_change_no_bit(tmp_path, pack):
    kept, found = {}, {}
    for name, options in POLICIES.items():
        engine = make_engine(tmp_path, **options)
        _loss(engine, pack).backward()  # FSDP allocates what it keeps for ever
        engine.optimizer.zero_grad()
        with Allocations() as memory:
            loss = _loss(engine, pack)
            kept[name] = memory.alive()
            engine.backward(loss)
            del loss
        found[name] = gradients(engine)
    assert kept["none"] > 1.3 * kept["selective"] and kept["selective"] > 1.3 * kept["mixed"]
    assert kept["mixed"] > 1.3 * kept["full"]
    for name, grads in found.items():
        for param, grad in grads.items():
            assert torch.equal(grad, found["none"][param]), (name, param)


def test_nothing_recomputed_outlives_the_backward(tmp_path, pack):
    """Also while the loss, and with it the graph, is still there: the next pack's forward begins before it goes."""
    engine = make_engine(tmp_path, **POLICIES["selective"])
    _loss(engine, pack).backward()
    with Allocations() as memory:
        loss = _loss(engine, pack)
        forward = memory.alive()
        engine.backward(loss)
        assert memory.alive() < 0.2 * forward + sum(p.numel() * 4 for p in engine.model.parameters())


def test_half_precision_too(tmp_path, pack):
    """Its operations are torch's own, several to one of ours."""
    grads = []
    for options in (POLICIES["none"], POLICIES["selective"]):
        fsdp = options.get("fsdp", {}) | {"cpu_param_dtype": "bfloat16"}
        engine = make_engine(tmp_path, **(options | {"fsdp": fsdp}))
        engine.backward(_loss(engine, pack))
        grads.append(gradients(engine))
    for name, grad in grads[0].items():
        assert torch.equal(grads[1][name], grad), name


@pytest.mark.parametrize("model", experts.MODELS)
def test_mixtures_of_experts_too(model):
    plain, remade = (
        experts.train(experts.make(model, {"recompute": "selective", "recompute_ratio": ratio}, 1), 1, range(1))
        for ratio in (0.0, 1.0)
    )
    assert plain["norms"] == remade["norms"]
    for name, grad in plain["gradients"][0].items():
        assert torch.equal(remade["gradients"][0][name], grad), name


def test_latent_attention_keeps_results_of_products_and_of_attention_alone():
    """Queries, keys and values, which are wider than what they are made of together, are made again."""
    config, rows = experts.MODELS["deepseek_v3"], 256
    model = config.build("cpu")
    model.init_weights(0, std=0.1)
    block, context = model.layers[0].self_attn, PackedAttention(SegmentLayout([rows], [-1]), "cpu")
    x, table = torch.randn(rows, 32, requires_grad=True), model.rotary(torch.arange(rows))
    weights = {StorageWeakRef(p.untyped_storage()) for p in block.parameters()}
    kept = {}
    for name, forward in (("none", block.forward), ("selective", selective(block.forward))):
        with Allocations() as memory:
            out = forward(x, table, context)
            memory.seen = {place: size for place, size in memory.seen.items() if place not in weights}
            kept[name] = memory.alive()
            out.sum().backward()
    a, heads = config.attention, 4
    key = a.qk_nope_head_dim + a.qk_rope_head_dim
    products = a.q_lora_rank + heads * key + a.kv_lora_rank + a.qk_rope_head_dim
    products += heads * (a.qk_nope_head_dim + a.v_head_dim) + 32
    attention = heads * (a.v_head_dim + 2)  # a peak and a sum of each row's softmax
    assert kept["selective"] == 4 * rows * (products + attention)
    assert kept["none"] > kept["selective"]


@recomputable
def double(x):
    return x * 2


@recomputable
def halves(x, sign):
    return x[: len(x) // 2] * sign, x[len(x) // 2 :]


def _both(function, *inputs):
    """Gradients with and without recomputation."""
    found = []
    for forward in (function, selective(function)):
        leaves = [t.clone().requires_grad_() for t in inputs]
        forward(*leaves).backward()
        found.append([leaf.grad for leaf in leaves])
    return found


def test_results_of_results_views_and_unused_ones():
    def function(x, w):
        first, second = halves(double(x), -1.0)
        return (first.view(2, -1) @ w).sum() + (second.t() @ second).sum() + halves(x, 3.0)[0].square().sum()

    plain, remade = _both(function, torch.randn(8, 8), torch.randn(16, 3))
    for a, b in zip(plain, remade, strict=True):
        assert torch.equal(a, b)


def test_a_result_that_is_changed_in_place_before_it_is_saved_is_kept():
    def function(x):
        y = double(x)
        y.add_(1)
        return (y * y).sum()

    plain, remade = _both(function, torch.randn(4))
    assert torch.equal(plain[0], remade[0])


def test_an_input_that_changes_before_the_backward_stops_it():
    x, w = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
    loss = selective(lambda: (double(x) @ w).sum())()
    x.add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()


def test_memory_that_comes_again_is_not_taken_for_the_result_that_was_there():
    """The first product saves nothing of the result, whose memory the allocator then hands to another tensor."""

    def function(x):
        total = x.new_zeros(())
        for scale in range(1, 30):
            total = total + double(x).sum()
            other = x * scale
            total = total + (other * other).sum()
        return total

    plain, remade = _both(function, torch.randn(64, 64))
    assert torch.equal(plain[0], remade[0])


def test_the_backward_can_be_done_twice():
    x = torch.randn(4, requires_grad=True)
    y = selective(lambda: (double(x) * double(x)).sum())()
    y.backward(retain_graph=True)
    once = x.grad.clone()
    y.backward()
    assert torch.equal(x.grad, 2 * once)
