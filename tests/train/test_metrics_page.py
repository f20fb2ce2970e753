"""docs/metrics.md lists what runs write, and nothing that they do not."""

import re
from pathlib import Path

import pytest

from xtuner.v1.rl.agent_loop_manager import AgentLoopManagerConfig, SyncProduceStrategyConfig
from xtuner.v1.rl.judger import ComposedJudgerConfig, JudgerConfig
from xtuner.v1.rl.loss import GRPOLossConfig, RolloutImportanceSampling
from xtuner.v1.train.demo.task import make_rows, write_rows

from .helpers import Run, config, fit, spread, task, with_evaluation, write_moe_model

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
UPDATES = "train_metrics/worker_0/step_avg_"
SCORE = r"(accuracy|(avg_)?pass@\d+|eval_(group|attempt)_count|eval_inferred_k)"
NOT_HERE = {
    "compiled_programs", "offload/to_host_gb_per_s", "offload/to_device_gb_per_s",
    "mismatch/<worker>/mean", "mismatch/<worker>/p99", "mismatch/<worker>/worst_sequence", "mismatch/<worker>/k1",
    "mismatch/<worker>/k3", "eval/tool_turns/mean", "eval/tool_turns/min", "eval/tool_turns/max",
    "response/unscaled_logprob_share", "response/missing_logprob_share", "router/z_loss",
}  # fmt: skip
"""What needs a device, several engines, an agent loop or a model of another kind."""
OF_OTHER_TESTS = {"compiled_programs"}
"""Written where another test of this process has compiled something."""


def names_on_the_page() -> set[str]:
    """Of every table of keys; those of updates by their name in metrics.jsonl."""
    names = set()
    for section in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        prefix = UPDATES if section.startswith("Updates\n") else ""
        for cell in re.findall(r"^\| (`.*?) \|", section, re.MULTILINE):
            names |= {prefix + name for name in re.findall(r"`(.+?)`", cell)}
    return names


def pattern(name: str) -> re.Pattern[str]:
    parts = re.split(r"(<\w+>)", name)
    return re.compile("".join(SCORE if p == "<score>" else r"[^/]+" if p[:1] == "<" else re.escape(p) for p in parts))


def rows_of(folder: Path, source) -> Path:
    """Prompts for this judge, and one that is too long."""
    folder.mkdir(parents=True)
    rows = [row | {"data_source": source} for row in make_rows(12, seed=3, evaluation=False)]
    write_rows(folder / "rows.jsonl", [*rows, rows[0] | {"prompt": rows[0]["prompt"] * 9}])
    return folder / "rows.jsonl"


def graded(response, label, extra_info):
    score = spread(response, label, extra_info)
    return {"score": score, "acc": score > 1, "note": "kind"}


class Fails:
    """Every seventh sample cannot be judged."""

    calls = 0

    def __call__(self, response, label, extra_info):
        self.calls += 1
        if self.calls % 7 == 0:
            raise LookupError("no such label")
        return spread(response, label, extra_info)


class DropsTheFirst:
    seen = 0

    def __call__(self, samples):
        self.seen += 1
        return self.seen > 1


def everything_at_once(model: Path, folder: Path):
    """Two tasks, a composed judge, a filter, KL, importance weights, two updates, two kinds of evaluation."""
    branches = {
        "math": JudgerConfig(judger_name="math", reward_handler=graded),
        "style": JudgerConfig(judger_name="style", reward_handler=spread),
    }
    drops = SyncProduceStrategyConfig(is_valid_sample_fn=DropsTheFirst())
    tasks = [
        task(model, rows_of(folder / "sums", {"math": 1.0, "style": 0.2}), "sums", produce_strategy_config=drops,
             judger_config=ComposedJudgerConfig(branches=branches)),
        task(model, rows_of(folder / "counts", "math"), "counts", reward=Fails(), max_judge_error_rate=1),
    ]  # fmt: skip
    evaluations = [task(model, rows_of(folder / name, name), name, k=2) for name in ("one", "other")]
    loss = GRPOLossConfig(
        policy_loss_cfg={"cliprange_low": 0.2, "cliprange_high": 0.28}, use_kl_loss=True, kl_loss_type="low_var_kl",
        rollout_is=RolloutImportanceSampling(
            rollout_is_mode="both", rollout_is_threshold=(0.5, 2.0), rollout_is_veto_threshold=(1e-4, 1e4)
        ),
    )  # fmt: skip
    changes = with_evaluation(model, folder) | {
        "agent_loop_manager_cfg": AgentLoopManagerConfig(tasks=tasks),
        "eval_agent_loop_manager_cfg": AgentLoopManagerConfig(tasks=evaluations),
        "evaluate_step": 2, "sync_weights_interval": 2, "total_train_steps": 4, "train_batch_size": 4,
    }  # fmt: skip
    return config(model, folder, worker={"loss_cfg": loss, "optimizer_steps": 2}, **changes)


@pytest.fixture(scope="module")
def run(model, tmp_path_factory) -> Run:
    return fit(everything_at_once(model, tmp_path_factory.mktemp("everything")))


def test_the_page_names_what_runs_write_and_nothing_else(run, tmp_path):
    experts, routed = write_moe_model(tmp_path / "experts"), {"enable_return_routed_experts": True}
    runs = [run, fit(config(experts, tmp_path, rollout=routed, total_train_steps=1))]
    written = {key for run in runs for row in run.rows for key in row}
    written |= {UPDATES + key for run in runs for row in run.updates for key in row.keys() - {"step"}}
    patterns = {name: pattern(name) for name in names_on_the_page()}
    assert not sorted(key for key in written if not any(p.fullmatch(key) for p in patterns.values())), "not on the page"
    unseen = {name for name, p in patterns.items() if not any(map(p.fullmatch, written))}
    left = {name.removeprefix(UPDATES) for name in unseen} - OF_OTHER_TESTS
    assert left == NOT_HERE - OF_OTHER_TESTS, "left: on the page, and not written"


def test_tasks_and_judges_have_the_values_of_their_samples(run):
    for row in run.rows:
        samples = [s for s in run.trajectories(row["step"]) if s["advantage"] is not None]
        sums, counts = ([s for s in samples if s["task_name"] == name] for name in ("sums", "counts"))
        assert {s["rollout_id"] for s in sums + counts} == {s["rollout_id"] for s in samples} and sums and counts
        assert row["response/task/sums/samples"] == len(sums) and row["response/task/counts/samples"] == len(counts)
        for name, values in {
            "task/sums/rewards": [s["reward"] for s in sums],
            "task/counts/rewards": [s["reward"] for s in counts],
            "task/counts/response_len": [s["response_len"] for s in counts],
            "judge/math": [s["reward_payload"]["branches"]["math"]["score"] for s in sums],
            "judge/style": [s["reward_payload"]["branches"]["style"]["score"] for s in sums],
            "reward/acc": [s["reward_payload"]["acc"] for s in sums],
        }.items():
            assert row[f"response/{name}/mean"] == pytest.approx(sum(values) / len(values)), name
