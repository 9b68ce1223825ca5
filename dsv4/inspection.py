"""What the traced model is made of, from a config alone: nothing is loaded and nothing is computed.

The model is built on the meta device, traced and split like the real one, then called over a sweep of sizes.
"""

import dataclasses
import math
from pathlib import Path
from typing import Any

from . import ops
from .caches import allocate_caches
from .checkpoint import DTYPES, expected_tensors
from .compile import compile_model
from .compile_stage import mark_step_sizes
from .config import ModelConfig
from .engine_config import CompileMode
from .execution import Execution, NumericsMode
from .model import DeepseekV4
from .runner import Runner, Sequence
from .weights import meta_weights

SWEEP = ((0, 0, 0), (1, 1, 1), (2, 1, 1), (7, 7, 7), (13, 2, 0), (64, 2, 2), (257, 3, 5))
"""Rows, requests and logit rows of the calls that must not trace again."""

_BLOCKS = 16


def inspect_model(
    path: str | Path, *, numerics: NumericsMode = "exact", mode: CompileMode = "piecewise"
) -> dict[str, Any]:
    """Trace a model on the meta device and describe it.

    Args:
        path: a checkpoint directory or a ``config.json``; weights are not read.
        numerics: mode whose ops are traced.
        mode: ``piecewise`` cuts at the boundary ops; ``full`` and ``off`` leave one piece.

    Returns:
        ``config``, ``parameters`` and ``bytes`` of the checkpoint, ``ops`` (all registered), ``graph_breaks``,
        ``boundary_ops`` (those met), ``pieces``, ``distinct_pieces`` (programs a compiler would see), ``recompiles``
        (over :data:`SWEEP`), ``op_calls`` (per op, in the trace) and ``piece_nodes`` (per distinct piece: op calls
        and remaining ATen nodes).
    """
    config = ModelConfig.from_json(path)
    runner = meta_runner(config, Execution.of(numerics, device="meta" if numerics == "official" else "cpu"))
    cuts = ops.boundary_ops() if mode == "piecewise" else ()
    compiled = compile_model(runner.model.forward_streams, cuts, "piecewise" if cuts else "full", backend="eager")
    for rows, requests, logit_rows in SWEEP:
        inputs = _sized_inputs(runner, rows, requests, logit_rows)
        mark_step_sizes(inputs, runner.caches)
        compiled(inputs, runner.caches)
    report = compiled.report
    table = expected_tensors(config)
    return {
        "config": config.to_dict(),
        "parameters": config.num_parameters,
        "bytes": sum(math.prod(t.shape) * DTYPES[t.dtype].itemsize for t in table.values()),
        "ops": sorted(spec.qualname for spec in ops.specs().values()),
        "graph_breaks": report.graph_breaks,
        "boundary_ops": list(report.boundary_ops),
        "pieces": report.num_pieces,
        "distinct_pieces": report.num_distinct_pieces,
        "recompiles": report.num_recompiles,
        "op_calls": dict(report.op_calls),
        "piece_nodes": [dataclasses.asdict(nodes) for nodes in report.piece_nodes],
    }


def meta_runner(config: ModelConfig, execution: Execution) -> Runner:
    """A runner whose model and caches have shapes and no storage."""
    model = DeepseekV4(config, execution, meta_weights(config, execution.numerics, execution.dtype), max_positions=4096)
    caches = allocate_caches(
        config, execution, num_blocks=_BLOCKS, num_window_pages=2 * _BLOCKS, num_slots=8,
        storage="bf16" if execution.quantized else "fp32", device="meta",
    )  # fmt: skip
    return Runner.eager(model, caches, _BLOCKS)


def _sized_inputs(runner: Runner, rows: int, requests: int, logit_rows: int):
    """Inputs of the given sizes: one request holds all rows, the others are pads."""
    segments = []
    if requests:
        sequence = Sequence()
        segments = [sequence.segment([0] * rows, [index % max(rows, 1) for index in range(logit_rows)])]
    return runner.inputs(segments, num_rows=rows, num_requests=requests)
