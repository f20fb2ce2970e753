"""How new weights reach the engines, and how it is known that they did."""

from .all_engines import push_to_all
from .buckets import exhaust, with_checksums
from .canary import ReadsWeights, StaleWeightsError, Witness
from .delivery import IncomingWeights, receive_weights, send_weights
from .disk import read_weights, write_weights
from .in_process import push_in_process
from .inventory import DeliveryError, EngineDownError, EngineLostError, Inventory, WeightUpdateError
from .line import Line

__all__ = [
    "DeliveryError",
    "EngineDownError",
    "EngineLostError",
    "IncomingWeights",
    "Inventory",
    "Line",
    "ReadsWeights",
    "StaleWeightsError",
    "WeightUpdateError",
    "Witness",
    "exhaust",
    "push_in_process",
    "push_to_all",
    "read_weights",
    "receive_weights",
    "send_weights",
    "with_checksums",
    "write_weights",
]
