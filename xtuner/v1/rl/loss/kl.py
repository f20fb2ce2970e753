"""Penalties that keep the policy near a reference model."""

from typing import Literal, get_args

from torch import Tensor

KLKind = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"]


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kind: KLKind) -> Tensor:
    """Penalty per sampled token, [N] (Schulman 2020, "Approximating KL divergence").

    With d = logprob - ref_logprob:

    - `kl`, `k1`: d. An unbiased value, but the reference does not occur in its gradient, which is that of the
      log-likelihood and 0 on average: as a loss it does not pull towards the reference.
    - `abs`: |d|
    - `mse`, `k2`: d² / 2. Its gradient on the policy's own samples is that of KL(policy, reference).
    - `low_var_kl`, `k3`: e^x - x - 1 with x = clamp(-d, -20, 20), then clamped to at most 10. Unbiased, never
      negative. The clamp keeps value and gradient finite at any distance; where it holds (d above 11.0 or
      below -2.61) the gradient is 0. `k2` goes on pulling there.

    The gradient flows to `logprob` only.
    """
    d = logprob - ref_logprob.detach()
    match kind:
        case "kl" | "k1":
            return d
        case "abs":
            return d.abs()
        case "mse" | "k2":
            return d.square() / 2
        case "low_var_kl" | "k3":
            x = (-d).clamp(-20, 20)
            return (x.expm1() - x).clamp(max=10)
        case _:
            raise ValueError(f"unknown KL kind {kind!r}; one of {', '.join(get_args(KLKind))}.")
