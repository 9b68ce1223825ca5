"""One model in two implementations: this library in exact fp32 numerics, and Hugging Face ``DeepseekV4ForCausalLM``.

Both get the same random weights: made under this library's kernel names, renamed for Hugging Face (whose loader must
then find every one of its own parameters). Expert and entry choices are recorded on both sides: where they differ the
competing scores must be equal within fp32 noise, and rows from there on are not compared.
"""

import re
from dataclasses import dataclass, field

import torch
from pytest import MonkeyPatch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from dsv4 import ops
from dsv4.caches import allocate_caches
from dsv4.config import ModelConfig
from dsv4.execution import Execution
from dsv4.model import DeepseekV4
from dsv4.ops import _routing
from dsv4.ops.shapes import BLOCK_TOKENS
from dsv4.runner import Runner, Sequence
from dsv4.weights import Weights, meta_weights

TIE = 1e-5  # of scores of size about 1; their fp32 noise is about 1e-6
LAYER_TYPES = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
RENAMES = (
    (r"embed\.", "model.embed_tokens."),
    (r"head\.", "lm_head."),
    (r"norm\.", "model.norm."),
    (r"hc_head_", "model.hc_head.hc_"),
    (r"layers\.", "model.layers."),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.hc_(attn|ffn)_", r".\1_hc."),
    (r"\.attn\.indexer\.compressor\.", ".self_attn.compressor.indexer."),
    (r"\.attn\.indexer\.weights_proj\.", ".self_attn.compressor.indexer.scorer.weights_proj."),
    (r"\.attn\.indexer\.", ".self_attn.compressor.indexer."),
    (r"\.attn\.", ".self_attn."),
    (r"\.ffn\.", ".mlp."),
    (r"\.attn_sink$", ".sinks"),
    (r"\.wq_a\.", ".q_a_proj."),
    (r"\.q_norm\.", ".q_a_norm."),
    (r"\.wq_b\.", ".q_b_proj."),
    (r"\.wkv\.", ".kv_proj."),
    (r"\.wo_([ab])\.", r".o_\1_proj."),
    (r"\.ape$", ".position_bias"),
    (r"(\.compressor(?:\.indexer)?)\.norm\.", r"\1.kv_norm."),
    (r"\.gate\.bias$", ".gate.e_score_correction_bias"),
    (r"\.experts\.w13\.weight$", ".experts.gate_up_proj"),
    (r"\.experts\.w2\.weight$", ".experts.down_proj"),
    (r"\.shared_experts\.w2\.", ".shared_experts.down_proj."),
)
SPLITS = (
    (r"\.wkv_gate$", (".kv_proj.weight", ".gate_proj.weight")),
    (r"\.shared_experts\.w13\.weight$", (".shared_experts.gate_proj.weight", ".shared_experts.up_proj.weight")),
)


def random_weights(config: ModelConfig, seed: int) -> Weights:
    """Weights under which every branch matters: activations near 1, gates neither saturated nor flat."""
    g = torch.Generator().manual_seed(seed)
    weights = {}
    for name, meta in meta_weights(config, "exact", torch.float32).items():
        noise = torch.randn(meta.shape, generator=g)
        if name.endswith("tid2eid"):
            order = torch.rand(meta.shape[0], config.n_routed_experts, generator=g).argsort(dim=1)
            value = order[:, : meta.shape[1]].int()
        elif name.endswith("norm.weight"):
            value = 1 + 0.3 * noise
        elif name.endswith(("hc_attn_scale", "hc_ffn_scale", "hc_head_scale")):
            value = 1 + 0.5 * noise
        elif name.endswith(("_base", "attn_sink", ".ape", "embed.weight")):
            value = noise
        elif name.endswith("gate.bias"):
            value = 0.2 * noise
        elif name == "head.weight":
            value = 4 * meta.shape[-1] ** -0.5 * noise
        else:
            value = noise * max(meta.shape[-1], 1) ** -0.5
        weights[name] = value
    return weights


def hf_weights(weights: Weights) -> Weights:
    """The same values under Hugging Face names."""
    renamed = {}
    for name, value in weights.items():
        if value.numel() == 0:
            continue
        if name.endswith("wo_a.weight"):
            value = value.flatten(0, 1)
        value = value.long() if name.endswith("tid2eid") else value
        names, values = [name], [value]
        for pattern, endings in SPLITS:
            if re.search(pattern, name):
                names, values = [re.sub(pattern, ending, name) for ending in endings], value.chunk(2)
        for part, tensor in zip(names, values, strict=True):
            for pattern, replacement in RENAMES:
                pattern = pattern if pattern.startswith((r"\.", "(")) else f"^{pattern}"
                part = re.sub(pattern, replacement, part)
            renamed[part] = tensor
    return renamed


