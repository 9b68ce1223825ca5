"""The processes of a run: what each measures, for which points, when, and for how long at most.

Measurements are named by text and imported by the process that makes them, so that a run starts its processes at once.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any, Literal

from . import suites
from .place import BACKENDS, Place
from .points import OFFICIAL_KINDS
from .runs import POISON_RUNS, REPLAY_RUNS, SWEEPS, WIDTHS

Stage = Literal["first", "alone", "together", "last"]


@dataclass(frozen=True)
class Section:
    """What one call measures.

    Attributes:
        run: ``module.function`` of this package, called with a place, a record and ``arguments``.
        points: what it is about; they fail if its process does.
        stage: ``first`` ones run on an idle machine and leave the kernel caches that the others use; ``alone`` ones
            follow, one at a time: timings, and whoever looks at the memory of the whole device. ``together`` ones run
            in parallel, because nothing in them is timed; ``last`` ones prepare beside those and measure alone.
        timeout: seconds.
        arguments: of ``run``.
        prepare: a function of :mod:`.children`, called before anything heavy is imported; the processes that it starts
            are ready before the section's turn comes, and ``run`` gets them as ``prepared``.
        imports: modules that the measurement needs and must not spend its turn on.
    """

    run: str
    points: tuple[str, ...]
    stage: Stage = "together"
    timeout: float = 250
    arguments: dict[str, Any] = field(default_factory=dict)
    prepare: str = ""
    imports: tuple[str, ...] = ()

    def load(self, place: Place) -> Callable[..., None]:
        """Import what the section needs."""
        for name in self.imports if not place.dry else ():
            import_module(name)
        module, _, name = self.run.partition(".")
        return partial(getattr(import_module(f".{module}", __package__), name), **self.arguments)


def _all() -> dict[str, Section]:
    made = {
        "prewarm": Section(
            "warm.cold_and_warm", ("prewarm_cold_s", "prewarm_warm_s", "gemm_keys"), "first", 240, prepare="prewarms"
        ),
        "mhc_post.triton": _mhc_post("triton", "triton"),
        "mhc_post.tilelang": _mhc_post("libraries", "tilelang"),
        "decode": Section(
            "speed.decode", ("decode_speed_up",), "alone", 100,
            imports=("transformers.models.deepseek_v4.modeling_deepseek_v4", "tests.hf_model"),
        ),
        "flash_width": Section(
            "flash.flash_width",
            ("flash_width", "flash_width_graphs", "flash_width_capture_s", "flash_width_graph_mib", "fp4_residency"),
            "alone", 90,
        ),
        "references": Section("nano.references", ("references_logits_max", "references_logits_mean", "references_nll")),
        "exact": Section("nano.exact", ("exact_nll", "exact_mtp_nll", "exact_top1")),
        "layers_43": Section(
            "flash.layers_43", ("layers_43_graphs", "layers_43_capture_s", "layers_43_graph_mib"), "together", 150
        ),
        "expert_memory": Section("flash.expert_memory", ("fp4_residency",)),
        "mhc_compilations": Section("warm.mhc_compilations", ("mhc_compilations",)),
        "prewarm_off": Section("warm.switched_off", ("prewarm_off",)),
        "prewarm_order": Section("warm.before_capture", ("prewarm_before_capture",)),
        "cold_key": Section("warm.cold_key", ("cold_key_in_capture",)),
        "bad_lengths": Section("cases.bad_lengths", ("case_C5", "case_C6")),
        "public_cases": Section("cases.public_cases", ("case_C3", "case_C5", "case_C6", "case_C8", "case_C11")),
        "processes": Section("cases.processes", ("case_C1", "case_C12")),
        "rows_32768.examples": Section("op_checks.rows_32768_examples", ("ops_large",)),
        "long_positions": Section("op_checks.long_positions", ("ops_long_positions",)),
    }  # fmt: skip
    for backend in BACKENDS:
        given = {"arguments": {"backend": backend}}
        official = tuple(f"official_{kind}_{backend}" for kind in OFFICIAL_KINDS)
        made |= {
            f"official.{backend}": Section("nano.official", official, **given),
            f"batches.{backend}": _batches(backend, "full"),
            f"batches.{backend}.piecewise": _batches(backend, "piecewise"),
            f"rows_32768.{backend}": Section("op_rows.rows_32768", ("ops_large", "ops_last_element"), **given),
            f"mhc_rows.{backend}": Section("op_checks.mhc_rows", ("ops",), **given),
            f"indexer.{backend}": Section("op_checks.indexer_memory", ("indexer_temporaries",), **given),
        }
    for run in REPLAY_RUNS:
        made[f"replay.{run}"] = _replay(run, ("replay_equals_padded", "replay_buckets"))
        made[f"replay.{run}.deterministic"] = _replay(f"{run}.deterministic", ("replay_equals_unpadded",))
    for run in POISON_RUNS:
        made[f"poison.{run}"] = Section("replay.poison", ("poison",), arguments={"run": run})
    for run in SWEEPS:
        points = ("zero_compilations", "zero_loads")
        made[f"sweep.{run}"] = Section("jit.sweep", points, arguments={"run": run})
    small = ("ops", "case_C8", "ops_layouts", "ops_poisoned")
    for backend, part in (*(("triton", f"{i}/4") for i in range(4)), ("libraries", "0/2"), ("libraries", "1/2")):
        made[f"ops.{backend}.{part[0]}"] = Section(
            "op_checks.small", small, arguments={"part": part, "backend": backend}
        )
    for width in WIDTHS:
        for part in ("0/3", "1/3", "2/3"):
            made[f"ops_large.{width}.{part[0]}"] = _large(width, part, "triton")
        made[f"ops_large.{width}.libraries"] = _large(width, "0/1", "libraries")
    for part in suites.PARTS:
        made[f"suite.{part}"] = Section("suites.suite", ("gpu_tests",), arguments={"part": part})
    made["first_request"] = Section("first_request.first_request", ("first_request",), "last", 130, prepare="servers")
    return made


def _mhc_post(backend: str, name: str) -> Section:
    given = {"arguments": {"backend": backend, "name": name}, "imports": (name,)}
    return Section("speed.mhc_post", ("mhc_post_copy_share",), "alone", 100, **given)


def _batches(backend: str, mode: str) -> Section:
    given = {"backend": backend, "mode": mode}
    return Section("replay.batch_independence", ("batch_independence",), arguments=given)


def _replay(run: str, points: tuple[str, ...]) -> Section:
    return Section("replay.replay", points, arguments={"run": run})


def _large(width: str, part: str, backend: str) -> Section:
    given = {"arguments": {"width": width, "part": part, "backend": backend}}
    return Section("op_checks.large", ("ops_large",), **given)


SECTIONS: dict[str, Section] = _all()
GROUPS: dict[tuple[str, ...], float] = {
    ("mhc_post.triton", "mhc_post.tilelang", "decode"): 0,
    ("references", "exact", "cold_key"): 900,
    ("replay.exact.full", "replay.exact.full.deterministic", "batches.triton"): 900,
    ("official.triton", "bad_lengths", "expert_memory"): 900,
    ("suite.engine",): 100,
    ("official.libraries", "batches.libraries"): 85,
    ("suite.deep_gemm",): 80,
    ("rows_32768.libraries", "mhc_rows.libraries"): 78,
    ("suite.capture",): 75,
    ("sweep.flash.full.libraries",): 75,
    ("replay.official.piecewise.libraries.deterministic",): 75,
    ("ops.libraries.1",): 72,
    ("ops.triton.2",): 71,
    ("mhc_compilations",): 70,
    ("ops.libraries.0",): 68,
    ("sweep.flash.piecewise.libraries",): 70,
    ("sweep.pro.full.libraries",): 65,
    ("batches.libraries.piecewise",): 65,
    ("sweep.pro.piecewise.libraries",): 60,
    ("batches.triton.piecewise",): 55,
    ("poison.piecewise.libraries", "poison.full.libraries"): 55,
    ("poison.piecewise", "poison.full"): 55,
    ("processes",): 95,
    ("replay.exact.piecewise", "layers_43"): 62,
    ("ops.triton.3",): 60,
    ("rows_32768.examples",): 60,
    ("replay.official.piecewise", "replay.official.piecewise.deterministic"): 59,
    ("rows_32768.triton", "mhc_rows.triton"): 55,
    ("indexer.libraries", "replay.official.full.libraries", "replay.official.full.libraries.deterministic"): 53,
    ("replay.exact.full.libraries", "replay.exact.full.libraries.deterministic"): 50,
    ("sweep.pro.piecewise.triton",): 48,
    ("sweep.flash.piecewise.triton",): 44,
    ("sweep.pro.full.triton",): 40,
    ("sweep.flash.full.triton",): 32,
    ("ops_large.pro.1",): 50,
    ("replay.official.piecewise.libraries",): 50,
    ("ops_large.pro.libraries",): 48,
    ("replay.exact.piecewise.deterministic",): 45,
    ("public_cases",): 44,
    ("ops_large.flash.libraries",): 42,
    ("suite.experts",): 40,
    ("replay.official.full", "replay.official.full.deterministic"): 37,
    ("suite.rest",): 36,
    ("ops.triton.1",): 35,
    ("ops_large.pro.0",): 35,
    ("ops_large.flash.1",): 33,
    ("ops.triton.0",): 33,
    ("ops_large.pro.2",): 28,
    ("suite.mhc",): 26,
    ("long_positions", "indexer.triton"): 25,
    ("prewarm_off", "prewarm_order"): 23,
}
"""Sections that share a process, since to import everything and to reach the GPU takes as long as many of them; and
where a process stands among those that run together. Numbers are seconds as an H200 took them, or about what it will
take for what is new: whoever takes longest begins first, so that none is alone at the end. Before them stand the short
ones of most weight, with 900."""
_OTHERS = 25


def processes(stages: tuple[Stage, ...], only: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Sections of ``stages`` by process, in the order in which they begin."""
    grouped = {name: group for group in GROUPS for name in group}
    found: dict[tuple[str, ...], float] = {}
    for name, section in SECTIONS.items():
        if section.stage in stages and (not only or name.startswith(only)):
            group = grouped.get(name, (name,))
            found[tuple(n for n in group if not only or n.startswith(only))] = GROUPS.get(group, _OTHERS)
    if "together" in stages:
        return sorted(found, key=lambda names: -found[names])
    return list(found)
