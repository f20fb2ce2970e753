"""Judgers: from a response to a reward, or to the reason why there is none."""

from typing import TYPE_CHECKING

from xtuner.v1.utils.not_here import not_here

from .base import BaseJudger, JudgeError, Judger
from .composed import ComposedJudger, ComposedJudgerConfig
from .config import JudgerConfig, build_judger
from .gsm8k import GSM8KJudgerConfig
from .native import NativeJudger
from .remote import JudgerPool, RemoteJudger

__all__ = [
    "BaseJudger",
    "ComposedJudger",
    "ComposedJudgerConfig",
    "GSM8KJudgerConfig",
    "JudgeError",
    "Judger",
    "JudgerConfig",
    "JudgerPool",
    "NativeJudger",
    "RemoteJudger",
    "build_judger",
]

if not TYPE_CHECKING:  # a type checker would take any name for one that is there
    _INSTEAD = dict.fromkeys(
        ("DapoMathJudgerConfig", "GEO3KJudgerConfig", "CompassVerifierV2Config"),
        "judge with a function or a service of your own, JudgerConfig(reward_handler=...)",
    ) | {"RayJudger": "JudgerConfig(cpu_resources=...) judges in other processes"}
    __getattr__ = not_here(__name__, _INSTEAD)
