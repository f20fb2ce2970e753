"""GRPO on GSM8K with a rule-based judge: the tutorial's run, with everything that one usually changes.

What happens in each of the 45 train steps: 64 questions are drawn, the model answers each of them 5 times, the judge
compares the number behind `####` with the right one, answers that beat their siblings are made more likely and the
others less, and the new weights go to the inference engine. After the last step the model is evaluated and saved.

The environment says what differs from place to place:

    MODEL_PATH       Hugging Face folder of an instruction-tuned model, e.g. Qwen3-8B
    DATA_PATH        training prompts; `xtuner data gsm8k --out-dir DIR` writes DIR/train.jsonl and DIR/test.jsonl
    EVAL_DATA_PATH   evaluation prompts; without it the run does not evaluate
    WORK_DIR         where runs are kept; --work-dir does as well
    WORLD_SIZE       number of machines (default 1) of 8 GPUs each; --num-workers N for any other number of GPUs
    SP_SIZE          sequence-parallel size (default 1)

See what it comes to, then start it (or let examples/v1/scripts/run_rl.sh set the variables and do so):

    xtuner check examples/v1/config/rl_grpo_gsm8k_judge.py
    xtuner train examples/v1/config/rl_grpo_gsm8k_judge.py

On one CPU, with a small model: add `--accelerator cpu --num-workers 1 --set train_batch_size=4`.
"""

import os

from xtuner.v1.config import AdamWConfig, FSDPConfig, LRConfig
from xtuner.v1.data_proto.rl_data import SampleParams
from xtuner.v1.datasets.config import DataloaderConfig, DatasetConfig
from xtuner.v1.datasets.rl_tokenize_fn import RLTextTokenizeFnConfig
from xtuner.v1.model import get_model_config_from_hf
from xtuner.v1.rl.advantage import GRPOAdvantageConfig
from xtuner.v1.rl.agent_loop import SingleTurnAgentLoopConfig
from xtuner.v1.rl.agent_loop_manager import (
    AgentLoopManagerConfig,
    SamplerConfig,
    SyncProduceStrategyConfig,
    TaskSpecConfig,
)
from xtuner.v1.rl.evaluator import EvaluatorConfig
from xtuner.v1.rl.judger import GSM8KJudgerConfig
from xtuner.v1.rl.loss import GRPOLossConfig
from xtuner.v1.rl.replay_buffer import SyncReplayBufferConfig
from xtuner.v1.rl.rollout.worker import RolloutConfig
from xtuner.v1.rl.trainer import WorkerConfig
from xtuner.v1.rl.utils import AcceleratorResourcesConfig, CPUResourcesConfig
from xtuner.v1.train.rl_trainer import RLColocateTrainerConfig

# ------------------------------------------------------------------------------------------------ the place

model_path = os.environ["MODEL_PATH"]
train_data = os.environ["DATA_PATH"]
eval_data = os.environ.get("EVAL_DATA_PATH") or None
work_dir = os.environ["WORK_DIR"]
machines = int(os.environ.get("WORLD_SIZE", "1"))
sp_size = int(os.environ.get("SP_SIZE", "1"))

# ------------------------------------------------------------------------------------------------ the sizes

max_prompt_length = 512  # tokens; longer questions are left out, and counted in the log
max_response_length = 1024  # tokens; an answer that is cut off here has no final number and gets no reward
answers_per_question = 5  # the group whose members are compared; at least 2
optimizer_steps = 1  # 1: every answer is trained on by exactly the weights that gave it
questions_per_step = 64 * optimizer_steps
total_train_steps = 45
evaluate_every = 45
pack_max_length = 32 * 1024  # answers are laid end to end up to this many tokens; less of it needs less memory


# ------------------------------------------------------------------------------------------------ the tasks


def gsm8k_task(name: str, file: str, answers: int, sampling: SampleParams) -> TaskSpecConfig:
    """The questions of `file`, `answers` answers to each, and the judge."""
    dataloader = DataloaderConfig(
        dataset_config_list=[
            {
                "dataset": DatasetConfig(name="grpo_gsm8k", anno_path=file),
                "tokenize_fn": RLTextTokenizeFnConfig(max_length=max_prompt_length),
            }
        ],
        pack_max_length=pack_max_length,
        collator="fake_collator",  # prompts go to the engine one by one:
        pack_level="none",  # there is nothing to collate or pack before the answers are there
    )
    return TaskSpecConfig(
        task_name=name,
        sampler_config=SamplerConfig(dataloader_cfg=dataloader, prompt_repeat_k=answers),
        agent_loop_config=SingleTurnAgentLoopConfig(hf_checkpoint=model_path, sample_params=sampling),
        # Rows name their judge in `data_source`; the converter writes this name. 1 for the right number, else 0.
        judger_config=GSM8KJudgerConfig(
            judger_name="openai/gsm8k",
            cpu_resources=CPUResourcesConfig(num_workers=1, num_cpus_per_worker=1),
        ),
        # A step waits for all its answers. None is older than the weights that it trains.
        produce_strategy_config=SyncProduceStrategyConfig(),
    )


