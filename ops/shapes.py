"""Named shapes that tests, prewarm and benchmarks share.

A :class:`Shape` holds the dimensions an op can see; ``dsv4.config`` derives one from a model config. The rows below
are the production configurations (hidden sizes and head counts from the published ``config.json`` files) and two
small ones for tests.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Dimensions of one DeepSeek-V4 variant as the ops see them."""

    name: str
    hidden: int
    num_streams: int = 4
    num_heads: int
    head_dim: int = 512
    rope_dim: int = 64
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    index_heads: int
    index_dim: int = 128
    index_topk: int
    window: int = 128
    num_experts: int
    experts_per_token: int = 6
    expert_hidden: int
    expert_dtype: Literal["fp4", "fp8"] = "fp4"  # of the weights in memory
    vocab: int
    route_scale: float
    swiglu_limit: float = 10.0
    eps: float = 1e-6
    sinkhorn_iters: int = 20
    max_context: int = 1024  # tokens a block table spans in example calls


BLOCK_TOKENS = 256  # tokens of one logical cache block
WINDOW_PAGE_TOKENS = 128  # tokens of one window-cache page

tiny = Shape(
    name="tiny", hidden=64, num_heads=2, head_dim=128, rope_dim=32, q_lora_rank=32, o_groups=2, o_lora_rank=32,
    index_heads=4, index_dim=64, index_topk=8, window=16, num_experts=8, experts_per_token=2, expert_hidden=32,
    vocab=97, route_scale=1.5,
)  # fmt: skip
nano = Shape(
    name="nano", hidden=256, num_heads=4, q_lora_rank=128, o_groups=2, o_lora_rank=128, index_heads=8, index_topk=64,
    num_experts=16, expert_hidden=128, vocab=2048, route_scale=1.5,
)  # fmt: skip
flash = Shape(
    name="flash", hidden=4096, num_heads=64, q_lora_rank=1024, o_groups=8, o_lora_rank=1024, index_heads=64,
    index_topk=512, num_experts=256, expert_hidden=2048, vocab=129280, route_scale=1.5,
)  # fmt: skip
pro = Shape(
    name="pro", hidden=7168, num_heads=128, q_lora_rank=1536, o_groups=16, o_lora_rank=1024, index_heads=64,
    index_topk=1024, num_experts=384, expert_hidden=3072, vocab=129280, route_scale=2.5,
)  # fmt: skip

SHAPES: dict[str, Shape] = {s.name: s for s in (tiny, nano, flash, pro)}
