import torch

from xtuner.v1.utils.compiled import compiled_programs


def test_a_recompilation_counts():
    torch._dynamo.reset()
    double = torch.compile(lambda x, times: x * times, backend="eager")
    before = compiled_programs()
    double(torch.ones(3), 2)
    double(torch.ones(3), 2)
    assert compiled_programs() == before + 1
    double(torch.ones(3, 3, dtype=torch.float64), 2)
    assert compiled_programs() == before + 2