# Training samples from the whole distribution: the log-probs that are trained are of just that one.
train_sampling = SampleParams(max_tokens=max_response_length, temperature=1.0, top_p=1.0, top_k=0)
train_tasks = AgentLoopManagerConfig(tasks=gsm8k_task("train_task", train_data, answers_per_question, train_sampling))

# Evaluation asks for the one most likely answer.
eval_sampling = SampleParams(max_tokens=max_response_length, temperature=0.0, top_p=1.0, top_k=1)
eval_tasks = eval_data and AgentLoopManagerConfig(tasks=gsm8k_task("eval_task", eval_data, 1, eval_sampling))

# ------------------------------------------------------------------------------------------------ the engine

rollout = RolloutConfig(
    env="grpo_gsm8k",
    model_path=model_path,
    dtype="bfloat16",
    tensor_parallel_size=1,  # GPUs of one engine; with 1, every GPU has an engine of its own
    expert_parallel_size=1,
    gpu_memory_utilization=0.8,  # of the GPU's memory while the trainer sleeps; the rest is left to the trainer
    context_length=max_prompt_length + max_response_length,
)

# ------------------------------------------------------------------------------------------------ the training

model = get_model_config_from_hf(model_path)  # reads config.json only
for name in ("balancing_loss_cfg", "z_loss_cfg"):  # router losses of mixture-of-experts models: not with RL
    if hasattr(model, name):
        setattr(model, name, None)

worker = WorkerConfig(
    model_cfg=model,
    load_from=model_path,
    optim_cfg=AdamWConfig(lr=1e-6, weight_decay=0.1, foreach=False),
    lr_cfg=LRConfig(lr_type="constant", warmup_ratio=0, lr_min=1e-6),
    loss_cfg=GRPOLossConfig(
        policy_loss_cfg={
            "loss_type": "vanilla",  # PPO's clipped ratio
            "cliprange_low": 0.2,  # no further push once an answer's token is 20 % less likely than it was,
            "cliprange_high": 0.28,  # or 28 % more likely: more room upwards keeps exploration alive
            "clip_ratio_c": 10.0,  # bounds the loss of a bad answer that became much more likely
            "log_prob_diff_min": -20.0,
            "log_prob_diff_max": 20.0,
        },
        ignore_idx=-100,
        use_kl_loss=False,  # True holds the model near the initial one, with a second copy of it in memory
        kl_loss_coef=0.0,
        kl_loss_type="low_var_kl",
        mode="chunk",  # logits are made for `chunk_size` tokens at a time and never all at once
        chunk_size=512,
    ),
    fsdp_cfg=FSDPConfig(torch_compile=False, cpu_offload=False, ep_size=1),
    sp_size=sp_size,
    optimizer_steps=optimizer_steps,
    pack_max_length=pack_max_length,
)

resources = AcceleratorResourcesConfig(
    accelerator="GPU",
    num_workers=8 * machines,
    num_cpus_per_worker=12,
    cpu_memory_per_worker=16 * 1024**3,  # bytes
)

# ------------------------------------------------------------------------------------------------ the run

trainer = RLColocateTrainerConfig(
    resources=resources,
    rollout_config=rollout,
    train_worker_cfg=worker,
    tokenizer_path=model_path,
    load_from=model_path,
    agent_loop_manager_cfg=train_tasks,
    replay_buffer_config=SyncReplayBufferConfig(),
    advantage_estimator_config=GRPOAdvantageConfig(eps=1e-8),
    train_batch_size=questions_per_step,
    total_train_steps=total_train_steps,
    sync_weights_interval=1,  # new weights to the engine after every step
    enable_evaluate=eval_tasks is not None,
    eval_agent_loop_manager_cfg=eval_tasks,
    evaluator_config=EvaluatorConfig(),
    enable_initial_evaluate=False,
    evaluate_step=evaluate_every,
    checkpoint_interval=-1,  # e.g. 10: a run that was cut short goes on from there with --set auto_resume=true
    work_dir=work_dir,
    seed=123,
)
