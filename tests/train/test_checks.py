"""A mistake is answered before a device is touched: field, value, way out."""

import json
import shutil

import pytest
from pydantic import ValidationError

from xtuner.v1.config import AdamWConfig, FSDPConfig, LRConfig
from xtuner.v1.data_proto import SampleParams
from xtuner.v1.model import ZLossConfig, get_model_config_from_hf
from xtuner.v1.rl.advantage import DrGRPOAdvantageConfig, OPOAdvantageConfig, PassKAdvantageConfig, RLOOAdvantageConfig
from xtuner.v1.rl.agent_loop import SingleTurnAgentLoopConfig
from xtuner.v1.rl.agent_loop_manager import AgentLoopManagerConfig, SyncProduceStrategyConfig, drop_equal_rewards
from xtuner.v1.rl.evaluator import EvaluatorConfig
from xtuner.v1.rl.judger import ComposedJudgerConfig, GSM8KJudgerConfig, JudgerConfig
from xtuner.v1.rl.loss import GRPOLossConfig, RolloutImportanceSampling
from xtuner.v1.train.rl_trainer import LoadCheckpointConfig, TraceConfig
from xtuner.v1.utils import get_logger

from .helpers import PROMPT, RESPONSE, config, fit, spread, task, with_evaluation, write_moe_model, write_prompts


def of_sequences():
    """A loss with importance weights of whole responses."""
    correction = RolloutImportanceSampling(rollout_is_level="sequence", rollout_is_threshold=(0.5, 2.0))
    return GRPOLossConfig(policy_loss_cfg={"cliprange_low": 0.2, "cliprange_high": 0.28}, rollout_is=correction)


def problems_of(model, tmp_path, **changes) -> str:
    return "\n".join(config(model, tmp_path, **changes).check())


def test_a_good_config_has_no_problem_and_is_not_changed_by_build(model, tmp_path):
    cfg = config(model, tmp_path, **with_evaluation(model, tmp_path))
    before, given = cfg.model_dump(mode="json"), cfg.model_fields_set
    assert cfg.check() == []
    fit(cfg)
    assert cfg.model_dump(mode="json") == before and cfg.model_fields_set == given
    assert cfg.train_worker_cfg.seed is None and cfg.train_worker_cfg.log_dir is None


# ---------------------------------------------------------------- at construction


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"total_train_steps": None}, "total_train_steps=None and total_epochs=None: set one"),
        ({"total_train_steps": 0}, "total_train_steps"),
        ({"train_batch_size": 0}, "train_batch_size"),
        ({"checkpoint_interval": 0}, "0 is not allowed: give a positive number, or -1"),
        ({"checkpoint_maxkeep": 0}, "0 is not allowed"),
        ({"hf_interval": -2}, "-2 is not allowed"),
        ({"checkpoint_interval": 6}, "checkpoint_interval=6 must be a multiple of sync_weights_interval=4; use 8"),
        ({"hf_interval": 6}, "hf_interval=6 must be a multiple of sync_weights_interval=4; use 8"),
        (
            {"evaluate_step": 6, "enable_evaluate": True},
            "evaluate_step=6 must be a multiple of sync_weights_interval=4; use 8",
        ),
        ({"debug_rollout": True, "debug_train": True, "debug_rollout_dir": "d"}, "exclude each other"),
        ({"debug_rollout": True}, "debug_rollout=True needs debug_rollout_dir"),
        ({"debug_train": True}, "debug_train=True needs debug_rollout_dir"),
        (
            {"debug_train": True, "debug_rollout_dir": "d",
             "load_checkpoint_cfg": LoadCheckpointConfig(checkpoint_path="c")},
            "checkpoint_path has no effect",
        ),
        ({"skip_checkpoint_validation": True}, "skip_checkpoint_validation=True"),
        ({"seed": 10**23}, "seed\n  Input should be less than 9223372036854775808"),
        ({"seed": -1}, "seed\n  Input should be greater than or equal to 0"),
        ({"no_such_field": 1}, "no_such_field"),
        ({"launcher": "slurm"}, "launcher"),
        ({"exp_tracker": "mlflow"}, "exp_tracker"),
        ({"exp_tracker": ["wandb", "mlflow"]}, "exp_tracker"),
    ],
)  # fmt: skip
def test_contradictions_are_refused_at_construction(model, tmp_path, changes, message):
    every = {"sync_weights_interval": 4} if "sync_weights_interval=4" in message else {}
    with pytest.raises(ValidationError) as info:
        config(model, tmp_path, **(every | changes))
    assert message in str(info.value)


