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

Stage = Literal["first", "together", "alone"]


@dataclass(frozen=True)
class Section:
    """One process.

    Attributes:
        run: measures and records.
        points: what it is about; they fail if the process does.
        stage: ``first`` sections run one after another on an idle machine and leave the kernel caches that the others
            use; ``together`` ones run in parallel, because nothing in them is timed; ``alone`` ones are timings, and
            tests that look at the memory of the whole device.
        timeout: seconds.
        caches: which of the kernel caches it uses.
    """

    run: Callable[[Place, Record], None]
    points: tuple[str, ...]
    stage: Stage = "together"
    timeout: float = 170
    caches: str = "triton"


def _all() -> dict[str, Section]:
    made = {
        "prewarm": Section(warm.cold_and_warm, ("prewarm_cold_s", "prewarm_warm_s", "gemm_keys"), "first", 240),
        "references": Section(nano.references, ("references_logits_max", "references_logits_mean", "references_nll")),
        "exact": Section(nano.exact, ("exact_nll", "exact_mtp_nll", "exact_top1")),
        "poison": Section(replay.poison, ("poison",)),
        "layers_43": Section(
            flash.layers_43, ("layers_43_graphs", "layers_43_capture_s", "layers_43_graph_mib"), "alone", 90
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
        "processes": Section(cases.processes, ("case_C1", "case_C12"), caches="libraries"),
        "long_positions": Section(op_checks.long_positions, ("ops_long_positions",)),
        "suite": Section(cases.suite, ("gpu_tests",), "alone", 150, caches="libraries"),
        "decode": Section(speed.decode, ("decode_speed_up",), "alone", 100),
    }  # fmt: skip
    for backend in BACKENDS:
        kept = {"caches": backend}
        official = tuple(f"official_{kind}_{backend}" for kind in KINDS)
        made[f"official.{backend}"] = Section(partial(nano.official, backend=backend), official, **kept)
        made[f"batches.{backend}"] = Section(
            partial(replay.batch_independence, backend=backend), ("batch_independence",), **kept
        )
        made[f"rows_32768.{backend}"] = Section(
            partial(op_checks.rows_32768, backend=backend), ("ops_large", "ops_last_element"), **kept
        )
        made[f"indexer.{backend}"] = Section(
            partial(op_checks.indexer_memory, backend=backend), ("indexer_temporaries",), **kept
        )
        name = "triton" if backend == "triton" else "tilelang"
        made[f"mhc_post.{name}"] = Section(
            partial(speed.mhc_post, backend=backend, name=name), ("mhc_post_copy_share",), "alone", 40, **kept
        )
    for run in REPLAY_RUNS:
        made[f"replay.{run}"] = _replay(run, ("replay_equals_padded", "replay_buckets"))
    for run in DETERMINISTIC_RUNS:
        made[f"replay.{run}.deterministic"] = _replay(f"{run}.deterministic", ("replay_equals_unpadded",))
    for width, mode, backend in product(WIDTHS, GRAPH_MODES, BACKENDS):
        if backend == "triton" or mode == "full":
            run = f"{width}.{mode}.{backend}"
            made[f"sweep.{run}"] = Section(
                partial(jit.sweep, run=run), ("zero_compilations", "zero_loads"), caches=backend
            )
    small = ("ops", "case_C8", "ops_layouts", "ops_poisoned")
    for backend, part in (("triton", "0/3"), ("triton", "1/3"), ("triton", "2/3"), ("libraries", "0/1")):
        made[f"ops.{backend}.{part[0]}"] = Section(
            partial(op_checks.small, part=part, backend=backend), small, caches=backend
        )
    for width, part in product(WIDTHS, ("0/2", "1/2")):
        made[f"ops_large.{width}.{part[0]}"] = Section(
            partial(op_checks.large, width=width, part=part, backend="triton"), ("ops_large",)
        )
    made["ops_large.flash.libraries"] = Section(
        partial(op_checks.large, width="flash", part="0/1", backend="libraries"), ("ops_large",), caches="libraries"
    )
    made["first_request"] = Section(speed.first_request, ("first_request",), "alone", 120)
    return made


def _replay(run: str, points: tuple[str, ...]) -> Section:
    return Section(partial(replay.replay, run=run), points, caches="libraries" if "libraries" in run else "triton")


_LONGEST = ("processes", "sweep", "ops", "official", "replay", "public_cases", "batches", "poison", "mhc_comp")
SECTIONS: dict[str, Section] = dict(sorted(_all().items(), key=lambda item: not item[0].startswith(_LONGEST)))
"""Those that take longest come first, so that none of them is alone at the end."""
