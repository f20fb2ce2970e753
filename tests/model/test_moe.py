"""Experts: choice, weights, load and losses of the routers, against transformers and plain loops."""

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError

from xtuner.v1.data_proto.packed import SegmentLayout
from xtuner.v1.model import BalancingLossConfig, MHAConfig, MoEModelConfig, RouterConfig, ZLossConfig
from xtuner.v1.model.hf_config import model_config_from_dict
from xtuner.v1.model.moe import MoEBlock, choose_experts, expert_weights
from xtuner.v1.ops.attention import PackedAttention

from .helpers import hidden_of, load, random_ids, write_hf


def moe_config(**changes) -> MoEModelConfig:
    values = dict(
        vocab_size=89, max_position_embeddings=256, num_hidden_layers=2, hidden_size=32, n_routed_experts=6,
        num_experts_per_tok=2, moe_intermediate_size=20,
        attention=MHAConfig(num_attention_heads=4, num_key_value_heads=2, head_dim=8, qk_norm=True),
    )  # fmt: skip
    return MoEModelConfig(**values | changes)


def moe_model(**changes):
    model = moe_config(**changes).build("cpu")
    model.init_weights(0, std=0.2)
    return model


def _logprobs(model, ids, row_weights=None):
    labels, rows = torch.tensor(ids[1:]), torch.arange(len(ids) - 1)
    context = PackedAttention(SegmentLayout([len(ids)], [-1]), "cpu")
    return model(
        torch.tensor(ids), torch.arange(len(ids)), context, rows, labels, torch.ones(len(labels)), 16,
        row_weights=row_weights,
    )[0]  # fmt: skip