def test_an_interval_that_is_off_needs_no_multiple(model, tmp_path):
    config(model, tmp_path, sync_weights_interval=4, evaluate_step=6, checkpoint_interval=-1, hf_interval=None)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: LoadCheckpointConfig(load_optimizer_args=False), "load_optimizer_args=False"),
        (lambda: TraceConfig(enabled=True), "trace_config.enabled=True: this version traces no rollouts"),
        (lambda: TraceConfig(xtuner_viewer_enabled=True), "trace_config.xtuner_viewer_enabled=True"),
        (lambda: TraceConfig(enable_rollout_trace=True), "trace_config.enable_rollout_trace=True"),
    ],
)
def test_options_that_would_do_nothing_are_refused(make, message):
    with pytest.raises(ValidationError, match=message):
        make()


def test_where_traces_would_go_may_be_said_while_there_are_none():
    TraceConfig(output_dir="otel", service_name="mine", xtuner_viewer_host="::", xtuner_viewer_port=0)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"sp_size": 3}, "sp_size=3 does not divide the model's num_attention_heads=4"),
        ({"fsdp_cfg": FSDPConfig(tp_size=4)}, "tp_size=4 does not divide the model's num_key_value_heads=2"),
        (
            {"fsdp_cfg": FSDPConfig(tp_size=2), "sp_size": 4},
            "sp_size=4 does not divide the model's num_attention_heads=4 / tp_size=2",
        ),
        ({"ref_model_fsdp_cfg": FSDPConfig(tp_size=2)}, "ref_model_fsdp_cfg.tp_size=2, but fsdp_cfg.tp_size=1"),
        ({"ref_model_fsdp_cfg": FSDPConfig(ep_size=2)}, "ref_model_fsdp_cfg.ep_size=2"),
        ({"fsdp_cfg": FSDPConfig(requires_grad=False)}, "requires_grad=False: the policy would not learn"),
        ({"offload_rollout_routed_experts": True}, "offload_rollout_routed_experts=True"),
        ({"sft_dataloader_cfg": {}}, "supervised steps"),
        ({"rollout_steps_per_sft": 2}, "sft_\\* options need"),
        (
            {"optim_cfg": AdamWConfig(lr=2e-7), "lr_cfg": LRConfig(lr_type="cosine")},
            "lr_min=1e-06 is not below optim_cfg.lr=2e-07, so lr_type='cosine' would raise the rate; .*lr_min=2e-08",
        ),
        (
            {"optim_cfg": AdamWConfig(lr=1e-6), "lr_cfg": LRConfig(lr_type="linear")},
            "lr_type='linear' would not lower the rate",
        ),
        ({"optimizer_steps": 0}, "optimizer_steps"),
        ({"update_weight_bucket_size_in_gb": 0}, "update_weight_bucket_size_in_gb"),
    ],
)
def test_a_worker_refuses_what_it_cannot_do(model, tmp_path, changes, message):
    with pytest.raises(ValidationError, match=message):
        config(model, tmp_path, worker=changes)


def test_a_constant_rate_has_no_lowest(model, tmp_path):
    config(model, tmp_path, worker={"optim_cfg": AdamWConfig(lr=2e-7), "lr_cfg": LRConfig(lr_type="constant")})


# ---------------------------------------------------------------- by check, and by build


def sampling(**fields):
    return {"task": {"params": SampleParams(**({"max_tokens": RESPONSE} | fields))}}


