"""A mistake in the config is answered with its file, line, value and the way out."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from xtuner.v1.train.cli.config_file import load_trainer
from xtuner.v1.train.cli.errors import UserError, show_value

MODEL = """
from pydantic import BaseModel, ConfigDict, Field, model_validator

class Optim(BaseModel):
    model_config = ConfigDict(extra="forbid")
    lr: float = Field(1.0, gt=0)
    api_key: int = 0

class Trainer(BaseModel):
    model_config = ConfigDict(extra="forbid")
    optim: Optim = Optim()
    items: list[Optim] = []
    low: int = 0
    high: int = 1

    @model_validator(mode="after")
    def ordered(self):
        if self.low > self.high:
            raise ValueError(f"low={self.low} is above high={self.high}; swap them.")
        return self

    def build(self): ...
"""
LINES = MODEL.count("\n")


@pytest.fixture(autouse=True)
def unchanged_imports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def write(folder: Path, text: str, name: str = "my_config.py") -> Path:
    path = folder / name
    path.write_text(MODEL + text)
    return path


def refusal(path: Path, **options: Path) -> str:
    with pytest.raises(UserError) as caught:
        load_trainer(path, **options)
    return str(caught.value)


def test_trainer_is_taken_from_a_file_that_imports_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "beside_my_config.py").write_text("LR = 3.0")
    path = write(tmp_path, "from beside_my_config import LR\ntrainer = Trainer(optim=Optim(lr=LR))")
    assert load_trainer(path).optim.lr == 3.0  # type: ignore[attr-defined]


# Text, line of it that is to be named, part of the message. The line is the argument's own, not the call's.
MISTAKES = [
    ("trainer = Trainer(\n low=0,\n optim=Optim(\n  lr=-1,\n ),\n)", 4, "lr = -1: Input should be gre"),
    ("trainer = Trainer(\n optim=dict(\n  lr=-1,\n ),\n)", 3, "optim.lr = -1: Input should be greater"),
    ("trainer = Trainer(\n optim={\n  'lr': -1,\n },\n)", 3, "optim.lr = -1: Input should be greater"),
    ("trainer = Trainer(\n items=[\n  {},\n  {'lr': 0},\n ],\n)", 4, "items.1.lr = 0: Input should be"),
    ("trainer = Trainer(\n hihg=3,\n)", 2, "hihg: no such field. Did you mean 'high'? Valid here: high, "),
    ("trainer = Trainer(low=3)", 1, "low=3 is above high=1; swap them."),
    ("trainer = Trainer(items=[{'lr': 'x'}, {'lr': 0}])", 1, "items.0.lr = 'x'"),
    ("trainer = Trainer(items=[{'lr': 'x'}, {'lr': 0}])", 1, "items.1.lr = 0"),
    ("\nint('four')\n", 2, "ValueError: invalid literal for int() with base 10: 'four'"),
    ("trainer = Trainer(\n", 1, "'(' was never closed"),
    ("import no_such_module_anywhere", 1, "No module named 'no_such_module_anywhere'"),
    ("raise SystemExit('give MODEL_PATH')", 1, "the config stopped itself: give MODEL_PATH"),
    ("import os\nos.environ['TEST_UNSET']", 2, "TEST_UNSET is not set: export TEST_UNSET=..."),
]


@pytest.mark.parametrize("text, line, message", MISTAKES)
def test_mistake_is_shown_with_its_line(tmp_path: Path, text: str, line: int, message: str) -> None:
    path = write(tmp_path, text)
    shown = refusal(path)
    assert shown.startswith(f"{path}:{LINES + line}: ")
    assert message in shown


def test_mistake_in_a_helper_module_names_that_file(tmp_path: Path) -> None:
    helper = tmp_path / "helper_with_mistake.py"
    helper.write_text("def make():\n    return 1 / 0\n")
    shown = refusal(write(tmp_path, "import helper_with_mistake\nhelper_with_mistake.make()"))
    assert shown.startswith(f"{helper}:2: ZeroDivisionError")
    assert "return 1 / 0" in shown


def test_secret_is_not_shown(tmp_path: Path) -> None:
    shown = refusal(write(tmp_path, "import os\ntrainer = Optim(api_key=os.environ.get('K', 'sk-123'))"))
    assert "(hidden)" in shown and "sk-123" not in shown


@pytest.mark.parametrize("name, shown", [("max_tokens", "'x'"), ("eos_token_id", "'x'"), ("hf_token", "(hidden)")])
def test_a_count_of_tokens_is_no_secret(name: str, shown: str) -> None:
    assert show_value("x", name) == shown


@pytest.mark.parametrize(
    "text",
    [
        "trainer = Optim(\n hf_token='sk-123')",
        "trainer = Optim(\n api_key=['sk-123', 1])",
        "trainer = Optim(lr={'env': {'DB': 'sk-123'}, 'OPENAI_KEY': ['sk-123'], 'url': 'http://me:sk-123@host'})",
        "import os\nos.environ['AWS_SECRET_ACCESS_KEY'] = 'sk-123' + 4",
        "options = {'PRIVATE_KEY': 'sk-123}",
    ],
)
def test_a_secret_is_not_shown_in_a_wrong_place_either(tmp_path: Path, text: str) -> None:
    shown = refusal(write(tmp_path, text))
    assert "sk-123" not in shown and "my_config.py" in shown


def test_a_line_that_only_mentions_a_key_is_quoted(tmp_path: Path) -> None:
    assert "max_tokens = 'x'" in refusal(write(tmp_path, "max_tokens = 'x' + 1"))
    assert "key = sorted(" in refusal(write(tmp_path, "key = sorted([1, None])", "other.py"))


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "defines no `trainer`"),
        ("trainer = 3", "`trainer` is a int"),
        ("trainer = Optim()", "`trainer` is a Optim"),
    ],
)
def test_trainer_must_be_a_config_that_builds(tmp_path: Path, text: str, message: str) -> None:
    assert message in refusal(write(tmp_path, text))


def test_only_an_existing_python_file_is_a_config(tmp_path: Path) -> None:
    assert "no such file" in refusal(tmp_path / "absent.py")
    assert "is a folder" in refusal(tmp_path)
    yaml = tmp_path / "config.yaml"
    yaml.write_text("trainer: 1")
    assert "a config is a Python file" in refusal(yaml)


@pytest.mark.parametrize("name", ["json.py", "typing_extensions.py", "pydantic.py"])
def test_config_must_not_hide_a_module(tmp_path: Path, name: str) -> None:
    """The file's folder is importable: a config called json.py would replace json from then on."""
    assert "hides the Python module" in refusal(write(tmp_path, "trainer = Trainer()", name))


