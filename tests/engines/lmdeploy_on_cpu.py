"""LMDeploy's engine where there is no GPU: `stand_in_lmdeploy.py` runs its server."""

from xtuner.v1.rl.rollout.backends import lmdeploy
from xtuner.v1.rl.rollout.backends.lmdeploy_weights import BucketCarrier

from .host_window import HostWindow


class LMDeployEngine(lmdeploy.LMDeployEngine):
    """Its weights come through host memory; of the device there is nothing to ask."""

    def new_carrier(self) -> BucketCarrier:
        return BucketCarrier(self, HostWindow)

    def device_bytes(self) -> int:
        return 1 << 34
