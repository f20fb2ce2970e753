"""The nearest orthogonal matrix, roughly, by products alone."""

import torch
from torch import Tensor

_A, _B, _C = 3.4445, -4.7750, 2.0315


def orthogonalize(matrices: Tensor, steps: int = 5) -> Tensor:
    """U V^T of each matrix U S V^T, but for singular values between about 0.7 and 1.2. [m, n] or [batch, m, n].

    Newton-Schulz iteration with the quintic that rises fastest at 0 (Jordan et al. 2024, "Muon"), in bfloat16; returns
    bfloat16.
    """
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    product = torch.addmm if x.dim() == 2 else torch.baddbmm
    # The iteration needs singular values of at most 1, and the Frobenius norm is no less than the largest.
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = product(x, product(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.mT if tall else x
