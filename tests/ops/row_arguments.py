"""Which arguments of which op have the same rows, and calls in which one of them has fewer."""

import torch

from dsv4 import ops
from dsv4.ops.shapes import tiny

from . import contract

NUM_TOKENS = 5
STEP = ("positions", "row_requests", "query_starts", "seq_lens", "state_slots")

# By op: the arguments of which none may have other rows than the rest. ``name.1`` is dimension 1 of an argument; an
# empty list says that no two arguments share rows.
ROW_WISE: dict[str, tuple[str, ...]] = {
    "compressor_merge": (
        *("maxima", "totals", "weighted", "maxima.1", "totals.1", "weighted.1"),
        *("row_requests", "block_tables"),
    ),
    "compressor_partials": ("kv_score", *STEP),
    "compressor_update": ("kv_score", *STEP, "block_tables"),
    "embed_streams": (),
    "ep_combine": ("y", "recv_source"),
    "ep_dispatch": (
        *("x", "x_scale", "ids", "weights"),
        *("recv_x", "recv_scale", "recv_ids", "recv_weights", "recv_source"),
    ),
    "expert_ffn": ("x", "x_scale", "ids", "weights"),
    "expert_sum": ("routed", "shared"),
    "fp8_linear": ("x", "x_scale"),
    "fp8_linear_decoded": ("x", "x_scale"),
    "grouped_o_proj": ("o", "positions"),
    "indexer_logits": ("q", "weights", "positions", "row_requests"),
    "indexer_picks": ("q", "weights", "positions", "row_requests"),
    "indexer_query": ("q", "weights", "positions"),
    "indexer_topk": ("scores", "positions"),
    "linear": (),
    "lse_merge": ("outs.1", "lses.1"),
    "mhc_head": (),
    "mhc_post": ("y", "streams", "post", "comb"),
    "mhc_post_pre": ("y", "streams", "post", "comb"),
    "mhc_pre": (),
    "pcp_moe_shard": ("x", "token_ids"),
    "qkv_rope_cache": ("q", "kv", "positions", "window_slots"),
    "quant_fp4": (),
    "quant_fp8": (),
    "record_expert_load": (),
    "rms_norm": (),
    "route_hash": ("logits", "token_ids"),
    "route_topk": (),
    "shared_expert": ("x", "x_scale"),
    "sparse_attention": (
        *("q", "picks", "positions", "row_requests", "out", "lse"),
        *("window_tables", "block_tables"),
    ),
}

NAMED_BY_THEIR_ERRORS = {"fp8_linear_decoded": "fp8_linear", "indexer_picks": "indexer_logits"}
INDICES = (
    *("positions", "row_requests", "query_starts", "seq_lens", "state_slots"),
    *("block_tables", "window_tables", "window_slots", "token_ids"),
)


CASES = [(op, argument) for op, names in ROW_WISE.items() for argument in names]


def example(name: str) -> tuple[dict[str, torch.Tensor], dict]:
    """Arguments of an example by name, and its keywords; in bf16 every row-wise argument is in use, scales too."""
    spec = ops.specs()[name]
    args, kwargs = contract.example(spec, tiny, NUM_TOKENS, torch.bfloat16)
    return dict(zip((a.name for a in spec.overload._schema.arguments), args, strict=False)), kwargs


def cut(name: str, argument: str, left: str) -> tuple[dict[str, torch.Tensor], dict, str]:
    """An example of which ``argument`` has too few rows, and the pattern of the error that it must raise."""
    values, kwargs = example(name)
    argument, _, dim = argument.partition(".")
    dim, whole = int(dim or 0), values[argument]
    rows = {"one fewer": whole.shape[dim] - 1, "one": 1, "none": 0}[left]
    assert rows < whole.shape[dim]
    values[argument] = whole.narrow(dim, 0, rows).contiguous()
    return values, kwargs, rf"^{NAMED_BY_THEIR_ERRORS.get(name, name)} \w+ must have the \d+ rows of .*, got \d+$"
