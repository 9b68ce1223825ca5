"""Distances of this library in ``official`` numerics to the recorded intermediates of the official model code.

:func:`measure` feeds recorded inputs to single sublayers and hyper-connection sites and returns one number per kind of
output; ``BOUNDS`` says how large each may be. The bounds are those of ``tests/golden/README.md``, section (b):

* ``attn_out`` … ``picks_changed``: what any backend may differ by (other block sizes, limited accumulators).
* ``*_out_fp32``: outputs for an implementation with fp32 accumulation and the official attention blocks of
  64, which the references are; the README expects 0.003 and 0.001 of it.
* ``hc_*``, ``router_*``, ``compressor_state``: fp32 stages before any quantiser, 1e-5.
* ``*_unequal``: share of elements that are not bit-equal. The input of these stages is one GEMM away from recorded
  values, so a bf16 product may round the other way: "well under 1 % of elements".
"""

from collections.abc import Mapping

import torch

from dsv4 import ops
from dsv4.evaluate import compare, relative_rms
from dsv4.ops import _mhc, _paged, _routing
from dsv4.runner import Runner, Sequence

Recorded = Mapping[str, torch.Tensor]

BOUNDS = {
    "attn_out": 0.010,
    "ffn_out": 0.006,
    "index_score": 0.03,
    "picks_changed": 0.003,
    "attn_out_fp32": 0.003,
    "ffn_out_fp32": 0.001,
    "wo_a_out_fp32": 0.003,
    "hc_pre": 1e-5,
    "hc_post": 1e-5,
    "hc_comb": 1e-5,
    "router_score": 1e-5,
    "router_weight": 1e-5,
    "compressor_state": 1e-5,
    "sublayer_input_unequal": 0.01,
    "streams_unequal": 0.01,
    "window_kv_unequal": 0.01,
    "compressed_kv_4_unequal": 0.01,
    "compressed_kv_128_unequal": 0.01,
    "index_query_unequal": 0.01,
    "index_key_unequal": 0.01,
    "index_score_unequal": 0.01,
    "shared_out_unequal": 0.01,
}
NAMED_LAYERS = {2: 4, 3: 128}  # layers of p140 with named intermediates, and their ratios


def exceeded(measured: Mapping[str, float]) -> set[str]:
    """Names whose value is beyond its bound (or NaN)."""
    assert set(measured) == set(BOUNDS)
    return {name for name, value in measured.items() if not value <= BOUNDS[name]}


def measure(runner: Runner, recorded: Recorded, named: Recorded, layers: set[int] | None = None) -> dict[str, float]:
    """Every number of ``BOUNDS``, the worst over the recorded layers.

    Args:
        runner: official numerics; its caches are overwritten.
        recorded: ``layers_official.safetensors``.
        named: ``named_official.safetensors``.
        layers: layers whose sublayers are compared; default: all.
    """

    def wanted(name: str) -> bool:
        layer = name.split(".")[1]
        return layers is None or not layer.startswith("layer") or int(layer.removeprefix("layer")) in layers

    worst = dict(compare(runner, {k: v for k, v in recorded.items() if wanted(k)}).worst)
    worst["attn_out_fp32"], worst["ffn_out_fp32"] = worst["attn_out"], worst["ffn_out"]
    found: dict[str, list[float]] = {}
    with torch.no_grad():
        for layer in NAMED_LAYERS:
            for part in (_hyper_sites, _attention, _experts):
                for name, value in part(runner, layer, {**recorded, **named}):
                    found.setdefault(name, []).append(value)
    return worst | {name: max(values) for name, values in found.items()}


def _unequal(got: torch.Tensor, want: torch.Tensor) -> float:
    rows = want.shape[0]
    assert got.shape[0] >= rows and got.shape[1:] == want.shape[1:], (got.shape, want.shape)
    return (got[:rows].float() != want.float()).double().mean().item()


def _distance(got: torch.Tensor, want: torch.Tensor) -> float:
    assert got.shape == want.shape, (got.shape, want.shape)
    return (got.double() - want.double()).abs().max().item()


def _hyper_sites(runner: Runner, layer: int, record: Recorded) -> list[tuple[str, float]]:
    """Both sites of a block, from its recorded streams and recorded sublayer outputs."""
    block, base = runner.model.blocks[layer], f"p140.layer{layer}"
    streams = record[f"{base}.in_streams"]
    rows = streams.shape[0]
    found = []
    x, post, comb = block.attn_site.pre(streams)
    after, *ffn = block.ffn_site.post_pre(record[f"{base}.attn_out"][:rows], streams, post, comb)
    sites = (("attn", block.attn_site, streams, (x, post, comb)), ("ffn", block.ffn_site, after, ffn))
    for name, site, read, (x, post, comb) in sites:
        numbers = {k: site.numbers[k] for k in ("eps", "hc_eps", "sinkhorn_iters", "deterministic")}
        pre, *_ = _mhc.pre_weights(read, site.fn, site.scale, site.base, **numbers)
        for kind, got in (("pre", pre), ("post", post), ("comb", comb)):
            found.append((f"hc_{kind}", _distance(got, record[f"{base}.{name}_hc.{kind}"][:rows])))
        found.append(("sublayer_input_unequal", _unequal(x, record[f"{base}.{name}_in"][:rows])))
    out = ops.mhc_post(record[f"{base}.ffn_out"][:rows], after, *ffn[1:])
    if (want := record.get(f"p140.layer{layer + 1}.in_streams")) is not None:
        found.append(("streams_unequal", _unequal(out, want)))
    return found


