"""Bugs that other implementations had, as patches of this library's internals; one function per bug.

Every function takes a ``pytest.MonkeyPatch`` and the model. The references call helpers through module globals, so a
patched global takes effect in ops that are already registered.
"""

import importlib
from types import ModuleType

import torch
from pytest import MonkeyPatch

from dsv4 import ops
from dsv4.execution import Execution
from dsv4.model import DeepseekV4
from dsv4.ops import _attention_tiles, _compressor, _experts, _formats, _mhc, _rope, _rows
from dsv4.rope import rope_table


def op_module(name: str) -> ModuleType:
    """The module of an op; ``dsv4.ops.<name>`` is the op itself."""
    return importlib.import_module(f"dsv4.ops.{name}")


def no_kv_quant(patch: MonkeyPatch, model: DeepseekV4) -> None:
    patch.setattr(_formats, "simulate_kv", lambda x, rope_dim: x)


def no_act_quant(patch: MonkeyPatch, model: DeepseekV4) -> None:
    """Every FP8 and FP4 product takes bf16 activations."""

    def dense(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        decode = _formats.dequantize_fp4 if weight.dtype == torch.uint8 else _formats.dequantize_fp8_weight
        return decode(weight, scale).bfloat16()

    def fp8_linear(x, x_scale, weight, weight_scale, *, dtype, deterministic):
        return ops.linear(x, dense(weight, weight_scale), dtype=dtype, deterministic=deterministic)

    none = torch.empty(0)

    def expert_ffn(x, x_scale, ids, weights, w13, w13_scale, w2, w2_scale, **numbers):
        return expert_op(x, none, ids, weights, dense(w13, w13_scale), none, dense(w2, w2_scale), none, **numbers)

    def shared_expert(x, x_scale, w13, w13_scale, w2, w2_scale, **numbers):
        halves = zip(w13.chunk(2), w13_scale.chunk(2), strict=True)
        w13 = torch.cat([dense(*half) for half in halves])
        return shared_op(x, none, w13, none, dense(w2, w2_scale), none, **numbers)

    expert_op, shared_op = ops.expert_ffn, ops.shared_expert
    patch.setattr(ops, "quant_fp8", lambda x: (x, none))
    for function in (fp8_linear, expert_ffn, shared_expert):
        patch.setattr(ops, function.__name__, function)
    patch.setattr(ops, "fp8_linear_decoded", fp8_linear)


def scale_not_pow2(patch: MonkeyPatch, model: DeepseekV4) -> None:
    patch.setattr(_formats, "power_of_two_at_least", lambda x: x)


def scale_floor(patch: MonkeyPatch, model: DeepseekV4) -> None:
    patch.setattr(_formats, "power_of_two_at_least", lambda x: torch.exp2(torch.floor(torch.log2(x))))


def wo_a_act_fp8(patch: MonkeyPatch, model: DeepseekV4) -> None:
    def quantized(x, weight, *, deterministic):
        x = _formats.simulate_fp8(x, _formats.ACTIVATION_BLOCK)
        return _rows.product(x, weight, deterministic=deterministic)

    patch.setattr(op_module("grouped_o_proj"), "product", quantized)


def router_weight_after_w2(patch: MonkeyPatch, model: DeepseekV4) -> None:
    apply = _experts.apply_expert

    def late(x, weights, *matrices, act, **numbers):
        y = apply(x, None, *matrices, act=act, **numbers)
        return y if weights is None else (y * weights.unsqueeze(-1)).to(act).float()

    patch.setattr(_experts, "apply_expert", late)


def no_inverse_rope(patch: MonkeyPatch, model: DeepseekV4) -> None:
    rotate = _rope.rotate
    patch.setattr(_rope, "rotate", lambda x, rows, *, inverse=False: x if inverse else rotate(x, rows))


def kv_quant_before_rope_all_dims(patch: MonkeyPatch, model: DeepseekV4) -> None:
    def normalize(x, weight, eps):
        value = _rows.rms_normalize(x, weight, eps)
        return _formats.simulate_fp8(value, _formats.KV_BLOCK) if x.shape[-1] == model.config.head_dim else value

    for module in (op_module("qkv_rope_cache"), _compressor):
        patch.setattr(module, "rms_normalize", normalize)
    patch.setattr(_formats, "simulate_kv", lambda x, rope_dim: x)


def compressed_rope_last_token(patch: MonkeyPatch, model: DeepseekV4) -> None:
    write = _compressor.write_entries

    def shifted(pooled, found, positions, requests, norm_weight, table, *rest, ratio, **numbers):
        write(pooled, found, positions, requests, norm_weight, table[ratio - 1 :], *rest, ratio=ratio, **numbers)

    patch.setattr(_compressor, "write_entries", shifted)


def no_index_fp4(patch: MonkeyPatch, model: DeepseekV4) -> None:
    patch.setattr(_formats, "simulate_fp4", lambda x: x)


def no_hadamard(patch: MonkeyPatch, model: DeepseekV4) -> None:
    patch.setattr(_formats, "hadamard", lambda x: x)


def index_score_fp32(patch: MonkeyPatch, model: DeepseekV4) -> None:
    patch.setattr(Execution, "score_dtype", torch.float32)


def sinkhorn_19(patch: MonkeyPatch, model: DeepseekV4) -> None:
    sinkhorn = _mhc.sinkhorn
    patch.setattr(_mhc, "sinkhorn", lambda logits, iters, eps: sinkhorn(logits, iters - 1, eps))


def comb_not_transposed(patch: MonkeyPatch, model: DeepseekV4) -> None:
    post = _mhc.post
    patch.setattr(_mhc, "post", lambda y, streams, weights, comb: post(y, streams, weights, comb.transpose(-1, -2)))


def shared_expert_not_clamped(patch: MonkeyPatch, model: DeepseekV4) -> None:
    apply = _experts.apply_expert

    def unlimited(x, weights, *matrices, limit, **numbers):
        return apply(x, weights, *matrices, limit=limit if weights is not None else torch.inf, **numbers)

    patch.setattr(_experts, "apply_expert", unlimited)


def no_sink(patch: MonkeyPatch, model: DeepseekV4) -> None:
    for block in model.blocks:
        patch.setitem(block.attn._buffers, "sink", torch.full_like(block.attn.sink, -torch.inf))


def yarn_on_window_layers(patch: MonkeyPatch, model: DeepseekV4) -> None:
    _use_table(patch, model, compressed=False, ratio=4)


def plain_theta_on_compressed_layers(patch: MonkeyPatch, model: DeepseekV4) -> None:
    _use_table(patch, model, compressed=True, ratio=0)


def plain_theta_on_window_kv_of_compressed_layers(patch: MonkeyPatch, model: DeepseekV4) -> None:
    """Queries and window keys only; entries and output keep the layer's own table."""
    _plain_table(patch, model, "qkv_rope_cache", 3)


def plain_theta_on_entries(patch: MonkeyPatch, model: DeepseekV4) -> None:
    _plain_table(patch, model, "compressor_update", 3, dim=model.config.head_dim)


def plain_theta_on_index_entries(patch: MonkeyPatch, model: DeepseekV4) -> None:
    _plain_table(patch, model, "compressor_update", 3, dim=model.config.index_head_dim)


def plain_theta_on_index_queries(patch: MonkeyPatch, model: DeepseekV4) -> None:
    _plain_table(patch, model, "indexer_query", 2)


def no_yarn_on_compressed_layers(patch: MonkeyPatch, model: DeepseekV4) -> None:
    """The right theta, but no interpolation."""
    unscaled = model.config.resized(rope_theta=model.config.compress_rope_theta)
    for block in model.blocks:
        if block.attn.ratio:
            patch.setitem(block.attn._buffers, "rope_table", rope_table(unscaled, 0, block.attn.rope_table.shape[0]))


def probabilities_fp32(patch: MonkeyPatch, model: DeepseekV4) -> None:
    """Attention probabilities are not rounded to bf16."""
    attend = _attention_tiles.attend_tile

    def unrounded(q, keys, sink, scale):
        out, lse = attend(q.float(), keys, sink, scale)
        return out.to(q.dtype), lse

    patch.setattr(op_module("sparse_attention"), "attend_tile", unrounded)


def query_rms_fp32(patch: MonkeyPatch, model: DeepseekV4) -> None:
    module = op_module("qkv_rope_cache")
    unit_rms = module._unit_rms
    patch.setattr(module, "_unit_rms", lambda q, eps: unit_rms(q.float(), eps).to(q.dtype))


def window_off_by_one(patch: MonkeyPatch, model: DeepseekV4) -> None:
    """A query does not see the oldest row of its window."""
    attend = ops.sparse_attention
    patch.setattr(ops, "sparse_attention", lambda *a, window, **numbers: attend(*a, window=window - 1, **numbers))


def entries_one_late(patch: MonkeyPatch, model: DeepseekV4) -> None:
    """A window's last token does not see the entry that it completes."""
    picks = ops.indexer_picks

    def earlier(q, weights, cache, positions, *places, **numbers):
        return picks(q, weights, cache, (positions - 1).clamp_min(-1), *places, **numbers)

    patch.setattr(ops, "indexer_picks", earlier)


def router_bias_in_weights(patch: MonkeyPatch, model: DeepseekV4) -> None:
    """Expert weights include the selection bias."""
    route = ops.route_topk

    def biased(logits, bias, num_valid, *, topk, scale):
        ids, _ = route(logits, bias, num_valid, topk=topk, scale=scale)
        score = torch.nn.functional.softplus(logits).sqrt() + bias
        weights = score.gather(1, ids.clamp_min(0).long())
        return ids, weights / weights.sum(-1, keepdim=True) * scale

    patch.setattr(ops, "route_topk", biased)


def state_one_row_late(patch: MonkeyPatch, model: DeepseekV4) -> None:
    """Compressor rows are stored one ring place too far: wrong only where a window spans two steps."""
    store = _compressor._store

    def late(rows, step, state):
        kept = torch.zeros_like(state)
        store(rows, step, kept)
        state.copy_(kept.roll(1, dims=1))

    patch.setattr(_compressor, "_store", late)


def _use_table(patch: MonkeyPatch, model: DeepseekV4, *, compressed: bool, ratio: int) -> None:
    for block in model.blocks:
        if bool(block.attn.ratio) == compressed:
            table = rope_table(model.config, ratio, block.attn.rope_table.shape[0])
            patch.setitem(block.attn._buffers, "rope_table", table)


def _plain_table(patch: MonkeyPatch, model: DeepseekV4, op: str, argument: int, dim: int | None = None) -> None:
    """Hand ``op`` the plain table instead of the YaRN one (argument number ``argument``)."""
    original, yarn = getattr(ops, op), rope_table(model.config, 4, model.blocks[0].attn.rope_table.shape[0])
    plain = rope_table(model.config, 0, yarn.shape[0])

    def wrong(*arguments, **numbers):
        arguments = list(arguments)
        if torch.equal(arguments[argument], yarn) and (dim is None or arguments[2].shape == (dim,)):
            arguments[argument] = plain
        return original(*arguments, **numbers)

    patch.setattr(ops, op, wrong)