def hf_config(config: ModelConfig) -> DeepseekV4Config:
    rotary = (config.qk_rope_head_dim + 0.5) / config.head_dim  # Hugging Face multiplies back and truncates
    scaling = config.rope_scaling
    same = (
        "vocab_size", "hidden_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim",
        "q_lora_rank", "num_experts_per_tok", "n_routed_experts", "routed_scaling_factor", "max_position_embeddings",
        "rope_theta", "compress_rope_theta", "hc_mult", "hc_sinkhorn_iters", "hc_eps", "swiglu_limit", "sliding_window",
        "o_groups", "o_lora_rank", "index_n_heads", "index_head_dim", "index_topk", "rms_norm_eps",
    )  # fmt: skip
    made = DeepseekV4Config(
        **{name: getattr(config, name) for name in same},
        layer_types=[LAYER_TYPES[ratio] for ratio in config.layer_ratios],
        mlp_layer_types=["hash_moe" if config.is_hash_layer(i) else "moe" for i in range(config.num_hidden_layers)],
        partial_rotary_factor=rotary,
        rope_parameters={
            "main": {"rope_type": "default", "rope_theta": config.rope_theta, "partial_rotary_factor": rotary},
            "compress": {
                "rope_type": "yarn", "rope_theta": config.compress_rope_theta, "partial_rotary_factor": rotary,
                "factor": scaling.factor, "beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow,
                "original_max_position_embeddings": scaling.original_max_position_embeddings, "attention_factor": 1.0,
            },
        },
    )  # fmt: skip
    assert made.qk_rope_head_dim == config.qk_rope_head_dim
    return made


@dataclass
class Choice:
    """Choices of one layer: sets ``[T, K]`` (−1 = none) and, on our side, the scores ``[T, N]`` they come from."""

    chosen: torch.Tensor
    scores: torch.Tensor | None = None


@dataclass
class Result:
    """Logits ``[T, V]`` and the choices of the indexers and routers, in the order in which the model makes them."""

    logits: torch.Tensor
    choices: list[Choice] = field(default_factory=list)


@torch.no_grad()
def run_hf(config: ModelConfig, weights: Weights, token_ids: list[int]) -> Result:
    made = hf_config(config)
    made._attn_implementation = "eager"
    model = DeepseekV4ForCausalLM(made).float().eval()
    model.load_state_dict(hf_weights(weights), strict=True)
    choices: list[Choice] = []
    for index, layer in enumerate(model.model.layers):
        if config.layer_ratios[index] == 4:
            hook = lambda module, args, out: choices.append(Choice(out[0]))  # noqa: E731
            layer.self_attn.compressor.indexer.register_forward_hook(hook)
        if not config.is_hash_layer(index):
            layer.mlp.gate.register_forward_hook(lambda module, args, out: choices.append(Choice(out[2])))
    logits = model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]
    return Result(logits, choices)


def build(config: ModelConfig, weights: Weights) -> DeepseekV4:
    return DeepseekV4(config, Execution.of("exact"), weights, max_positions=512)


def run_ours(model: DeepseekV4, token_ids: list[int], chunks: tuple[int, ...] | None = None) -> Result:
    """Prefill in ``chunks`` (rows per step, repeated; default: in one go), all logits."""
    blocks = -(-len(token_ids) // BLOCK_TOKENS)
    caches = allocate_caches(
        model.config, model.execution, num_blocks=blocks, num_window_pages=2 * blocks, num_slots=1, storage="fp32"
    )
    for tensor in caches.tensors():
        tensor.fill_(torch.nan)  # nothing may be read before it is written
    runner, sequence = Runner.eager(model, caches, blocks), Sequence()
    logits, steps = [], []
    while sequence.length < len(token_ids):
        size = chunks[len(steps) % len(chunks)] if chunks else len(token_ids)
        part = token_ids[sequence.length :][:size]
        with MonkeyPatch.context() as patch:
            steps.append(_record_choices(patch))
            logits.append(runner.run([sequence.segment(part, range(len(part)))])[0])
    choices = []
    for parts in zip(*steps, strict=True):
        choices.append(Choice(*(torch.cat([getattr(p, name) for p in parts]) for name in ("chosen", "scores"))))
    return Result(torch.cat(logits), choices)


def _record_choices(patch: MonkeyPatch) -> list[Choice]:
    choices: list[Choice] = []
    indexer_picks, route_topk = ops.indexer_picks, ops.route_topk

    def record_entries(*args, topk, **numbers):
        picks = indexer_picks(*args, topk=topk, **numbers)
        choices.append(Choice(picks, ops.indexer_logits(*args, **numbers)))
        return picks

    def record_experts(logits, bias, num_valid, **numbers):
        ids, weights = route_topk(logits, bias, num_valid, **numbers)
        choices.append(Choice(ids, _routing.scores(logits) + bias))
        return ids, weights

    patch.setattr(ops, "indexer_picks", record_entries)
    patch.setattr(ops, "route_topk", record_experts)
    return choices


def comparable_rows(ours: Result, theirs: Result) -> int:
    """Rows before the first one whose choices differ by a tie; ``AssertionError`` if scores beyond a tie differ."""
    rows = ours.logits.shape[0]
    assert len(ours.choices) == len(theirs.choices)
    for number, (mine, other) in enumerate(zip(ours.choices, theirs.choices)):
        for row in range(rows):
            a, b = ({i for i in c.chosen[row].tolist() if i >= 0} for c in (mine, other))
            if a == b:
                continue
            competing = mine.scores[row, sorted(a ^ b)]
            spread = (competing.max() - competing.min()).item() if len(a) == len(b) else torch.inf
            swapped = f"{sorted(a - b)} instead of {sorted(b - a)}"
            assert spread <= TIE, f"choice {number} of row {row}: {swapped}, scores {spread} apart"
            rows = row
            break
    return rows
