"""Every point of the report in one table: the question, how its value follows from the samples, and the bar.

``needs`` lists paths (``a/b/c``) that the samples must hold, so that a run that measured less cannot pass.
"""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from .children import REQUEST_PATHS
from .place import BACKENDS
from .rules import RULES, SampleError
from .runs import POISON_CASES, POISON_KINDS, REPLAY_RUNS, SWEEP_KINDS, SWEEPS, WATCHED, WIDTHS
from .suites import PARTS

Sense = Literal["<=", ">=", "=="]
_HOLDS = {"<=": operator.le, ">=": operator.ge, "==": operator.eq}

FLASH_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
REPLAY_KINDS = (
    *("step/prefill", "step/decode", "step/mixed", "step/verify"),
    *("draft/prefill", "draft/decode", "draft/mixed"),
)


def paths(*parts: Iterable[object]) -> tuple[str, ...]:
    """Every combination, joined by slashes."""
    return tuple("/".join(map(str, combination)) for combination in product(*parts))


@dataclass(frozen=True, kw_only=True)
class Point:
    """One question that the report answers with a number.

    Attributes:
        question: one sentence.
        rule: name of the function of :mod:`.rules` that makes the value from the samples.
        bar: what the value is compared with.
        sense: how.
        needs: paths that the samples must hold.
    """

    question: str
    rule: str
    bar: float
    sense: Sense = "<="
    needs: Sequence[str] = ()

    def judge(self, samples: Any) -> tuple[float, bool]:
        """Value and pass; :class:`SampleError` if the samples do not allow them."""
        for path in self.needs:
            inner = samples
            for part in path.split("/"):
                if not isinstance(inner, dict) or part not in inner:
                    raise SampleError(f"samples must hold {path}")
                inner = inner[part]
            if inner is None or inner == {} or inner == []:
                raise SampleError(f"samples must hold {path}, got an empty one")
        try:
            value = RULES[self.rule](samples)
        except SampleError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
            raise SampleError(f"samples must fit the rule {self.rule}, got {type(error).__name__}: {error}") from error
        return value, bool(_HOLDS[self.sense](value, self.bar))


_ROWS_32768 = ("mhc_pre", "mhc_post", "mhc_post_pre", "mhc_head", "qkv_rope_cache", "sparse_attention",
               "grouped_o_proj")  # fmt: skip
_OFFICIAL = ("bf16", "fp8", "fp8.fp8_experts")  # cache rows, and FP4 experts re-encoded as FP8
OFFICIAL_KINDS = {
    "attn_out": ("relative RMS of the attention output", 0.010),
    "ffn_out": ("relative RMS of the FFN output", 0.006),
    "index_score": ("relative RMS of index scores", 0.03),
    "picks_changed": ("mean share of changed picks", 0.003),
}
_SWEEP = (
    *(path for kind, rows in SWEEP_KINDS.items() for path in paths(SWEEPS, (kind,), rows)),
    *paths(SWEEPS, ("by_library",), WATCHED),
)
_POISON = (
    *paths(POISON_CASES, POISON_KINDS, ("not_finite", "differing")),
    *paths(POISON_CASES, ("unowned/written",)),
)

