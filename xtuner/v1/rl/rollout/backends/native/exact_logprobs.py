"""Log-probs of drawn tokens by the trainer's own reduction."""

import torch
from torch import Tensor

from xtuner.v1.ops.exact import exact_row_statistics


def exact_logprobs(
    logits: Tensor, tokens: Tensor, logprobs: Tensor, inv_temperature: Tensor, greedy: Tensor, shaped: Tensor
) -> Tensor:
    """float32 [B]: of the drawn tokens under softmax(logits * inv_temperature), of greedy ones under softmax(logits).

    logits float32 [B, V] as the model gave them; tokens int64 [B]. Rows that are `shaped` (bool [B]: drawn from
    another distribution than the model's) and not `greedy` (bool [B]) keep their `logprobs`.
    """
    scale = torch.where(greedy, 1.0, inv_temperature)
    exact, _, _ = exact_row_statistics(logits, tokens, scale)
    return torch.where(shaped & ~greedy, logprobs, exact)
