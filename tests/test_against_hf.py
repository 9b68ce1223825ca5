"""Random small models against Hugging Face transformers in fp32: all logits, prefilled in one go and in chunks.

Tolerance: logits have a standard deviation of about 4 and both sides round at 2^-24, so one operation errs by a few
1e-7; up to a hundred dependent ones add up to 1e-5 (largest of the 600 swept models: 2.0e-5). The bound leaves a factor
of 5 for other BLAS libraries. Wrong rules move logits by 2 and more, one Sinkhorn round less by 5e-4
(``test_planted_bug``).
"""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, assume, event, example, given, settings, strategies as st

from dsv4.config import ModelConfig, RopeScaling
from tests import planted_bugs
from tests.hf_model import Choice, Result, build, comparable_rows, random_weights, run_hf, run_ours
from tests.tiny_checkpoint import NANO

LOGITS_ATOL = 1e-4
LENGTHS = (1, 3, 4, 5, 8, 31, 127, 128, 129, 255, 256, 257, 300)


@dataclass(frozen=True)
class Case:
    """One model, one prompt and the sizes of its prefill chunks."""

    config: ModelConfig
    seed: int
    num_tokens: int
    chunks: tuple[int, ...]

    @property
    def token_ids(self) -> list[int]:
        generator = torch.Generator().manual_seed(self.seed + 1)
        return torch.randint(self.config.vocab_size, (self.num_tokens,), generator=generator).tolist()


def small_config(**changes: object) -> ModelConfig:
    """Every kind of layer, narrow window and clamp, selection from position 68 on."""
    return ModelConfig.from_json(NANO).resized(**{
        "num_hidden_layers": 4, "compress_ratios": (0, 4, 128, 4), "num_nextn_predict_layers": 0, "num_hash_layers": 1,
        "hidden_size": 64, "num_attention_heads": 4, "head_dim": 32, "qk_rope_head_dim": 8, "q_lora_rank": 24,
        "o_groups": 2, "o_lora_rank": 16, "index_n_heads": 16, "index_head_dim": 16, "index_topk": 16,
        "sliding_window": 24, "moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 3,
        "vocab_size": 61, "swiglu_limit": 1.0, "max_position_embeddings": 8 * 4096,
        "rope_scaling": RopeScaling(factor=8, beta_fast=32, beta_slow=1, original_max_position_embeddings=4096),
    } | changes)  # fmt: skip


@st.composite
def cases(draw: st.DrawFn) -> Case:
    layers = draw(st.integers(1, 4))
    groups, heads_per_group = draw(st.sampled_from((1, 2, 4))), draw(st.sampled_from((1, 2, 3)))
    rope = draw(st.sampled_from((2, 4, 8, 16)))
    experts = draw(st.integers(1, 12))
    # ReLU makes exact ties between entries that no head likes: either many heads, or every entry is picked.
    index_heads = draw(st.sampled_from((1, 3, 12, 24, 32)))
    topk = draw(st.sampled_from((1, 8, 30, 64))) if index_heads >= 12 else 128
    original, factor = draw(st.sampled_from((512, 4096, 65536))), draw(st.sampled_from((1, 4, 16)))
    config = small_config(
        num_hidden_layers=layers,
        compress_ratios=tuple(draw(st.lists(st.sampled_from((0, 4, 128)), min_size=layers, max_size=layers))),
        num_hash_layers=draw(st.integers(0, layers)),
        hidden_size=32 * draw(st.integers(1, 3)),
        num_attention_heads=groups * heads_per_group,
        o_groups=groups,
        o_lora_rank=draw(st.integers(1, 24)),
        head_dim=rope + draw(st.sampled_from((2, 14, 33, 48))),
        qk_rope_head_dim=rope,
        q_lora_rank=draw(st.integers(4, 40)),
        index_n_heads=index_heads,
        index_head_dim=draw(st.sampled_from([n for n in (16, 32) if n >= rope])),
        index_topk=topk,
        sliding_window=draw(st.sampled_from((1, 2, 24, 127, 128, 129, 400))),
        moe_intermediate_size=32 * draw(st.integers(1, 2)),
        n_routed_experts=experts,
        num_experts_per_tok=draw(st.integers(1, min(experts, 6))),
        routed_scaling_factor=draw(st.sampled_from((0.7, 1.5, 2.5))),
        swiglu_limit=draw(st.sampled_from((0.5, 1.5, 10.0))),
        vocab_size=draw(st.integers(2, 90)),
        hc_mult=draw(st.sampled_from((1, 2, 4))),
        hc_sinkhorn_iters=draw(st.sampled_from((1, 2, 20))),
        hc_eps=draw(st.sampled_from((1e-6, 1e-2))),
        rms_norm_eps=draw(st.sampled_from((1e-6, 1e-2))),
        rope_theta=draw(st.sampled_from((100.0, 10000.0))),
        compress_rope_theta=draw(st.sampled_from((1000.0, 160000.0))),
        max_position_embeddings=original * factor,
        rope_scaling=RopeScaling(
            factor=factor,
            beta_fast=draw(st.sampled_from((4, 32))),
            beta_slow=1,
            original_max_position_embeddings=original,
        ),
    )
    length = draw(st.one_of(st.sampled_from(LENGTHS), st.integers(1, 300)))
    chunks = draw(st.lists(st.sampled_from((1, 2, 3, 5, 16, 63, 64, 100, 128, 129)), min_size=1, max_size=5))
    if length / (sum(chunks) / len(chunks)) > 40:  # steps; long runs of single tokens take seconds
        chunks.append(128)
    return Case(config, draw(st.integers(0, 2**20)), length, tuple(chunks))


