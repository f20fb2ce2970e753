"""The decoder against transformers, and packs against their samples alone."""

import pytest
import torch

from xtuner.v1.data_proto.packed import SegmentLayout
from xtuner.v1.ops.attention import PackedAttention

from .helpers import FAMILIES, hidden_of, load, random_ids, tiny_model, write_hf


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(tmp_path, family: str) -> None:
    theirs = write_hf(tmp_path, family)
    ours = load(tmp_path)
    ids = random_ids(0, 60)
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0]
        logits = ours.logits(hidden_of(ours, [ids], [-1])[0])
    assert expected.std() > 0.5  # weights that matter
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4 if "moe" in family else 1e-5)


def test_gradients_equal_transformers(tmp_path) -> None:
    theirs = write_hf(tmp_path, "qwen3")
    ours = load(tmp_path)
    ids = random_ids(0, 30)
    theirs(torch.tensor([ids])).logits.log_softmax(-1)[0, :-1].gather(
        1, torch.tensor(ids[1:])[:, None]
    ).sum().backward()
    rows = torch.arange(29)
    logprobs, _ = ours(
        torch.tensor(ids), torch.arange(30), PackedAttention(SegmentLayout([30], [-1]), "cpu"), rows,
        torch.tensor(ids[1:]), torch.ones(29), 8,
    )  # fmt: skip
    logprobs.sum().backward()
    grads = {name: param.grad for name, param in theirs.named_parameters()}
    for name, place in ours.hf_params.items():
        grad = ours.get_parameter(place.param).grad[place.start : place.end]
        scale = grads[name].abs().max()
        torch.testing.assert_close(grad / scale, grads[name] / scale, rtol=0, atol=1e-4, msg=name)


def test_bf16_logits_are_close_to_transformers(tmp_path) -> None:
    theirs = write_hf(tmp_path, "qwen3", torch.bfloat16)
    ours = load(tmp_path).to(torch.bfloat16)
    ids = random_ids(0, 40)
    with torch.no_grad():
        expected = theirs.float()(torch.tensor([ids])).logits[0]
        half_error = (theirs.bfloat16()(torch.tensor([ids])).logits[0].float() - expected).norm()
        logits = ours.logits(hidden_of(ours, [ids], [-1])[0])
    assert logits.dtype == torch.float32
    # Both round to bfloat16 at slightly different places: neither may be much worse than the other.
    assert (logits - expected).norm() < 1.3 * half_error


def test_samples_of_a_pack_equal_samples_alone() -> None:
    model = tiny_model()
    samples = [random_ids(i, n) for i, n in enumerate((9, 1, 30, 14))]
    packed = hidden_of(model, samples, [-1] * 4)
    for sample, hidden in zip(samples, packed, strict=True):
        torch.testing.assert_close(hidden, hidden_of(model, [sample], [-1])[0], rtol=0, atol=1e-5)


def test_changing_one_sample_never_moves_another() -> None:
    model = tiny_model()
    samples = [random_ids(i, n) for i, n in enumerate((9, 12, 10))]
    before = hidden_of(model, samples, [-1] * 3)
    changed = [samples[0], [(t + 1) % 80 for t in samples[1]], samples[2]]
    after = hidden_of(model, changed, [-1] * 3)
    assert torch.equal(before[0], after[0]) and torch.equal(before[2], after[2])
    assert not torch.allclose(before[1], after[1])


def test_shared_prompt_equals_prompt_in_every_sample() -> None:
    """Values, and gradients of the weights, of K responses behind one prompt against K whole samples."""
    model = tiny_model()
    prompts = [random_ids(50, 11), random_ids(51, 4)]
    responses = [[random_ids(10 * p + k, n) for k, n in enumerate((5, 17, 1, 9))] for p in range(2)]
    g = torch.Generator().manual_seed(0)
    weights = [[torch.randn(len(r), 32, generator=g) for r in group] for group in responses]

    ids, prefix = [], []
    for prompt, group in zip(prompts, responses, strict=True):
        prefix += [-1] + [len(ids)] * len(group)
        ids += [prompt, *group]
    shared = hidden_of(model, ids, prefix)
    shared = [h for h, p in zip(shared, prefix, strict=True) if p >= 0]
    whole = hidden_of(model, [p + r for p, group in zip(prompts, responses, strict=True) for r in group], [-1] * 8)
    flat_weights = [w for group in weights for w in group]
    losses = []
    for states, cut in ((shared, False), (whole, True)):
        loss = torch.zeros(())
        for hidden, weight in zip(states, flat_weights, strict=True):
            loss = loss + ((hidden[-len(weight) :] if cut else hidden) * weight).sum()
        losses.append(loss)
    for ours, alone, weight in zip(shared, whole, flat_weights, strict=True):
        torch.testing.assert_close(ours, alone[-len(weight) :], rtol=0, atol=1e-5)
    params = list(model.parameters())
    grads = [torch.autograd.grad(loss, params, retain_graph=True) for loss in losses]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * float(b.abs().max()))