POINTS: dict[str, Point] = {
    # ---- nano against the goldens
    "references_logits_max": Point(
        question="How far are the references on the GPU in fp32 from the exact golden logits, at most?",
        rule="largest", bar=1e-4, needs=paths(range(16)),
    ),
    "references_logits_mean": Point(
        question="How far are they on average, for the worst prompt?",
        rule="largest", bar=1e-5, needs=paths(range(16)),
    ),
    "references_nll": Point(
        question="How far is the references' NLL of a window from the golden, at most?",
        rule="largest", bar=1e-4, needs=paths(range(2)),
    ),
    "exact_nll": Point(
        question="How far is the kernels' mean NLL, exact mode in bf16, from the golden, over 35 windows?",
        rule="abs_mean", bar=5e-3, needs=paths(range(35)),
    ),
    "exact_mtp_nll": Point(
        question="How far is the mean NLL of the MTP block, over the same windows?", rule="abs_mean", bar=5e-3,
        needs=("mean",),
    ),
    "exact_top1": Point(
        question="How often do the kernels in exact mode choose the goldens' token, over prompts and all positions?",
        rule="agreement", bar=0.97, sense=">=", needs=("prompts", "prompt_9", "prompt_13", "window_0", "window_3"),
    ),
    **{
        f"official_{kind}_{backend}": Point(
            question=f"Forced inputs, official mode, kernels of {backend}: {what}, worst layer?",
            rule="largest", bar=bar, needs=_OFFICIAL,
        )
        for backend, (kind, (what, bar)) in product(BACKENDS, OFFICIAL_KINDS.items())
    },
    # ---- replays
    "replay_equals_padded": Point(
        question="How many replays differ in a bit from an eager call on the same padded batch?",
        rule="total", bar=0, sense="==", needs=paths(REPLAY_RUNS, REPLAY_KINDS),
    ),
    "replay_buckets": Point(
        question="How many buckets (step ladder and draft ladder) were never replayed in that comparison?",
        rule="zeros", bar=0, sense="==", needs=paths(REPLAY_RUNS, ("step", "draft")),
    ),
    "replay_equals_unpadded": Point(
        question="Deterministic: how many replays differ in a bit from the unpadded eager call?",
        rule="total", bar=0, sense="==", needs=paths(REPLAY_RUNS, REPLAY_KINDS),
    ),
    "batch_independence": Point(
        question="Deterministic, 64 rows alone and in 65, 129, 4,225, eager and through graphs: how many differ?",
        rule="total", bar=0, sense="==",
        needs=paths(("exact", "official"), BACKENDS, ("eager", "full", "piecewise"), (65, 129, 4225)),
    ),
    "poison": Point(
        question="With pads and unowned cache bytes poisoned, how many valid results change or are not finite, or how "
                 "many of these bytes are written?",
        rule="total", bar=0, sense="==",
        needs=_POISON,
    ),
    # ---- Flash width
    "flash_width": Point(
        question="8 Flash-width layers of 256 experts: how many steps missed the graphs or were not finite?",
        rule="total", bar=0, sense="==", needs=("prefill_8192", *(f"decode_{b}" for b in FLASH_BATCHES)),
    ),
    "flash_width_graphs": Point(
        question="How many graphs does a ladder of 20 buckets take there?", rule="total", bar=20, needs=("graphs",),
    ),
    "flash_width_capture_s": Point(
        question="Capture seconds of the 20 buckets of 8 layers?", rule="largest", bar=10, needs=("capture_s",),
    ),
    "flash_width_graph_mib": Point(
        question="MiB that these graphs hold, 20 buckets up to 8,192 rows?", rule="largest", bar=4096, needs=("mib",),
    ),
    "layers_43_graphs": Point(
        question="43 Flash-width layers: how many graphs do at most 20 buckets take?", rule="total", bar=20,
        needs=("graphs",),
    ),
    "layers_43_capture_s": Point(
        question="43 layers: capture seconds?", rule="largest", bar=30, needs=("capture_s",),
    ),
    "layers_43_graph_mib": Point(
        question="43 layers: MiB that the graphs hold?", rule="largest", bar=6144, needs=("mib",),
    ),
    "fp4_residency": Point(
        question="Peak memory beyond what is resident, as a share of an 8-bit copy of the FP4 experts?",
        rule="worst_memory", bar=0.5, needs=("flash_width", "op_1", "op_256", "op_8192"),
    ),
    # ---- nothing compiles once ready
    "zero_compilations": Point(
        question="Kernels compiled after ready: prefill over every split bucket's first and last row count, decode, "
                 "mixed, verification, and drafts of all?",
        rule="total", bar=0, sense="==", needs=_SWEEP,
    ),
    "zero_loads": Point(
        question="Kernels loaded from disk after ready, over the same steps?", rule="total", bar=0, sense="==",
        needs=_SWEEP,
    ),
    "mhc_compilations": Point(
        question="Distinct mHC compilations of one hidden size?", rule="largest", bar=8,
        needs=paths(("triton", "tilelang"), WIDTHS),
    ),
    "gemm_keys": Point(
        question="GEMM keys of Flash: how many kernels that DeepGEMM built in the cold prewarm have no counted key?",
        rule="uncounted_kernels", bar=0, sense="==", needs=paths(BACKENDS, ("gemm_keys",)),
    ),
    "prewarm_cold_s": Point(
        question="Seconds of a prewarm of everything for Flash from empty caches?", rule="largest", bar=60,
        needs=BACKENDS,
    ),
    "prewarm_warm_s": Point(
        question="Seconds of the same in another process with warm caches?", rule="largest", bar=5, needs=BACKENDS,
    ),
    "prewarm_off": Point(
        question="DSV4_PREWARM=0: how many kernels did the prewarm run, compile or mark warm?", rule="total", bar=0,
        sense="==", needs=("run", "compilations", "warm_keys"),
    ),
    "prewarm_before_capture": Point(
        question="How many captures began before the prewarm had been called?", rule="captures_before_prewarm", bar=0,
        sense="==", needs=("nano",),
    ),
    "cold_key_in_capture": Point(
        question="How many cold keys met while capturing did not raise the error that names them?", rule="unnamed",
        bar=0, sense="==", needs=("rms_norm", "prewarm"),
    ),
    "first_request": Point(
        question="First request over the tenth, right after the last stage of start-up, in processes that nothing else "
                 "disturbs and whose device and core were kept busy for half a second before: median of 3, worst path?",
        rule="first_over_tenth", bar=1.2, needs=paths(REQUEST_PATHS, ("first_s", "tenth_s", "awake_s")),
    ),
    # ---- inputs that broke other implementations
    "case_C1": Point(
        question="Skewed compilation on 4 processes: how many failed or entered a collective too early?", rule="total",
        bar=0, sense="==", needs=("failed", "entered_early", "wrong_sums", "not_skewed"),
    ),
    "case_C3": Point(
        question="A prewarm for one token, then mHC post at 1, 17, 4,096 tokens: compilations, loads, wrong results?",
        rule="total", bar=0, sense="==", needs=("compilations", "loads", "beyond_tolerance"),
    ),
    "case_C5": Point(
        question="All-zero lengths, 32 to 256 rows: how many outputs are not defined?", rule="total", bar=0, sense="==",
        needs=paths(("ops", "model"), (32, 33, 64, 128, 250, 256)),
    ),
    "case_C6": Point(
        question="Lengths 5, 0, -1, -4, top-k 512: how many pads are not zero, valid rows not finite or changed?",
        rule="total", bar=0, sense="==",
        needs=paths(("ops", "model"), ("pads_not_zero", "valid_changed", "not_finite")),
    ),
    "case_C8": Point(
        question="Ops without tokens: how many outputs have a wrong shape or dtype?", rule="total", bar=0, sense="==",
        needs=("suite",),
    ),
    "case_C11": Point(
        question="A model that no op recognises: how many prewarms did not raise?", rule="unnamed", bar=0, sense="==",
        needs=("no_case", "other_model", "other_layer"),
    ),
    "case_C12": Point(
        question="4 processes on one cold key: compilations beyond the first, and wrong results?", rule="total", bar=0,
        sense="==", needs=paths(("triton", "tilelang"), ("extra_compilations", "wrong")),
    ),
    # ---- ops
    "ops": Point(
        question="Every op against its reference, 0 to 129 rows, nano and Flash: worst error over its tolerance?",
        rule="worst_error", bar=1,
    ),
    "ops_large": Point(
        question="Model ops at Flash and Pro shapes, up to 32,768 rows: worst error over tolerance?",
        rule="worst_error", bar=1,
        needs=(
            *paths(_ROWS_32768, ("pro.32768.bfloat16",)),
            *paths(("expert_ffn", "fp8_linear", "indexer_logits", "indexer_topk", "route_topk"),
                   ("flash.8192.bfloat16", "pro.8192.bfloat16")),
        ),
    ),
    "ops_last_element": Point(
        question="Pro, 32,768 rows, queries of 2^31 elements: how far is the last element of outputs, in bf16 steps?",
        rule="largest", bar=1, needs=tuple(f"{name}.0" for name in _ROWS_32768),
    ),
    "ops_long_positions": Point(
        question="Ops that read positions, at position 1,048,575: worst error over tolerance?", rule="worst_error",
        bar=1, needs=("qkv_rope_cache", "indexer_query", "indexer_logits", "sparse_attention", "grouped_o_proj"),
    ),
    "ops_layouts": Point(
        question="How many outputs change when inputs are not contiguous?", rule="total", bar=0, sense="==",
    ),
    "ops_poisoned": Point(
        question="How many outputs change when all fresh memory is poisoned?", rule="total", bar=0, sense="==",
    ),
    "indexer_temporaries": Point(
        question="Peak temporaries of indexer logits over the stated bound, 8,192 rows against 65,536 tokens?",
        rule="worst_memory", bar=1, needs=BACKENDS,
    ),
    # ---- speed
    "mhc_post_copy_share": Point(
        question="mHC post at 16,384 tokens, L2-cold: share of the copy rate of the same minute?",
        rule="best_copy_share", bar=0.85, sense=">=", needs=("triton", "tilelang"),
    ),
    "decode_speed_up": Point(
        question="Decode of 4 Flash-width layers (64 experts, batch 1): how many times faster than Hugging Face eager?",
        rule="speed_up", bar=20, sense=">=", needs=("ours", "theirs"),
    ),
    # ---- the run itself
    "gpu_tests": Point(
        question="pytest -m gpu: how many tests did not pass?", rule="not_passed", bar=0, sense="==",
        needs=paths(PARTS, ("passed", "failed", "errors", "skipped")),
    ),
    "whole_run_s": Point(
        question="Seconds of the whole run?", rule="largest", bar=480, needs=("seconds",),
    ),
}  # fmt: skip
