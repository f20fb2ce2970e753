"""What can be known before a device is touched: files, and fields that must fit each other."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xtuner.v1.engine.checkpoint import check_train_state
from xtuner.v1.model import get_model_config_from_hf
from xtuner.v1.model.hf import check_hf_weights
from xtuner.v1.rl.agent_loop import SingleTurnAgentLoopConfig
from xtuner.v1.rl.agent_loop_manager import AgentLoopManagerConfig, SyncProduceStrategyConfig, TaskSpecConfig
from xtuner.v1.rl.agent_loop_manager.manager import restore_samplers
from xtuner.v1.rl.agent_loop_manager.sampler import Sampler
from xtuner.v1.rl.rollout.backends.native.requests import read_eos_ids
from xtuner.v1.rl.rollout.backends.options import engine_arguments
from xtuner.v1.rl.rollout.backends.sampling_checks import is_greedy, refusal
from xtuner.v1.rl.utils import launch_problem
from xtuner.v1.utils import get_logger

from .checkpoints import STATE_FILE, read_state, refuse_done, refuse_other_batches
from .debug_replay import replay_problem
from .exact import changes_of_distribution, check_exact
from .idle_fields import idle_fields
from .tokenizer import load_tokenizer
from .wandb_run import wandb_problem

if TYPE_CHECKING:
    from .rl_trainer import RLColocateTrainerConfig

_NO_WEIGHTS = {"bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings"} | {
    "balancing_loss_cfg", "z_loss_cfg", "freeze_routers",
}  # fmt: skip
"""Fields of a model configuration that change neither its parameters nor what they compute. How routers are trained
is the run's to choose."""


def check_run(cfg: "RLColocateTrainerConfig") -> list[str]:
    """Problems that would stop the run, each with field, value and the way out. Doubts are logged as warnings."""
    problems = _check_folders(cfg) + _check_workers(cfg) + check_exact(cfg)
    if idle := idle_fields(cfg):
        get_logger().info(f"no effect in this run: {', '.join(idle)}.")
    if "wandb" in cfg.trackers and (unsent := wandb_problem()):
        problems.append(unsent)
    if cfg.debug_train:  # neither data nor engine is used
        problem = replay_problem(Path(cfg.debug_rollout_dir or ""), cfg.total_train_steps)
        return problems + ([problem] if problem else [])
    problems += _check_engine(cfg)
    if cfg.total_train_steps is not None and not cfg.debug_rollout:
        _warn_of_intervals(cfg, cfg.total_train_steps)
    for task in cfg.agent_loop_manager_cfg.task_list():
        problems += _check_task(cfg, "agent_loop_manager_cfg", task) + _check_training_task(cfg, task)
    if not cfg.enable_evaluate or cfg.debug_rollout:
        return problems
    missing = [n for n in ("eval_agent_loop_manager_cfg", "evaluator_config") if getattr(cfg, n) is None]
    if missing:
        problems.append(f"enable_evaluate=True needs {' and '.join(missing)}; give them or set enable_evaluate=False.")
    if cfg.eval_agent_loop_manager_cfg is not None:
        for task in cfg.eval_agent_loop_manager_cfg.task_list():
            problems += _check_task(cfg, "eval_agent_loop_manager_cfg", task)
            _warn_of_copies(task)
            _warn_of_unused(task)
    return problems


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
        if training and not _prompt_limit(task):
            longest = int(sampler.dataloader.prompt_lengths.max())
            problems += _length_problems(cfg, "agent_loop_manager_cfg", task, longest)
    return problems


def _warn_of_weights(task: TaskSpecConfig, sampler: Sampler) -> None:
    if (place := sampler.dataloader.weighted_row) and not _reads_data_source(task):
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
    _warn_of_intervals(cfg, steps)
    return steps


def _warn_of_intervals(cfg: "RLColocateTrainerConfig", steps: int) -> None:
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


