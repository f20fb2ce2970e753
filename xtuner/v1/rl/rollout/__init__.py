"""Engines that generate, and the controller that feeds them."""

from .config import RolloutConfig

__all__ = ["RolloutConfig"]
