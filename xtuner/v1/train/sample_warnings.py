"""What keeps a run from learning, said in the log: it cannot be missed, and it cannot flood."""

from collections import Counter

from xtuner.v1.utils import get_logger

_MANY_CUT = 0.5


class SampleWarnings:
    """Warns at the first step of a kind, then at the second, fourth, eighth, ... one, in a row or not."""

    def __init__(self) -> None:
        self._steps: Counter[str] = Counter()

    def look(self, step: int, metrics: dict[str, float]) -> None:
        """metrics: of the step's samples, by the names of `SampleReport.metrics`."""
        if "advantages/max" not in metrics:
            return
        if metrics["advantages/min"] == metrics["advantages/max"] == 0:
            self._say(
                step,
                "without signal",
                "all advantages are 0, so rewards teach nothing: {batch_size:.0f} groups, rewards {rewards/mean:.4g} "
                "on average, from {rewards/min:.4g} to {rewards/max:.4g}, standard deviation within groups "
                "{rewards/group_std:.4g}. Look at the answers in train_rollout: prompts that are always or never "
                "solved, or a judge that gives all the same. More answers a prompt (prompt_repeat_k) find differences, "
                "and is_valid_sample_fn=drop_equal_rewards() draws other prompts for such groups.".format_map(metrics),
            )
        if metrics["response_len/cut_share"] > _MANY_CUT:
            self._say(
                step,
                "with most responses cut",
                "{response_len/cut_share:.0%} of the responses were cut at max_tokens or the end of the context, and "
                "judged unfinished; their mean length is {response_len/mean:.0f} tokens, the longest has "
                "{response_len/max:.0f}. Raise sample_params.max_tokens (rollout_config.context_length and "
                "pack_max_length with it), or ask for shorter answers.".format_map(metrics),
            )

    def _say(self, step: int, kind: str, message: str) -> None:
        self._steps[kind] += 1
        count = self._steps[kind]
        if count & (count - 1) == 0:
            steps = "step" if count == 1 else "steps"
            get_logger().warning(
                f"train step {step}: {message} ({count} {steps} {kind} so far; said again at {2 * count}.)"
            )