def test_file_name_need_not_be_an_identifier(tmp_path: Path) -> None:
    assert load_trainer(write(tmp_path, "trainer = Trainer()", "grpo-8b.v2.py")) is not None


def test_work_dir_stands_in_for_the_variable_only_if_it_is_unset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "import os\nclass T(Trainer):\n    w: str\ntrainer = T(w=os.environ['WORK_DIR'])"
    path = write(tmp_path, text)
    monkeypatch.delenv("WORK_DIR", raising=False)
    shown = refusal(path)
    assert "WORK_DIR is not set" in shown and "--work-dir" in shown
    assert load_trainer(path, Path("given")).w == "given"  # type: ignore[attr-defined]
    assert "WORK_DIR" not in os.environ
    monkeypatch.setenv("WORK_DIR", "mine")
    assert load_trainer(path, Path("given")).w == "mine"  # type: ignore[attr-defined]


def test_edited_file_is_read_anew(tmp_path: Path) -> None:
    """Python's own cache goes by time in seconds and size: an edit of one digit would go unseen."""
    values = []
    for lr in (1, 2):
        path = write(tmp_path, f"trainer = Trainer(optim=Optim(lr={lr}))")
        os.utime(path, (1_000_000_000, 1_000_000_000))
        values.append(load_trainer(path).optim.lr)  # type: ignore[attr-defined]
    assert values == [1, 2]
