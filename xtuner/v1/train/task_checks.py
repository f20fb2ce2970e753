"""What can be known of a task before a device is touched: its fields must fit each other and the run's."""

from pathlib import Path
from typing import TYPE_CHECKING

from xtuner.v1.rl.agent_loop import SingleTurnAgentLoopConfig
from xtuner.v1.rl.agent_loop_manager import SyncProduceStrategyConfig, TaskSpecConfig
from xtuner.v1.rl.rollout.backends.options import engine_arguments
from xtuner.v1.rl.rollout.backends.sampling_checks import is_greedy, refusal
from xtuner.v1.utils import get_logger

from .exact import changes_of_distribution

if TYPE_CHECKING:
    from .rl_trainer import RLColocateTrainerConfig


def check_task(cfg: "RLColocateTrainerConfig", manager: str, task: TaskSpecConfig) -> list[str]:
    problems, where = [], f"{manager}.{task.task_name}"
    for item in task.sampler_config.dataloader_cfg.dataset_config_list or []:
        path = Path(item["dataset"].anno_path).expanduser()
        if not path.exists():
            problems.append(f"{where}: dataset anno_path={str(path)!r} does not exist.")
    problems += length_problems(cfg, manager, task) + _sampling_problems(cfg, where, task)
    datasets, judger = task.sampler_config.dataloader_cfg.dataset_config_list or [], task.judger_config
    if judger is not None and judger.needs_label and not all(d["tokenize_fn"].require_ground_truth for d in datasets):
        problems.append(
            f"{where}: the tokenize function's require_ground_truth=False lets rows without a label in, but "
            "judger_config compares with the label; leave require_ground_truth out."
        )
    if any(d["tokenize_fn"].data_judger_mapping for d in datasets) and not reads_data_source(task):
        problems.append(
            f"{where}: the tokenize function's data_judger_mapping has no effect: {type(judger).__name__} reads no "
            "data_source. Leave it out, or give a ComposedJudgerConfig with these judgers as branches."
        )
    if type(task.agent_loop_config) is not SingleTurnAgentLoopConfig:
        return problems  # a loop of the user's own may set the reward itself, and read what it likes
    if task.judger_config is None:
        problems.append(f"{where}: judger_config is None: nothing would give a reward.")
    return problems + _check_checkpoint_of_loop(cfg, where, task.agent_loop_config.hf_checkpoint)


def check_training_task(cfg: "RLColocateTrainerConfig", task: TaskSpecConfig) -> list[str]:
    problems, where = [], f"agent_loop_manager_cfg.{task.task_name}"
    params, repeat = task.agent_loop_config.sample_params, task.sampler_config.prompt_repeat_k
    if is_greedy(params):
        problems.append(
            f"{where}: sample_params.temperature={params.temperature}, top_k={params.top_k} is greedy: all responses "
            "of a group would be alike. Training needs temperature >= 1e-5 and top_k != 1."
        )
    if params.sampling_seed is not None:
        problems.append(
            f"{where}: sample_params.sampling_seed={params.sampling_seed} gives all responses of a group the same "
            "draws: they would be alike, and nothing would be learnt. Leave it out; the run's seed makes them "
            "repeatable."
        )
    if not params.return_logprob:
        problems.append(f"{where}: sample_params.return_logprob must be True for training.")
    estimator = cfg.advantage_estimator_config
    if repeat < estimator.min_group_size:
        problems.append(
            f"{where}: sampler_config.prompt_repeat_k={repeat}, but a group needs at least "
            f"{estimator.min_group_size} responses: {type(estimator).__name__} compares a response with its siblings."
        )
    if changes := changes_of_distribution(params):
        get_logger().warning(
            f"{where}: sample_params {changes} change the sampled distribution; the trainer's log-probs are of the "
            "model's own. The gap shows in mismatch/*."
        )
        correction = cfg.train_worker_cfg.loss_cfg.rollout_is
        if correction.enabled and correction.rollout_is_level == "sequence":
            problems.append(
                f"{where}: sample_params {changes} with loss_cfg.rollout_is.rollout_is_level='sequence': a weight is "
                "the product over the response of what each token's distribution was changed by, which goes to 0 with "
                "the length, so that next to nothing is learnt. Set 'token' or 'geometric', or sample from the model's "
                "own distribution."
            )
    return problems


def warn_of_evaluation(task: TaskSpecConfig) -> None:
    """Of fields that an evaluation's task sets in vain."""
    _warn_of_copies(task)
    _warn_of_unused(task)


def _warn_of_unused(task: TaskSpecConfig) -> None:
    """An evaluation takes every prompt once and keeps every answer, whatever the task says of batches."""
    strategy, unused = task.produce_strategy_config, [] if task.weight == 1 else [f"weight={task.weight:g}"]
    if type(strategy) is not SyncProduceStrategyConfig:
        unused.append(f"produce_strategy_config={type(strategy).__name__}")
    for name, field in type(strategy).model_fields.items():
        value = getattr(strategy, name)
        if value != field.get_default(call_default_factory=True):
            unused.append(f"produce_strategy_config.{name}={getattr(value, '__name__', value)}")
    if unused:
        get_logger().warning(
            f"eval_agent_loop_manager_cfg.{task.task_name}: an evaluation does not use {', '.join(unused)}."
        )


