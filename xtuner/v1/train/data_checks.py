"""What the rows tell before a device is touched, and what follows from their number."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from xtuner.v1.engine.checkpoint import check_train_state
from xtuner.v1.rl.agent_loop_manager import AgentLoopManagerConfig, TaskSpecConfig
from xtuner.v1.rl.agent_loop_manager.manager import restore_samplers
from xtuner.v1.rl.agent_loop_manager.sampler import Sampler
from xtuner.v1.utils import get_logger

from .checkpoints import read_state, refuse_done, refuse_other_batches
from .task_checks import length_problems, prompt_limit, reads_data_source
from .tokenizer import load_tokenizer

if TYPE_CHECKING:
    from .rl_trainer import RLColocateTrainerConfig


def check_data(cfg: "RLColocateTrainerConfig") -> list[str]:
    """Problems of the prompts: reads all rows as the run will, which finds them measured in the cache then."""
    if cfg.debug_train:
        return []
    try:
        tokenizer = load_tokenizer(cfg.tokenizer_path)
    except ValueError as error:
        return [str(error)]
    evaluation = cfg.eval_agent_loop_manager_cfg if cfg.enable_evaluate and not cfg.debug_rollout else None
    problems = []
    for manager in filter(None, (cfg.agent_loop_manager_cfg, evaluation)):
        names = [task.task_name for task in manager.task_list()]
        try:
            samplers = manager.samplers(tokenizer, cfg.seed)
            problems += measured_problems(cfg, manager, samplers)
            if manager is cfg.agent_loop_manager_cfg:
                drawn = zip(manager.task_list(), samplers, strict=True)
                prompts = sum(len(sampler) for task, sampler in drawn if task.weight > 0)
                if cfg.total_train_steps is None:
                    steps = epoch_steps(cfg, prompts)
                else:
                    steps = cfg.total_train_steps
                    warn_of_repeated_prompts(cfg, prompts)
                if (state := check_named_checkpoint(cfg, steps)) and cfg.load_checkpoint_cfg.load_dataset:
                    restore_samplers(dict(zip(names, samplers, strict=True)), state["manager"])
            elif cfg.evaluator_config is not None:
                for name, sampler in zip(names, samplers, strict=True):
                    cfg.evaluator_config.num_prompts(name, len(sampler))
        except (ValueError, FileNotFoundError) as error:
            problems.append(str(error))
    return list(dict.fromkeys(problems))  # training and evaluation often share the tokenizer


def check_named_checkpoint(cfg: "RLColocateTrainerConfig", steps: int) -> dict[str, Any] | None:
    """The state of the checkpoint that a run of so many steps begins with; None if that is not known: there is none, or
    auto_resume prefers the run's own.

    Raises:
        ValueError, FileNotFoundError: it is none, no step is left behind it, or its batches or model are others.
    """
    path, worker = cfg.load_checkpoint_cfg.checkpoint_path, cfg.train_worker_cfg
    if path is None or cfg.auto_resume:
        return None
    folder = Path(path)
    state = read_state(folder)
    if not (cfg.enable_evaluate and cfg.enable_initial_evaluate):
        refuse_done(folder, steps)
    refuse_other_batches(folder, state, cfg)
    check_train_state(folder / "weights", worker.model_cfg, worker.lora_cfg)
    return state


def measured_problems(
    cfg: "RLColocateTrainerConfig", manager: AgentLoopManagerConfig, samplers: list[Sampler]
) -> list[str]:
    """What the rows tell: ids that the model does not have, and in training tasks too long prompts that no `max_length`
    leaves out. An evaluation cuts and counts responses that the context cannot hold. Weights of judges that nobody
    reads are a warning."""
    problems, training = [], manager is cfg.agent_loop_manager_cfg
    for task, sampler in zip(manager.task_list(), samplers, strict=True):
        if training and task.weight == 0:
            continue
        _warn_of_weights(task, sampler)
        largest, place = sampler.dataloader.largest_id
        if largest >= (size := cfg.train_worker_cfg.model_cfg.vocab_size):
            problems.append(
                f"{place}: the prompt has token id {largest}, but train_worker_cfg.model_cfg.vocab_size={size}: give "
                "the model's own tokenizer_path, or leave the row out."
            )
        if training and not prompt_limit(task):
            longest = int(sampler.dataloader.prompt_lengths.max())
            problems += length_problems(cfg, "agent_loop_manager_cfg", task, longest)
    return problems


def _warn_of_weights(task: TaskSpecConfig, sampler: Sampler) -> None:
    if (place := sampler.dataloader.weighted_row) and not reads_data_source(task):
        get_logger().warning(
            f"{place}: data_source names several judgers or a weight other than 1, which judger_config of task "
            f"{task.task_name!r} does not read: {type(task.judger_config).__name__} judges all rows, without weight. "
            "Give a ComposedJudgerConfig, or one name a row."
        )


def warn_of_repeated_prompts(cfg: "RLColocateTrainerConfig", prompts: int) -> None:
    if prompts < cfg.train_batch_size:
        get_logger().warning(
            f"{prompts} prompts are fewer than train_batch_size={cfg.train_batch_size}: every step draws some of them "
            "more than once."
        )


def epoch_steps(cfg: "RLColocateTrainerConfig", prompts: int) -> int:
    """Train steps of `total_epochs`.

    Raises:
        ValueError: there are none.
    """
    assert cfg.total_epochs is not None
    steps = prompts // cfg.train_batch_size * cfg.total_epochs
    if steps == 0:
        raise ValueError(
            f"{prompts} prompts are fewer than train_batch_size={cfg.train_batch_size}: total_epochs="
            f"{cfg.total_epochs} gives 0 train steps. Lower train_batch_size or give more prompts."
        )
    warn_of_intervals(cfg, steps)
    return steps


def warn_of_intervals(cfg: "RLColocateTrainerConfig", steps: int) -> None:
    """An interval that is longer than the run is never over; without one there is nothing to resume from."""
    of_evaluation = cfg.evaluate_step if cfg.enable_evaluate and not cfg.enable_initial_evaluate else 0
    for name, interval, what in (
        ("evaluate_step", of_evaluation, "nothing is evaluated"),
        ("checkpoint_interval", cfg.checkpoint_interval or 0, "no checkpoint is saved"),
    ):
        if interval > steps:
            get_logger().warning(f"{name}={interval} is more than the run's {steps} train steps: {what}. Lower it.")
    kept = cfg.checkpoint_maxkeep not in (None, -1)
    if cfg.checkpoint_interval in (None, -1) and (cfg.auto_resume or kept):
        asked = f"checkpoint_maxkeep={cfg.checkpoint_maxkeep}" if kept else "auto_resume=True"
        get_logger().warning(
            f"{asked}, but checkpoint_interval={cfg.checkpoint_interval} saves no checkpoint: a run that breaks begins "
            "anew. Set checkpoint_interval."
        )