def test_gradients_and_balancing_loss_equal_transformers(tmp_path) -> None:
    """With one layer of experts transformers' loss is this one, but for its f that is not divided by top_k."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    theirs, ids, top_k, alpha = write_hf(tmp_path, "qwen3_moe-mixed"), random_ids(0, 50), 2, 0.3
    ours = load(tmp_path)
    out = theirs(torch.tensor([ids]), output_router_logits=True)
    logits = [layer for layer in out.router_logits if layer is not None]
    assert len(logits) == 1
    balancing = load_balancing_loss_func(tuple(logits), 6, top_k)
    logprobs = out.logits.log_softmax(-1)[0, :-1].gather(1, torch.tensor(ids[1:])[:, None]).squeeze(1)
    (logprobs.sum() + alpha * balancing).backward()

    mine = _logprobs(ours, ids, torch.ones(50, dtype=torch.int32))
    (stats,) = ours.router_stats
    share = stats.assigned / stats.assigned.sum()
    my_balancing = 6 * (share * stats.prob_sum / 50).sum()
    torch.testing.assert_close(mine, logprobs, rtol=0, atol=1e-4)
    torch.testing.assert_close(my_balancing * top_k, balancing, rtol=1e-5, atol=0)
    torch.testing.assert_close(stats.z_sum / 50, logits[0].logsumexp(-1).square().mean(), rtol=1e-5, atol=0)
    (mine.sum() + alpha * top_k * my_balancing).backward()

    block, reference = ours.layers[1].mlp, theirs.model.layers[1].mlp
    pairs = [
        (block.gate.weight, reference.gate.weight),
        (block.experts.gate_up_proj.weight, reference.experts.gate_up_proj),
        (block.experts.down_proj.weight, reference.experts.down_proj),
        (ours.layers[0].mlp.down_proj.weight, theirs.model.layers[0].mlp.down_proj.weight),
        (ours.embed_tokens.weight, theirs.model.embed_tokens.weight),
    ]
    for a, b in pairs:
        scale = b.grad.abs().max()
        torch.testing.assert_close(a.grad / scale, b.grad.view_as(a) / scale, rtol=0, atol=1e-4)


def test_block_is_a_weighted_sum_over_chosen_experts() -> None:
    """Against float64 token by token; an expert that nobody chooses gets the gradient zero and not none at all."""
    block = MoEBlock(moe_config(), torch.float32)
    with torch.no_grad():
        for param in block.parameters():
            param.normal_(0, 0.3, generator=torch.Generator().manual_seed(param.numel()))
        block.gate.weight[5] = 0.0
    x = torch.randn(40, 32, generator=torch.Generator().manual_seed(1)) + 1.0
    with torch.no_grad():
        block.gate.weight[5] = -x.mean(0)  # far below all others
    out, stats = block(x, torch.ones(40, dtype=torch.int32))
    assert stats.assigned[5] == 0 and stats.assigned.sum() == 80
    gate_up = block.experts.gate_up_proj.weight.detach().double().view(6, 40, 32)
    down = block.experts.down_proj.weight.detach().double().view(6, 32, 20)
    probs = (x.double() @ block.gate.weight.detach().double().t()).softmax(-1)
    for row, p, result in zip(x.double(), probs, out, strict=True):
        top = p.topk(2)
        expected = torch.zeros(32, dtype=torch.float64)
        for weight, expert in zip(top.values / top.values.sum(), top.indices, strict=True):
            gate, up = (gate_up[expert] @ row).chunk(2)
            expected += weight * (down[expert] @ (F.silu(gate) * up))
        torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-5)
    out.square().sum().backward()
    assert not block.experts.down_proj.weight.grad.view(6, -1)[5].any()
    assert block.experts.down_proj.weight.grad.view(6, -1)[:5].any(1).all()


def test_one_expert_for_all_tokens_drops_none() -> None:
    """The most unequal load there is: a capacity would leave most tokens without an expert."""
    block = MoEBlock(moe_config(num_experts_per_tok=1), torch.float32)
    with torch.no_grad():
        for param in block.parameters():
            param.normal_(0, 0.3, generator=torch.Generator().manual_seed(param.numel()))
        block.gate.weight.zero_()[3] = 1.0
    x = torch.rand(200, 32) + 0.1
    out, stats = block(x, torch.ones(200, dtype=torch.int32))
    assert stats.assigned.tolist() == [0, 0, 0, 200, 0, 0]
    gate_up, down = block.experts.gate_up_proj.weight.view(6, 40, 32)[3], block.experts.down_proj.weight.view(6, 32, 20)
    gate, up = F.linear(x, gate_up).chunk(2, dim=-1)
    torch.testing.assert_close(out, F.linear(F.silu(gate) * up, down[3]), rtol=1e-4, atol=1e-5)


def test_choice_by_group_and_correction() -> None:
    scores = torch.tensor([[0.9, 0.1, 0.6, 0.5, 0.7, 0.2]])
    plain = RouterConfig(scoring_func="sigmoid", norm_topk_prob=False)
    assert choose_experts(scores, 2, plain, None).tolist() == [[0, 4]]
    # Groups (0, 1), (2, 3), (4, 5) have sums 1.0, 1.1, 0.9: only the second may be used.
    grouped = plain.model_copy(update={"n_group": 3})
    assert choose_experts(scores, 2, grouped, None).tolist() == [[2, 3]]
    # The correction decides about the choice and not about the weights.
    correction = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.9])
    ids = choose_experts(scores, 1, grouped, correction)
    assert ids.tolist() == [[5]] and expert_weights(scores, ids, grouped).tolist() == [[pytest.approx(0.2)]]
    scaled = plain.model_copy(update={"norm_topk_prob": True, "router_scaling_factor": 2.0})
    weights = expert_weights(scores, choose_experts(scores, 2, scaled, None), scaled)
    torch.testing.assert_close(weights, torch.tensor([[0.9, 0.7]]) / 1.6 * 2)


def test_negative_scores_for_choice_stay_behind_the_chosen_groups() -> None:
    """A group that is out must be out even if all corrected scores of the others are below zero."""
    config = RouterConfig(scoring_func="sigmoid", n_group=2, topk_group=1)
    scores, correction = torch.full((1, 4), 0.1), torch.tensor([-1.0, -1.1, -2.0, -2.0])
    assert choose_experts(scores, 2, config, correction).tolist() == [[0, 1]]


def test_router_computes_in_its_own_type() -> None:
    """Logits that differ by less than bfloat16 resolves decide between experts."""
    x = torch.ones(1, 32, dtype=torch.bfloat16)
    chosen = {}
    for dtype in ("float32", "bfloat16"):
        block = MoEBlock(moe_config(router_dtype=dtype, num_experts_per_tok=1), torch.bfloat16)
        with torch.no_grad():
            block.gate.weight.fill_(1.0)
            block.gate.weight[4, 0] = 1.0078125  # the next bfloat16 after 1: lost in a sum of 32 in bfloat16
        weights, chosen[dtype], _ = block.gate(x)
        assert weights.dtype == torch.float32
    assert chosen["float32"].item() == 4 and chosen["bfloat16"].item() != 4


def test_rows_count_as_often_as_the_weights_say() -> None:
    model, ids = moe_model(), random_ids(0, 12)
    with torch.no_grad():
        _logprobs(model, ids, torch.tensor([3] * 5 + [1] * 4 + [0] * 3, dtype=torch.int32))
        weighted = model.router_stats
        _logprobs(model, ids, torch.tensor([1] * 5 + [0] * 7, dtype=torch.int32))
        first = model.router_stats
        _logprobs(model, ids, torch.tensor([0] * 5 + [1] * 4 + [0] * 3, dtype=torch.int32))
        second = model.router_stats
    for all_, a, b in zip(weighted, first, second, strict=True):
        for total, x, y in zip(all_, a, b, strict=True):
            torch.testing.assert_close(total, 3 * x + y)


def test_frozen_routers_have_no_gradient_and_the_rest_has() -> None:
    model = moe_model(freeze_routers=True)
    _logprobs(model, random_ids(0, 30)).sum().backward()
    without = {name for name, param in model.named_parameters() if param.grad is None}
    assert without == {f"layers.{i}.mlp.gate.weight" for i in range(2)}
    trained = moe_model()
    _logprobs(trained, random_ids(0, 30)).sum().backward()
    assert trained.layers[0].mlp.gate.weight.grad.any()


def test_samples_of_a_pack_equal_samples_alone() -> None:
    model = moe_model()
    samples = [random_ids(i, n) for i, n in enumerate((9, 1, 30, 14))]
    for sample, hidden in zip(samples, hidden_of(model, samples, [-1] * 4), strict=True):
        torch.testing.assert_close(hidden, hidden_of(model, [sample], [-1])[0], rtol=0, atol=1e-5)


def test_compiled_layers_give_the_same() -> None:
    model, ids = moe_model(dense_layers=(0,), intermediate_size=40), [random_ids(0, 9), random_ids(1, 30)]
    with torch.no_grad():
        expected = hidden_of(model, ids, [-1, -1])
        model.compile_layers(backend="eager")
        for a, b in zip(expected, hidden_of(model, ids, [-1, -1]), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "bos_token_id": 151643,
    "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
    "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [],
    "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32,
    "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
    "sliding_window": None, "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip


def test_published_qwen3_moe() -> None:
    config = model_config_from_dict(QWEN3_30B_A3B)
    assert isinstance(config, MoEModelConfig) and not config.dense_layers
    assert (config.n_routed_experts, config.num_experts_per_tok, config.moe_intermediate_size) == (128, 8, 768)
    assert config.router == RouterConfig(norm_topk_prob=True) and config.router_dtype == torch.float32
    assert config.balancing_loss_cfg == BalancingLossConfig(balancing_loss_alpha=1e-3) and config.z_loss_cfg is None
    model = config.build("meta")
    assert sum(p.numel() for p in model.parameters()) == 30_532_122_624
    assert model.hf_params["model.layers.47.mlp.experts.127.up_proj.weight"].end == 128 * 2 * 768


def test_losses_can_be_switched_off_by_assignment() -> None:
    config = model_config_from_dict(QWEN3_30B_A3B)
    assert config.has_router_loss
    config.balancing_loss_cfg = config.z_loss_cfg = None
    assert not config.has_router_loss
    config.z_loss_cfg = ZLossConfig()
    assert config.has_router_loss


def test_sparse_step_and_dense_layers() -> None:
    read = {**QWEN3_30B_A3B, "num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    assert model_config_from_dict(read).dense_layers == (0, 2, 3, 4)
    without_experts = {k: v for k, v in QWEN3_30B_A3B.items() if k != "num_experts"}
    assert model_config_from_dict({**without_experts, "num_local_experts": 16}).n_routed_experts == 16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts_per_tok": 7}, "num_experts_per_tok=7 exceeds the 6 experts"),
        ({"router": RouterConfig(n_group=4, topk_group=2)}, "router.n_group=4 does not divide n_routed_experts=6"),
        ({"dense_layers": (5,)}, r"dense_layers=\[5\] are outside the 2 layers"),
        ({"dense_layers": (0, 1), "intermediate_size": 8}, "all 2 layers are dense_layers"),
        ({"dense_layers": (0,)}, "intermediate_size"),
        ({"expert_bias": True}, "model_type='qwen3_moe' has other parts"),
    ],
)
def test_contradictions_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        moe_config(**change)
    with pytest.raises(ValidationError, match="topk_group=3 exceeds router.n_group=2"):
        RouterConfig(n_group=2, topk_group=3)