def _check_folders(cfg: "RLColocateTrainerConfig") -> list[str]:
    worker, broken = cfg.train_worker_cfg, _check_model(cfg, "load_from", cfg.load_from)
    written = {
        "work_dir": cfg.work_dir or "work_dirs",
        "log_dir": cfg.log_dir,
        "rollout_config.worker_log_dir": cfg.rollout_config.worker_log_dir,
        "debug_rollout_dir": cfg.debug_rollout_dir if cfg.debug_rollout else None,
    }
    problems = [p for field, folder in written.items() if folder for p in _check_written(field, folder)] + broken
    if not broken and not _same_folder(worker.load_from, cfg.load_from):
        problems.append(
            f"train_worker_cfg.load_from={str(worker.load_from)!r}, but load_from={str(cfg.load_from)!r}: training "
            "begins with the latter; set both alike."
        )
    if worker.loss_cfg.use_kl_loss and worker.ref_load_from is not None:
        problems += _check_model(cfg, "train_worker_cfg.ref_load_from", worker.ref_load_from)
    idle = [name for name in ("ref_load_from", "ref_model_fsdp_cfg") if getattr(worker, name) is not None]
    if idle and not worker.loss_cfg.use_kl_loss:
        get_logger().warning(f"train_worker_cfg: no effect without loss_cfg.use_kl_loss: {', '.join(idle)}.")
    tokenizer = Path(cfg.tokenizer_path)
    if not (tokenizer / "tokenizer_config.json").is_file() and not (tokenizer / "tokenizer.json").is_file():
        problems.append(f"tokenizer_path={str(cfg.tokenizer_path)!r}: no tokenizer files there.")
    checkpoint = cfg.load_checkpoint_cfg.checkpoint_path
    if checkpoint is not None and not (Path(checkpoint) / STATE_FILE).is_file():
        problems.append(
            f"load_checkpoint_cfg.checkpoint_path={str(checkpoint)!r}: no {STATE_FILE} there; give a "
            "ckpt-step-N folder."
        )
    return problems


def _same_folder(one: str | Path, other: str | Path) -> bool:
    return Path(one).resolve() == Path(other).resolve()


def _check_written(field: str, path: str | Path) -> list[str]:
    """Whether a folder that the run writes in can be made; nothing is."""
    folder, where = Path(path).absolute(), f"{field}={str(path)!r}"
    there = next(p for p in (folder, *folder.parents) if p.exists())
    if not there.is_dir():
        return [f"{where}: {there} is a file; give a folder."]
    if not os.access(there, os.W_OK | os.X_OK):
        return [f"{where}: no permission to write in {there}; give another folder."]
    return []


def _check_engine(cfg: "RLColocateTrainerConfig") -> list[str]:
    """An engine that can be had here, with a model that fits it."""
    rollout = cfg.rollout_config
    broken = _check_model(cfg, "rollout_config.model_path", rollout.model_path)
    problems = broken if Path(rollout.model_path) != Path(cfg.load_from) else []  # said of load_from already
    try:
        backend = rollout.resolve_backend() if broken else rollout.resolve(cfg.resources.device).backend
        if backend != "native" and cfg.train_worker_cfg.update_weight_checksum:
            problems.append(
                f"train_worker_cfg.update_weight_checksum=True: the weights of {backend} cannot be read back; leave it "
                "False."
            )
        if not broken:
            read_eos_ids(rollout.model_path, cfg.train_worker_cfg.model_cfg.vocab_size)
    except (ValueError, RuntimeError) as error:
        problems.append(str(error))
    return problems