@pytest.mark.parametrize(
    "changes, message",
    [
        (sampling(temperature=0.0), "train: sample_params.temperature=0.0, top_k=0 is greedy"),
        (sampling(top_k=1), "temperature=1.0, top_k=1 is greedy"),
        (sampling(sampling_seed=5), "train: sample_params.sampling_seed=5 gives all responses of a group the same"),
        (
            sampling(top_p=0.5) | {"worker": {"loss_cfg": of_sequences()}},
            "top_p=0.5 with loss_cfg.rollout_is.rollout_is_level='sequence': a weight is the product over",
        ),
        (sampling(temperature=9e-6), "temperature=9e-06, top_k=0 is greedy"),
        (sampling(return_logprob=False), "train: sample_params.return_logprob must be True"),
        (sampling(return_token_ids=False), "train: sample_params.return_token_ids=False: the native engine is asked"),
        (sampling(no_stop_trim=False), "train: sample_params.no_stop_trim=False"),
        ({"task": {"k": 1}}, "prompt_repeat_k=1, but a group needs at least 2 responses: GRPOAdvantageConfig"),
        ({"task": {"k": 1}, "advantage_estimator_config": RLOOAdvantageConfig()}, "at least 2 responses: RLOO"),
        ({"task": {"k": 1}, "advantage_estimator_config": OPOAdvantageConfig()}, "at least 2 responses: OPO"),
        ({"advantage_estimator_config": PassKAdvantageConfig(k=6)}, "=4, but a group needs at least 6 responses"),
        ({"task": {"judger_config": None}}, "train: judger_config is None"),
        (
            {"rollout": {"context_length": 50}},
            f"max_length={PROMPT} + sample_params.max_tokens={RESPONSE} = 56 exceeds rollout_config.context_length=50",
        ),
        (
            {"rollout": {"context_length": None}, **sampling(max_tokens=500), "worker": {"pack_max_length": 999}},
            "= 548 exceeds the model's max_position_embeddings=512; choose another model, or lower max_length or max_",
        ),
        (
            {"worker": {"pack_max_length": 54}},
            "can have 55 tokens (prompt max_length=48, sample_params.max_tokens=8, the last of which is no input), "
            "more than train_worker_cfg.pack_max_length=54; raise pack_max_length, or lower max_length or max_tokens.",
        ),
        ({"worker": {"optimizer_steps": 13}}, "optimizer_steps=13 exceeds the 12 samples of a step (train_batch"),
        ({"launcher": "local", "num_workers": 2}, "launcher='local' runs one worker, but resources.num_workers=2"),
        (
            {"num_workers": 3, "worker": {"fsdp_cfg": FSDPConfig(hsdp_sharding_size=2)}},
            "train_worker_cfg.fsdp_cfg.hsdp_sharding_size=2 does not divide num_workers=3; use a divisor of 3 or None",
        ),
        (
            {"num_workers": 3, "rollout": {"tensor_parallel_size": 2}},
            "rollout_config.tensor_parallel_size=2 does not divide num_workers=3; use a multiple of 2 workers",
        ),
        (
            {"num_workers": 4, "rollout": {"tensor_parallel_size": 4}},
            "rollout_config.tensor_parallel_size=4 does not divide the model's num_key_value_heads=2; use one of 1, 2",
        ),
        (
            {"num_workers": 4, "worker": {"fsdp_cfg": FSDPConfig(hsdp_sharding_size=2), "sp_size": 4}},
            "hsdp_sharding_size=2 is no multiple of sp_size=4",
        ),
        (
            {"num_workers": 6, "worker": {"fsdp_cfg": FSDPConfig(tp_size=2), "sp_size": 2}},
            "tp_size=2 x sp_size=2 does not divide num_workers=6; use a multiple of 4 workers",
        ),
        ({"load_from": "/no/such"}, "load_from='/no/such': no config.json there; give a Hugging Face model folder"),
        (
            {"worker": {"load_from": "/no/such"}},
            "train_worker_cfg.load_from='/no/such', but load_from=",
        ),
        (
            {"task": {"agent_loop_config": SingleTurnAgentLoopConfig(
                hf_checkpoint="/no/such", sample_params=SampleParams(max_tokens=RESPONSE))}},
            "agent_loop_manager_cfg.train: agent_loop_config.hf_checkpoint='/no/such' is no folder; give that of the",
        ),
        ({"rollout": {"model_path": "/no/such"}}, "rollout_config.model_path='/no/such': no config.json there"),
        ({"tokenizer_path": "/no/such"}, "tokenizer_path='/no/such': no tokenizer files there"),
        ({"rows": "/no/such.jsonl"}, "dataset anno_path='/no/such.jsonl' does not exist"),
        (
            {"advantage_estimator_config": DrGRPOAdvantageConfig(),
             "worker": {"loss_cfg": GRPOLossConfig(
                 policy_loss_cfg={"cliprange_low": 0.2, "cliprange_high": 0.2}, loss_reduction="sample")}},
            "train_worker_cfg.loss_cfg: loss_reduction='sample', loss_max_length=None contradict",
        ),
        (
            {"worker": {"ref_load_from": "/no/such", "loss_cfg": GRPOLossConfig(
                policy_loss_cfg={"cliprange_low": 0.2, "cliprange_high": 0.2}, use_kl_loss=True, kl_loss_type="k3")}},
            "train_worker_cfg.ref_load_from='/no/such': no config.json there",
        ),
        (
            {"load_checkpoint_cfg": LoadCheckpointConfig(checkpoint_path="/no/such")},
            "load_checkpoint_cfg.checkpoint_path='/no/such': no train_state.json there",
        ),
        (
            {"enable_evaluate": True},
            "enable_evaluate=True needs eval_agent_loop_manager_cfg and evaluator_config; give them or set",
        ),
        (
            {"debug_train": True, "debug_rollout_dir": "/no/such"},
            "debug_rollout_dir='/no/such': no debug_rollout_<step>.jsonl there; make them with debug_rollout=True",
        ),
    ],
)  # fmt: skip
def test_what_would_stop_the_run_is_told_before(model, tmp_path, changes, message):
    cfg = config(model, tmp_path, **changes)
    (problem,) = cfg.check()
    assert message in problem
    with pytest.raises(ValueError, match="the run cannot start"):
        cfg.build()
    assert not (tmp_path / "runs").exists()


