"""Judgers: from a response to a reward, or to the reason why there is none."""

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
