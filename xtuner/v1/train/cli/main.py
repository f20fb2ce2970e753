"""The `xtuner` command."""

import enum
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .errors import UserError
from .glance import refuse_at_a_glance
from .process import StopSignals, exit_process, run_process
from .source import is_message

if TYPE_CHECKING:
    from pydantic import BaseModel

app = typer.Typer(
    name="xtuner",
    help="Reinforcement learning of language models, from one Python file.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
data_app = typer.Typer(help="Make training data.", no_args_is_help=True)
app.add_typer(data_app, name="data")


class Accelerator(enum.StrEnum):
    cpu = "cpu"
    gpu = "gpu"


class LauncherKind(enum.StrEnum):
    auto = "auto"
    local = "local"
    ray = "ray"


ConfigArgument = Annotated[
    Path | None,
    typer.Argument(metavar="CONFIG", help="Python file that defines `trainer`.", show_default=False),
]
ConfigOption = Annotated[Path | None, typer.Option("--config", help="The same, as an option.", show_default=False)]
WorkDir = Annotated[
    Path | None, typer.Option(help="Folder of the run. Also stands in for WORK_DIR if the config reads it.")
]
NumWorkers = Annotated[int | None, typer.Option(min=1, help="Training workers, one an accelerator.")]
AcceleratorOption = Annotated[Accelerator | None, typer.Option(help="Where to compute.")]
LauncherOption = Annotated[
    LauncherKind | None, typer.Option(help="local: this process, one worker. ray: any number of them.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        help="Replace a field: train_worker_cfg.optim_cfg.lr=3e-4. Repeatable.",
    ),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks of mistakes in the config too (XTUNER_DEBUG=1).")]


@app.callback(invoke_without_command=True)
def main(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    # Threads that spin for long while they wait for each other make a run many times slower on a machine that is
    # not idle; threads that never spin, half as fast again on one that is.
    # The OpenMP runtime reads this when torch is imported, which is later.
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    if version:
        typer.echo(_version())
        raise typer.Exit()


@app.command()
def train(
    config: ConfigArgument = None,
    config_option: ConfigOption = None,
    work_dir: WorkDir = None,
    num_workers: NumWorkers = None,
    accelerator: AcceleratorOption = None,
    launcher: LauncherOption = None,
    set_: SetOption = None,
    debug: Debug = False,
) -> None:
    """Train as the config says."""

    def body(signals: StopSignals) -> None:
        if (file := config or config_option) is not None:
            refuse_at_a_glance(file, accelerator and accelerator.value, set_ or [])
        trainer_cfg = _resolve(config, config_option, work_dir, num_workers, accelerator, launcher, set_)
        trainer = _build(trainer_cfg)
        signals.arm()
        signals.resume_hint = getattr(trainer, "resume_hint", signals.resume_hint)
        trainer.fit()

    exit_process(run_process(body, debug))


@app.command()
def check(
    config: ConfigArgument = None,
    config_option: ConfigOption = None,
    work_dir: WorkDir = None,
    num_workers: NumWorkers = None,
    accelerator: AcceleratorOption = None,
    launcher: LauncherOption = None,
    set_: SetOption = None,
    debug: Debug = False,
) -> None:
    """Show what a run would do, and what stands in its way. Starts nothing."""

    def body(signals: StopSignals) -> None:
        from .plan import print_plan

        trainer_cfg: Any = _resolve(config, config_option, work_dir, num_workers, accelerator, launcher, set_)
        print_plan(trainer_cfg)
        if problems := trainer_cfg.check() or trainer_cfg.check_data():
            raise UserError("\n".join(["the run cannot start:", *(f"- {problem}" for problem in problems)]))
        typer.echo("No problem found.")

    exit_process(run_process(body, debug))


@data_app.command()
def gsm8k(
    out_dir: Annotated[Path, typer.Option(help="Folder for train.jsonl and test.jsonl.")],
    input_dir: Annotated[
        str, typer.Option(help="Folder with GSM8K's rows, or the name of the data set on the hub.")
    ] = "openai/gsm8k",
    debug: Debug = False,
) -> None:
    """Convert GSM8K to the JSONL that a config reads."""

    def body(signals: StopSignals) -> None:
        from xtuner.v1.utils.convert_gsm8k import convert

        try:
            counts = convert(input_dir, out_dir)
        except (OSError, ValueError, ImportError) as error:
            raise UserError(str(error)) from error
        for split, count in counts.items():
            typer.echo(f"{out_dir / split}.jsonl: {count:,} rows")

    exit_process(run_process(body, debug))


@app.command()
def demo(
    work_dir: Annotated[Path, typer.Option(help="Folder of the run.")] = Path("work_dirs/demo"),
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 120,
    accelerator: Annotated[Accelerator, typer.Option(help="Where to compute.")] = Accelerator.cpu,
    debug: Debug = False,
) -> None:
    """Train a tiny model on this machine: no GPU, no download."""

    def body(signals: StopSignals) -> None:
        from xtuner.v1.train.demo import run_demo

        try:
            work_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--work-dir {work_dir}: no folder can be made there ({error})") from error
        run_demo(work_dir, steps, accelerator.value)

    exit_process(run_process(body, debug))


def _resolve(
    config: Path | None,
    config_option: Path | None,
    work_dir: Path | None,
    num_workers: int | None,
    accelerator: Accelerator | None,
    launcher: LauncherKind | None,
    set_: list[str] | None,
) -> "BaseModel":
    """The trainer config of the file, with everything that the command line changes."""
    from .config_file import load_trainer
    from .overrides import Override, apply_overrides

    if (config is None) == (config_option is None):
        raise UserError("give one config file: `xtuner train CONFIG`, or --config CONFIG")
    options = [
        ("work_dir", "--work-dir", work_dir),
        ("resources.num_workers", "--num-workers", num_workers),
        ("resources.accelerator", "--accelerator", accelerator),
        ("launcher", "--launcher", launcher),
    ]
    overrides = [Override(path, str(v), f"{name} {v}") for path, name, v in options if v is not None]
    overrides += [Override.parse(text) for text in set_ or []]
    return apply_overrides(load_trainer(config or config_option, work_dir), overrides)  # type: ignore[arg-type]


def _build(trainer_cfg: Any) -> Any:
    try:
        return trainer_cfg.build()
    except Exception as error:
        if is_message(error):
            raise UserError(str(error)) from error
        raise


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"xtuner {version('xtuner')}"
    except PackageNotFoundError:  # run from a clone that is not installed
        return "xtuner (not installed)"
