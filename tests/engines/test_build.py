"""Environments of engines: built once, rebuilt when half built, and tests that fail with the reason when they cannot
be."""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from .build_env import BuildError, Recipe

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """Of an environment with nothing in it but one module of ours."""
    folder = tmp_path_factory.mktemp("recipe")
    (folder / "requirements.txt").write_text("")
    (folder / "stub.py").write_text("word = 'here'\n")
    return Recipe("toy", (), folder / "requirements.txt", (folder / "stub.py",), free_gib=0.1)


def test_two_that_want_it_at_once_build_it_once(recipe, tmp_path):
    half = tmp_path / f"toy-{recipe.key()}"
    (half / "bin").mkdir(parents=True)
    (half / "bin" / "left-behind").touch()
    with ThreadPoolExecutor() as two:
        first, second = two.map(recipe.environment, [tmp_path, tmp_path])
    assert first == second == half / "bin" / "python" and not (half / "bin" / "left-behind").exists()
    said = subprocess.run([first, "-c", "import stub; print(stub.word)"], capture_output=True, text=True, cwd="/")
    assert said.stdout == "here\n"
    (half / "whole").touch()
    assert recipe.environment(tmp_path) == first and (half / "whole").exists()
    first.unlink()
    first.symlink_to("/nowhere/python")  # the Python that it was made from is gone
    with pytest.raises(BuildError, match="GiB are needed"):  # to build it again
        replace(recipe, free_gib=1e6).environment(tmp_path)


def test_another_recipe_is_another_environment(recipe, tmp_path):
    (tmp_path / "stub.py").write_text("word = 'there'\n")
    (tmp_path / "requirements.txt").write_text("six==1.17.0\n")
    others = [
        Recipe("toy", (), recipe.requirements, (tmp_path / "stub.py",)),
        Recipe("toy", (), tmp_path / "requirements.txt", recipe.stubs),
        Recipe("toy", ("torch==2.13.0",), recipe.requirements, recipe.stubs),
    ]
    assert len({recipe.key(), *(other.key() for other in others)}) == 4


def test_too_little_room_is_an_error_before_anything_is_downloaded(recipe, tmp_path):
    wide = Recipe("toy", (), recipe.requirements, free_gib=1e6)
    with pytest.raises(BuildError, match=r"1e\+06 GiB are needed there, and .* free. XTUNER_ENGINES_CACHE names"):
        wide.environment(tmp_path)
    assert not (tmp_path / f"toy-{wide.key()}").exists()
    (tmp_path / "file").touch()
    with pytest.raises(BuildError, match="cannot be built in .*file"):
        recipe.environment(tmp_path / "file")


def test_an_engine_that_cannot_be_built_fails_its_tests_with_the_reason(tmp_path):
    """As with an index that cannot be reached."""
    variables = {
        "XTUNER_TEST_ENGINES": "vllm", "XTUNER_ENGINES_CACHE": str(tmp_path), "XTUNER_ENGINES_ATTEMPTS": "1",
        "PIP_NO_INDEX": "1",
    }  # fmt: skip
    environment = {k: v for k, v in os.environ.items() if k != "XTUNER_VLLM_PYTHON"} | variables
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/engines/test_run.py"],
        cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1 and re.search(r"^\d+ errors? in", done.stdout, re.MULTILINE)  # and nothing else
    assert "BuildError: The environment of vllm cannot be built" in done.stdout
    assert "No matching distribution found for" in done.stdout
