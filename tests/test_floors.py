"""The house rules, read from the sources: who may import whom, and how large a file may be."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "xtuner" / "v1"

# A folder or module imports only from itself and from what stands above it here.
FLOORS = (
    "config data_proto utils ops model engine datasets "
    "rl/utils rl/advantage rl/loss rl/judger rl/weight_update rl/rollout rl/agent_loop rl/replay_buffer "
    "rl/agent_loop_manager rl/evaluator rl/trainer train viewer train/cli"  # the command line starts all of it
).split()
ENGINES = ("vllm", "sglang", "lmdeploy")
MAX_LINES, MAX_FIT_LINES = 500, 100

SOURCES = sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    """`rl/loss/kl` for xtuner/v1/rl/loss/kl.py."""
    return path.relative_to(PACKAGE).with_suffix("").as_posix().removesuffix("/__init__")


def floor_of(name: str) -> str | None:
    """The longest entry of FLOORS that holds the module."""
    found = [floor for floor in FLOORS if name == floor or name.startswith(floor + "/")]
    return max(found, key=len) if found else None


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of everything the file imports, at its top or inside a function."""
    package = ("xtuner", "v1", *path.relative_to(PACKAGE).parent.parts)
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *([node.module] if node.module else [])))
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def places(paths: list[Path], is_wrong) -> list[str]:
    """file:line of the imports that `is_wrong(module name, imported name)` objects to."""
    return [
        f"{path.relative_to(ROOT)}:{line} imports {imported}"
        for path in paths
        for line, imported in imports_of(path)
        if is_wrong(name_of(path), imported)
    ]


def test_every_module_stands_on_a_floor() -> None:
    strays = [name_of(path) for path in SOURCES if floor_of(name_of(path)) is None]
    assert set(strays) <= {"__init__", "rl"}  # packages without code of their own
    assert (PACKAGE / "__init__.py").read_text() == (PACKAGE / "rl/__init__.py").read_text() == ""


def test_imports_point_to_the_ground() -> None:
    def upward(name: str, imported: str) -> bool:
        target = floor_of(imported.removeprefix("xtuner.v1.").replace(".", "/"))
        here = floor_of(name)
        if not imported.startswith("xtuner.v1.") or here is None or target is None:
            return False
        return FLOORS.index(target) > FLOORS.index(here)

    assert places(SOURCES, upward) == []


def top(imported: str) -> str:
    return imported.split(".")[0]


def test_ray_is_known_to_the_launcher_alone() -> None:
    assert places(SOURCES, lambda name, i: top(i) == "ray" and name != "rl/utils/launcher") == []


def test_an_engine_is_known_to_its_own_backend_alone() -> None:
    def foreign(name: str, imported: str) -> bool:
        own = f"rl/rollout/backends/{top(imported)}"
        in_its_process = f"rl/rollout/backends/engine_side/xtuner_{top(imported)}"
        return top(imported) in ENGINES and name not in (own, in_its_process) and not name.startswith(own + "/")

    assert places(SOURCES, foreign) == []


def test_the_package_needs_neither_tests_nor_examples() -> None:
    assert places(SOURCES, lambda _, i: top(i) in ("tests", "examples", "benchmarks")) == []


@pytest.mark.parametrize("folder", ["xtuner", "tests", "examples", "benchmarks"])
def test_a_file_is_about_one_idea(folder: str) -> None:
    lengths = {p: len(p.read_bytes().splitlines()) for p in (ROOT / folder).rglob("*.py")}
    assert [f"{p.relative_to(ROOT)}: {n} lines" for p, n in lengths.items() if n > MAX_LINES] == []


def test_fit_reads_on_one_page() -> None:
    """The loop is the algorithm: `fit` and `_fit` of the trainers stay short enough to read."""
    functions = [
        (path, node)
        for path in (PACKAGE / "train").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name in ("fit", "_fit")
    ]
    lengths = {f"{p.name}:{n.name}": (n.end_lineno or 0) - n.lineno + 1 for p, n in functions}
    assert lengths and max(lengths.values()) <= MAX_FIT_LINES
