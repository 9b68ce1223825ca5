"""Inputs that broke other implementations: untraceable host code, ids as indices, empty steps, the wrong RoPE base."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from dsv4 import ops
from dsv4.compile import GraphBreakError, compile_model
from dsv4.compile_stage import mark_step_sizes
from dsv4.execution import Execution
from dsv4.inputs import build_inputs
from dsv4.inspection import meta_runner
from dsv4.model import DeepseekV4
from dsv4.runner import Runner, Sequence
from dsv4.weights import meta_weights

from .engines import greedy, make_engine, recorded_texts
from .tiny_model import TinyCheckpoint, place, random_tokens, runner_of, tiny_config

NUMERICS = ("exact", "official")


def ids_around(vocab_size: int) -> list[int]:
    """First and last id, the first beyond the vocabulary, the pad, and the largest int32."""
    return [0, vocab_size - 1, vocab_size, -1, 2**31 - 1]


# ---- host code in the traced path ------------------------------------------------------------------------------------


@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize("ratios", [(0, 4), (128, 4)], ids=str)
def test_two_layers_are_one_graph(ratios, numerics):
    """Without data there is nothing to read back: one graph without breaks serves 13, 1 and 64 rows."""
    runner = meta_runner(tiny_config(ratios), Execution.of(numerics))
    compiled = compile_model(runner.model.forward_streams, ops.boundary_ops(), backend="eager")
    for rows in (13, 1, 64):
        inputs = runner.inputs([place(0).segment([1] * rows, (rows - 1,))])
        mark_step_sizes(inputs, runner.caches)
        logits, streams = compiled(inputs, runner.caches)
        assert logits.device.type == "meta" and logits.shape == (1, 61) and streams.shape == (rows, 4, 96)
    assert compiled.report.graph_breaks == compiled.report.num_recompiles == 0


def test_a_read_back_value_is_no_graph(monkeypatch):
    """What the test above would say of a layer that looks at its data."""
    runner = meta_runner(tiny_config((0, 4)), Execution.of("exact"))
    attention = runner.model.blocks[1].attn
    forward = type(attention).forward

    def reads_back(self, x, inputs, cache):
        return forward(self, x * float(inputs.num_valid.item() > 1), inputs, cache)

    monkeypatch.setattr(type(attention), "forward", reads_back)
    inputs = runner.inputs([place(0).segment([1] * 13, (12,))])
    mark_step_sizes(inputs, runner.caches)
    with pytest.raises(GraphBreakError):
        compile_model(runner.model.forward_streams, ops.boundary_ops(), backend="eager")(inputs, runner.caches)


@pytest.mark.parametrize("numerics", NUMERICS)
def test_fake_tensors(numerics):
    """Fakes of a CPU model have the shapes and dtypes of real steps, MTP included."""
    config, mode = tiny_config((4, 128)), Execution.of(numerics)
    kinds = {name: (w.shape, w.dtype) for name, w in meta_weights(config, numerics, mode.dtype).items()}
    with FakeTensorMode():
        weights = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in kinds.items()}
        runner = runner_of(DeepseekV4(config, mode, weights, max_positions=512))
        for rows in (1, 13, 64):
            segment = place(0).segment([1] * rows, range(rows))
            logits, streams = runner.run([segment])
            mtp_logits, mtp_streams = runner.run_draft([segment], streams)
            for value in (logits, mtp_logits):
                assert isinstance(value, FakeTensor) and value.device.type == "cpu"
                assert value.shape == (rows, 61) and value.dtype == torch.float32
            for value in (streams, mtp_streams):
                assert value.shape == (rows, 4, 96) and value.dtype == mode.dtype


# ---- ids used as indices ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_ids_outside_the_tables_read_nothing(dtype):
    vocab, topk, experts = 97, 6, 16
    g = torch.Generator().manual_seed(0)
    ids = torch.tensor(ids_around(vocab), dtype=dtype)
    weight = torch.randn(vocab, 32, generator=g)
    streams = ops.embed_streams(ids, weight, num_streams=4, dtype=torch.float32)
    want = torch.stack([weight[0], weight[vocab - 1], *torch.zeros(3, 32)])
    assert torch.equal(streams, want.unsqueeze(1).expand(5, 4, 32))

    table = torch.rand(vocab, experts, generator=g).argsort(1)[:, :topk].int().contiguous()
    logits = torch.randn(5, experts, generator=g)
    valid = torch.tensor([5], dtype=torch.int32)
    chosen, weights = ops.route_hash(logits, table, ids, valid, scale=1.5)
    assert torch.equal(chosen[:2], table[[0, vocab - 1]])
    torch.testing.assert_close(weights[:2].sum(1), torch.full((2,), 1.5))
    assert (chosen[2:] == -1).all() and (weights[2:] == 0).all()


@pytest.mark.parametrize("index", [2, 3, 4])
def test_ids_are_refused_before_a_step(index):
    token = ids_around(2048)[index]
    segment = Sequence().segment([0, 2047, token])
    with pytest.raises(ValueError, match=rf"request 0: token id at index 2 must be .* \[0, 2048\), got {token}"):
        build_inputs([segment], vocab_size=2048, max_blocks=1)


def test_ids_are_refused_by_the_engine(nano_model, golden):
    """Each bad prompt gets its error; the good one beside them is served."""
    engine, text = make_engine(nano_model), recorded_texts(golden)[0]
    *bad, good = engine.generate([*([5, token] for token in ids_around(2048)[2:]), text.prompt], greedy(4))
    for token, completion in zip(ids_around(2048)[2:], bad, strict=True):
        assert f"prompt: token id at index 1 must be an integer in [0, 2048), got {token}" in completion.error
    assert good.error is None and good.token_ids == text.continuation[:4]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[bool, TinyCheckpoint]:
    """By whether it has hash-routed layers."""
    directory = tmp_path_factory.mktemp("cases")
    return {
        hashed: TinyCheckpoint.write(tiny_config(num_hash_layers=2 * hashed), directory / str(hashed))
        for hashed in (False, True)
    }


@pytest.mark.parametrize("numerics", NUMERICS)
@pytest.mark.parametrize("hashed", [False, True], ids=["scored", "hashed"])
def test_own_embeddings_equal_looked_up_ones(checkpoints, hashed, numerics):
    """With hash layers the ids must come too; without them −1 says that a row has none."""
    model = checkpoints[hashed].model(numerics)
    tokens = random_tokens(9, 61, seed=6)
    want = runner_of(model).run([place(0).segment(tokens, range(9))], num_rows=11)
    embeddings = model.embed[torch.tensor(tokens)].to(model.execution.dtype)
    given = tokens if hashed else [-1] * 9
    got = runner_of(model).run_embedded([place(0).segment(given, range(9))], embeddings, num_rows=11)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_embeddings_alone_are_refused_with_hash_layers(checkpoints):
    runner = runner_of(checkpoints[True].model("exact"))
    embeddings = torch.randn(3, 96)
    message = "request 0: token ids must come with embeddings for a model with 2 hash layers, got -1 at index 1"
    with pytest.raises(ValueError, match=message):
        runner.run_embedded([place(0).segment([4, -1, 5])], embeddings)
    with pytest.raises(ValueError, match="request 1: token ids must come with embeddings"):
        runner.run_embedded([place(0).segment([4]), place(1).segment([-1, -1])], embeddings)


def test_wrong_embeddings_are_refused(checkpoints):
    runner = runner_of(checkpoints[False].model("exact"))
    segments = [place(0).segment([-1, -1, 5])]
    with pytest.raises(ValueError, match=r"embeddings must have shape \[3, 96\], got \[2, 96\]"):
        runner.run_embedded(segments, torch.randn(2, 96))
    with pytest.raises(ValueError, match="embeddings must have dtype torch.float32, got torch.bfloat16"):
        runner.run_embedded(segments, torch.randn(3, 96).bfloat16())
    with pytest.raises(ValueError, match=r"index 2 must be an integer in \[-1, 61\), got 61"):
        runner.run_embedded([place(0).segment([-1, -1, 61])], torch.randn(3, 96))
    with pytest.raises(ValueError, match=r"index 0 must be an integer in \[0, 61\), got -1"):
        runner.run(segments)


# ---- steps without rows ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pads", [{}, {"num_rows": 5}, {"num_rows": 5, "num_requests": 3}, {"num_requests": 3}], ids=str
)
@pytest.mark.parametrize("numerics, storage", [("exact", "fp32"), ("official", "bf16"), ("official", "fp8")])
def test_steps_without_rows(nano_model, numerics, storage, pads):
    model = nano_model(numerics)
    runner = runner_of(model, storage=storage)
    runner.run([place(0).segment(random_tokens(9, 2048, seed=7))])
    before = [t.clone() for t in runner.caches.tensors()]
    inputs = runner.inputs([], **pads)
    with torch.no_grad():
        logits, streams = model.forward_streams(inputs, runner.caches)
        mtp_logits, mtp_streams = model.forward_mtp(inputs, runner.caches, streams)
    for value in (logits, mtp_logits):
        assert value.shape == (0, 2048) and value.dtype == torch.float32
    for value in (streams, mtp_streams):
        assert value.shape == (pads.get("num_rows", 0), 4, 256) and value.dtype == model.execution.dtype
        assert (value == 0).all()
    for old, new in zip(before, runner.caches.tensors(), strict=True):
        assert torch.equal(old.flatten().view(torch.uint8), new.flatten().view(torch.uint8))


# ---- the RoPE base of each kind of layer -----------------------------------------------------------------------------


class Calls(TorchDispatchMode):
    """Arguments of the last call of every ``dsv4::`` op."""

    def __init__(self) -> None:
        super().__init__()
        self.last: dict[str, tuple] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "dsv4":
            self.last[func.name().removeprefix("dsv4::")] = args
        return func(*args, **(kwargs or {}))


def angle_per_position(ratio: int) -> np.ndarray:
    """Published values: base 10,000; or base 160,000, divided by 16 from frequency 25 on, unchanged up to 15."""
    i = np.arange(32)
    plain = (160_000.0 if ratio else 10_000.0) ** (-2 * i / 64)
    if not ratio:
        return plain
    divided = np.clip((i - 15) / (25 - 15), 0, 1)
    return plain * (1 - divided) + plain / 16 * divided


def turned(value: torch.Tensor, positions: range, ratio: int) -> torch.Tensor:
    """``value [T, ..., dim]`` with its last 64 dimensions rotated as complex numbers, in float64."""
    angles = np.outer(np.array(positions), angle_per_position(ratio))
    factor = torch.tensor(np.exp(1j * angles)).view(len(positions), *[1] * (value.dim() - 2), 32)
    pairs = torch.view_as_complex(value[..., -64:].double().unflatten(-1, (32, 2)))
    tail = torch.view_as_real(pairs * factor).flatten(-2)
    return torch.cat((value[..., :-64].double(), tail), -1)


def rotated_values(runner: Runner, layer: int, x: torch.Tensor, positions: range) -> dict[str, torch.Tensor]:
    """Everything that ``layer`` rotates, as the next op or the caches see it."""
    attention, cache = runner.model.blocks[layer].attn, runner.caches.layers[layer]
    inputs = runner.inputs([place(0).segment([1] * len(x), start=positions.start)])
    with torch.no_grad(), Calls() as calls:
        attention(x, inputs, cache)
    assert calls.last["grouped_o_proj"][1] is attention.rope_table  # un-rotates with the same table
    window = cache.window.flatten(0, 1)[positions.start : positions.stop]
    values = {"q": calls.last["sparse_attention"][0], "window": window}
    if attention.ratio:
        first, last = positions.start // attention.ratio, positions.stop // attention.ratio
        values["entries"] = cache.entries.flatten(0, 1)[first:last]
        values["index_q"] = calls.last["indexer_picks"][0]
        values["index_k"] = cache.index_entries.flatten(0, 1)[first:last]
    return {name: value.clone() for name, value in values.items()}


@pytest.mark.parametrize("ratio, layer", [(0, 1), (4, 2)])
def test_rope_base_of_each_kind(make_runner, ratio, layer):
    """The same layer input, rotated by its own table and, with a table of ones and zeros, not at all."""
    positions = range(1000, 1140)
    x = torch.randn(len(positions), 256, generator=torch.Generator().manual_seed(8))
    runner = make_runner()
    attention = runner.model.blocks[layer].attn
    assert attention.ratio == ratio
    actual = rotated_values(runner, layer, x, positions)
    own = attention.rope_table
    attention.rope_table = torch.cat((torch.ones(2048, 32), torch.zeros(2048, 32)), 1)
    try:
        still = rotated_values(make_runner(), layer, x, positions)
    finally:
        attention.rope_table = own
    firsts = range(positions.start, positions.stop, 4)
    assert set(actual) == ({"q", "window", "entries", "index_q", "index_k"} if ratio else {"q", "window"})
    for name, value in still.items():
        at = firsts if name in ("entries", "index_k") else positions
        # At 1,140 radians the fp32 frequency and its product with the position are each 6e-5 off; pairs reach norm 8.
        torch.testing.assert_close(actual[name].double(), turned(value, at, ratio), rtol=0, atol=1e-3)
        other = turned(value, at, 4 - ratio)
        assert (actual[name] - other).abs().max() > 1, f"{name} must differ between the kinds of layers"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logit_offsets": (-1,)}, r"request 1: a logit offset must be in \[0, 2\), got -1"),
        ({"logit_offsets": (2,)}, r"request 1: a logit offset must be in \[0, 2\), got 2"),
        ({"state_slot": -1}, "request 1: state_slot must be at least 0, got -1"),
        ({"blocks": ()}, "request 1: blocks must cover 2 tokens, got 0 pages of 256"),
        ({"window_pages": ()}, "request 1: window_pages must cover 2 tokens, got 0 pages of 128"),
    ],
)
def test_segments_that_would_reach_other_requests(make_runner, change, message):
    runner = make_runner(num_requests=2, max_blocks=2)
    good = Sequence().segment([5, 6, 7], (2,))
    bad = replace(Sequence(2, 4, 1).segment([8, 9], (1,)), **change)
    with pytest.raises(ValueError, match=message):
        runner.inputs([good, bad])


def test_rope_tables_must_cover_the_caches(make_runner):
    runner = make_runner()
    with pytest.raises(ValueError, match=r"max_positions must be at least 2304, got 2048"):
        Runner.eager(runner.model, runner.caches, 9)
