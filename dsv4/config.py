"""Model configuration: the official ``config.json`` as a frozen, fully validated dataclass.

Field names are those of the file. Every error (``ValueError``) names the field, the rule and the value. Sibling
releases with another architecture (DSpark drafts, V4.1) are refused by name. No other module reads the environment.
Source: published ``config.json`` files of DeepSeek-V4-Flash and DeepSeek-V4-Pro.
"""

import json
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from .ops.shapes import SHAPES, Shape

logger = logging.getLogger(__name__)

RATIOS = (0, 4, 128)
_UNUSED_KEYS = {"architectures", "attention_dropout", "initializer_range", "use_cache", "torch_dtype", "dtype",
                "transformers_version", "pad_token_id"}  # fmt: skip


def default_compile_cache() -> Path:
    """Directory of compiled pieces in the user's cache directory (``XDG_CACHE_HOME``, else ``~/.cache``)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dsv4" / "compile"


def deep_gemm_cache() -> Path:
    """Where DeepGEMM keeps what it compiled (``DG_JIT_CACHE_DIR``, else ``~/.deep_gemm``)."""
    return Path(os.environ.get("DG_JIT_CACHE_DIR") or Path.home() / ".deep_gemm")


def prewarm_enabled() -> bool:
    """Whether the prewarm runs kernels: ``DSV4_PREWARM`` is ``0`` (no), ``1`` or unset (yes)."""
    value = os.environ.get("DSV4_PREWARM", "1")
    _require(value in ("0", "1"), "DSV4_PREWARM", "be '0' or '1'", value)
    return value == "1"


def _require(holds: bool, subject: str, rule: str, value: object) -> None:
    if not holds:
        raise ValueError(f"{subject} must {rule}, got {value!r}")


def _fixed(value: Any) -> Any:
    """A field with one supported value."""
    return field(default=value, metadata={"fixed": value})


def _at_least(minimum: int) -> Any:
    return field(metadata={"minimum": minimum})


def _check_scalars(values: Any, prefix: str = "") -> None:
    """Fixed values, and integer and float fields: right type, finite, positive (or at least the field's minimum)."""
    for f in fields(values):
        name, value = prefix + f.name, getattr(values, f.name)
        if "fixed" in f.metadata:
            fixed = f.metadata["fixed"]
            _require(type(value) is type(fixed) and value == fixed, name, f"be {fixed!r}", value)
        elif f.type is int:
            minimum = f.metadata.get("minimum", 1)
            rule = "be a positive integer" if minimum == 1 else f"be an integer >= {minimum}"
            _require(type(value) is int and value >= minimum, name, rule, value)
        elif f.type is float:
            finite = type(value) in (int, float) and math.isfinite(value)
            _require(finite and value > 0, name, "be a positive finite number", value)


def _pick(cls: type, values: object, subject: str) -> dict[str, Any]:
    """Constructor arguments of ``cls`` from a JSON object that must hold every field without a default."""
    _require(isinstance(values, Mapping), subject, "be a JSON object", values)
    for f in fields(cls):
        if f.default is MISSING and f.name not in values:
            raise ValueError(f"{subject} must have the key {f.name}, got none")
    return {f.name: values[f.name] for f in fields(cls) if f.name in values}


def _nested(cls: type, values: object, subject: str) -> Any:
    """``cls`` from a nested JSON object that holds its fields and no others."""
    picked = _pick(cls, values, subject)
    unknown = sorted(set(values) - set(picked))
    _require(not unknown, subject, f"have only the keys {[f.name for f in fields(cls)]}", unknown)
    return cls(**picked)


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """YaRN parameters of the layers with compressed entries."""

    type: str = _fixed("yarn")
    """Interpolation rule."""
    factor: float
    """Context extension factor."""
    beta_fast: float
    """Rotations over the original context above which a frequency is kept."""
    beta_slow: float
    """Rotations over the original context below which a frequency is divided by ``factor``."""
    original_max_position_embeddings: int
    """Context length in tokens before the extension."""

    def __post_init__(self) -> None:
        _check_scalars(self, "rope_scaling.")
        _require(self.factor >= 1, "rope_scaling.factor", "be at least 1", self.factor)
        rule = f"exceed rope_scaling.beta_slow ({self.beta_slow})"
        _require(self.beta_fast > self.beta_slow, "rope_scaling.beta_fast", rule, self.beta_fast)


@dataclass(frozen=True, kw_only=True)
class QuantizationConfig:
    """Storage of the dense matrices; one scheme is supported."""

    quant_method: str = _fixed("fp8")
    """Number format family."""
    fmt: str = _fixed("e4m3")
    """FP8 format."""
    scale_fmt: str = _fixed("ue8m0")
    """Scale format: powers of two."""
    activation_scheme: str = _fixed("dynamic")
    """Activations are quantised at run time."""
    weight_block_size: tuple[int, ...] = _fixed((128, 128))
    """Rows and columns that share one scale."""

    def __post_init__(self) -> None:
        if isinstance(self.weight_block_size, list):
            object.__setattr__(self, "weight_block_size", tuple(self.weight_block_size))
        _check_scalars(self, "quantization_config.")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One DeepSeek-V4 model."""

    model_type: str = _fixed("deepseek_v4")
    """Architecture name."""
    hidden_size: int
    """Width of one residual stream."""
    num_hidden_layers: int
    """Backbone layers, without the MTP block."""
    num_attention_heads: int
    """Query heads."""
    num_key_value_heads: int = _fixed(1)
    """Key-value heads: one latent serves all query heads, as key and as value."""
    head_dim: int
    """Width of a head, rotary dimensions included."""
    qk_rope_head_dim: int
    """Rotary dimensions, the last ones of a head."""
    q_lora_rank: int
    """Width of the query latent."""
    o_groups: int
    """Groups of heads that the output projection compresses separately."""
    o_lora_rank: int
    """Output width of one group."""
    index_n_heads: int
    """Indexer heads of ratio-4 layers."""
    index_head_dim: int
    """Width of an indexer head."""
    index_topk: int
    """Compressed entries that the indexer picks per query."""
    sliding_window: int
    """Raw key-value rows that a query sees, itself included, in tokens."""
    compress_ratios: tuple[int, ...]
    """Tokens per compressed entry of every layer (0: window only), then of the MTP block; later entries are dropped."""
    moe_intermediate_size: int
    """Hidden width of one expert."""
    n_routed_experts: int
    """Routed experts per layer."""
    n_shared_experts: int = _fixed(1)
    """Experts that serve every token."""
    num_experts_per_tok: int
    """Routed experts per token."""
    routed_scaling_factor: float
    """Factor on the normalised routing weights."""
    scoring_func: str = _fixed("sqrtsoftplus")
    """Router score of a logit."""
    topk_method: str = _fixed("noaux_tc")
    """Expert choice: largest score plus bias."""
    norm_topk_prob: bool = _fixed(True)
    """Routing weights are divided by their sum."""
    num_hash_layers: int = _at_least(0)
    """First layers that choose experts by token id."""
    num_nextn_predict_layers: int = _at_least(0)
    """MTP blocks: 0 or 1."""
    swiglu_limit: float
    """Clamp of gate and up values of all experts."""
    hidden_act: str = _fixed("silu")
    """Activation of the gate."""
    hc_mult: int
    """Residual streams."""
    hc_sinkhorn_iters: int
    """Normalisation rounds of the stream mixing matrix."""
    hc_eps: float
    """Added to stream weights and to the sums that divide them."""
    rms_norm_eps: float
    """Added to the mean square in RMSNorm."""
    rope_theta: float
    """RoPE base of window-only layers."""
    compress_rope_theta: float
    """RoPE base of layers with compressed entries."""
    rope_scaling: RopeScaling
    """YaRN parameters of layers with compressed entries."""
    max_position_embeddings: int
    """Longest context in tokens."""
    vocab_size: int
    """Token ids."""
    bos_token_id: int = _at_least(0)
    """Begin-of-sequence id."""
    eos_token_id: int = _at_least(0)
    """End-of-sequence id."""
    tie_word_embeddings: bool = _fixed(False)
    """The language-model head has its own weights."""
    attention_bias: bool = _fixed(False)
    """Attention projections have no bias."""
    expert_dtype: str = "fp4"
    """Storage of the routed experts: ``fp4`` or ``fp8``."""
    quantization_config: QuantizationConfig = QuantizationConfig()
    """Storage of the dense matrices."""

    def __post_init__(self) -> None:
        _check_scalars(self)
        _require(isinstance(self.rope_scaling, RopeScaling), "rope_scaling", "be a RopeScaling", self.rope_scaling)
        storage = self.quantization_config
        _require(isinstance(storage, QuantizationConfig), "quantization_config", "be a QuantizationConfig", storage)
        _require(self.expert_dtype in ("fp4", "fp8"), "expert_dtype", "be 'fp4' or 'fp8'", self.expert_dtype)
        self._check_attention()
        self._check_experts()
        self._check_ratios()
        for name in ("bos_token_id", "eos_token_id"):
            token = getattr(self, name)
            _require(token < self.vocab_size, name, f"be below vocab_size ({self.vocab_size})", token)
        original, longest = self.rope_scaling.original_max_position_embeddings, self.max_position_embeddings
        rule = f"be at least rope_scaling.original_max_position_embeddings ({original})"
        _require(longest >= original, "max_position_embeddings", rule, longest)

    def _check_attention(self) -> None:
        rope, index = self.qk_rope_head_dim, self.index_head_dim
        _require(rope % 2 == 0, "qk_rope_head_dim", "be even", rope)
        _require(self.head_dim > rope, "head_dim", f"exceed qk_rope_head_dim ({rope})", self.head_dim)
        _require(index >= rope, "index_head_dim", f"be at least qk_rope_head_dim ({rope})", index)
        _require(index & (index - 1) == 0, "index_head_dim", "be a power of two (Hadamard rotation)", index)
        rule = f"be a multiple of o_groups ({self.o_groups})"
        _require(self.num_attention_heads % self.o_groups == 0, "num_attention_heads", rule, self.num_attention_heads)

    def _check_experts(self) -> None:
        topk, rule = self.num_experts_per_tok, f"be at most n_routed_experts ({self.n_routed_experts})"
        _require(topk <= self.n_routed_experts, "num_experts_per_tok", rule, topk)
        rule = f"be at most num_hidden_layers ({self.num_hidden_layers})"
        _require(self.num_hash_layers <= self.num_hidden_layers, "num_hash_layers", rule, self.num_hash_layers)
        for name in ("hidden_size", "moe_intermediate_size"):
            _require(getattr(self, name) % 32 == 0, name, "be a multiple of 32 (FP4 block)", getattr(self, name))

    def _check_ratios(self) -> None:
        name, ratios, num_mtp = "compress_ratios", self.compress_ratios, self.num_nextn_predict_layers
        _require(num_mtp <= 1, "num_nextn_predict_layers", "be 0 or 1", num_mtp)
        _require(isinstance(ratios, (list, tuple)), name, "be a list of integers", ratios)
        needed = self.num_hidden_layers + num_mtp
        rule = f"have at least num_hidden_layers + num_nextn_predict_layers = {needed} entries"
        _require(len(ratios) >= needed, name, rule, len(ratios))
        for index, ratio in enumerate(ratios[:needed]):
            _require(type(ratio) is int and ratio in RATIOS, f"{name}[{index}]", f"be one of {list(RATIOS)}", ratio)
        if num_mtp:
            _require(ratios[needed - 1] == 0, f"{name}[{needed - 1}] (the MTP block)", "be 0", ratios[needed - 1])
        object.__setattr__(self, name, tuple(ratios[:needed]))

    @classmethod
    def from_json(cls, path: str | Path) -> "ModelConfig":
        """Read ``config.json``, given itself or its directory."""
        path = Path(path)
        path = path / "config.json" if path.is_dir() else path
        try:
            return cls.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} must be valid JSON, got: {error}") from error
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ModelConfig":
        """From the parsed ``config.json``; keys that the library does not use are logged, not silently dropped."""
        _require(isinstance(values, Mapping), "config", "be a JSON object", values)
        _refuse_siblings(values)
        picked = _pick(cls, values, "config")
        picked["rope_scaling"] = _nested(RopeScaling, values["rope_scaling"], "rope_scaling")
        key = "quantization_config"
        if key in values:
            picked[key] = _nested(QuantizationConfig, values[key], key)
        unused = sorted(set(values) - set(picked) - _UNUSED_KEYS)
        if unused:
            logger.warning("config keys not used: %s", ", ".join(unused))
        return cls(**picked)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values that :meth:`from_dict` reads back to an equal config."""
        values = json.loads(json.dumps(asdict(self)))
        return {"architectures": ["DeepseekV4ForCausalLM"], "torch_dtype": "bfloat16"} | values

    def resized(self, *, num_hidden_layers: int | None = None, **fields_: Any) -> "ModelConfig":
        """A copy with some fields replaced; fewer layers keep the first ratios and the MTP block's."""
        layers = self.num_hidden_layers if num_hidden_layers is None else num_hidden_layers
        rule = f"be an integer in 1...{self.num_hidden_layers} (the model's layers)"
        _require(type(layers) is int and 1 <= layers <= self.num_hidden_layers, "num_hidden_layers", rule, layers)
        known = {f.name for f in fields(self)}
        for name in fields_:
            _require(name in known, "override", "be a field of ModelConfig", name)
        changes = {
            "num_hidden_layers": layers,
            "num_hash_layers": min(self.num_hash_layers, layers),
            "compress_ratios": self.layer_ratios[:layers] + self.compress_ratios[self.num_hidden_layers :],
        }
        return replace(self, **(changes | fields_))

    @property
    def layer_ratios(self) -> tuple[int, ...]:
        """Compression ratio of every backbone layer."""
        return self.compress_ratios[: self.num_hidden_layers]

    @property
    def mtp_ratio(self) -> int:
        """Compression ratio of the MTP block."""
        _require(self.num_nextn_predict_layers == 1, "num_nextn_predict_layers", "be 1 for an MTP block", 0)
        return self.compress_ratios[self.num_hidden_layers]

    def is_hash_layer(self, index: int) -> bool:
        """Whether backbone layer ``index`` chooses experts by token id."""
        return index < self.num_hash_layers

    @property
    def num_parameters(self) -> int:
        """Logical parameters, the MTP block included; block scales and hash tables do not count."""
        from .checkpoint import num_parameters  # the tensor table imports this module

        return num_parameters(self)

    def shape(self) -> Shape:
        """Dimensions as the ops see them; the named row of ``dsv4.ops.shapes`` where there is one."""
        shape = Shape(
            name="custom", hidden=self.hidden_size, num_streams=self.hc_mult, num_heads=self.num_attention_heads,
            head_dim=self.head_dim, rope_dim=self.qk_rope_head_dim, q_lora_rank=self.q_lora_rank,
            o_groups=self.o_groups, o_lora_rank=self.o_lora_rank, index_heads=self.index_n_heads,
            index_dim=self.index_head_dim, index_topk=self.index_topk, window=self.sliding_window,
            num_experts=self.n_routed_experts, experts_per_token=self.num_experts_per_tok,
            expert_hidden=self.moe_intermediate_size, expert_dtype=self.expert_dtype, vocab=self.vocab_size,
            route_scale=self.routed_scaling_factor, swiglu_limit=self.swiglu_limit, eps=self.rms_norm_eps,
            sinkhorn_iters=self.hc_sinkhorn_iters,
        )  # fmt: skip
        return next((named for named in SHAPES.values() if replace(shape, name=named.name) == named), shape)


def _refuse_siblings(values: Mapping[str, Any]) -> None:
    """Name the releases that share the family name but not the architecture."""
    dspark = sorted(key for key in values if key.startswith("dspark_"))
    if dspark:
        raise ValueError(
            f"config must be of a model with an MTP block, got DSpark keys {dspark}: "
            "V4-Flash-0731 replaces the MTP block by DSpark draft stages, which are not supported"
        )
    engram = sorted(key for key in values if "engram" in key.lower())
    name = str(values.get("model_type", "deepseek_v4"))
    later = name != "deepseek_v4" and name.startswith("deepseek_v4")
    if engram or later or (values.get("hidden_size"), values.get("num_hidden_layers")) == (5120, 40):
        mark = engram or {"model_type": name, "hidden_size": values.get("hidden_size")}
        raise ValueError(f"config must be of DeepSeek-V4, got {mark}: V4.1 is another architecture, not supported")


_COMMON: dict[str, Any] = {
    "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64, "o_lora_rank": 1024,
    "index_n_heads": 64, "index_head_dim": 128, "sliding_window": 128, "n_shared_experts": 1, "num_experts_per_tok": 6,
    "num_hash_layers": 3, "num_nextn_predict_layers": 1, "swiglu_limit": 10.0, "hc_mult": 4, "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6, "rms_norm_eps": 1e-6, "rope_theta": 10000, "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 65536,
    },
    "max_position_embeddings": 1048576, "vocab_size": 129280, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


def flash_config() -> ModelConfig:
    """DeepSeek-V4-Flash: 43 layers, the first two window-only."""
    return ModelConfig.from_dict(_COMMON | {
        "hidden_size": 4096, "num_hidden_layers": 43, "num_attention_heads": 64, "q_lora_rank": 1024, "o_groups": 8,
        "index_topk": 512, "moe_intermediate_size": 2048, "n_routed_experts": 256, "routed_scaling_factor": 1.5,
        "compress_ratios": (0, 0) + (4, 128) * 20 + (4, 0),
    })  # fmt: skip


def pro_config() -> ModelConfig:
    """DeepSeek-V4-Pro: 61 layers, every one with compressed entries."""
    return ModelConfig.from_dict(_COMMON | {
        "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "q_lora_rank": 1536, "o_groups": 16,
        "index_topk": 1024, "moe_intermediate_size": 3072, "n_routed_experts": 384, "routed_scaling_factor": 2.5,
        "compress_ratios": (128, 128) + (4, 128) * 29 + (4, 0),
    })  # fmt: skip
