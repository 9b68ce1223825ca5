"""Op schemas are public ABI: a golden of all of them, and docs/ops.md must say the same.

``EXPECTTEST_ACCEPT=1 python -m pytest tests/ops/test_schemas.py`` rewrites the golden; a published schema may only be
added, never changed.
"""

import re
import textwrap
from pathlib import Path

import pytest
import torch
from expecttest import TestCase

from dsv4 import ops

DOC = Path(__file__).resolve().parents[2] / "docs" / "ops.md"
# by heading of the document
ROLES = {"model ops": "model", "part ops": "part", "parallel ops": "parallel", "tools": "tool"}


def listing() -> str:
    """Every schema as torch understands it, by name, wrapped after commas only."""
    schemas = sorted(str(spec.overload._schema) for spec in ops.specs().values())
    glued = (re.sub("(?<!,) ", "\N{NO-BREAK SPACE}", schema) for schema in schemas)
    lines = (textwrap.fill(schema, 112, subsequent_indent="    ", break_on_hyphens=False) for schema in glued)
    return "\n".join(lines).replace("\N{NO-BREAK SPACE}", " ")


class TestSchemas(TestCase):
    def test_golden(self) -> None:
        self.assertExpectedInline(
            listing(),
            """\
dsv4::compressor_merge(Tensor maxima, Tensor totals, Tensor weighted, Tensor norm_weight, Tensor rope_table,
    Tensor positions, Tensor row_requests, Tensor block_tables, Tensor(a!) cache, *, int ratio, float eps,
    str quantize) -> ()
dsv4::compressor_partials(Tensor kv_score, Tensor ape, Tensor positions, Tensor row_requests,
    Tensor query_starts, Tensor seq_lens, Tensor state_slots, Tensor(a!) state, *, int ratio,
    bool overlap) -> (Tensor maximum, Tensor total, Tensor weighted)
dsv4::compressor_update(Tensor kv_score, Tensor ape, Tensor norm_weight, Tensor rope_table, Tensor positions,
    Tensor row_requests, Tensor query_starts, Tensor seq_lens, Tensor block_tables, Tensor state_slots,
    Tensor(a!) state, Tensor(b!) cache, *, int ratio, bool overlap, float eps, str quantize) -> ()
dsv4::embed_streams(Tensor token_ids, Tensor weight, *, int num_streams, ScalarType dtype) -> Tensor
dsv4::ep_combine(Tensor y, Tensor recv_source, Tensor recv_count, Tensor(a!) out, *, str group) -> ()
dsv4::ep_dispatch(Tensor x, Tensor x_scale, Tensor ids, Tensor weights, Tensor(a!) recv_x,
    Tensor(b!) recv_scale, Tensor(c!) recv_ids, Tensor(d!) recv_weights, Tensor(e!) recv_source,
    Tensor(f!) recv_count, *, int num_experts, str group) -> ()
dsv4::expert_ffn(Tensor x, Tensor x_scale, Tensor ids, Tensor weights, Tensor w13, Tensor w13_scale, Tensor w2,
    Tensor w2_scale, *, float limit, bool deterministic) -> Tensor
dsv4::expert_sum(Tensor routed, Tensor shared, *, ScalarType dtype) -> Tensor
dsv4::fp8_linear(Tensor x, Tensor x_scale, Tensor weight, Tensor weight_scale, *, ScalarType dtype,
    bool deterministic) -> Tensor
dsv4::fp8_linear_decoded(Tensor x, Tensor x_scale, Tensor weight, Tensor weight_scale, *, ScalarType dtype,
    bool deterministic) -> Tensor
dsv4::grouped_o_proj(Tensor o, Tensor rope_table, Tensor positions, Tensor weight, *,
    bool deterministic) -> Tensor
dsv4::indexer_logits(Tensor q, Tensor weights, Tensor cache, Tensor positions, Tensor row_requests,
    Tensor block_tables, *, int ratio, ScalarType dtype, bool deterministic) -> Tensor
dsv4::indexer_picks(Tensor q, Tensor weights, Tensor cache, Tensor positions, Tensor row_requests,
    Tensor block_tables, *, int ratio, ScalarType dtype, int topk, bool deterministic) -> Tensor
dsv4::indexer_query(Tensor q, Tensor weights, Tensor rope_table, Tensor positions, *, float scale, str quantize,
    ScalarType dtype) -> (Tensor q, Tensor weights)
dsv4::indexer_topk(Tensor scores, Tensor positions, *, int ratio, int topk) -> Tensor
dsv4::linear(Tensor x, Tensor weight, *, ScalarType dtype, bool deterministic) -> Tensor
dsv4::lse_merge(Tensor outs, Tensor lses, Tensor sink) -> (Tensor out, Tensor lse)
dsv4::mhc_head(Tensor streams, Tensor fn, Tensor scale, Tensor base, Tensor norm_weight, *, float eps,
    float hc_eps, bool deterministic) -> Tensor
dsv4::mhc_post(Tensor y, Tensor streams, Tensor post, Tensor comb) -> Tensor
dsv4::mhc_post_pre(Tensor y, Tensor streams, Tensor post, Tensor comb, Tensor fn, Tensor scale, Tensor base,
    Tensor norm_weight, *, float eps, float hc_eps, int sinkhorn_iters, bool deterministic) -> (Tensor streams,
    Tensor x, Tensor post, Tensor comb)
dsv4::mhc_pre(Tensor streams, Tensor fn, Tensor scale, Tensor base, Tensor norm_weight, *, float eps,
    float hc_eps, int sinkhorn_iters, bool deterministic) -> (Tensor x, Tensor post, Tensor comb)
dsv4::pcp_moe_shard(Tensor x, Tensor token_ids, Tensor num_valid, Tensor gate, Tensor bias, Tensor table,
    Tensor w13, Tensor w13_scale, Tensor w2, Tensor w2_scale, Tensor shared_w13, Tensor shared_w13_scale,
    Tensor shared_w2, Tensor shared_w2_scale, Tensor load_enabled, Tensor(a!) load_counts, *, int topk,
    float scale, float limit, bool hashed, bool deterministic, str group) -> Tensor
dsv4::qkv_rope_cache(Tensor q, Tensor kv, Tensor kv_norm_weight, Tensor rope_table, Tensor positions,
    Tensor window_slots, Tensor(a!) window_cache, *, float eps, bool quantize) -> Tensor
dsv4::quant_fp4(Tensor x) -> (Tensor packed, Tensor scale)
dsv4::quant_fp8(Tensor x) -> (Tensor, Tensor)
dsv4::record_expert_load(Tensor ids, Tensor enabled, Tensor(a!) counts) -> ()
dsv4::rms_norm(Tensor x, Tensor weight, *, float eps) -> Tensor
dsv4::route_hash(Tensor logits, Tensor table, Tensor token_ids, Tensor num_valid, *,
    float scale) -> (Tensor ids, Tensor weights)
dsv4::route_topk(Tensor logits, Tensor bias, Tensor num_valid, *, int topk, float scale) -> (Tensor ids,
    Tensor weights)
dsv4::shared_expert(Tensor x, Tensor x_scale, Tensor w13, Tensor w13_scale, Tensor w2, Tensor w2_scale, *,
    float limit, ScalarType dtype, bool deterministic) -> Tensor
dsv4::sparse_attention(Tensor q, Tensor window_cache, Tensor entry_cache, Tensor picks, Tensor sink,
    Tensor positions, Tensor row_requests, Tensor window_tables, Tensor block_tables, Tensor(a!) out,
    Tensor(b!) lse, *, int window, int ratio, str entries, float scale, bool deterministic) -> ()""",
        )