def _attention(runner: Runner, layer: int, record: Recorded) -> list[tuple[str, float]]:
    """Rows, entries and states that the attention sublayer leaves in its caches, and what it hands to ``wo_b``."""
    attention, cache = runner.model.blocks[layer].attn, runner.caches.layers[layer]
    base, ratio = f"p140.layer{layer}.attn", NAMED_LAYERS[layer]
    x, token_ids = record[f"p140.layer{layer}.attn_in"], record["p140.ids"].tolist()
    inputs = runner.inputs([Sequence().segment(token_ids)])
    products: list[torch.Tensor] = []
    handle = attention.activation.register_forward_pre_hook(lambda _, args: products.append(args[0]))
    try:
        attention(x, inputs, cache)
    finally:
        handle.remove()
    rows = torch.arange(len(token_ids))
    want = record[f"{base}.wo_a_out"]
    head, num_entries = runner.model.config.head_dim, len(token_ids) // ratio
    found = [
        ("window_kv_unequal", _unequal(_paged.read(cache.window, rows, head), record[f"{base}.window_kv"])),
        ("wo_a_out_fp32", relative_rms(products[-1][: want.shape[0]], want)),
        (
            f"compressed_kv_{ratio}_unequal",
            _unequal(_paged.read(cache.entries, rows[:num_entries], head), record[f"{base}.compressed_kv"]),
        ),
    ]
    if attention.indexer is None:
        return found
    *latent, _ = attention.query_latent(x)
    query, weights = attention.indexer.queries(x, tuple(latent), attention.rope_table, inputs)
    keys = _paged.read(cache.index_entries, rows[:num_entries], runner.model.config.index_head_dim)
    last = torch.arange(len(token_ids) - ratio, len(token_ids)) % cache.state.shape[1]  # p140 ends with a window
    state = torch.cat([record[f"{base}.compressor.{part}_state"][:ratio] for part in ("kv", "score")], dim=1)
    return found + [
        ("index_query_unequal", _unequal(query, record[f"{base}.indexer.q"])),
        ("index_key_unequal", _unequal(keys, record[f"{base}.indexer.k"])),
        ("compressor_state", _distance(cache.state[0, last], state)),
        ("index_score_unequal", _index_score(runner, layer, record)),
    ]


def _index_score(runner: Runner, layer: int, record: Recorded) -> float:
    attention, cache = runner.model.blocks[layer].attn, runner.caches.layers[layer]
    inputs = runner.inputs([Sequence().segment(record["p300.ids"].tolist())])
    x, want = record[f"p300.layer{layer}.attn_in"], record[f"p300.layer{layer}.attn.indexer.score"]
    attention(x, inputs, cache)
    return _unequal(attention.index_scores(x, inputs, cache)[:, : want.shape[1]], want)


def _experts(runner: Runner, layer: int, record: Recorded) -> list[tuple[str, float]]:
    """Routing and shared expert."""
    moe, base = runner.model.blocks[layer].ffn, f"p140.layer{layer}"
    x = record[f"{base}.ffn_in"]
    inputs = runner.inputs([Sequence().segment(record["p140.ids"].tolist())])
    logits = ops.linear(x, moe.router.weight, dtype=torch.float32, deterministic=False)
    ids, weights = moe.router(x, inputs)
    got, order = ids.sort(dim=1)
    want, want_order = record[f"{base}.ffn.expert_ids"].sort(dim=1)
    same = bool((got == want).all())
    weight_error = _distance(weights.gather(1, order), record[f"{base}.ffn.expert_weights"].gather(1, want_order))
    shared = ops.shared_expert(
        *moe.activation(x), moe.shared_w13, moe.shared_w13_scale, moe.shared_w2, moe.shared_w2_scale,
        limit=moe.limit, dtype=torch.bfloat16, deterministic=False,
    )  # fmt: skip
    score = record[f"{base}.ffn.router_score"]
    return [
        ("router_score", _distance(_routing.scores(logits)[: score.shape[0]], score)),
        ("router_weight", weight_error if same else torch.inf),
        ("shared_out_unequal", _unequal(shared, record[f"{base}.ffn.shared_out"])),
    ]
