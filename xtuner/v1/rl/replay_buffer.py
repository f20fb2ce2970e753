"""Where finished groups wait for training, oldest first."""

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from xtuner.v1.config.base import XTunerConfig
from xtuner.v1.data_proto import RolloutState, Status
from xtuner.v1.utils.not_here import not_here

Group = list[RolloutState]


class ReplayBuffer:
    """Groups by task and status, first in, first out.

    Synchronous production puts a group when it is usable and takes the batch when it is full, so between two
    steps the buffer is empty. What a broken step left is used by the next one while it is fresh,
    that is, made by the weights that the engine still holds; stale groups are removed and counted as expired,
    and their prompts are drawn again.
    """

    policy = "fifo"

    def __init__(self) -> None:
        self._groups: dict[tuple[str, Status], deque[Group]] = {}

    def __len__(self) -> int:
        return sum(len(groups) for groups in self._groups.values())

    def put(self, group: Group, task_name: str, status: Status = Status.COMPLETED) -> None:
        """Add one group. `status` is the group's: a usable group may hold failed members."""
        if not group:
            raise ValueError(f"replay buffer: an empty group of task {task_name!r} was put.")
        self._groups.setdefault((task_name, status), deque()).append(group)

    def count(self, task_name: str, status: Status = Status.COMPLETED) -> int:
        """Groups that wait."""
        return len(self._groups.get((task_name, status), ()))

    def take(self, n: int, task_name: str, status: Status = Status.COMPLETED) -> list[Group]:
        """Remove and return the oldest groups, at most `n`."""
        waiting = self._groups.get((task_name, status), deque())
        return [waiting.popleft() for _ in range(min(n, len(waiting)))]

    def remove(
        self, drop: Callable[[Group], bool], task_name: str, status: Status = Status.COMPLETED
    ) -> list[Group]:
        """Remove and return the groups for which `drop` is True."""
        waiting = self.take(self.count(task_name, status), task_name, status)
        dropped = []
        for group in waiting:
            if drop(group):
                dropped.append(group)
            else:
                self.put(group, task_name, status)
        return dropped

    def state_dict(self) -> dict[str, Any]:
        """All groups as JSON values.

        Raises:
            ValueError: a sample holds what JSON cannot (itself).
        """
        entries = []
        for (task_name, status), groups in self._groups.items():
            for group in groups:
                try:
                    samples = [state.to_json() for state in group]
                except Exception as error:
                    raise ValueError(
                        f"replay buffer: group {group[0].group_id} of task {task_name!r} cannot be saved as "
                        "JSON "
                        f"({error}); set checkpoint_no_save_replay_buffer=True to save without waiting "
                        "groups."
                    ) from error
                entries.append({"task_name": task_name, "status": status.value, "samples": samples})
        return {"policy": self.policy, "groups": entries}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the groups of a `state_dict`, in their order.

        Raises:
            RuntimeError: this buffer already holds groups.
            ValueError: the state is of another policy or damaged; nothing is loaded then.
        """
        if len(self):
            raise RuntimeError(f"replay buffer: {len(self)} groups are here already; load into a new buffer.")
        if state.get("policy") != self.policy:
            raise ValueError(
                f"replay buffer: the saved one has policy {state.get('policy')!r}, this run uses "
                f"{self.policy!r}; "
                "resume with the replay_buffer_config of the saved run."
            )
        loaded = ReplayBuffer()
        for index, entry in enumerate(state.get("groups", [])):
            try:
                group = [RolloutState.model_validate(sample) for sample in entry["samples"]]
                loaded.put(group, entry["task_name"], Status(entry["status"]))
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"replay buffer: saved group {index} is damaged: {error}") from error
        self._groups = loaded._groups


class SyncReplayBufferConfig(XTunerConfig):
    """The buffer of synchronous production: first in, first out."""

    def build(self) -> ReplayBuffer:
        return ReplayBuffer()


if not TYPE_CHECKING:  # a type checker would take any name for one that is there
    _INSTEAD = {
        "AsyncReplayBufferConfig": "rollouts and training take turns, use SyncReplayBufferConfig",
    }
    __getattr__ = not_here(__name__, _INSTEAD)
