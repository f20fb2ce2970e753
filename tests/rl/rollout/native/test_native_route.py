"""The engine's prefill and decode steps against the trainer's forward over whole sequences."""

import numpy as np
import pytest
import torch

from xtuner.v1.data_proto import SegmentLayout
from xtuner.v1.model.config import DenseModelConfig, MHAConfig
from xtuner.v1.ops.attention import PackedAttention
from xtuner.v1.rl.rollout.backends.native.cache import KVCache
from xtuner.v1.rl.rollout.backends.native.runner import ModelRunner
from xtuner.v1.rl.rollout.backends.native.weights import PlainWeights, lay_out_by_input

FAMILIES = {
    "qwen3": {"qk_norm": True},
    "qwen2": {"qkv_bias": True},
    "llama": {"qkv_bias": True, "o_bias": True},
}


def _model(family: str, dtype: torch.dtype):
    attention = MHAConfig(num_attention_heads=6, num_key_value_heads=2, head_dim=16, **FAMILIES[family])
    config = DenseModelConfig(
        model_type=family, vocab_size=50, max_position_embeddings=256, num_hidden_layers=3, hidden_size=48,
        intermediate_size=80, eos_token_id=1, tie_word_embeddings=family == "qwen3", attention=attention,
        **({"mlp_bias": True} if family == "llama" else {}),
    )  # fmt: skip
    return config.build("cpu", dtype).requires_grad_(False).eval()


@torch.no_grad()
def _randomise(model, seed: int) -> None:
    # Norms and biases too: `init_weights` gives them values that hide a forgotten one.
    generator = torch.Generator().manual_seed(seed)
    for name, param in model.named_parameters():
        noise = 0.3 * torch.randn(param.shape, generator=generator)
        param.copy_(noise + 1 if name.endswith("norm.weight") else noise)


def _trainers_logits(model, sequences):
    lengths = [len(ids) for ids in sequences]
    attention = PackedAttention(SegmentLayout(lengths, [-1] * len(lengths)), "cpu")
    ids = torch.from_numpy(np.concatenate(sequences)).long()
    positions = torch.cat([torch.arange(n) for n in lengths])
    return model.logits(model.hidden_states(ids, positions, attention)[torch.tensor(lengths).cumsum(0) - 1])


@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float32, 2e-5), (torch.bfloat16, 0.08)],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_whole_sequence(family, dtype, tolerance):
    model = _model(family, dtype)
    plain = dtype == torch.float32
    if plain:
        lay_out_by_input(model)
    weights = PlainWeights(model)
    cache = KVCache(3, 2, 16, 16, dtype, torch.device("cpu"), max_slots=4, max_length=128)
    cache.set_budget(10**6)
    runner = ModelRunner(model, cache)
    rng = np.random.default_rng(0)
    short, long = rng.integers(0, 50, 3), rng.integers(0, 50, 60)
    for round_ in range(2):
        # The second round: other weights in other memory, and a cache with old content.
        weights.drop()
        weights.restore()
        _randomise(model, round_)
        prompts = sequences = [ids.astype(np.int32) for ids in (short, long, short, long[:11])]
        with torch.inference_mode():
            cache.reserve(4, 62, live=0)
            first = runner.fill(sequences, 0)
            for step in range(9):
                last = np.array([7 + step, 3, 20 - step, 9])
                sequences = [np.append(s, t).astype(np.int32) for s, t in zip(sequences, last, strict=True)]
                cache.reserve(4, max(map(len, sequences)), live=4)
                logits = runner.forward(last, np.array([len(s) for s in sequences]))
            for ours, ids in ((first, prompts), (logits, sequences)):
                expected = _trainers_logits(model, ids)
                scale = max(1.0, expected.abs().max().item())
                torch.testing.assert_close(ours, expected, rtol=0, atol=tolerance * scale)
