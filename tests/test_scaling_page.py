"""docs/scaling.md shows what its script prints."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import scaling_model

    yield scaling_model
    for name in ("scaling_model", "random_model"):
        sys.modules.pop(name, None)


def test_the_tables_are_current(script):
    assert script.page() in (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8"), (
        "put the output of python benchmarks/scaling_model.py into docs/scaling.md"
    )


@pytest.mark.parametrize("shape", ["qwen3-0.6b", "qwen3-8b", "qwen3-30b-a3b"])
def test_sizes_are_those_of_the_models(script, shape):
    from xtuner.v1.model.hf_config import model_config_from_dict

    built = model_config_from_dict(script.SHAPES[shape]).build("meta")
    assert script.Model.of(shape).total == sum(p.numel() for p in built.parameters())


def test_traffic_between_nodes_is_shared_by_the_adapters_of_a_node(script):
    inside, across, alone = script.gather(1e9, 8), script.gather(1e9, 64), script.gather(1e9, 8, stride=8)
    assert inside.outside == 0 and inside.inside == 7e9 / 8
    assert across.outside == pytest.approx(7e9 / 8 / 8) and alone.outside == pytest.approx(7e9 / 8)
    assert alone.inside == 0 and alone.seconds > 5 * across.seconds