def documented(text: str) -> dict[str, tuple[str, str]]:
    """Op name -> (role, schema) of the code blocks under ``## Schemas: <kind of ops>``."""
    found: dict[str, tuple[str, str]] = {}
    section = re.compile(r"^## Schemas: ([a-z ]+?)(?: \(.*?\))?\n+```\n(.*?)^```", re.MULTILINE | re.DOTALL)
    for heading, block in section.findall(text):
        block = re.sub(r" *#.*", "", block)
        for entry in filter(None, map(str.strip, re.split(r"\n(?=\w)", f"\n{block}"))):
            schema = " ".join(entry.split())
            name = schema.partition("(")[0]
            assert name not in found, f"docs/ops.md lists {name} twice"
            found[name] = (ROLES[heading], schema)
    return found


def normal(schema: str) -> str:
    """The schema in torch's own spelling."""
    return str(torch._C.parse_schema(f"dsv4::{schema}"))


def test_document_lists_every_op():
    assert set(documented(DOC.read_text())) == set(ops.specs())


@pytest.mark.parametrize("spec", ops.specs().values(), ids=lambda spec: spec.name)
def test_document_agrees(spec):
    role, schema = documented(DOC.read_text())[spec.name]
    assert normal(schema) == str(spec.overload._schema)
    assert role == spec.role


def test_parser_of_the_document():
    text = """# Ops
## Schemas: model ops

```
one(Tensor x) -> Tensor   # a comment (Tensor y)

two(Tensor x, *, int n,
    bool b) -> (Tensor a, Tensor b)     # [T]
                                        # more
three(Tensor(a!) x) -> ()
```

## Schemas: parallel ops (with one rank they are nothing)

```
four() -> Tensor
```
"""
    assert documented(text) == {
        "one": ("model", "one(Tensor x) -> Tensor"),
        "two": ("model", "two(Tensor x, *, int n, bool b) -> (Tensor a, Tensor b)"),
        "three": ("model", "three(Tensor(a!) x) -> ()"),
        "four": ("parallel", "four() -> Tensor"),
    }