def test_all_problems_are_told_at_once(model, tmp_path):
    text = problems_of(model, tmp_path, tokenizer_path="/no/such", enable_evaluate=True, **sampling(temperature=0.0))
    assert len(text.splitlines()) == 3


def test_evaluation_may_be_greedy_or_seeded_and_is_checked_too(model, tmp_path):
    assert problems_of(model, tmp_path, **with_evaluation(model, tmp_path)) == ""
    seeded = SampleParams(max_tokens=RESPONSE, sampling_seed=5)
    assert problems_of(model, tmp_path, **with_evaluation(model, tmp_path, params=seeded)) == ""
    rows = write_prompts(tmp_path)
    long = task(model, rows, "long", k=1, params=SampleParams(max_tokens=99, temperature=0.0))
    changes = with_evaluation(model, tmp_path) | {"eval_agent_loop_manager_cfg": AgentLoopManagerConfig(tasks=long)}
    assert "eval_agent_loop_manager_cfg.long: prompt max_length=48" in problems_of(model, tmp_path, **changes)


@pytest.mark.parametrize(
    "params, message",
    [
        ({"return_token_ids": False}, "eval: sample_params.return_token_ids=False: the native engine is asked for ids"),
        ({"no_stop_trim": False}, "eval: sample_params.no_stop_trim=False"),
        ({"stop_token_ids": [10**6]}, "eval: sample_params.stop_token_ids=[1000000] are outside the model's voc"),
        ({"top_logprobs": 21}, "eval: sample_params.top_logprobs=21: the native engine reports up to 20"),
    ],
)
def test_what_an_evaluation_s_engine_would_refuse_is_told_before(model, tmp_path, params, message):
    params = SampleParams(max_tokens=RESPONSE, **params)
    (problem,) = config(model, tmp_path, **with_evaluation(model, tmp_path, params=params)).check()
    assert f"eval_agent_loop_manager_cfg.{message}" in problem


