"""What the workers of a run ask of the machines."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator

from xtuner.v1.config.base import XTunerConfig

PackStrategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
GIB = 1024**3


def _upper(value: Any) -> Any:
    return value.upper() if isinstance(value, str) else value


class CPUResourcesConfig(XTunerConfig):
    """A pool of workers that need no accelerator (judgers, agent loops).

    In a Ray cluster that the run started for itself nobody shares the machine: the demands are lowered to
    what it has (with a log line) and memory is not reserved. The local launcher reserves nothing.
    """

    num_workers: int = Field(1, ge=1)
    """Processes in the pool."""
    num_cpus_per_worker: float = Field(1, gt=0)
    """CPUs reserved for each worker. A share of one CPU is allowed."""
    cpu_memory_per_worker: int = Field(GIB, gt=0)
    """Host memory reserved for each worker, in bytes."""
    pg_pack_strategy: Annotated[PackStrategy, BeforeValidator(_upper)] = "SPREAD"
    """Ray's placement strategy: PACK (few nodes), SPREAD (many), or STRICT_PACK, STRICT_SPREAD."""


class AcceleratorResourcesConfig(XTunerConfig):
    """The workers that train and generate: one bundle of an accelerator, CPUs and host memory for each.

    `num_cpus_per_worker` and `cpu_memory_per_worker` are reservations in a shared Ray cluster. Where nobody
    shares the machine (a Ray cluster that the run started for itself) and for accelerator CPU, CPUs are
    lowered to what there is (with a log line) and memory is not reserved, so a laptop can run it. The local
    launcher reserves nothing.
    """

    accelerator: Annotated[Literal["GPU", "CPU"], BeforeValidator(_upper)] = "GPU"
    """What computes: GPU (CUDA) or CPU."""
    num_workers: int = Field(ge=1)
    """Training workers in all, one process each; every one holds a rollout worker too."""
    num_cpus_per_worker: float = Field(12, gt=0)
    """CPUs reserved for each worker."""
    cpu_memory_per_worker: int = Field(16 * GIB, gt=0)
    """Host memory reserved for each worker, in bytes."""
    num_accelerators_per_node: int = Field(8, ge=1)
    """Accelerators of one machine, for documentation: the launcher counts what is really there."""
    num_accelerators_per_worker: float = Field(1, gt=0)
    """Accelerators of each worker. Not used by accelerator CPU."""
    pg_pack_strategy: Annotated[PackStrategy, BeforeValidator(_upper)] = "PACK"
    """Ray's placement strategy for the bundles."""

    @field_validator("accelerator", mode="before")
    @classmethod
    def _no_npu(cls, value: Any) -> Any:
        if isinstance(value, str) and value.upper() == "NPU":
            raise ValueError("accelerator='NPU' is not supported yet; one of 'GPU', 'CPU'.")
        return value

    @classmethod
    def from_total(
        cls,
        accelerator: str,
        total_accelerators: float,
        total_cpus: float,
        total_memory: int,
        num_workers: int,
        pg_pack_strategy: str = "PACK",
    ) -> "AcceleratorResourcesConfig":
        """Split totals evenly over `num_workers`."""
        return cls(
            accelerator=accelerator,
            num_workers=num_workers,
            num_cpus_per_worker=total_cpus / num_workers,
            cpu_memory_per_worker=total_memory // num_workers,
            num_accelerators_per_worker=total_accelerators / num_workers,
            pg_pack_strategy=pg_pack_strategy,
        )

    @property
    def device(self) -> Literal["cuda", "cpu"]:
        """Torch's name of the device."""
        return "cuda" if self.accelerator == "GPU" else "cpu"
