"""The ops of DeepSeek-V4, registered under ``torch.ops.dsv4``; importing this package registers all of them."""

if __name__ != "dsv4.ops":
    raise ImportError(f"import this package as dsv4.ops, not as {__name__}: a second copy would register ops twice")

from ._registry import OpSpec, PrewarmCase, boundary_ops, spec, specs  # noqa: E402
from .compressor_merge import compressor_merge  # noqa: E402
from .compressor_partials import compressor_partials  # noqa: E402
from .compressor_update import compressor_update  # noqa: E402
from .embed_streams import embed_streams  # noqa: E402
from .ep_combine import ep_combine  # noqa: E402
from .ep_dispatch import ep_dispatch  # noqa: E402
from .expert_ffn import expert_ffn  # noqa: E402
from .expert_sum import expert_sum  # noqa: E402
from .fp8_linear import fp8_linear  # noqa: E402
from .fp8_linear_decoded import fp8_linear_decoded  # noqa: E402
from .grouped_o_proj import grouped_o_proj  # noqa: E402
from .indexer_logits import indexer_logits  # noqa: E402
from .indexer_picks import indexer_picks  # noqa: E402
from .indexer_query import indexer_query  # noqa: E402
from .indexer_topk import indexer_topk  # noqa: E402
from .linear import linear  # noqa: E402
from .lse_merge import lse_merge  # noqa: E402
from .mhc_head import mhc_head  # noqa: E402
from .mhc_post import mhc_post  # noqa: E402
from .mhc_post_pre import mhc_post_pre  # noqa: E402
from .mhc_pre import mhc_pre  # noqa: E402
from .pcp_moe_shard import pcp_moe_shard  # noqa: E402
from .qkv_rope_cache import qkv_rope_cache  # noqa: E402
from .quant_fp4 import quant_fp4  # noqa: E402
from .quant_fp8 import quant_fp8  # noqa: E402
from .record_expert_load import record_expert_load  # noqa: E402
from .rms_norm import rms_norm  # noqa: E402
from .route_hash import route_hash  # noqa: E402
from .route_topk import route_topk  # noqa: E402
from .shared_expert import shared_expert  # noqa: E402
from .sparse_attention import sparse_attention  # noqa: E402
