"""What each layer keeps for its backward.

Bytes a token and layer in bfloat16, of a dense model with hidden size H, Q query columns, K key columns and MLP width
I: nothing recomputed 2 (4H + 3Q + 3K + 3I); selective 2 (2H + 2Q + 2K + 2I), which is the layer's input and the results
of three matrix products and attention; full 2H. Qwen3-8B: 134, 84 and 8 KiB, so a pack of 32k tokens keeps 151, 94 or 9
GiB in 36 layers. Full recomputation runs the forward of a layer twice, a third more work; selective costs a few per
cent of the time.
"""

from collections.abc import Iterable
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from xtuner.v1.config import FSDPConfig
from xtuner.v1.ops.recompute import selective


def recompute_layers(layers: Iterable[nn.Module], cfg: FSDPConfig, compiled: bool) -> None:
    """Replace the layers' `forward` by ones that recompute as the configuration says.

    Compiled layers recompute selectively by themselves: the compiler keeps the results of matrix products and makes
    what lies between again.
    """
    layers = list(layers)
    first = round(cfg.recompute_ratio * len(layers)) if cfg.requires_grad else 0
    for index, layer in enumerate(layers):
        chosen = index < first
        if chosen and cfg.recompute != "selective":
            layer.forward = partial(
                checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=cfg.checkpoint_preserve_rng_state
            )
        elif cfg.requires_grad and not compiled and cfg.recompute == ("selective" if chosen else "mixed"):
            layer.forward = selective(layer.forward)