def _check_model(cfg: "RLColocateTrainerConfig", field: str, path: str | Path) -> list[str]:
    """A complete Hugging Face folder of the architecture that is trained."""
    folder, where = Path(path), f"{field}={str(path)!r}"
    if not (folder / "config.json").is_file():
        return [f"{where}: no config.json there; give a Hugging Face model folder."]
    if not any(folder.glob("*.safetensors")):
        return [f"{where}: no *.safetensors weights there."]
    try:
        there = get_model_config_from_hf(folder).model_dump(mode="json")
        check_hf_weights(folder)
    except (ValueError, FileNotFoundError) as error:
        return [f"{where}: {error}"]
    for name in ("generation_config.json", "tokenizer_config.json", "tokenizer.json"):
        try:
            content = json.loads((folder / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except ValueError as error:
            return [f"{where}: {folder / name} is not JSON ({error}). Download it again."]
        if not isinstance(content, dict):
            return [f"{where}: {folder / name} holds no JSON object. Download it again."]
    ours = cfg.train_worker_cfg.model_cfg.model_dump(mode="json")
    return [
        f"train_worker_cfg.model_cfg.{name}={mine!r}, but {folder / 'config.json'} says {theirs!r}: {field} must be "
        "of the same model, for example model_cfg=get_model_config_from_hf(load_from)."
        for name, mine, theirs in _differences(ours, there)
    ]


def _differences(ours: dict[str, Any], theirs: dict[str, Any], prefix: str = "") -> list[tuple[str, Any, Any]]:
    """(name, our value, their value) where two model configurations compute differently."""
    found: list[tuple[str, Any, Any]] = []
    for name in ours.keys() & theirs.keys() - _NO_WEIGHTS:
        mine, other = ours[name], theirs[name]
        if isinstance(mine, dict) and isinstance(other, dict):
            found += _differences(mine, other, f"{prefix}{name}.")
        elif mine != other:
            found.append((prefix + name, mine, other))
    return sorted(found)


def _check_workers(cfg: "RLColocateTrainerConfig") -> list[str]:
    problems = []
    from xtuner.v1.engine.mesh import MeshSizes

    workers, worker = cfg.resources.num_workers, cfg.train_worker_cfg
    if cfg.launcher == "local" and workers != 1:
        problems.append(
            f"launcher='local' runs one worker, but resources.num_workers={workers}; use launcher='ray' or one worker."
        )
    if not cfg.debug_train and (problem := cfg.rollout_config.workers_problem(workers)):
        problems.append(problem)
    for field, fsdp_cfg in (("fsdp_cfg", worker.fsdp_cfg), ("ref_model_fsdp_cfg", worker.ref_model_fsdp_cfg)):
        try:
            if fsdp_cfg is not None:
                MeshSizes.of(fsdp_cfg, worker.sp_size, workers, f"train_worker_cfg.{field}")
        except ValueError as error:
            problems.append(str(error))
    if cfg.launcher != "local" or workers == 1:
        problem = launch_problem(cfg.launcher, cfg.resources)
        problems += [problem] if problem else []
    try:
        cfg.train_worker_cfg.loss_cfg.normalized_by(cfg.advantage_estimator_config.loss_max_length)
    except ValueError as error:
        problems.append(f"train_worker_cfg.loss_cfg: {error}")
    repeat = min(task.sampler_config.prompt_repeat_k for task in cfg.agent_loop_manager_cfg.task_list())
    if cfg.train_batch_size * repeat < cfg.train_worker_cfg.optimizer_steps:
        problems.append(
            f"train_worker_cfg.optimizer_steps={cfg.train_worker_cfg.optimizer_steps} exceeds the "
            f"{cfg.train_batch_size * repeat} samples of a step (train_batch_size={cfg.train_batch_size} x "
            f"prompt_repeat_k={repeat}); lower it."
        )
    return problems


def _check_task(cfg: "RLColocateTrainerConfig", manager: str, task: TaskSpecConfig) -> list[str]:
    problems, where = [], f"{manager}.{task.task_name}"
    for item in task.sampler_config.dataloader_cfg.dataset_config_list or []:
        path = Path(item["dataset"].anno_path).expanduser()
        if not path.exists():
            problems.append(f"{where}: dataset anno_path={str(path)!r} does not exist.")
    problems += _length_problems(cfg, manager, task) + _sampling_problems(cfg, where, task)
    datasets, judger = task.sampler_config.dataloader_cfg.dataset_config_list or [], task.judger_config
    if judger is not None and judger.needs_label and not all(d["tokenize_fn"].require_ground_truth for d in datasets):
        problems.append(
            f"{where}: the tokenize function's require_ground_truth=False lets rows without a label in, but "
            "judger_config compares with the label; leave require_ground_truth out."
        )
    if any(d["tokenize_fn"].data_judger_mapping for d in datasets) and not _reads_data_source(task):
        problems.append(
            f"{where}: the tokenize function's data_judger_mapping has no effect: {type(judger).__name__} reads no "
            "data_source. Leave it out, or give a ComposedJudgerConfig with these judgers as branches."
        )
    if type(task.agent_loop_config) is not SingleTurnAgentLoopConfig:
        return problems  # a loop of the user's own may set the reward itself, and read what it likes
    if task.judger_config is None:
        problems.append(f"{where}: judger_config is None: nothing would give a reward.")
    return problems + _check_checkpoint_of_loop(cfg, where, task.agent_loop_config.hf_checkpoint)


def _reads_data_source(task: TaskSpecConfig) -> bool:
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
    if not _same_folder(folder, cfg.tokenizer_path) and not _same_folder(folder, cfg.load_from):
        get_logger().warning(f"{said} has no effect: the loop takes tokenizer_path={str(cfg.tokenizer_path)!r}.")
    return []


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


def _length_problems(
    cfg: "RLColocateTrainerConfig", manager: str, task: TaskSpecConfig, measured: int | None = None
) -> list[str]:
    """Prompt and response must fit into the context and, where they are trained on, into a pack.

    measured: tokens of the longest prompt, where no `max_length` bounds them or `disable_filter` keeps longer ones.
    None: not known yet, at least 1.
    """
    problems, where = [], f"{manager}.{task.task_name}"
    response, context = task.agent_loop_config.sample_params.max_tokens, cfg.rollout_config.context_length
    longest_of_model = cfg.train_worker_cfg.model_cfg.max_position_embeddings
    limit = _prompt_limit(task)
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


def _check_training_task(cfg: "RLColocateTrainerConfig", task: TaskSpecConfig) -> list[str]:
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


def _prompt_limit(task: TaskSpecConfig) -> int:
    """Limit of the task's prompts in tokens; 0 if one dataset has none, or keeps what is longer."""
    datasets = task.sampler_config.dataloader_cfg.dataset_config_list or []
    limits = [None if item["dataset"].disable_filter else item["tokenize_fn"].max_length for item in datasets]
    return max((limit for limit in limits if limit), default=0) if all(limits) else 0