@pytest.mark.parametrize(
    "backend, params, message",
    [
        ("sglang", {"sampling_seed": 5}, "sampling_seed=5: sglang draws by a request's seed only with"),
        ("sglang", {"repetition_penalty": 1.1}, "repetition_penalty=1.1: sglang leaves the prompt out"),
        ("sglang", {"min_tokens": 2, "stops": ["a"]}, "min_tokens=2: sglang stops at stop strings before that"),
        ("lmdeploy", {"stops": ["a"]}, "stops: lmdeploy stops at any token that holds such a string"),
        ("lmdeploy", {"presence_penalty": 0.5}, "lmdeploy has no such penalties"),
        ("lmdeploy", {"temperature": 3.0}, "temperature=3.0: lmdeploy takes up to 2"),
        ("vllm", {"temperature": 0.005}, "temperature=0.005: vllm draws at 0.01 at least"),
    ],
)
@pytest.mark.parametrize("manager", ["train", "eval"])
def test_what_one_engine_would_refuse_is_told_for_this_engine_alone(model, tmp_path, backend, params, message, manager):
    """Also where it is not installed."""

    def text(backend, **fields):
        given = SampleParams(max_tokens=RESPONSE, **params)
        of_task = {"task": {"params": given}} if manager == "train" else with_evaluation(model, tmp_path, params=given)
        return problems_of(model, tmp_path, rollout={"backend": backend, **fields}, **of_task)

    assert f"_manager_cfg.{manager}: sample_params." in text(backend)
    assert message in text(backend) and message not in text("native")
    if "sampling_seed" in params:
        assert message not in text(backend, extra_rollout_config={"sglang_enable-deterministic-inference": True})


