"""The processes of a run: what each measures, for which points, when, and for how long at most."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Literal

from dsv4.evaluate import KINDS

from . import cases, flash, jit, nano, op_checks, replay, speed, warm
from .common import Place, Record
from .points import BACKENDS, DETERMINISTIC_RUNS, GRAPH_MODES, REPLAY_RUNS, WIDTHS

Stage = Literal["first", "together", "gated", "alone"]


@dataclass(frozen=True)
class Section:
    """What one call measures.

    Attributes:
        run: measures and records.
        points: what it is about; they fail if its process does.
        stage: ``first`` ones run on an idle machine and leave the kernel caches that the others use; ``together`` ones
            run in parallel, because nothing in them is timed; ``gated`` ones prepare beside those and measure on an
            idle machine; ``alone`` ones are timings, and tests that look at the memory of the whole device.
        timeout: seconds.
    """

    run: Callable[[Place, Record], None]
    points: tuple[str, ...]
    stage: Stage = "together"
    timeout: float = 250


def _all() -> dict[str, Section]:
    made = {
        "prewarm": Section(warm.cold_and_warm, ("prewarm_cold_s", "prewarm_warm_s", "gemm_keys"), "first", 240),
        "references": Section(nano.references, ("references_logits_max", "references_logits_mean", "references_nll")),
        "exact": Section(nano.exact, ("exact_nll", "exact_mtp_nll", "exact_top1")),
        "poison": Section(replay.poison, ("poison",)),
        "layers_43": Section(
            flash.layers_43, ("layers_43_graphs", "layers_43_capture_s", "layers_43_graph_mib"), "together", 150
        ),
        "flash_width": Section(
            flash.flash_width,
            ("flash_width", "flash_width_graphs", "flash_width_capture_s", "flash_width_graph_mib", "fp4_residency"),
            "alone", 90,
        ),
        "expert_memory": Section(flash.expert_memory, ("fp4_residency",)),
        "mhc_compilations": Section(warm.mhc_compilations, ("mhc_compilations",)),
        "prewarm_off": Section(warm.switched_off, ("prewarm_off",)),
        "prewarm_order": Section(warm.before_capture, ("prewarm_before_capture",)),
        "cold_key": Section(warm.cold_key, ("cold_key_in_capture",)),
        "bad_lengths": Section(cases.bad_lengths, ("case_C5", "case_C6")),
        "public_cases": Section(cases.public_cases, ("case_C3", "case_C5", "case_C6", "case_C8", "case_C11")),
        "processes": Section(cases.processes, ("case_C1", "case_C12")),
        "long_positions": Section(op_checks.long_positions, ("ops_long_positions",)),
        "decode": Section(speed.decode, ("decode_speed_up",), "alone", 100),
    }  # fmt: skip
    for backend in BACKENDS:
        official = tuple(f"official_{kind}_{backend}" for kind in KINDS)
        made[f"official.{backend}"] = Section(partial(nano.official, backend=backend), official)
        made[f"batches.{backend}"] = Section(
            partial(replay.batch_independence, backend=backend), ("batch_independence",)
        )
        made[f"rows_32768.{backend}"] = Section(
            partial(op_checks.rows_32768, backend=backend), ("ops_large", "ops_last_element")
        )
        made[f"indexer.{backend}"] = Section(
            partial(op_checks.indexer_memory, backend=backend), ("indexer_temporaries",)
        )
        name = "triton" if backend == "triton" else "tilelang"
        made[f"mhc_post.{name}"] = Section(
            partial(speed.mhc_post, backend=backend, name=name), ("mhc_post_copy_share",), "alone", 40
        )
    for run in REPLAY_RUNS:
        made[f"replay.{run}"] = _replay(run, ("replay_equals_padded", "replay_buckets"))
    for run in DETERMINISTIC_RUNS:
        made[f"replay.{run}.deterministic"] = _replay(f"{run}.deterministic", ("replay_equals_unpadded",))
    for width, mode, backend in product(WIDTHS, GRAPH_MODES, BACKENDS):
        if backend == "triton" or mode == "full":
            run = f"{width}.{mode}.{backend}"
            made[f"sweep.{run}"] = Section(partial(jit.sweep, run=run), ("zero_compilations", "zero_loads"))
    small = ("ops", "case_C8", "ops_layouts", "ops_poisoned")
    for backend, part in (("triton", "0/3"), ("triton", "1/3"), ("triton", "2/3"), ("libraries", "0/1")):
        made[f"ops.{backend}.{part[0]}"] = Section(partial(op_checks.small, part=part, backend=backend), small)
    for width, part in product(WIDTHS, ("0/2", "1/2")):
        made[f"ops_large.{width}.{part[0]}"] = Section(
            partial(op_checks.large, width=width, part=part, backend="triton"), ("ops_large",)
        )
    made["ops_large.flash.libraries"] = Section(
        partial(op_checks.large, width="flash", part="0/1", backend="libraries"), ("ops_large",)
    )
    for part in cases.SUITE:
        stage = "alone" if part == "graphs" else "together"
        made[f"suite.{part}"] = Section(partial(cases.suite, part=part), ("gpu_tests",), stage)
    made["first_request"] = Section(speed.first_request, ("first_request",), "gated", 240)
    return made


def _replay(run: str, points: tuple[str, ...]) -> Section:
    return Section(partial(replay.replay, run=run), points)


SECTIONS: dict[str, Section] = _all()
GROUPS: tuple[tuple[str, ...], ...] = (
    ("replay.exact.full", "replay.exact.full.deterministic", "batches.triton"),
    ("replay.official.full", "replay.official.full.deterministic"),
    ("replay.official.piecewise", "replay.official.piecewise.deterministic"),
    ("replay.exact.piecewise", "layers_43"),
    ("indexer.libraries", "replay.official.full.libraries", "replay.official.full.libraries.deterministic"),
    ("rows_32768.libraries", "replay.official.piecewise.libraries"),
    ("official.libraries", "batches.libraries"),
    ("prewarm_off", "prewarm_order", "mhc_compilations"),
    ("official.triton", "bad_lengths", "expert_memory"),
    ("references", "exact", "poison", "cold_key"),
    ("rows_32768.triton", "long_positions", "indexer.triton"),
    ("mhc_post.triton", "mhc_post.tilelang", "decode"),
)
"""Sections that share a process, since to import everything and to reach the GPU takes as long as many of them."""
_LONGEST = ("suite", "processes", "ops", "sweep", "public")


def processes(stages: tuple[Stage, ...], only: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Sections of ``stages`` by process; those that take longest first, so that none is alone at the end."""
    grouped = {name: group for group in GROUPS for name in group}
    found: dict[tuple[str, ...], None] = {}
    for name, section in SECTIONS.items():
        if section.stage in stages and (not only or name.startswith(only)):
            group = grouped.get(name, (name,))
            found[tuple(n for n in group if not only or n.startswith(only))] = None
    return sorted(found, key=lambda names: not names[0].startswith(_LONGEST))
