import pytest
import torch

from dsv4 import ops
from dsv4.ops.shapes import tiny

from .compressor_cases import (
    CONTEXT,
    LENGTHS,
    Session,
    bits,
    feed_steps,
    make_compressor,
    merge_op,
    partials_and_merge,
    partials_op,
    random_rows,
)


@pytest.mark.parametrize(
    ("ratio", "dim", "quantize", "dtype"),
    [
        (4, 40, "none", torch.float32),
        (128, 40, "none", torch.float32),
        (4, 512, "fp8", torch.uint8),
        (128, 512, "fp8", torch.bfloat16),
        (4, 128, "fp4", torch.uint8),
    ],
)
def test_one_rank_is_the_update(ratio, dim, quantize, dtype):
    c = make_compressor(ratio, dim)
    prompts = [random_rows(c, n, seed=n) for n in LENGTHS]
    options = {"num_requests": 3, "quantize": quantize, "cache_dtype": dtype}
    update, parallel = Session(c, **options), Session(c, **options, update=partials_and_merge)
    poison = update.cache.clone()
    for session in (update, parallel):
        feed_steps(session, prompts, pad=2)
    assert torch.equal(bits(update.cache), bits(parallel.cache))
    assert torch.equal(bits(update.state), bits(parallel.state))
    assert not torch.equal(bits(update.cache), bits(poison))


class Ranks:
    """Runs every step on several ranks that own random rows, then merges into the caller's cache."""

    def __init__(self, session: Session, num_ranks: int) -> None:
        self.states = [session.state.clone() for _ in range(num_ranks)]
        self.generator = torch.Generator().manual_seed(num_ranks)

    def __call__(self, session: Session, **rows: torch.Tensor) -> None:
        owner = torch.randint(len(self.states), rows["positions"].shape, generator=self.generator)
        width, partials = session.compressor.ape.shape[1], []
        for rank, state in enumerate(self.states):
            own = rows["kv_score"].clone()
            own[owner != rank, width:] = -torch.inf
            own[owner != rank, :width] = 3.0
            session.state = state
            partials.append(partials_op(session, **(rows | {"kv_score": own})))
        merge_op(session, partials, **rows)


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
@pytest.mark.parametrize("ratio", [4, 128])
def test_ranks_agree_with_the_update(ratio, num_ranks):
    c = make_compressor(ratio, dim=40)
    prompts = [random_rows(c, n, seed=n) for n in LENGTHS]
    update, split = Session(c, num_requests=3), Session(c, num_requests=3)
    split.update = Ranks(split, num_ranks)
    for session in (update, split):
        feed_steps(session, prompts, pad=2)
    # Only the order of fp32 sums of at most 128 terms and one more exponential differ.
    torch.testing.assert_close(split.cache, update.cache, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert update.entries(0, 262 // ratio).isfinite().all()


def test_a_far_larger_maximum_elsewhere_wins():
    """Rescaling by the global maximum: the rank with tiny scores underflows to nothing."""
    c = make_compressor(4, dim=16)
    rows = random_rows(c, 4, seed=0)
    both, strong = rows.clone(), rows.clone()
    both[:2, 64 // 2 :] -= 500.0
    strong[:2, 64 // 2 :] = -torch.inf
    sessions = Session(c), Session(c)
    sessions[0].update = Ranks(sessions[0], 2)
    sessions[0].step((0, 0, both))
    sessions[1].step((0, 0, strong))
    torch.testing.assert_close(sessions[0].entries(0, 1), sessions[1].entries(0, 1), rtol=1e-5, atol=1e-5)
    assert sessions[0].entries(0, 1).isfinite().all()


def test_entries_no_rank_has_are_not_written():
    c = make_compressor(4, dim=16)
    rows = random_rows(c, 16, seed=0)
    rows[:8, c.ape.shape[1] :] = -torch.inf  # the first two windows have nothing; the third only its own rows
    session = Session(c)
    session.update = Ranks(session, 2)
    session.step((0, 0, rows))
    entries = session.entries(0, 4)
    assert entries[:2].isnan().all() and entries[2:].isfinite().all()


def test_zero_tokens():
    c = make_compressor(4, dim=16)
    session = Session(c)
    before = bits(session.cache).clone()
    none = torch.empty(0, dtype=torch.int64)
    parts = [(torch.empty(1, c.dim), torch.empty(1, c.dim), torch.empty(1, c.dim))] * 2
    merge_op(session, parts, positions=none, row_requests=none.int(), block_tables=torch.full((1, CONTEXT // 256), -1))
    assert torch.equal(bits(session.cache), before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"totals": torch.randn(2, 4)}, r"totals must be a float32 \[ranks, entries, 128\], got \[2, 4\]"),
        ({"weighted": torch.randn(2, 4, 3)}, r"weighted must be a float32 \[ranks, entries, 128\], got \[2, 4, 3\]"),
        ({"maxima": torch.randn(2, 4, 128).double()}, r"maxima must be a float32 .* got \[2, 4, 128\] torch.float64"),
        ({"norm_weight": torch.randn(3)}, r"norm_weight must have shape \[128\], got \[3\]"),
        ({"quantize": "int8"}, r"quantize must be one of .* got 'int8'"),
        ({"ratio": 0}, r"ratio must be positive, got 0"),
    ],
)
def test_errors(change, message):
    spec = ops.spec("compressor_merge")
    args, kwargs = spec.example(tiny, num_tokens=3, device=torch.device("cpu"), dtype=torch.float32, seed=0)
    names = [a.name for a in spec.overload._schema.arguments]
    with pytest.raises(ValueError, match="compressor_merge .*" + message):
        spec.overload(**(dict(zip(names, args, strict=False)) | kwargs | change))
