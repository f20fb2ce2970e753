"""From prompts to groups of samples to be generated."""

from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

from pydantic import Field

from xtuner.v1.config.base import XTunerConfig
from xtuner.v1.data_proto import RolloutState
from xtuner.v1.datasets.config import DataloaderConfig

if TYPE_CHECKING:
    from xtuner.v1.datasets.dataloader import PromptDataloader


def make_group(
    prompt: RolloutState, size: int, group_id: int, first_rollout_id: int, task_name: str
) -> list[RolloutState]:
    """`size` samples of one prompt. They share its messages and token ids, which nobody changes."""
    return [
        prompt.model_copy(
            update={
                "group_id": group_id,
                "rollout_id": first_rollout_id + i,
                "uid": first_rollout_id + i,
                "task_name": task_name,
                "extra_fields": dict(prompt.extra_fields),
            }
        )
        for i in range(size)
    ]


class Sampler:
    """Gives the next prompt as a group of K samples, for ever.

    `group_id` and `rollout_id` never repeat in a run, over epochs, resumes and tasks. With one task
    `group_id` counts from 0 and `rollout_id` is `group_id * K + i`. Of T tasks, task t has the groups
    t, t + T, t + 2T, and so on, and K is the largest of all tasks. Where a run goes on with another K,
    its rollout ids from there on lie above all that were used (`id_offset`).
    """

    def __init__(
        self,
        dataloader: "PromptDataloader",
        prompt_repeat_k: int,
        task_name: str,
        task_index: int = 0,
        num_tasks: int = 1,
        id_stride: int | None = None,
    ):
        self.dataloader = dataloader
        self.prompt_repeat_k = prompt_repeat_k
        self.task_name = task_name
        self.num_groups = 0
        self.id_offset = 0
        """The first rollout id of group 0, the same for all tasks of a run."""
        self._given_back: list[int] = []
        """Numbers of the groups to be drawn again, a heap."""
        self._task_index, self._num_tasks = task_index, num_tasks
        self._id_stride = id_stride or prompt_repeat_k

    def __len__(self) -> int:
        """Prompts of one epoch."""
        return len(self.dataloader)

    def sample(self) -> list[RolloutState]:
        """The next prompt, K times: of those given back the first one drawn, if there are any."""
        if self._given_back:
            number = heappop(self._given_back)
            prompt = self.dataloader.again(number)
        else:
            number, prompt = self.num_groups, self.dataloader.next()
            self.num_groups += 1
        group_id = number * self._num_tasks + self._task_index
        first_rollout_id = self.id_offset + group_id * self._id_stride
        return make_group(prompt, self.prompt_repeat_k, group_id, first_rollout_id, self.task_name)

    def give_back(self, group: list[RolloutState]) -> None:
        """This group came to nothing: its prompt is drawn again, under the same ids, before any new one."""
        assert group[0].group_id is not None
        heappush(self._given_back, (group[0].group_id - self._task_index) // self._num_tasks)

    def state_dict(self) -> dict[str, Any]:
        """Position in the data, the running count, how ids follow from it and what was given back, as JSON values."""
        return {
            "num_groups": self.num_groups,
            "id_offset": self.id_offset,
            "id_stride": self._id_stride,
            "given_back": sorted(self._given_back),
            "dataloader": self.dataloader.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the group that would have come next. With another K `id_offset` is then above this task's own
        ids; the caller raises it above those of the others."""
        self.dataloader.load_state_dict(state["dataloader"])
        self.num_groups = state["num_groups"]
        self.id_offset = state.get("id_offset", 0)
        stride = state.get("id_stride", self._id_stride)  # checkpoints of before do not say
        if stride != self._id_stride:
            self.id_offset += self.num_groups * self._num_tasks * stride
        self._given_back = list(state.get("given_back", []))


class SamplerConfig(XTunerConfig):
    """Which prompts, and how many responses to each."""

    dataloader_cfg: DataloaderConfig
    """The prompts."""
    prompt_repeat_k: int = Field(1, ge=1)
    """Responses to each prompt (K). Training compares siblings: at least 2. Evaluation: for pass@k."""

    def build(
        self,
        tokenizer: Any,
        seed: int,
        task_name: str,
        task_index: int = 0,
        num_tasks: int = 1,
        id_stride: int | None = None,
    ) -> Sampler:
        """Load the prompts; `seed` orders them."""
        dataloader = self.dataloader_cfg.build(tokenizer, seed=seed)
        return Sampler(dataloader, self.prompt_repeat_k, task_name, task_index, num_tasks, id_stride)
