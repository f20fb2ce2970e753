"""What may differ between engine and trainer before a run stops."""

from pydantic import Field, model_validator

from xtuner.v1.config import XTunerConfig


class WeightCanaryConfig(XTunerConfig):
    """After every update of an engine's weights: are they the trainer's, and does it compute with them?

    Two questions: sums of bits of a sample of weights on both sides, when they have come and again when the engine has
    made its tokens; and the log-probs of a few tokens that each engine draws behind a fixed prompt, which the trainer
    computes before it trains. A wrong answer stops the run before anything is trained on those tokens.
    """

    enabled: bool = True
    """False: weights that stay behind show in mismatch/* alone. docs/weights.md says what it costs."""
    every: int = Field(8, ge=1)
    """Each weight is in the sample once in so many updates; embedding, final norm, head, first and last layer always
    are. 1: all weights, every time."""
    logprob_gap: float | None = Field(None, ge=0)
    """Largest mean |difference| of the log-probs. None: 0 in exact mode, 0.001 if trainer and engine compute in
    float32 (0.02 for an engine other than the native one on a GPU, which multiplies as TF32), else 0.15, with experts
    1.5."""


class GapBounds(XTunerConfig):
    """Bounds of one step's gap δ = log-prob of the trainer - log-prob of the engine over an engine's tokens. None: no
    bound."""

    mean: float | None = Field(None, ge=0)
    """Of mean |δ|."""
    p99: float | None = Field(None, ge=0)
    """Of the 99th percentile of |δ|."""
    worst_sequence: float | None = Field(None, ge=0)
    """Of the largest mean |δ| of a response."""
    k1: float | None = Field(None, ge=0)
    """Of |mean of -δ|, an estimate of KL(engine, trainer)."""
    k3: float | None = Field(None, ge=0)
    """Of mean e^δ - δ - 1, another one, which is never negative."""


class RolloutGapConfig(XTunerConfig):
    """How far the engines' log-probs of a step may be from the trainer's. They are measured in any case, see
    mismatch/*; the bounds hold for each engine by itself."""

    warn_above: GapBounds = GapBounds()
    """A line in the log."""
    stop_above: GapBounds = GapBounds()
    """The run stops; weights and optimizer of that step are not saved, its trajectories are."""

    @model_validator(mode="after")
    def _ordered(self) -> "RolloutGapConfig":
        for name, stop in self.stop_above:
            warn = getattr(self.warn_above, name)
            if warn is not None and stop is not None and warn > stop:
                raise ValueError(
                    f"warn_above.{name}={warn:g} is above stop_above.{name}={stop:g}: the run would stop before it "
                    "warns; exchange them."
                )
        return self