def test_what_an_evaluation_does_not_use_is_a_doubt(model, tmp_path, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(get_logger(), "warning", lambda text: said.append(text))
    strategy = SyncProduceStrategyConfig(is_valid_sample_fn=drop_equal_rewards(), step_timeout=60)
    for fields in ({}, {"produce_strategy_config": strategy, "weight": 2.0}):
        assert problems_of(model, tmp_path, **with_evaluation(model, tmp_path, **fields)) == ""
    (text,) = said
    assert "eval_agent_loop_manager_cfg.eval: an evaluation does not use weight=2, " in text
    assert "produce_strategy_config.is_valid_sample_fn=" in text and "should_continue_fn" not in text
    assert "produce_strategy_config.step_timeout=60" in text


@pytest.mark.parametrize("composed", [False, True])
def test_a_judge_that_compares_needs_labels(model, tmp_path, composed):
    def text(judger, required):
        cfg = config(model, tmp_path, task={"judger_config": judger})
        (entry,) = cfg.agent_loop_manager_cfg.tasks.sampler_config.dataloader_cfg.dataset_config_list
        entry["tokenize_fn"].require_ground_truth = required
        return "\n".join(cfg.check())

    rule, own = GSM8KJudgerConfig(), JudgerConfig(judger_name="own", reward_handler=spread)
    both = ComposedJudgerConfig(branches={"rule": rule, "own": own}) if composed else own
    rule = ComposedJudgerConfig(branches={"rule": rule}) if composed else rule
    whole = ComposedJudgerConfig(branches={"rule": rule, "own": own})
    for judger in (rule, ComposedJudgerConfig(branches={"whole": whole})):
        assert "train: the tokenize function's require_ground_truth=False lets" in text(judger, required=False)
    assert text(rule, required=True) == text(both, required=False) == ""


class RewardsItself(SingleTurnAgentLoopConfig):
    """A loop of the user's own, which sets the reward."""


def test_a_loop_of_ones_own_needs_no_judge(model, tmp_path):
    loop = RewardsItself(hf_checkpoint=model, sample_params=SampleParams(max_tokens=RESPONSE))
    assert problems_of(model, tmp_path, task={"judger_config": None, "agent_loop_config": loop}) == ""


@pytest.mark.parametrize(
    "field, value",
    [("hidden_size", 64), ("rope", {"theta": 5e5}), ("rms_norm_eps", 1e-5), ("tie_word_embeddings", False)],
)
def test_a_model_config_of_another_model_is_told_by_field(model, tmp_path, field, value):
    other = get_model_config_from_hf(model)
    if isinstance(value, dict):
        other.rope.theta = value["theta"]
        field = "rope.theta"
    else:
        setattr(other, field, value)
    text = problems_of(model, tmp_path, worker={"model_cfg": other})
    assert f"train_worker_cfg.model_cfg.{field}=" in text and "load_from must be of the same model" in text


def test_how_routers_are_trained_is_the_runs_to_choose(tmp_path):
    moe = write_moe_model(tmp_path / "moe")
    ours = get_model_config_from_hf(moe)
    ours.balancing_loss_cfg, ours.z_loss_cfg, ours.freeze_routers = None, ZLossConfig(), True
    assert problems_of(moe, tmp_path, worker={"model_cfg": ours}) == ""


def test_a_model_whose_turns_never_end_is_told(model, tmp_path):
    folder = tmp_path / "endless"
    shutil.copytree(model, folder)
    for name in ("config.json", "generation_config.json"):
        raw = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
        (folder / name).write_text(json.dumps({k: v for k, v in raw.items() if k != "eos_token_id"}))
    assert "has eos_token_id" in problems_of(folder, tmp_path)


def test_a_folder_without_weights_or_of_a_strange_family_is_told(model, tmp_path):
    folder = tmp_path / "empty"
    folder.mkdir()
    (folder / "config.json").write_text((model / "config.json").read_text())
    assert "no *.safetensors weights there" in problems_of(model, tmp_path, load_from=folder)
    raw = json.loads((model / "config.json").read_text()) | {"model_type": "gpt_bigcode"}
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "model.safetensors").touch()
    assert "gpt_bigcode" in problems_of(model, tmp_path, load_from=folder)


