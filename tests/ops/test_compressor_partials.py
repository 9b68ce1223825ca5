import numpy as np
import pytest
import torch

from dsv4 import ops
from dsv4.ops.shapes import tiny

from .compressor_cases import (
    CONTEXT,
    LENGTHS,
    STEPS,
    Compressor,
    Session,
    bits,
    feed_steps,
    make_compressor,
    partials_op,
    random_rows,
)

RATIOS = [4, 128]


def pooled_rows(c: Compressor, rows: np.ndarray, last: int) -> tuple[np.ndarray, np.ndarray]:
    """Values and scores of the positions pooled by the window that ends at ``last``, position by position."""
    width, kv, score = c.ape.shape[1], [], []
    for position in range(max(0, last + 1 - c.pooled), last + 1):
        half = slice(0, width)
        if c.overlap:
            half = slice(width // 2, width) if position > last - c.ratio else slice(0, width // 2)
        kv.append(rows[position, :width][half])
        score.append((rows[position, width:] + c.ape.numpy()[position % c.ratio])[half])
    return np.stack(kv).astype(np.float64), np.stack(score).astype(np.float64)


@pytest.mark.parametrize("ratio", RATIOS)
def test_matches_numpy(ratio):
    c = make_compressor(ratio, dim=12)
    prompts = [random_rows(c, CONTEXT, seed=n) for n in range(3)]
    outputs, steps = [], []

    def record(session, **rows):
        outputs.append(partials_op(session, **rows))
        steps.append(rows)

    session = Session(c, num_requests=3, update=record)
    feed_steps(session, prompts, pad=2)
    emitted = 0
    for segments, rows, (maximum, total, weighted) in zip(STEPS, steps, outputs, strict=True):
        capacity = len(rows["positions"]) // ratio + len(rows["seq_lens"])
        assert maximum.shape == total.shape == weighted.shape == (capacity, c.dim)
        empty = set(range(capacity))
        for row, (position, request) in enumerate(zip(rows["positions"].tolist(), rows["row_requests"].tolist())):
            if position < 0 or (position + 1) % ratio:
                continue
            entry = row // ratio + request
            empty.remove(entry)  # raises if two windows share a row
            kv, score = pooled_rows(c, prompts[segments[request][0]].numpy(), position)
            weight = np.exp(score - score.max(0))
            np.testing.assert_array_equal(maximum[entry].numpy(), score.max(0).astype(np.float32))
            np.testing.assert_allclose(total[entry].numpy(), weight.sum(0), rtol=1e-5)
            np.testing.assert_allclose(weighted[entry].numpy(), (weight * kv).sum(0), rtol=1e-5, atol=1e-5)
            emitted += 1
        rest = sorted(empty)
        assert (maximum[rest] == -torch.inf).all() and (total[rest] == 0).all() and (weighted[rest] == 0).all()
    assert emitted == sum(n // ratio for n in LENGTHS)


@pytest.mark.parametrize("ratio", RATIOS)
def test_state_is_that_of_the_update(ratio):
    c = make_compressor(ratio, dim=12)
    prompts = [random_rows(c, CONTEXT, seed=n) for n in range(3)]
    sessions = Session(c, num_requests=3), Session(c, num_requests=3, update=partials_op)
    for session in sessions:
        feed_steps(session, prompts, pad=1)
    assert torch.equal(bits(sessions[0].state), bits(sessions[1].state))
    assert sessions[1].stored(0, LENGTHS[0] - 1, c.pooled).isfinite().all()


def test_rows_of_other_ranks_are_empty():
    c = make_compressor(4, dim=12)
    outputs = []
    session = Session(c, update=lambda s, **rows: outputs.append(partials_op(s, **rows)))
    rows = random_rows(c, 8, seed=0)
    rows[:, c.ape.shape[1] :] = -torch.inf
    session.step((0, 0, rows[:6]))
    session.step((0, 6, rows[6:]))
    for maximum, total, weighted in outputs:
        assert (maximum == -torch.inf).all() and (total == 0).all() and (weighted == 0).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_score": torch.randn(3, 7)}, r"kv_score must be \[tokens, 512\], got \[3, 7\]"),
        ({"positions": torch.arange(2)}, r"positions must have the 3 rows of kv_score, got 2"),
        ({"state": torch.randn(5, 7, 512)}, r"ring must have at least 8 rows, got 7"),
        ({"state": torch.randn(5, 8, 512).bfloat16()}, r"state must be float32, got torch.bfloat16"),
    ],
)
def test_errors(change, message):
    spec = ops.spec("compressor_partials")
    args, kwargs = spec.example(tiny, num_tokens=3, device=torch.device("cpu"), dtype=torch.float32, seed=0)
    names = [a.name for a in spec.overload._schema.arguments]
    with pytest.raises(ValueError, match="compressor_partials .*" + message):
        spec.overload(**(dict(zip(names, args, strict=False)) | kwargs | change))
