"""What the tests against recorded official values catch: every known bug moves a number beyond its bound.

The values that must move are the ones of ``tests/golden/README.md``. ``*_fp32`` bounds hold for the references only;
a backend with other attention blocks passes the wide ``attn_out`` with unrounded probabilities. Bugs of the exact
maths are planted a second time in ``test_against_hf.py``: the recorded values do not reach the SwiGLU clamp.
"""

from collections.abc import Callable

import pytest

from tests import planted_bugs as bugs
from tests.official_measure import exceeded, measure

LAYERS = {0, 2, 3}  # one of each kind; the bounds hold per layer
CAUGHT = {
    bugs.no_kv_quant: {"attn_out", "window_kv_unequal", "compressed_kv_4_unequal", "compressed_kv_128_unequal"},
    bugs.no_act_quant: {"attn_out", "ffn_out", "index_score", "picks_changed", "shared_out_unequal"},
    bugs.scale_not_pow2: {"attn_out", "ffn_out", "window_kv_unequal", "index_score"},
    bugs.scale_floor: {"attn_out", "ffn_out", "window_kv_unequal", "index_score"},
    bugs.wo_a_act_fp8: {"attn_out"},
    bugs.router_weight_after_w2: {"ffn_out"},
    bugs.no_inverse_rope: {"attn_out"},
    bugs.kv_quant_before_rope_all_dims: {"attn_out", "window_kv_unequal", "compressed_kv_128_unequal"},
    bugs.compressed_rope_last_token: {"attn_out", "compressed_kv_4_unequal", "compressed_kv_128_unequal"},
    bugs.no_index_fp4: {"index_score", "picks_changed", "index_query_unequal", "index_key_unequal"},
    bugs.no_hadamard: {"index_score", "picks_changed", "index_query_unequal", "index_key_unequal"},
    bugs.index_score_fp32: {"index_score_unequal"},
    bugs.sinkhorn_19: {"hc_comb"},
    bugs.comb_not_transposed: {"streams_unequal", "hc_pre", "sublayer_input_unequal"},
    bugs.no_sink: {"attn_out"},
    bugs.yarn_on_window_layers: {"attn_out"},
    bugs.plain_theta_on_compressed_layers: {"attn_out", "window_kv_unequal", "index_query_unequal"},
    bugs.plain_theta_on_window_kv_of_compressed_layers: {"attn_out", "window_kv_unequal"},
    bugs.plain_theta_on_entries: {"attn_out", "compressed_kv_4_unequal"},
    bugs.plain_theta_on_index_entries: {"index_score", "index_key_unequal"},
    bugs.plain_theta_on_index_queries: {"index_score", "index_query_unequal"},
    bugs.no_yarn_on_compressed_layers: {"index_score", "window_kv_unequal", "compressed_kv_4_unequal"},
    bugs.probabilities_fp32: {"attn_out_fp32"},
    bugs.query_rms_fp32: {"attn_out_fp32"},
    bugs.window_off_by_one: {"attn_out_fp32"},
    bugs.entries_one_late: {"attn_out", "picks_changed"},
    bugs.router_bias_in_weights: {"ffn_out", "router_weight"},
}


@pytest.mark.parametrize("bug", CAUGHT, ids=lambda bug: bug.__name__)
def test_is_caught(bug: Callable, make_runner, golden, monkeypatch):
    runner = make_runner("official", max_blocks=2)
    bug(monkeypatch, runner.model)
    records = golden("layers_official.safetensors"), golden("named_official.safetensors")
    measured = measure(runner, *records, layers=LAYERS)
    missed = CAUGHT[bug] - exceeded(measured)
    assert not missed, {name: measured[name] for name in missed}


def test_patches_are_gone(make_runner, golden):
    """The session's model is shared: a bug that stayed in it would blame other tests."""
    records = golden("layers_official.safetensors"), golden("named_official.safetensors")
    assert not exceeded(measure(make_runner("official", max_blocks=2), *records, layers=LAYERS))
