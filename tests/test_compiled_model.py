"""The compiled model: one fullgraph trace, equal to eager, no recompile over any sizes, few distinct pieces."""

import pytest
import torch
from expecttest import assert_expected_inline

from dsv4 import ops
from dsv4.compile import compile_model, mark_unbacked_sizes
from dsv4.compile_stage import mark_step_sizes
from dsv4.inspection import inspect_model
from dsv4.runner import Runner, Sequence

from .conftest import NANO, ROOT

ATOL = 1e-5
SIZES = ((3, 1, 1), (1, 1, 1), (0, 1, 0), (2, 2, 2), (65, 2, 65), (200, 3, 7), (0, 0, 0), (1, 1, 0))


def random_segments(rows: int, requests: int, logit_rows: int, seed: int) -> list:
    """Fresh sequences that share ``rows`` rows; the first ones want logits."""
    g = torch.Generator().manual_seed(seed)
    segments, left, wanted = [], rows, logit_rows
    for index in range(requests):
        count = left if index == requests - 1 else left // 2
        tokens = torch.randint(7, 2048, (count,), generator=g).tolist()
        sequence = Sequence(first_block=2 * index, first_page=4 * index, state_slot=index)
        offsets = range(min(count, wanted))
        segments.append(sequence.segment(tokens, offsets))
        left, wanted = left - count, wanted - len(offsets)
    return segments


def compiled_runner(make_runner, cache_dir, mode: str, backend: str = "inductor", cuts=None, **kwargs) -> Runner:
    runner = make_runner(num_requests=3, max_blocks=2, **kwargs)
    cuts = ops.boundary_ops() if cuts is None else cuts
    compiled = compile_model(runner.model.forward_streams, cuts, mode, backend=backend, cache_dir=cache_dir)
    inputs = runner.inputs([Sequence().segment([5, 6, 7], (2,))], num_rows=4, num_requests=2)
    mark_step_sizes(inputs, runner.caches)
    compiled.prepare(inputs, runner.caches)
    runner.step = compiled
    return runner


@pytest.fixture(scope="session")
def piece_cache(tmp_path_factory):
    return tmp_path_factory.mktemp("pieces")


