"""What the text of a config tells before anything is imported."""

import sys
import textwrap

import pytest

from xtuner.v1.train.cli import glance
from xtuner.v1.train.cli.errors import UserError

TEXT = """
resources = AcceleratorResourcesConfig(
    accelerator={accelerator}, num_workers=8)
rollout = RolloutConfig({rollout})
"""


@pytest.fixture
def refusal(tmp_path, monkeypatch):
    """The message for a config, or None."""
    monkeypatch.setattr(glance, "_has_gpu", lambda: False)
    for engine in ("NATIVE", "SGLANG", "LMDEPLOY", "VLLM"):
        monkeypatch.delenv(f"XTUNER_USE_{engine}", raising=False)

    def of(accelerator='"GPU"', rollout="", option=None, sets=()):
        path = tmp_path / "config.py"
        path.write_text(textwrap.dedent(TEXT.format(accelerator=accelerator, rollout=rollout)))
        try:
            glance.refuse_at_a_glance(path, option, list(sets))
        except UserError as error:
            return str(error)
        return None

    return of


def test_a_gpu_run_without_a_gpu_is_refused_with_its_line(refusal):
    message = refusal()
    assert "config.py:3: accelerator='GPU'" in message and "--accelerator cpu" in message
    assert "--accelerator gpu, but" in refusal(accelerator='"CPU"', option="gpu")


@pytest.mark.parametrize(
    "case",
    [
        {"accelerator": '"CPU"'}, {"accelerator": "choose()"}, {"option": "cpu"},
        {"sets": ["resources.accelerator=CPU"]},
    ],
)  # fmt: skip
def test_what_is_computed_or_changed_is_left_to_the_full_check(refusal, case):
    assert refusal(**case) is None


def test_with_a_gpu_nothing_is_said_of_it(refusal, monkeypatch):
    monkeypatch.setattr(glance, "_has_gpu", lambda: True)
    assert refusal() is None


@pytest.mark.skipif(glance.importlib.util.find_spec("vllm") is not None, reason="vllm is installed here")
def test_an_engine_that_is_not_installed_is_named_with_the_command(refusal, monkeypatch):
    cpu = {"accelerator": '"CPU"'}
    assert "config.py:4: backend='vllm', but" in refusal(**cpu, rollout='backend="vllm"')
    monkeypatch.setenv("XTUNER_USE_VLLM", "1")
    message = refusal(**cpu)
    assert "XTUNER_USE_VLLM=1" in message and "pip install 'xtuner[vllm]'" in message
    assert refusal(**cpu, rollout='backend="native"') is None
    assert refusal(**cpu, rollout="**more") is None
    assert refusal(**cpu, sets=["rollout_config.backend=native"]) is None
    assert refusal(**cpu, rollout="extra_rollout_config=options") is None  # may name the engine's interpreter
    monkeypatch.setenv("XTUNER_VLLM_PYTHON", "/engines/vllm/bin/python")
    assert refusal(**cpu) is None


@pytest.mark.skipif(glance.importlib.util.find_spec("vllm") is not None, reason="vllm is installed here")
@pytest.mark.parametrize("other, told", [('backend="native"', False), ("", False), ('backend="vllm"', True)])
def test_of_two_branches_both_must_name_the_engine(refusal, other, told):
    message = refusal(accelerator='"CPU"', rollout=f'backend="vllm") if local else RolloutConfig({other}')
    assert (message is not None) == told


def test_a_file_that_cannot_be_read_is_left_to_those_who_run_it(tmp_path):
    (tmp_path / "broken.py").write_text("def (")
    glance.refuse_at_a_glance(tmp_path / "broken.py", None, [])
    glance.refuse_at_a_glance(tmp_path / "missing.py", "gpu", [])


def test_a_tracker_that_is_not_installed_is_named_with_the_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    path = tmp_path / "config.py"
    path.write_text('trainer = RLColocateTrainerConfig(\n    exp_tracker="wandb")\n')
    with pytest.raises(UserError, match=r"config.py:2: exp_tracker='wandb', .*: pip install 'xtuner\[wandb\]'"):
        glance.refuse_at_a_glance(path, None, [])
    glance.refuse_at_a_glance(path, None, ["exp_tracker=jsonl"])
    path.write_text('trainer = RLColocateTrainerConfig(exp_tracker="tensorboard")\n')
    glance.refuse_at_a_glance(path, None, [])