def check(case: Case) -> int:
    """Compare both implementations; returns the number of rows before the first tied choice."""
    weights = random_weights(case.config, case.seed)
    theirs = run_hf(case.config, weights, case.token_ids)
    model = build(case.config, weights)
    compared = []
    for chunks in (None, case.chunks):
        ours = run_ours(model, case.token_ids, chunks)
        rows = comparable_rows(ours, theirs)
        assert ours.logits.isfinite().all()
        assert bool(((ours.logits - theirs.logits)[:rows].abs() <= LOGITS_ATOL).all())
        compared.append(rows)
    return min(compared)


def swept(max_examples: int):
    return settings(
        max_examples=max_examples, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
    )


def check_random(case: Case) -> None:
    rows = check(case)
    event("all rows compared" if rows == case.num_tokens else "rows before a tie compared")
    assume(2 * rows >= case.num_tokens)  # hypothesis fails a test whose examples are mostly rejected


@swept(25)
@given(cases())
@example(Case(small_config(), 1, 300, (7, 64, 1, 30)))
@example(Case(small_config(qk_rope_head_dim=16), 2, 90, (5, 64)))  # RoPE over whole indexer vectors
def test_random_models(case):
    check_random(case)


@pytest.mark.slow
@swept(600)
@given(cases())
def test_random_models_swept(case):
    check_random(case)


@pytest.mark.parametrize("ratio", [0, 4, 128])
@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_lengths_around_boundaries(ratio, num_tokens):
    """One layer of each kind; chunks of 1 for short prompts, else an odd mix."""
    config = small_config(num_hidden_layers=1, compress_ratios=(ratio,), num_hash_layers=0)
    chunks = (1,) if num_tokens < 40 else (1, 2, 126, 5, 128)
    assert check(Case(config, num_tokens, num_tokens, chunks)) == num_tokens


def test_only_ties_may_be_chosen_differently():
    scores = torch.tensor([[3.0, 2.0, 1.0, 0.0], [3.0, 0.0, 2.0, 2.0 - 1e-6], [3.0, 0.0, 2.0, 1.99]])
    logits = torch.zeros(3, 5)

    def rows(mine: list[list[int]], theirs: list[list[int]]) -> int:
        ours = Result(logits, [Choice(torch.tensor(mine), scores)])
        return comparable_rows(ours, Result(logits, [Choice(torch.tensor(theirs))]))

    assert rows([[0, 1], [0, 2], [0, 2]], [[1, 0], [2, 0], [2, 0]]) == 3
    assert rows([[0, 1], [0, 2], [0, 2]], [[0, 1], [0, 3], [0, 3]]) == 1
    with pytest.raises(AssertionError, match=r"row 2: \[2\] instead of \[3\]"):
        rows([[0, 1], [0, 2], [0, 2]], [[0, 1], [0, 2], [0, 3]])
    with pytest.raises(AssertionError, match=r"row 0: \[1\] instead of \[\]"):
        rows([[0, 1], [0, 2], [0, 2]], [[0, -1], [0, 2], [0, 2]])


EXACT_BUGS = (
    planted_bugs.shared_expert_not_clamped,
    planted_bugs.comb_not_transposed,
    planted_bugs.sinkhorn_19,
    planted_bugs.no_sink,
    planted_bugs.no_inverse_rope,
    planted_bugs.compressed_rope_last_token,
    planted_bugs.yarn_on_window_layers,
    planted_bugs.plain_theta_on_compressed_layers,
    planted_bugs.plain_theta_on_window_kv_of_compressed_layers,
    planted_bugs.plain_theta_on_entries,
    planted_bugs.plain_theta_on_index_entries,
    planted_bugs.plain_theta_on_index_queries,
    planted_bugs.no_yarn_on_compressed_layers,
    planted_bugs.window_off_by_one,
    planted_bugs.entries_one_late,
    planted_bugs.router_bias_in_weights,
)


@pytest.mark.parametrize("bug", EXACT_BUGS, ids=lambda bug: bug.__name__)
def test_planted_bug(bug, monkeypatch):
    """Each of these wrong rules moves a logit of the example model beyond the tolerance."""
    case = Case(small_config(), 5, 300, (300,))
    weights = random_weights(case.config, case.seed)
    theirs = run_hf(case.config, weights, case.token_ids)
    model = build(case.config, weights)
    assert (run_ours(model, case.token_ids).logits - theirs.logits).abs().max().item() <= LOGITS_ATOL
    bug(monkeypatch, model)
    assert (run_ours(model, case.token_ids).logits - theirs.logits).abs().max().item() > 3 * LOGITS_ATOL


def test_planted_bug_in_chunks(monkeypatch):
    """A bug of the compressor state shows in chunks and not in one go."""
    case = Case(small_config(), 5, 300, (30, 98))
    weights = random_weights(case.config, case.seed)
    model = build(case.config, weights)
    planted_bugs.state_one_row_late(monkeypatch, model)
    theirs = run_hf(case.config, weights, case.token_ids)
    errors = [(run_ours(model, case.token_ids, c).logits - theirs.logits).abs().max() for c in (None, case.chunks)]
    assert errors[0] <= LOGITS_ATOL
    assert not errors[1] <= 3 * LOGITS_ATOL
