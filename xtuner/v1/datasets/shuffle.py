"""Random order that any version of any library draws alike."""

import numpy as np


def permutation(n: int, *seed: int) -> np.ndarray:
    """A random order of 0..n-1 (int64 [n]) that depends on nothing but the seeds.

    A checkpoint holds a position in this order, so it must survive an upgrade. NumPy keeps the raw stream of
    PCG64 fixed but not what `Generator.permutation` makes of it; hence random keys, sorted.
    """
    keys = np.random.PCG64([number % 2**64 for number in seed]).random_raw(n)
    return np.argsort(keys, kind="stable")
