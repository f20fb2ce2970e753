"""Production and evaluation over the native engine: the same samples for the same seed, and clean stops."""

import asyncio

import pytest
import torch
from safetensors.torch import save_file
from scripted import make_task, strategy, write_prompts
from transformers import AutoTokenizer

from xtuner.v1.data_proto import SampleParams
from xtuner.v1.model import get_model_config_from_hf
from xtuner.v1.model.hf import export_hf_tensors
from xtuner.v1.rl.agent_loop import SingleTurnAgentLoopConfig
from xtuner.v1.rl.agent_loop_manager import AgentLoopManagerConfig
from xtuner.v1.rl.evaluator import EvaluatorConfig
from xtuner.v1.rl.judger import JudgerConfig
from xtuner.v1.rl.rollout.worker import RolloutConfig
from xtuner.v1.rl.utils import AcceleratorResourcesConfig, build_launcher
from xtuner.v1.train.demo.model import write_config, write_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_config(folder, hidden_size=32, layers=1)
    write_tokenizer(folder)
    model = get_model_config_from_hf(folder).build(device="cpu")
    model.init_weights(0)
    tensors = {name: t.contiguous() for name, t in export_hf_tensors(model, torch.float32)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


async def odd_length(response, label, extra_info):
    return float(len(response) % 2)


def samples(states):
    return [(s.rollout_id, s.response_ids, s.logprobs, s.reward) for s in states]


def test_production_is_repeatable_and_survives_its_own_stops(model, tmp_path):
    prompts = write_prompts(tmp_path / "p.jsonl", range(20))
    tokenizer = AutoTokenizer.from_pretrained(model)
    launcher = build_launcher("local", AcceleratorResourcesConfig(accelerator="CPU", num_workers=1))
    controller = RolloutConfig(model_path=model, context_length=64).build(launcher, tokenizer, 5, "cpu")

    def manager(**changes):
        task = make_task(
            prompts,
            k=4,
            agent_loop_config=SingleTurnAgentLoopConfig(
                hf_checkpoint=str(model), sample_params=SampleParams(max_tokens=12)
            ),
            judger_config=JudgerConfig(judger_name="odd", reward_handler=odd_length),
            **changes,
        )
        return AgentLoopManagerConfig(tasks=task).build(controller, tokenizer, None, launcher, 5)

    async def main():
        await controller.start()
        first = await manager().produce_batch(4, 1, 0)

        with pytest.raises(RuntimeError, match="step_timeout"):
            await manager(**strategy(step_timeout=1e-4)).produce_batch(4, 1, 0)
        short = manager(**strategy(should_continue_fn=lambda done, batch: done < 1))
        assert (await short.produce_batch(4, 1, 0)).missing_groups > 0

        again = await manager().produce_batch(4, 1, 0)
        for one, other in zip(first.groups, again.groups, strict=True):
            assert samples(one) == samples(other)
        assert len({tuple(s.response_ids) for g in first.groups for s in g}) > 4, "siblings must differ"

        evaluator = EvaluatorConfig(eval_sample_num=5).build(manager())
        results = [await evaluator.evaluate(step, 0) for step in (1, 2)]
        assert samples(results[0].states) == samples(results[1].states)
        assert results[0].metrics == results[1].metrics and results[0].metrics["samples"] == 20

        with pytest.raises(RuntimeError, match="missed a weight update"):
            await manager().produce_batch(4, 2, 1)
        await controller.shutdown()

    try:
        asyncio.run(main())
    finally:
        launcher.shutdown()