def test_positions_matter_and_distances_alone_do() -> None:
    model = tiny_model()
    ids = torch.tensor(random_ids(3, 12))
    context = PackedAttention(SegmentLayout([12], [-1]), "cpu")
    at_zero = model.hidden_states(ids, torch.arange(12), context)
    shifted = model.hidden_states(ids, torch.arange(12) + 100, context)
    stretched = model.hidden_states(ids, torch.arange(12) * 2, context)
    torch.testing.assert_close(at_zero, shifted, rtol=0, atol=1e-4)
    assert (at_zero - stretched).abs().max() > 1e-3


def test_forward_is_the_softmax_of_logits_at_the_temperature() -> None:
    model = tiny_model(tie_word_embeddings=False)
    ids, rows, labels = torch.tensor(random_ids(0, 9)), torch.tensor([8, 2, 2]), torch.tensor([5, 6, 7])
    context = PackedAttention(SegmentLayout([9], [-1]), "cpu")
    inv_temperature = torch.tensor([1.0, 2.0, 0.5])
    logprobs, entropy = model(ids, torch.arange(9), context, rows, labels, inv_temperature, 2, with_entropy=True)
    logits = model.logits(model.hidden_states(ids, torch.arange(9), context)[rows]) * inv_temperature[:, None]
    log_p = logits.log_softmax(-1)
    torch.testing.assert_close(logprobs, log_p.gather(1, labels[:, None]).squeeze(1), rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy, -(log_p.exp() * log_p).sum(-1), rtol=0, atol=1e-5)


def test_dropping_rows_behind_the_last_attention_changes_nothing_but_the_work() -> None:
    """Rows 0 to 2 are seen by the targets, row 8 is seen by none, and row 3 is trained on twice."""
    ids, rows, labels = torch.tensor(random_ids(0, 9)), torch.tensor([3, 7, 3, 4]), torch.tensor([5, 6, 7, 8])
    results = []
    for drops in (True, False):
        model = tiny_model()
        model.drops_rows = drops
        worked_on: list[int] = []
        model.layers[-1].mlp.register_forward_hook(lambda _, args, __, out=worked_on: out.append(len(args[0])))
        context = PackedAttention(SegmentLayout([9], [-1]), "cpu")
        logprobs, _ = model(ids, torch.arange(9), context, rows, labels, torch.ones(4), 8)
        (logprobs * torch.tensor([1.0, -2.0, 3.0, 0.5])).sum().backward()
        assert worked_on == [4 if drops else 9]
        results.append([logprobs.detach(), *(p.grad for p in model.parameters())])
    for dropped, whole in zip(*results, strict=True):
        torch.testing.assert_close(dropped, whole, rtol=1e-4, atol=1e-5)


def test_pack_without_targets_gives_zero_gradients_to_every_parameter() -> None:
    model = tiny_model(tie_word_embeddings=False)
    none = torch.zeros(0, dtype=torch.int64)
    logprobs, _ = model(
        torch.tensor([4, 5]), torch.arange(2), PackedAttention(SegmentLayout([2], [-1]), "cpu"), none, none,
        torch.zeros(0), 8,
    )  # fmt: skip
    logprobs.sum().backward()
    for name, param in model.named_parameters():
        assert param.grad is not None and not param.grad.any(), name


def test_recomputed_layers_give_the_same_gradient() -> None:
    from functools import partial

    from torch.utils.checkpoint import checkpoint

    grads = []
    for recompute in (False, True):
        model = tiny_model()
        if recompute:
            for layer in model.layers:
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        states = hidden_of(model, [random_ids(0, 5), random_ids(1, 6), random_ids(2, 7)], [-1, 0, 0])
        torch.cat(states).square().sum().backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_init_weights_is_seeded_and_its_norms_are_one() -> None:
    a, b, c = tiny_model(seed=1), tiny_model(seed=1), tiny_model(seed=2)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.embed_tokens.weight, c.embed_tokens.weight)
    assert all((p == 1).all() for name, p in a.named_parameters() if name.endswith("norm.weight"))


def test_compiled_layers_are_one_program_for_all_layers_and_packs() -> None:
    """A program per layer or pack would pass the compiler's limit and fall back to eager in silence."""
    from torch._dynamo.utils import counters

    model = tiny_model(num_hidden_layers=10).to(torch.float64)  # a type without kernels, which a compiler leaves out
    packs = [[random_ids(0, 5), random_ids(1, n)] for n in (9, 12, 30)]
    with torch.no_grad():
        expected = [hidden_of(model, ids, [-1, 0]) for ids in packs]
        model.compile_layers(backend="eager")
        counters.clear()
        compiled = [hidden_of(model, packs[0], [-1, 0])]
        programs = counters["stats"]["unique_graphs"]
        compiled += [hidden_of(model, ids, [-1, 0]) for ids in packs[1:]]
    assert 1 <= programs <= 4 and counters["stats"]["unique_graphs"] == programs
    for ours, theirs in zip(compiled, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_inference_gives_the_bits_of_hidden_states(tmp_path, family: str, dtype: torch.dtype) -> None:
    write_hf(tmp_path, family)
    model = load(tmp_path).to(dtype)
    ids, positions = torch.tensor(random_ids(0, 30)), torch.arange(30)
    with torch.no_grad():
        attention = PackedAttention(SegmentLayout([30], [-1]), "cpu")
        expected = model.hidden_states(ids, positions, attention)
        assert torch.equal(model.infer(ids, positions, attention), expected)
