"""What a run would do, in a table."""

from pathlib import Path
from typing import Any

from xtuner.v1.train.resume import start_of


def print_plan(trainer_cfg: Any) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE, show_header=False, title="Plan", title_justify="left")
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in plan_rows(trainer_cfg):
        table.add_row(Text(name), Text(value))
    Console().print(table)


def plan_rows(cfg: Any) -> list[tuple[str, str]]:
    """Name and value of everything that decides the run's result, cost and output."""
    worker, rollout = cfg.train_worker_cfg, cfg.rollout_config
    rows = [
        ("model", f"{cfg.load_from} ({_model(worker.model_cfg)})"),
        ("engine", f"{_engine(rollout)}, context {rollout.context_length or 'of the model'}"),
        ("workers", _workers(cfg)),
        ("compute types", _compute_types(cfg)),
        ("start", start_of(cfg)),
    ]
    for task in cfg.agent_loop_manager_cfg.task_list():
        rows += _task_rows("train", task)
    rows += [
        ("train step", _step(cfg)),
        (
            "optimizer",
            f"{type(worker.optim_cfg).__name__} {_given(worker.optim_cfg)}; {_given(worker.lr_cfg)}",
        ),
        ("loss", f"{type(worker.loss_cfg).__name__} {_given(worker.loss_cfg)}"),
        (
            "advantage",
            f"{type(cfg.advantage_estimator_config).__name__} {_given(cfg.advantage_estimator_config)}",
        ),
        ("length of run", _length(cfg)),
        ("evaluation", _evaluation(cfg)),
    ]
    if cfg.enable_evaluate and cfg.eval_agent_loop_manager_cfg is not None:
        for task in cfg.eval_agent_loop_manager_cfg.task_list():
            rows += _task_rows("eval", task)
    return [*rows, ("saved", _saved(cfg)), ("seed", _seed(cfg))]


def _model(model_cfg: Any) -> str:
    return f"{type(model_cfg).__name__}: {model_cfg.num_hidden_layers} layers, hidden {model_cfg.hidden_size}"


def _engine(rollout: Any) -> str:
    try:
        backend = rollout.resolve_backend()
    except (ValueError, RuntimeError) as error:
        return str(error)
    size = rollout.tensor_parallel_size
    return backend if size == 1 else f"{backend}, one of every {size} workers"


def _workers(cfg: Any) -> str:
    count, kind = cfg.resources.num_workers, cfg.launcher
    if kind == "auto":
        kind = "local" if count == 1 else "ray"
    where = "this process" if kind == "local" else "Ray"
    return f"{count} x {cfg.resources.accelerator}, launcher {kind} ({where})"


def _compute_types(cfg: Any) -> str:
    """Those of the device that is computed on; the configuration has one of each kind."""
    fsdp, rollout, on_cpu = cfg.train_worker_cfg.fsdp_cfg, cfg.rollout_config, cfg.resources.device == "cpu"

    def name(dtype: Any) -> str:
        return str(dtype).removeprefix("torch.")

    if not on_cpu:
        return f"trainer {name(fsdp.param_dtype)}, engine {name(rollout.dtype)}"
    return (
        f"trainer {name(fsdp.cpu_param_dtype)} (cpu_param_dtype), engine {name(rollout.cpu_dtype)} (cpu_dtype); "
        f"param_dtype={name(fsdp.param_dtype)} and dtype={name(rollout.dtype)} are for GPUs"
    )


def _task_rows(kind: str, task: Any) -> list[tuple[str, str]]:
    sampler, params = task.sampler_config, task.agent_loop_config.sample_params
    files = [str(item["dataset"].anno_path) for item in sampler.dataloader_cfg.dataset_config_list or []]
    judge = type(task.judger_config).__name__ if task.judger_config is not None else "none"
    return [
        (f"{kind} data", f"{task.task_name}: {', '.join(files)}"),
        (
            f"{kind} responses",
            f"{sampler.prompt_repeat_k} a prompt, up to {params.max_tokens} tokens, temperature "
            f"{params.temperature:g}, judged by {judge}",
        ),
    ]


def _step(cfg: Any) -> str:
    repeats = {task.sampler_config.prompt_repeat_k for task in cfg.agent_loop_manager_cfg.task_list()}
    samples = f" x {repeats.pop()} responses" if len(repeats) == 1 else ""
    worker = cfg.train_worker_cfg
    return (
        f"{cfg.train_batch_size} prompts{samples}, optimizer updates: {worker.optimizer_steps}, "
        f"packs of up to {worker.pack_max_length} tokens; new weights every {cfg.sync_weights_interval} steps"
    )


def _length(cfg: Any) -> str:
    if cfg.total_train_steps is not None:
        return f"{cfg.total_train_steps} train steps"
    return f"{cfg.total_epochs} epochs" if cfg.total_epochs is not None else "the saved rollouts"


def _evaluation(cfg: Any) -> str:
    if not cfg.enable_evaluate:
        return "off"
    first = ", and before the first" if cfg.enable_initial_evaluate else ""
    return f"every {cfg.evaluate_step} steps{first}"


def _saved(cfg: Any) -> str:
    def every(interval: int | None) -> str | None:
        return None if interval in (None, -1) else f"every {interval} steps"

    often = every(cfg.hf_interval)
    model = f"{often}, and at the end" if often else "at the end only" if cfg.save_final_hf else "off"
    return (
        f"in {cfg.work_dir or Path.cwd() / 'work_dirs'}: checkpoints {every(cfg.checkpoint_interval) or 'off'}; "
        f"Hugging Face model {model}"
    )


def _seed(cfg: Any) -> str:
    return f"{cfg.seed}{', deterministic' if cfg.deterministic else ''}"


def _given(config: Any) -> str:
    """The fields that the user gave."""
    return ", ".join(
        f"{name}={getattr(config, name)!r}" for name in type(config).model_fields if name in config.model_fields_set
    )
