"""Documentation says how it is now."""

import importlib
import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def _reference_page():
    spec = importlib.util.spec_from_file_location("reference_page", ROOT / "docs" / "make_config_reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_configuration_reference_is_current():
    assert (ROOT / "docs" / "config.md").read_text(encoding="utf-8") == _reference_page().page(), (
        "run python docs/make_config_reference.py"
    )


def test_every_field_of_a_configuration_is_described():
    module = _reference_page()
    missing = [
        f"{name}.{field}"
        for source, names in module.CLASSES
        for name in names
        for field, info in getattr(importlib.import_module(source), name).model_fields.items()
        if not info.description
    ]
    assert not missing


def test_links_and_paths_in_the_pages_exist():
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        text = page.read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#]+?)\)", text):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name}: {target}"
        for path in re.findall(r"\b((?:examples|benchmarks|xtuner)/[\w/]+\.(?:py|sh))", text):
            assert (ROOT / path).exists(), f"{page.name}: {path}"
