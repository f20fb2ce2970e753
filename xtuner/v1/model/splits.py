"""Into how many parts a model can be cut."""

import math

from .config import DenseModelConfig, TransformerConfig


def split_problems(model: TransformerConfig, tp_size: int, sp_size: int, tp_name: str = "tp_size") -> list[str]:
    """Why the matrices cannot be cut over `tp_size` ranks, or the heads over `sp_size`; empty if they can.

    tp_name: the field that gives `tp_size`.
    """
    if tp_size > 1 and not isinstance(model, DenseModelConfig):
        return [f"{tp_name}={tp_size}: only dense models are cut by tensor parallelism, not {model.model_type}; set 1."]
    problems = []
    heads, kv_heads = model.attention.num_attention_heads, model.attention.cache_shape[0]
    if tp_size > 1:
        assert isinstance(model, DenseModelConfig)
        sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
        sizes["intermediate_size"] = model.intermediate_size
        fitting = _one_of(_divisors(math.gcd(*sizes.values())))
        for name, size in sizes.items():
            if size % tp_size:
                problems.append(f"{tp_name}={tp_size} does not divide the model's {name}={size}; {fitting}.")
    if problems:
        return problems
    heads, kv_heads = heads // tp_size, kv_heads // tp_size
    of_tp = f" / {tp_name}={tp_size}" if tp_size > 1 else ""
    fitting = _one_of([n for n in _divisors(heads) if kv_heads % n == 0 or n % kv_heads == 0])
    if heads % sp_size:
        problems.append(
            f"sp_size={sp_size} does not divide the model's num_attention_heads={heads * tp_size}{of_tp}; {fitting}."
        )
    elif kv_heads % sp_size and sp_size % kv_heads:
        problems.append(
            f"sp_size={sp_size} is neither a divisor nor a multiple of the model's num_key_value_heads="
            f"{kv_heads * tp_size}{of_tp}; {fitting}."
        )
    return problems


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _one_of(sizes: list[int]) -> str:
    return f"use {'one of ' * (len(sizes) > 1)}{', '.join(map(str, sizes))}"
