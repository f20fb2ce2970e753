"""What every configuration does when it is changed or copied."""

import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import ValidationError, model_validator

from xtuner.v1.config.base import XTunerConfig


class Inner(XTunerConfig):
    size: int = 1
    handler: Callable[..., Any] | None = None


class Outer(XTunerConfig):
    every: int = 2
    interval: int | None = None
    items: list[dict[str, Any]] = []

    @model_validator(mode="after")
    def _multiple(self) -> "Outer":
        if self.interval is not None and self.interval % self.every:
            raise ValueError(f"interval={self.interval} must be a multiple of every={self.every}")
        return self


def test_a_refused_assignment_changes_nothing():
    """Else the next check finds nothing wrong with a value that was refused."""
    cfg = Outer(interval=4)
    with pytest.raises(ValidationError, match="interval=4 must be a multiple of every=3"):
        cfg.every = 3
    assert cfg == Outer(interval=4) and cfg.model_fields_set == {"interval"}
    cfg.interval = 6
    cfg.every = 3
    assert cfg == Outer(interval=6, every=3)


class Rates(XTunerConfig):
    rate: float = 1.0
    bound: float | None = None
    weights: dict[str, float] = {}


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_numbers_are_finite(value):
    for fields in ({"rate": value}, {"bound": value}, {"weights": {"a": value}}):
        with pytest.raises(ValidationError, match="finite number"):
            Rates(**fields)


def test_a_copy_has_configs_of_its_own_and_shares_what_is_the_user_s():
    class Service:
        def __init__(self):
            self.lock = threading.Lock()

        def score(self):
            return 1.0

    service = Service()
    inner = Inner(handler=service.score)
    cfg = Outer(items=[{"part": inner, "parts": (inner,), "object": service}])
    copied = cfg.model_copy(deep=True)
    assert copied == cfg and copied.model_fields_set == {"items"}
    entry = copied.items[0]
    assert entry["object"] is service and entry["part"].handler.__self__ is service
    entry["part"].size, entry["parts"][0].size, entry["more"] = 2, 3, 4
    copied.items.append({})
    assert inner.size == 1 and len(cfg.items) == 1 and "more" not in cfg.items[0]
