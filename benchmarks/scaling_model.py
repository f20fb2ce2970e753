"""What many GPUs would give, on paper: bytes, memory and seconds of an update for a layout, from the rates of one.

    python benchmarks/scaling_model.py

Prints the tables of docs/scaling.md, which explains the formulas. Nothing is measured here: of the rates below, the
first three were measured on one H200, the others are a target and data-sheet values. Generation is left out.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from random_model import SHAPES

MATMUL = 800e12
"""bfloat16 FLOP/s of a large product (measured: 790 to 810 TFLOP/s)."""
ATTENTION = 389e12
"""FLOP/s of packed attention, forward and backward together, 32/8 heads of 128, sequences of 1k (measured)."""
COPY = 4.27e12
"""Bytes/s of device memory (measured)."""
REACHED = 0.55
"""Share of MATMUL that a training step reaches apart from attention (Qwen3-0.6B on one card; layouts: unmeasured)."""
NVLINK = 450e9
"""Bytes/s a GPU sends and receives to its node (data sheet, NVLink 4)."""
NIC = 50e9
"""Bytes/s a GPU sends and receives to other nodes (data sheet, one 400 Gb/s adapter a GPU)."""
OF_LINK = 0.8
"""Share of a link's rate that large collectives reach (assumed)."""
NODE = 8
"""GPUs of a node."""
GIB = 2**30


@dataclass(frozen=True)
class Model:
    """Sizes of a published shape, in parameters."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    """Width of what follows the attention, as one token sees it."""
    dense: int
    """Parameters of all layers but the experts."""
    experts: int
    """Parameters of all experts."""
    used: float
    """Share of the experts' parameters that a token uses."""
    per_token: int
    """Experts a token uses; 0 without."""
    vocabulary: int
    embedding: int
    """Parameters of the embedding."""
    head: int
    """Parameters of the head; counted in `embedding` where they are tied, and computed with all the same."""
    tied: bool

    @classmethod
    def of(cls, shape: str) -> "Model":
        c = SHAPES[shape]
        h, d, layers, vocabulary = c["hidden_size"], c["head_dim"], c["num_hidden_layers"], c["vocab_size"]
        heads, kv_heads, count = c["num_attention_heads"], c["num_key_value_heads"], c.get("num_experts", 0)
        attention = 2 * h * heads * d + 2 * h * kv_heads * d + 2 * h + 2 * d
        inner, per_token = c["intermediate_size"], c.get("num_experts_per_tok", 0)
        if count:
            inner = c["moe_intermediate_size"] * per_token
        return cls(
            name=shape, layers=layers, hidden=h, heads=heads, kv_heads=kv_heads, head_dim=d, inner=inner,
            dense=layers * (attention + (h * count if count else 3 * h * inner)),
            experts=layers * count * 3 * h * c.get("moe_intermediate_size", 0),
            used=per_token / count if count else 0.0, per_token=per_token, vocabulary=vocabulary,
            embedding=vocabulary * h, head=vocabulary * h, tied=c["tie_word_embeddings"],
        )  # fmt: skip

    @property
    def root(self) -> int:
        """Parameters outside of layers: embedding, head, final norm."""
        return self.embedding + (0 if self.tied else self.head) + self.hidden

    @property
    def total(self) -> int:
        return self.dense + self.experts + self.root

    @property
    def multiplied(self) -> float:
        """Parameters that a token is multiplied with."""
        return self.dense + self.experts * self.used + self.head


@dataclass(frozen=True)
class Layout:
    """Ranks = replicate x shard x sp x tp, in this order; ep is taken from shard x sp."""

    name: str
    shard: int
    replicate: int = 1
    sp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def ranks(self) -> int:
        return self.replicate * self.shard * self.sp * self.tp


@dataclass(frozen=True)
class Link:
    """Bytes a GPU moves within its node and to others, and how long that takes."""

    inside: float = 0.0
    outside: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: "Link") -> "Link":
        return Link(self.inside + other.inside, self.outside + other.outside, self.seconds + other.seconds)

    def __mul__(self, times: float) -> "Link":
        return Link(self.inside * times, self.outside * times, self.seconds * times)


