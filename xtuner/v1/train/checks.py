"""What can be known before a device is touched: files, and fields that must fit each other."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from xtuner.v1.rl.advantage import DrGRPOAdvantageConfig, GRPOAdvantageConfig, PassKAdvantageConfig
from xtuner.v1.utils import get_logger

if TYPE_CHECKING:
    from .rl_trainer import RLColocateTrainerConfig


def check_run(cfg: "RLColocateTrainerConfig") -> list[str]:
    """Problems that would stop the run, each with field, value and the way out. Doubts are logged as warnings."""
    problems: list[str] = []
    problems += _check_folders(cfg)
    problems += _check_evaluation(cfg)
    for name, manager in (("agent_loop_manager_cfg", cfg.agent_loop_manager_cfg),
                          ("eval_agent_loop_manager_cfg", cfg.eval_agent_loop_manager_cfg)):  # fmt: skip
        if manager is not None:
            for task in manager.task_list():
                training = manager is cfg.agent_loop_manager_cfg
                problems += _check_task(cfg, f"{name}.{task.task_name}", task, training)
    return problems


def _check_folders(cfg: "RLColocateTrainerConfig") -> list[str]:
    problems = []
    for field, path in (("load_from", cfg.load_from), ("rollout_config.model_path", cfg.rollout_config.model_path)):
        folder = Path(path)
        if not (folder / "config.json").is_file():
            problems.append(f"{field}={str(path)!r}: no config.json there; give a Hugging Face model folder.")
        elif not any(folder.glob("*.safetensors")):
            problems.append(f"{field}={str(path)!r}: no *.safetensors weights there.")
    tokenizer = Path(cfg.tokenizer_path)
    if not (tokenizer / "tokenizer_config.json").is_file() and not (tokenizer / "tokenizer.json").is_file():
        problems.append(f"tokenizer_path={str(cfg.tokenizer_path)!r}: no tokenizer files there.")
    model_json = Path(cfg.load_from) / "config.json"
    if model_json.is_file():
        raw = json.loads(model_json.read_text(encoding="utf-8"))
        model_cfg = cfg.train_worker_cfg.model_cfg
        for key in ("vocab_size", "hidden_size", "num_hidden_layers"):
            if raw.get(key) != getattr(model_cfg, key):
                problems.append(
                    f"train_worker_cfg.model_cfg.{key}={getattr(model_cfg, key)}, but {model_json} says "
                    f"{raw.get(key)}: both must describe the same model."
                )
    return problems


def _check_evaluation(cfg: "RLColocateTrainerConfig") -> list[str]:
    if not cfg.enable_evaluate:
        return []
    missing = [n for n in ("eval_agent_loop_manager_cfg", "evaluator_config") if getattr(cfg, n) is None]
    if not missing:
        return []
    return [f"enable_evaluate=True needs {' and '.join(missing)}; give them or set enable_evaluate=False."]


def _check_task(cfg: "RLColocateTrainerConfig", where: str, task, training: bool) -> list[str]:
    problems = []
    params = task.agent_loop_config.sample_params
    repeat = task.sampler_config.prompt_repeat_k
    context, pack = cfg.rollout_config.context_length, cfg.train_worker_cfg.pack_max_length
    longest = 0
    for item in task.sampler_config.dataloader_cfg.dataset_config_list or []:
        path = Path(item["dataset"].anno_path)
        if not path.exists():
            problems.append(f"{where}: dataset anno_path={str(path)!r} does not exist.")
        longest = max(longest, item["tokenize_fn"].max_length or 0)
    need = longest + params.max_tokens
    if longest and context is not None and need > context:
        problems.append(
            f"{where}: prompt max_length={longest} + sample_params.max_tokens={params.max_tokens} = {need} exceeds "
            f"rollout_config.context_length={context}; raise it or lower one of them."
        )
    if not training:
        return problems
    if longest and need - 1 > pack:
        problems.append(
            f"{where}: a sample can have {need - 1} tokens, more than train_worker_cfg.pack_max_length={pack}; "
            "raise pack_max_length, or lower max_length or max_tokens."
        )
    if params.temperature == 0 or params.top_k == 1:
        problems.append(
            f"{where}: sample_params.temperature={params.temperature}, top_k={params.top_k} is greedy: all responses "
            "of a group would be alike. Training needs temperature > 0 and top_k != 1."
        )
    if not params.return_logprob or not params.return_token_ids:
        problems.append(f"{where}: sample_params.return_logprob and return_token_ids must be True for training.")
    estimator = cfg.advantage_estimator_config
    if repeat < 2 and isinstance(estimator, (GRPOAdvantageConfig, DrGRPOAdvantageConfig)):
        problems.append(
            f"{where}: sampler_config.prompt_repeat_k={repeat}: a group needs at least 2 responses, "
            "since the advantage compares a response with its siblings."
        )
    if isinstance(estimator, PassKAdvantageConfig) and estimator.k > repeat:
        problems.append(f"{where}: advantage k={estimator.k} exceeds sampler_config.prompt_repeat_k={repeat}.")
    if task.judger_config is None:
        problems.append(f"{where}: judger_config is None: nothing would give a reward.")
    if cfg.train_batch_size * repeat < cfg.train_worker_cfg.optimizer_steps:
        problems.append(
            f"train_worker_cfg.optimizer_steps={cfg.train_worker_cfg.optimizer_steps} exceeds the "
            f"{cfg.train_batch_size * repeat} samples of a step."
        )
    if params.top_p < 1 or params.top_k not in (0, -1):
        get_logger().warning(
            f"{where}: top_p={params.top_p}, top_k={params.top_k} truncate the sampled distribution; the trainer's "
            "log-probs are of the full one. The gap shows in mismatch/*."
        )
    return problems