@pytest.mark.parametrize("numerics", ["exact", "official"])
def test_piecewise_equals_eager(make_runner, piece_cache, numerics):
    compiled = compiled_runner(make_runner, piece_cache, "piecewise", numerics=numerics)
    eager = make_runner(numerics, num_requests=3, max_blocks=2)
    for seed, sizes in enumerate(SIZES):
        segments = random_segments(*sizes, seed)
        pads = {"num_rows": sizes[0] + seed % 3, "num_requests": sizes[1] + seed % 2}
        got, want = compiled.run(segments, **pads), eager.run(segments, **pads)
        valid = [t[: sizes[0]] if i else t for i, t in enumerate(got)]
        for a, b in zip(valid, [want[0], want[1][: sizes[0]]], strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype
            torch.testing.assert_close(a, b, rtol=0, atol=ATOL if numerics == "exact" else 0)
    report = compiled.step.report
    assert (report.graph_breaks, report.num_recompiles) == (0, 0)
    for mine, theirs in zip(compiled.caches.tensors(), eager.caches.tensors(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=ATOL)


def test_chunked_decode_through_pieces(make_runner, piece_cache, golden):
    """A golden prompt in uneven chunks, then the same compiled pieces for single tokens."""
    runner = compiled_runner(make_runner, piece_cache, "piecewise")
    assert runner.step.report.cache_hits == runner.step.report.num_distinct_pieces  # compiled by the test above
    tokens, sequence = golden("prompts.json")[9], Sequence()
    for start, end in ((0, 70), (70, 127), (127, 128), (128, 129)):
        logits, _ = runner.run([sequence.segment(tokens[start:end], (end - start - 1,))])
    assert (logits[-1] - golden("exact_logits.safetensors")["logits_9"]).abs().max() <= 5e-4


def test_custom_cut_and_full_equal_eager(make_runner):
    """Any split set gives the same function (``eager`` backend: the split, not the compiler, is under test)."""
    eager = make_runner(num_requests=3, max_blocks=2)
    segments = random_segments(40, 2, 5, seed=1)
    want = eager.run(segments)
    cases = (
        ("full", (), 1),
        ("piecewise", ("dsv4::sparse_attention",), 15),
        ("piecewise", ("dsv4::expert_ffn",), 15),
    )
    for mode, cuts, pieces in cases:
        runner = compiled_runner(make_runner, None, mode, backend="eager", cuts=cuts)
        got = runner.run(segments)
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b)
        assert runner.step.report.num_pieces == pieces


@pytest.mark.slow
def test_full_mode_through_inductor(make_runner, tmp_path):
    eager = make_runner(num_requests=3, max_blocks=2)
    runner = compiled_runner(make_runner, tmp_path, "full")
    for seed, sizes in enumerate(SIZES):
        segments = random_segments(*sizes, seed)
        for a, b in zip(runner.run(segments), eager.run(segments), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=ATOL)
    assert runner.step.report.num_pieces == 1


def test_draft_function_traces_alike(make_runner):
    runner, eager = make_runner(), make_runner()
    inputs = runner.inputs([Sequence().segment([5, 6, 7], (2,))])
    streams = torch.randn(3, 4, 256)
    mark_step_sizes(inputs, runner.caches)
    holder = type("Holder", (), {"streams": streams})()
    mark_unbacked_sizes(holder, {"streams": {0: "rows"}})
    compiled = compile_model(runner.model.forward_mtp, ops.boundary_ops(), backend="eager")
    with torch.no_grad():
        for size in (3, 1, 9, 0):
            segment = Sequence().segment(list(range(10, 10 + size)), (0,) if size else ())
            streams = torch.randn(size, 4, 256) if size != 3 else streams
            inputs = inputs if size == 3 else runner.inputs([segment])
            want = eager.model.forward_mtp(inputs, eager.caches, streams)
            for a, b in zip(compiled(inputs, runner.caches, streams), want, strict=True):
                assert torch.equal(a, b)
    assert compiled.report.num_recompiles == 0


def test_two_layers_share_a_piece_and_differ(make_runner):
    """Layers 3 and 5 (ratio 128) run one program; swapping their weights or RoPE tables changes the result."""
    runner = compiled_runner(make_runner, None, "piecewise", backend="eager")
    report = runner.step.report
    programs = [line.split()[-1] for line in report.plan.splitlines() if line.split()[1] == "compiled"]
    assert len(set(programs)) == report.num_distinct_pieces < len(programs)
    segments = random_segments(150, 1, 3, seed=3)
    base = runner.run(segments)[0]
    blocks = runner.model.blocks
    first, second = blocks[3].attn, blocks[5].attn
    first.wkv.weight.data, second.wkv.weight.data = second.wkv.weight.data, first.wkv.weight.data
    try:
        changed = runner.run(segments)[0]
    finally:
        first.wkv.weight.data, second.wkv.weight.data = second.wkv.weight.data, first.wkv.weight.data
    assert (changed - base).abs().max() > 1e-3
    table = first.rope_table
    saved = table.clone()
    try:
        table[:150] = table[torch.randperm(150)]  # a shift would cancel out between queries and keys
        assert (runner.run(segments)[0] - base).abs().max() > 1e-3
    finally:
        table.copy_(saved)
    assert torch.equal(runner.run(segments)[0], base)


def test_inspect_flash():
    found = inspect_model(ROOT / "assets" / "configs" / "flash" / "config.json")
    assert found["graph_breaks"] == found["recompiles"] == 0
    assert found["pieces"] == 87 and found["distinct_pieces"] <= 12
    assert found["parameters"] == 290_942_289_362
    assert found["op_calls"]["dsv4::sparse_attention"] == 43
    assert found["op_calls"]["dsv4::mhc_post_pre"] == 85
    glue = {name for nodes in found["piece_nodes"] for name in nodes["aten"]}
    allowed = {
        "aten::add",
        "aten::view",
        "aten::empty",
        "aten::empty_like",
        "aten::index_select",
        "aten::_assert_scalar",
    }
    assert glue <= allowed  # everything else is an op of ours


def test_piece_plan_of_nano():
    found = inspect_model(NANO, numerics="official")
    lines = [f"{found['pieces']} pieces, {found['distinct_pieces']} distinct"]
    for nodes in found["piece_nodes"]:
        aten = {name: count for name, count in nodes["aten"].items() if name != "aten::_assert_scalar"}
        lines.append(f"{sum(nodes['ops'].values())} ops, {sum(aten.values())} aten nodes")
    assert_expected_inline(
        "\n".join(lines),
        """\
15 pieces, 7 distinct
9 ops, 3 aten nodes
19 ops, 3 aten nodes
24 ops, 4 aten nodes
20 ops, 3 aten nodes
24 ops, 4 aten nodes
20 ops, 3 aten nodes
14 ops, 1 aten nodes""",
    )