def _warn_of_copies(task: TaskSpecConfig) -> None:
    params, repeat = task.agent_loop_config.sample_params, task.sampler_config.prompt_repeat_k
    if repeat > 1 and (params.sampling_seed is not None or is_greedy(params)):
        get_logger().warning(
            f"eval_agent_loop_manager_cfg.{task.task_name}: sample_params.temperature={params.temperature:g}, "
            f"top_k={params.top_k}, sampling_seed={params.sampling_seed} make the {repeat} responses to a prompt alike"
            ": pass@k would be pass@1. Leave sampling_seed out and sample, or set prompt_repeat_k=1."
        )


def reads_data_source(task: TaskSpecConfig) -> bool:
    """Whether judgers named in the data, and their weights, may have an effect. A loop of the user's own may read them
    itself."""
    if task.judger_config is None or type(task.agent_loop_config) is not SingleTurnAgentLoopConfig:
        return True
    return task.judger_config.reads_data_source


def _check_checkpoint_of_loop(cfg: "RLColocateTrainerConfig", where: str, folder: str | Path) -> list[str]:
    """The single-turn loop reads nothing from it; another tokenizer would be expected to have an effect."""
    said = f"{where}: agent_loop_config.hf_checkpoint={str(folder)!r}"
    if not Path(folder).is_dir():
        return [f"{said} is no folder; give that of the run's model, as in load_from."]
    if not same_folder(folder, cfg.tokenizer_path) and not same_folder(folder, cfg.load_from):
        get_logger().warning(f"{said} has no effect: the loop takes tokenizer_path={str(cfg.tokenizer_path)!r}.")
    return []


def same_folder(one: str | Path, other: str | Path) -> bool:
    return Path(one).resolve() == Path(other).resolve()


def _sampling_problems(cfg: "RLColocateTrainerConfig", where: str, task: TaskSpecConfig) -> list[str]:
    """What would make the engine refuse every request."""
    rollout, params = cfg.rollout_config, task.agent_loop_config.sample_params
    try:
        backend = rollout.named_backend()
    except ValueError:
        return []  # `_check_engine` says it
    arguments = engine_arguments(rollout, backend)
    problem = refusal(params, backend, arguments, cfg.train_worker_cfg.model_cfg.vocab_size)
    return [f"{where}: {problem}"] if problem else []


def length_problems(
    cfg: "RLColocateTrainerConfig", manager: str, task: TaskSpecConfig, measured: int | None = None
) -> list[str]:
    """Prompt and response must fit into the context and, where they are trained on, into a pack.

    measured: tokens of the longest prompt, where no `max_length` bounds them or `disable_filter` keeps longer ones.
    None: not known yet, at least 1.
    """
    problems, where = [], f"{manager}.{task.task_name}"
    response, context = task.agent_loop_config.sample_params.max_tokens, cfg.rollout_config.context_length
    longest_of_model = cfg.train_worker_cfg.model_cfg.max_position_embeddings
    limit = prompt_limit(task)
    longest = limit or measured or 1
    prompt = f"prompt max_length={limit}" if limit else f"longest prompt={measured}" if measured else "prompt of 1"
    shorter = "max_length or max_tokens" if limit else "max_tokens"
    left_out = ", or leave longer prompts out (the tokenize function's max_length, disable_filter=False)"
    shorter += left_out if measured else ""
    if longest + response > (context or longest_of_model):
        text = (
            f"rollout_config.context_length={context}; raise it"
            if context
            else f"the model's max_position_embeddings={longest_of_model}; choose another model"
        )
        problems.append(
            f"{where}: {prompt} + sample_params.max_tokens={response} = {longest + response} exceeds {text}, or lower "
            f"{shorter}."
        )
    tokens, pack = longest + response - 1, cfg.train_worker_cfg.pack_max_length
    if manager == "agent_loop_manager_cfg" and tokens > pack:
        problems.append(
            f"{where}: a sample can have {tokens} tokens ({prompt}, sample_params.max_tokens={response}, the last of "
            f"which is no input), more than train_worker_cfg.pack_max_length={pack}; raise pack_max_length, or lower "
            f"{shorter}."
        )
    return problems


def prompt_limit(task: TaskSpecConfig) -> int:
    """Limit of the task's prompts in tokens; 0 if one dataset has none, or keeps what is longer."""
    datasets = task.sampler_config.dataloader_cfg.dataset_config_list or []
    limits = [None if item["dataset"].disable_filter else item["tokenize_fn"].max_length for item in datasets]
    return max((limit for limit in limits if limit), default=0) if all(limits) else 0
