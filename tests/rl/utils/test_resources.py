import pytest
from pydantic import ValidationError

from xtuner.v1.rl.utils import AcceleratorResourcesConfig, CPUResourcesConfig


def test_defaults_are_the_documented_ones():
    cpu = CPUResourcesConfig()
    assert (cpu.num_workers, cpu.num_cpus_per_worker, cpu.cpu_memory_per_worker) == (1, 1, 2**30)
    assert cpu.pg_pack_strategy == "SPREAD"
    gpu = AcceleratorResourcesConfig(num_workers=8)
    assert (gpu.accelerator, gpu.num_cpus_per_worker, gpu.cpu_memory_per_worker) == ("GPU", 12, 16 * 2**30)
    assert (gpu.num_accelerators_per_worker, gpu.pg_pack_strategy, gpu.device) == (1, "PACK", "cuda")


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"accelerator": "NPU", "num_workers": 1}, "'NPU' is not supported yet; one of 'GPU', 'CPU'"),
        ({"num_workers": 0}, "greater than or equal to 1"),
        ({"num_workers": 1, "pg_pack_strategy": "TIGHT"}, "'PACK', 'SPREAD', 'STRICT_PACK' or 'STRICT_SPREAD'"),
        ({"num_workers": 1, "gpus": 1}, "Extra inputs"),
    ],
)
def test_wrong_values_are_refused_with_what_is_allowed(values, text):
    with pytest.raises(ValidationError, match=text):
        AcceleratorResourcesConfig(**values)


def test_totals_are_split_over_the_workers():
    split = AcceleratorResourcesConfig.from_total("cpu", 0.5, 8, 4 * 2**30, num_workers=2)
    assert (split.accelerator, split.device, split.num_workers) == ("CPU", "cpu", 2)
    assert (split.num_cpus_per_worker, split.cpu_memory_per_worker) == (4, 2 * 2**30)
    assert split.num_accelerators_per_worker == 0.25