def gather(size: float, group: int, stride: int = 1) -> Link:
    """All-gather or reduce-scatter of `size` bytes in all over `group` ranks that lie `stride` apart.

    Every rank receives (g - 1) / g of it. Between nodes that stream is shared by the adapters of the group's ranks of
    a node; within a node it goes over NVLink at the same time.
    """
    nodes = max(1, min(group, group * stride // NODE))
    per_node = group // nodes
    inside = size * (group - 1) / group if per_node > 1 else 0.0
    outside = size * (nodes - 1) / nodes / per_node
    return Link(inside, outside, max(inside / NVLINK, outside / NIC) / OF_LINK)


def exchange(size: float, group: int, stride: int = 1) -> Link:
    """All-to-all: every rank sends `size` bytes, evenly to all of the group."""
    nodes = max(1, min(group, group * stride // NODE))
    per_node = group // nodes
    inside, outside = size * (per_node - 1) / group, size * (group - per_node) / group
    return Link(inside, outside, (inside / NVLINK + outside / NIC) / OF_LINK)


@dataclass(frozen=True)
class Step:
    """One update of a rank."""

    compute: float
    """Seconds of arithmetic, optimizer included."""
    waiting: float
    """Seconds in which a rank waits for a link."""
    hidden: float
    """Seconds of traffic behind arithmetic."""
    moved: Link
    memory: float
    """Bytes on a rank at the peak."""
    tokens: float
    """Tokens of a rank."""

    @property
    def rate(self) -> float:
        """Tokens/s and GPU."""
        return self.tokens / (self.compute + self.waiting)

    @property
    def scaling(self) -> float:
        """Share of the rate of a GPU that never waits."""
        return self.compute / (self.compute + self.waiting)


def update(m: Model, layout: Layout, pack: int, packs: int, length: int = 1024, recompute: float = 1.0) -> Step:
    """`packs` packs of `pack` tokens in sequences of `length`, each on the sp x tp ranks of a pack."""
    rows = pack / layout.sp  # of a tensor-parallel group, which computes 1 / tp of each
    own = rows / layout.tp
    forward = 2 * m.multiplied * own / (REACHED * MATMUL)
    forward += 4 * m.layers * m.heads * m.head_dim * (length / 2) * own / ATTENTION
    backward = (2 + recompute) * forward
    # Weights: gathered in the forward and again in the backward, gradients scattered; 2 bytes each.
    group, inner = layout.shard * layout.sp, layout.tp
    weights = gather(2 * m.dense / layout.tp, group, inner) + gather(2 * m.root, group * layout.tp)
    if m.experts:
        weights += gather(2 * m.experts / layout.ep, group // layout.ep, layout.ep)
    held = layout.shard * layout.sp * layout.tp
    reduced = Link()
    if layout.replicate > 1:  # all-reduce of this rank's part of the gradients, once an update
        share = 2 * m.total / held * 2 * (layout.replicate - 1) / layout.replicate
        across = held >= NODE
        reduced = Link(0 if across else share, share if across else 0, share / (NIC if across else NVLINK) / OF_LINK)
    # Rows and heads: nothing to compute meanwhile. Forward, backward, and the forward again.
    again = 2 + recompute
    kv = 2 * max(m.kv_heads / layout.tp, layout.sp if layout.sp > 1 else 0)
    blocked = Link()
    if layout.sp > 1:
        blocked += exchange(2 * rows * (2 * m.heads / layout.tp + kv) * m.head_dim, layout.sp, inner)
    if layout.tp > 1:
        blocked += gather(2 * rows * m.hidden, layout.tp) * 4
    if layout.ep > 1:
        blocked += exchange(2 * own * m.per_token * m.hidden, layout.ep) * 2
    blocked = blocked * (m.layers * again)
    late_forward = max(0.0, weights.seconds - forward)
    moved = (weights * 3 + blocked) * packs + reduced
    # Gathered weights and scattered gradients of every pack; between the copies once, with the last pack.
    late_backward = [max(0.0, 2 * weights.seconds + more - backward) for more in (0.0, reduced.seconds)]
    # Nothing hides the first gather and the last reduction.
    ends = (packs * 2 * weights.seconds + reduced.seconds) / m.layers
    late = packs * late_forward + (packs - 1) * late_backward[0] + late_backward[1] + ends
    optimizer = 28 * m.total / held / COPY
    return Step(
        compute=packs * (forward + backward) + optimizer,
        waiting=packs * blocked.seconds + late,
        hidden=packs * 3 * weights.seconds + reduced.seconds - late,
        moved=moved,
        memory=memory(m, layout, rows, recompute),
        tokens=packs * own,
    )


def memory(m: Model, layout: Layout, rows: float, recompute: float) -> float:
    """Bytes: float32 weights, gradients and two moments, the gathered parts, activations, a chunk of logits."""
    held = layout.shard * layout.sp * layout.tp
    states = 16 * m.total / held
    # Two layers' weights and one's gradients; the root's weights and gradients, the head's first in float32.
    layer = (m.dense / layout.tp + m.experts / layout.ep) / m.layers
    gathered = 2 * (3 * layer + 2 * m.root) + 4 * m.head
    own = rows / layout.tp
    qkv = (m.heads + 2 * m.kv_heads) * m.head_dim
    inside = 2 * own * (4 * m.hidden + 2 * qkv + m.heads * m.head_dim + 3 * m.inner)
    if layout.tp > 1:  # inputs of both cut pairs of matrices, with the rows of all ranks
        inside += 2 * rows * 2 * m.hidden
    activations = m.layers * (recompute * 2 * own * m.hidden + (1 - recompute) * inside) + recompute * inside
    return states + gathered + activations + 2 * 4 * 1024 * m.vocabulary


def smallest_pack(m: Model, ep: int = 1) -> float:
    """Tokens of a pack and rank below which NVLink brings weights later than they are needed."""
    return (m.dense + m.root + m.experts / ep) / m.multiplied * REACHED * MATMUL / (NVLINK * OF_LINK)


def table(m: Model, layouts: list[tuple[Layout, int, int]]) -> Iterator[str]:
    head = ("GPUs", "layout", "tokens a pack", "packs", "GiB", "GB in node", "GB out", "s compute", "s waiting",
            "tokens/s/GPU", "of no waiting")  # fmt: skip
    yield f"**{m.name}**: {m.total / 1e9:.1f} B parameters; a token is multiplied with {m.multiplied / 1e9:.1f} B"
    yield ""
    yield "| " + " | ".join(head) + " |"
    yield "|---" * len(head) + "|"
    for layout, pack, packs in layouts:
        s = update(m, layout, pack, packs)
        yield (
            f"| {layout.ranks} | {layout.name} | {pack // 1024}k | {packs} | {s.memory / GIB:.0f} | "
            f"{s.moved.inside / 1e9:.0f} | {s.moved.outside / 1e9:.0f} | {s.compute:.2f} | {s.waiting:.2f} | "
            f"{s.rate:,.0f} | {100 * s.scaling:.0f} % |"
        )
    yield ""


K = 1024
DENSE = [
    (Layout("shard 8", 8), 32 * K, 4),
    (Layout("shard 8", 8), 8 * K, 16),
    (Layout("shard 8", 8), 1 * K, 16),
    (Layout("sp 8", 1, sp=8), 256 * K, 4),
    (Layout("tp 8", 1, tp=8), 256 * K, 4),
    (Layout("shard 64", 64), 32 * K, 4),
    (Layout("shard 64", 64), 2 * K, 8),
    (Layout("replicate 8 x shard 8", 8, replicate=8), 32 * K, 4),
    (Layout("replicate 8 x shard 8", 8, replicate=8), 2 * K, 8),
    (Layout("shard 8 x sp 8", 8, sp=8), 256 * K, 4),
    (Layout("shard 2 x sp 32", 2, sp=32), 1024 * K, 4),
    (Layout("shard 8 x tp 8", 8, tp=8), 256 * K, 4),
]
SPARSE = [
    (Layout("shard 8", 8), 32 * K, 4),
    (Layout("shard 8", 8), 8 * K, 16),
    (Layout("shard 8, ep 8", 8, ep=8), 32 * K, 4),
    (Layout("shard 8, ep 8", 8, ep=8), 8 * K, 16),
    (Layout("shard 64", 64), 32 * K, 4),
    (Layout("shard 64", 64), 8 * K, 16),
    (Layout("shard 64, ep 8", 64, ep=8), 32 * K, 4),
    (Layout("shard 64, ep 8", 64, ep=8), 8 * K, 16),
    (Layout("replicate 8 x shard 8", 8, replicate=8), 32 * K, 4),
    (Layout("shard 8 x sp 8", 8, sp=8), 256 * K, 4),
]


def page() -> str:
    """The tables in Markdown."""
    dense, sparse = Model.of("qwen3-8b"), Model.of("qwen3-30b-a3b")
    lines = [*table(dense, DENSE), *table(sparse, SPARSE)]
    bounds = {
        "8B": smallest_pack(dense),
        "30B-A3B": smallest_pack(sparse),
        "30B-A3B with ep 8": smallest_pack(sparse, 8),
    }
    listed = ", ".join(f"{name} {tokens:,.0f}" for name, tokens in bounds.items())
    lines.append(f"Tokens of a pack and GPU below which weights come too late: {listed}.")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
