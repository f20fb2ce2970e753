"""Experts on request: those that each token's row went through, whatever became of the sequence on its way."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from native_models import EOS, VOCAB, AheadRunner, prompt, request, run, started, write_model

from xtuner.v1.data_proto import SegmentLayout
from xtuner.v1.model.hf import export_hf_tensors, save_hf_model
from xtuner.v1.model.hf_config import model_config_from_dict
from xtuner.v1.ops.attention import PackedAttention
from xtuner.v1.rl.rollout.backends.native import NativeEngine

_BASE = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 256, "eos_token_id": EOS[0],
}  # fmt: skip
FAMILIES = {
    "qwen3_moe": {"num_key_value_heads": 2, "head_dim": 8, "num_experts": 8, "num_experts_per_tok": 3,
                  "moe_intermediate_size": 12, "norm_topk_prob": True, "mlp_only_layers": [1]},
    "gpt_oss": {"num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
                "sliding_window": 9},
    "deepseek_v3": {"moe_intermediate_size": 12, "n_routed_experts": 8, "n_group": 2, "topk_group": 1,
                    "num_experts_per_tok": 3, "first_k_dense_replace": 1, "q_lora_rank": None, "kv_lora_rank": 12,
                    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
}  # fmt: skip


def write_experts(folder: Path, family: str):
    """The model, float32, and its folder."""
    config = model_config_from_dict({"model_type": family, **_BASE, **FAMILIES[family]})
    model = config.build("cpu")
    model.init_weights(0, std=0.3)
    save_hf_model(export_hf_tensors(model, torch.float32), config, folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    return model


@pytest.fixture(params=FAMILIES)
def model_and_path(request, tmp_path):
    return write_experts(tmp_path / "m", request.param), tmp_path / "m"


@pytest.fixture
def qwen(tmp_path):
    return write_experts(tmp_path / "m", "qwen3_moe"), tmp_path / "m"


def chosen_by(model, ids: list[int]) -> np.ndarray:
    """int16 [T, L, K], of a forward over the whole sequence."""
    chosen: list[torch.Tensor] = []
    context = PackedAttention(SegmentLayout([len(ids)], [-1]), "cpu")
    with torch.no_grad():
        model.hidden_states(torch.tensor(ids), torch.arange(len(ids)), context, chosen=chosen)
    return torch.stack(chosen, 1).to(torch.int16).numpy()


def check(model, prompts, outputs) -> None:
    for ids, out in zip(prompts, outputs, strict=True):
        # The last token has not been through the model.
        expected = chosen_by(model, ids + out.token_ids[:-1])
        assert out.routed_experts.dtype == np.int16 and out.routed_experts.shape == expected.shape
        assert np.array_equal(np.sort(out.routed_experts), np.sort(expected))


def test_sequences_that_end_under_steps_in_flight_keep_theirs(qwen) -> None:
    model, path = qwen
    engine = started(path, return_routed_experts=True)
    runner = AheadRunner.put_into(engine)
    prompts = [prompt(i, 1 + 9 * i) for i in range(8)]
    stops = list(range(10, VOCAB, 4))
    outputs = run(engine, *[request(i, p, max_tokens=90, stop_token_ids=stops) for i, p in enumerate(prompts)])
    assert runner.calls_ahead > 0 and {out.finish_reason for out in outputs} == {"stop"}
    check(model, prompts, outputs)


def test_they_are_the_models_own_choice(model_and_path) -> None:
    """Prompts longer than a page, siblings, more sequences than slots, ends at different steps."""
    model, path = model_and_path
    prompts = [prompt(i, n) for i, n in enumerate((3, 70, 17, 1, 64, 130))]
    prompts += [prompts[1]] * 3 + [prompts[4]] * 2
    engine = started(path, return_routed_experts=True, max_batch_size=6)
    for _ in range(2):  # the second time most of the prompts are in the cache
        outputs = run(engine, *[request(i, p, max_tokens=5 + 7 * (i % 5)) for i, p in enumerate(prompts)])
        check(model, prompts, outputs)
    asyncio.run(engine.sleep(("kv_cache",)))
    asyncio.run(engine.wake(("kv_cache",)))
    check(model, prompts, run(engine, *[request(i, p) for i, p in enumerate(prompts)]))


def test_prompts_in_pieces_and_sequences_that_make_room(qwen) -> None:
    model, path = qwen
    prompts = [prompt(i, 60 + i) for i in range(6)]
    engine = started(path, return_routed_experts=True, max_prefill_rows=25, cpu_cache_bytes=9 * 64 * 400)
    outputs = run(engine, *[request(i, p, max_tokens=90, min_tokens=90) for i, p in enumerate(prompts)])
    assert engine.statistics()["preemptions"] > 0
    check(model, prompts, outputs)


def test_they_come_where_they_are_wanted(qwen, tmp_path) -> None:
    _, path = qwen
    engine = started(path, return_routed_experts=True)
    wanted, unwanted = run(engine, request(0), request(1, return_routed_experts=False))
    assert wanted.routed_experts is not None and unwanted.routed_experts is None
    (out,) = run(started(path), request(0))
    assert out.routed_experts is None and out.token_ids == wanted.token_ids
    dense = write_model(tmp_path / "dense")
    with pytest.raises(ValueError, match="return_routed_experts=True: .*model_type='qwen3', which has no experts"):
        asyncio.run(NativeEngine(dense, return_routed_experts=True).start())


def test_what_an_aborted_response_has_so_far(qwen) -> None:
    model, path = qwen
    engine = started(path, return_routed_experts=True)
    prompts = [prompt(i, 9) for i in range(3)]

    async def abort_soon():
        tasks = [asyncio.ensure_future(engine.generate(request(i, p, max_tokens=200, min_tokens=200)))
                 for i, p in enumerate(prompts)]  # fmt: skip
        for _ in range(20):
            await asyncio.sleep(0)
        await engine.abort()
        return await asyncio.gather(*tasks)

    outputs = asyncio.run(abort_soon())
    assert all(out.finish_reason == "abort" and 0 < len(out.token_ids) < 200 for out in outputs)
    check(model, prompts, outputs)