@pytest.mark.parametrize(
    "params",
    [
        {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.1}, {"repetition_penalty": 1.1}, {"min_tokens": 3},
        {"presence_penalty": 0.5},
    ],
)  # fmt: skip
def test_sampling_that_is_not_the_model_s_own_is_a_doubt(model, tmp_path, params, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(get_logger(), "warning", lambda text: said.append(text))
    assert problems_of(model, tmp_path, **sampling(**params)) == ""
    ((name, value),) = params.items()
    assert len(said) == 1 and f"{name}={value} change the sampled distribution" in said[0]


@pytest.mark.parametrize("params, said_of", [
    ({"sampling_seed": 3}, "sampling_seed=3"), ({"temperature": 0}, "=0,"), ({"temperature": 1e-6}, "=1e-06,"),
])  # fmt: skip
def test_repeats_of_an_evaluation_that_are_copies_are_a_doubt(model, tmp_path, params, said_of, monkeypatch):
    """Their pass@k would be reported without a word."""
    said: list[str] = []
    monkeypatch.setattr(get_logger(), "warning", lambda text: said.append(text))
    for k, warnings in ((1, 0), (4, 1)):
        fields = with_evaluation(model, tmp_path, params=SampleParams(max_tokens=RESPONSE, **params))
        fields["eval_agent_loop_manager_cfg"].tasks.sampler_config.prompt_repeat_k = k
        assert problems_of(model, tmp_path, **fields) == "" and len(said) == warnings
    assert said_of in said[0] and "the 4 responses to a prompt alike: pass@k would be pass@1" in said[0]


@pytest.mark.parametrize("length", [{"total_train_steps": 3}, {"total_train_steps": None, "total_epochs": 1}])
def test_an_interval_that_is_never_over_is_a_doubt(model, tmp_path, length, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(get_logger(), "warning", lambda text: said.append(text))
    for interval in (3, 4):
        fields = with_evaluation(model, tmp_path) | length | {"checkpoint_interval": interval}
        cfg = config(model, tmp_path, rows=write_prompts(tmp_path, 9), evaluate_step=interval, **fields)
        assert cfg.check() == [] and cfg.check_data() == []
        assert len(said) == (2 if interval == 4 else 0)
    assert said[0].startswith("evaluate_step=4 is more than the run's 3 train steps: nothing is evaluated.")
    assert said[1].startswith("checkpoint_interval=4 is more than the run's 3 train steps: no checkpoint is saved.")


@pytest.mark.parametrize(
    "fields, doubt",
    [
        ({"auto_resume": True}, "auto_resume=True, but checkpoint_interval=-1 saves no checkpoint"),
        ({"checkpoint_maxkeep": 2}, "checkpoint_maxkeep=2, but checkpoint_interval=-1 saves no checkpoint"),
        ({"auto_resume": True, "checkpoint_maxkeep": 2, "checkpoint_interval": 1}, None),
        ({}, None),
    ],
)
def test_to_resume_without_checkpoints_is_a_doubt(model, tmp_path, fields, doubt, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(get_logger(), "warning", lambda text: said.append(text))
    assert problems_of(model, tmp_path, **fields) == ""
    assert [text.partition(":")[0] for text in said] == ([doubt] if doubt else [])


# ---------------------------------------------------------------- by the data


def test_fewer_prompts_than_a_batch_give_no_silent_success(model, tmp_path):
    cfg = config(
        model, tmp_path, rows=write_prompts(tmp_path, 5), train_batch_size=8, total_epochs=3, total_train_steps=None
    )
    with pytest.raises(ValueError, match="5 prompts are fewer than train_batch_size=8: total_epochs=3 gives 0"):
        cfg.build()
    assert not (tmp_path / "runs").exists()


def test_an_epoch_has_no_prompt_of_a_task_without_weight(model, tmp_path):
    """Else a run makes many passes over the other tasks, and its learning rate falls as slowly."""
    tasks = [task(model, write_prompts(tmp_path, n), f"of-{n}", weight=w) for n, w in ((6, 1), (60, 0))]
    cfg = config(model, tmp_path, total_train_steps=None, total_epochs=1)
    cfg.agent_loop_manager_cfg = AgentLoopManagerConfig(tasks=tasks)
    assert cfg.check_data() == []
    trainer = cfg.build()
    assert trainer.total_steps == 2
    trainer.close()
    cfg.train_batch_size = 7
    assert "6 prompts are fewer than train_batch_size=7" in cfg.check_data()[0]


def test_an_empty_file_stops_before_a_run_is_made(model, tmp_path):
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ValueError, match="empty.jsonl"):
        config(model, tmp_path, rows=tmp_path / "empty.jsonl").build()
    assert not (tmp_path / "runs").exists()


def test_more_groups_a_step_than_prompts_take_some_twice(model, tmp_path, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(get_logger(), "warning", lambda text: said.append(text))
    cfg = config(model, tmp_path, rows=write_prompts(tmp_path, 5), train_batch_size=8, total_train_steps=1)
    assert cfg.check() == [] and cfg.check_data() == []
    doubt = "5 prompts are fewer than train_batch_size=8: every step draws some of them more than once."
    assert said == [doubt], "check says what the run says"
    run = fit(cfg)
    assert said == [doubt, doubt]
    assert len(run.trajectories(1)) == 32 and len(set(run.prompts(1))) == 5


def test_an_evaluation_of_no_prompt_is_refused(model, tmp_path):
    changes = with_evaluation(model, tmp_path) | {"evaluator_config": EvaluatorConfig(eval_sample_ratio=0.1)}
    (problem,) = config(model, tmp_path, **changes).check_data()
    assert problem == "evaluation task 'eval': eval_sample_ratio=0.1 of 4 prompts is none; raise it."
