"""Every point of the report in one table: the question, how its value follows from the samples, and the bar."""

from itertools import product

from . import required
from .children import REQUEST_PATHS, REQUEST_REPEATS
from .place import BACKENDS
from .point import Point
from .required import OFFICIAL_LAYERS, REPLAY_BUCKETS, REPLAY_CASES, WIDE_BUCKETS, paths
from .runs import POISON_CASES, POISON_KINDS, REPLAY_RUNS, SWEEP_KINDS, SWEEPS, WATCHED, WIDTHS
from .suites import OUTCOMES, PARTS

FLASH_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
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

_ZERO_ROWS = (32, 33, 64, 128, 250, 256)
COLD_KEY_TEXTS = {
    "rms_norm": ("rms_norm", "1234", "prewarm"),
    "prewarm": ("outside stream capture", "before the first capture"),
}
C11_TEXTS = {
    "no_case": ("at least 1 case, got 0", "no op recognised the model"),
    "other_model": ("must contain one DeepseekV4", "Linear"),
    "other_layer": ("Sequential at blocks.1.ffn", "recognises"),
}
_SECONDS = 0.001  # the least that anything can have taken
_PREWARMED = dict.fromkeys(paths(BACKENDS, ("call_s",)), _SECONDS) | dict.fromkeys(paths(BACKENDS, ("keys",)), 100)
# Bytes of an 8-bit copy of what one layer of Flash holds in FP4: 256 experts of three matrices of 4,096 x 2,048.
_LAYER_BYTES = 256 * 3 * 4096 * 2048
_INDEXER_BYTES, _PICKS_BYTES = 64 << 20, 256 << 20  # the bounds that indexer_logits and indexer_picks state
_PICKS = ("picks.bfloat16", "picks.float32")
_COPY_BYTES = 1_209_270_272  # what mHC post moves at 16,384 tokens: y, 4 streams in and out, and their weights
_ONE_GRAPH_EACH = dict.fromkeys(paths(("graphs",), WIDE_BUCKETS), 1)
_BY_BUCKET = paths(("by_bucket",), WIDE_BUCKETS)
_EVERY_OUTPUT = {"outputs": required.outputs}

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
        rule="abs_mean", bar=5e-3, needs=paths(range(35)), closed=True,
    ),
    "exact_mtp_nll": Point(
        question="How far is the mean NLL of the MTP block, over the same windows?", rule="abs_mean", bar=5e-3,
        needs=("mean",), closed=True,
    ),
    "exact_top1": Point(
        question="How often do the kernels in exact mode choose the goldens' token, over prompts and all positions?",
        rule="agreement", bar=0.97, sense=">=", closed=True,
        needs=paths(("prompts", "prompt_9", "prompt_13", "window_0", "window_3"), ("agreed", "rows")),
        given={"prompts/rows": 16, "prompt_9/rows": 129, "prompt_13/rows": 513, "window_0/rows": 1024,
               "window_3/rows": 1024},
    ),
    **{
        f"official_{kind}_{backend}": Point(
            question=f"Forced inputs, official mode, kernels of {backend}: {what}, worst layer?",
            rule="largest", bar=bar, needs=paths(_OFFICIAL, OFFICIAL_LAYERS[kind]),
        )
        for backend, (kind, (what, bar)) in product(BACKENDS, OFFICIAL_KINDS.items())
    },
    # ---- replays
    "replay_equals_padded": Point(
        question="How many replays differ in a bit from an eager call on the same padded batch?",
        rule="total", bar=0, sense="==", needs=paths(REPLAY_RUNS, REPLAY_CASES),
    ),
    "replay_buckets": Point(
        question="How many buckets (step ladder and draft ladder) were never replayed in that comparison?",
        rule="zeros", bar=0, sense="==", needs=paths(REPLAY_RUNS, REPLAY_BUCKETS),
    ),
    "replay_equals_unpadded": Point(
        question="Deterministic: how many replays differ in a bit from the unpadded eager call?",
        rule="total", bar=0, sense="==", needs=paths(REPLAY_RUNS, REPLAY_CASES),
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
        rule="total", bar=0, sense="==",
        needs=paths(("prefill_8192", *(f"decode_{b}" for b in FLASH_BATCHES)), ("not_finite", "not_replayed")),
    ),
    "flash_width_graphs": Point(
        question="How many graphs does a ladder of 20 buckets take there?", rule="total", bar=20,
        needs=tuple(_ONE_GRAPH_EACH), least=_ONE_GRAPH_EACH,
    ),
    "flash_width_capture_s": Point(
        question="Capture seconds of the 20 buckets of 8 layers?", rule="largest", bar=10,
        needs=_BY_BUCKET, least={"capture_s": _SECONDS},
    ),
    "flash_width_graph_mib": Point(
        question="MiB that these graphs hold, 20 buckets up to 8,192 rows?", rule="largest", bar=4096,
        needs=_BY_BUCKET, least={"mib": 1},
    ),
    "layers_43_graphs": Point(
        question="43 Flash-width layers: how many graphs do at most 20 buckets take?", rule="total", bar=20,
        needs=tuple(_ONE_GRAPH_EACH), least=_ONE_GRAPH_EACH,
    ),
    "layers_43_capture_s": Point(
        question="43 layers: capture seconds?", rule="largest", bar=30, needs=_BY_BUCKET,
        least={"capture_s": _SECONDS},
    ),
    "layers_43_graph_mib": Point(
        question="43 layers: MiB that the graphs hold?", rule="largest", bar=6144, needs=_BY_BUCKET,
        least={"mib": 1},
    ),
    "fp4_residency": Point(
        # Below 1, nothing that ran held such a copy. Graphs of up to 8,192 rows, 2.5 GiB, are two fifths of one.
        question="Peak memory beyond weights and caches, as a share of an 8-bit copy of ONE layer's FP4 experts?",
        rule="worst_memory", bar=0.75,
        needs=paths(("flash_width", "op_1", "op_256", "op_8192"), ("peak_bytes", "before_bytes")),
        given=dict.fromkeys(paths(("flash_width", "op_1", "op_256", "op_8192"), ("unit_bytes",)), _LAYER_BYTES),
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
        needs=(), least=dict.fromkeys(paths(("triton", "tilelang"), WIDTHS), 1),
    ),
    "gemm_keys": Point(
        question="GEMM keys of Flash: how many kernels that DeepGEMM built in the cold prewarm have no counted key, "
                 "and how many such keys no kernel?",
        rule="uncounted_kernels", bar=0, sense="==",
        needs=paths(BACKENDS, ("by_op", "deep_gemm_keys", "deep_gemm_kernels")),
        least=dict.fromkeys(paths(BACKENDS, ("gemm_keys",)), 30)
        | dict.fromkeys(paths(("libraries",), ("by_op/deep_gemm", "deep_gemm_keys", "deep_gemm_kernels")), 30),
        may_be_empty=("triton/deep_gemm_keys", "triton/deep_gemm_kernels"),
    ),
    "prewarm_cold_s": Point(
        question="Seconds of a prewarm of everything for Flash from empty caches?", rule="longest_call", bar=60,
        needs=(), least=_PREWARMED | dict.fromkeys(paths(BACKENDS, ("compilations",)), 100),
    ),
    "prewarm_warm_s": Point(
        question="Seconds of the same in another process with warm caches, which compiles nothing?",
        rule="longest_call", bar=5, needs=(), least=_PREWARMED,
        given=dict.fromkeys(paths(BACKENDS, ("compilations",)), 0),
    ),
    "prewarm_off": Point(
        question="DSV4_PREWARM=0: how many kernels did the prewarm run, compile or mark warm?", rule="total", bar=0,
        sense="==", needs=("run", "compilations", "warm_keys"),
    ),
    "prewarm_before_capture": Point(
        question="How many captures began before the prewarm had been called?", rule="captures_before_prewarm", bar=0,
        sense="==", needs=(), least={"nano/events": 12},  # a prewarm, and as many captures as the ladder has buckets
    ),
    "cold_key_in_capture": Point(
        question="How many cold keys met while capturing did not raise the error that names them?", rule="unnamed",
        bar=0, sense="==", needs=paths(COLD_KEY_TEXTS, ("message",)), options={"texts": COLD_KEY_TEXTS},
    ),
    "first_request": Point(
        question="First request over the tenth: the median of this ratio over 3 engines or more, each in a process "
                 "that nothing else disturbs, whose device and core were kept busy for half a second, which rehearsed "
                 "again, as start-up ends with a rehearsal, and whose core took as long, within a tenth, for a loop of "
                 "Python before and after either request; worst path?",
        rule="first_over_tenth", bar=1.2, needs=(),
        least=dict.fromkeys(paths(REQUEST_PATHS, ("awake_s", "request_s", "core_s")), REQUEST_REPEATS),
        options={"engines": REQUEST_REPEATS},
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
        needs=(
            *paths(("model",), _ZERO_ROWS),
            *paths(("ops",), _ZERO_ROWS, (f"{name}_differs" for name in required.LENGTH_OPS)),
            *paths(("ops",), _ZERO_ROWS, (f"{n}_pads_differ" for n in (*required.LENGTH_OPS, *required.PAGE_OPS))),
        ),
    ),
    "case_C6": Point(
        question="Lengths 5, 0, -1, -4, top-k 512: how many pads are not zero, valid rows not finite or changed?",
        rule="total", bar=0, sense="==",
        needs=paths(("ops", "model"), ("pads_not_zero", "valid_changed", "not_finite")),
    ),
    "case_C8": Point(
        question="Ops without tokens: how many outputs have a wrong shape or dtype?", rule="total", bar=0, sense="==",
        needs=required.empty_calls,
    ),
    "case_C11": Point(
        question="A model that no op recognises: how many prewarms did not raise?", rule="unnamed", bar=0, sense="==",
        needs=paths(C11_TEXTS, ("message",)), options={"texts": C11_TEXTS},
    ),
    "case_C12": Point(
        question="4 processes on the same cold keys, all of nano's in Triton, one in TileLang: compilations beyond the "
                 "first of a kernel, keys without a kernel, and wrong results?",
        rule="total", bar=0, sense="==",
        needs=paths(
            ("triton", "tilelang"),
            ("extra_compilations", "keys_without_kernel", "wrong", "neither_compiled_nor_loaded"),
        ),
    ),
    # ---- ops
    "ops": Point(
        question="Every op against its reference, 0 to 129 rows, nano, Flash and Pro: worst error over tolerance?",
        rule="worst_error", bar=1, needs=required.op_cases, options=_EVERY_OUTPUT,
    ),
    "ops_large": Point(
        question="Model ops at Flash and Pro shapes, up to 32,768 rows: worst error over tolerance?",
        rule="worst_error", bar=1, needs=required.large_cases, options=_EVERY_OUTPUT,
    ),
    "ops_last_element": Point(
        question="Pro, outputs of up to 2^31 elements and more: how far is the last one, in 1/256 of it or its row?",
        rule="largest", bar=1,
        needs=required.last_elements,
    ),
    "ops_long_positions": Point(
        question="Ops that read positions, at position 1,048,575: worst error over tolerance?", rule="worst_error",
        bar=1, needs=paths(required.LONG_POSITIONS, ("2.bfloat16", "17.bfloat16")), options=_EVERY_OUTPUT,
    ),
    "ops_layouts": Point(
        question="How many outputs change when inputs are not contiguous?", rule="total", bar=0, sense="==",
        needs=required.laid_out_ops,
    ),
    "ops_poisoned": Point(
        question="How many outputs change when all fresh memory is poisoned?", rule="total", bar=0, sense="==",
        needs=required.poisoned_ops,
    ),
    "indexer_temporaries": Point(
        question="Peak memory of the indexer over the bounds its ops state: temporaries of scores, 8,192 rows against "
        "65,536 tokens, and all of picks, 8,192 rows against 2^20 tokens?",
        rule="worst_memory", bar=1, needs=paths((*BACKENDS, *_PICKS), ("peak_bytes", "before_bytes")),
        given=dict.fromkeys(paths(BACKENDS, ("unit_bytes",)), _INDEXER_BYTES)
        | dict.fromkeys(paths(_PICKS, ("unit_bytes",)), _PICKS_BYTES),
    ),
    # ---- speed
    "mhc_post_copy_share": Point(
        question="mHC post at 16,384 tokens, L2-cold: share of the copy rate of the same minute, slower backend?",
        rule="worst_copy_share", bar=0.85, sense=">=", needs=(),
        least=dict.fromkeys(paths(("triton", "tilelang"), ("kernel_us", "copy_us")), 30),
        given=dict.fromkeys(paths(("triton", "tilelang"), ("kernel_bytes", "copy_bytes")), _COPY_BYTES),
    ),
    "decode_speed_up": Point(
        question="Decode of 4 Flash-width layers (64 experts, batch 1): how many times faster than Hugging Face eager?",
        rule="speed_up", bar=20, sense=">=", needs=(), least={"ours": 30, "theirs": 30},
    ),
    # ---- the run itself
    "gpu_tests": Point(
        question="pytest -m gpu: how many tests did not pass?", rule="not_passed", bar=0, sense="==",
        needs=lambda: (*required.tests(), *paths(PARTS, (*OUTCOMES, "collected"))),
    ),
    "whole_run_s": Point(
        question="Seconds of the whole run?", rule="largest", bar=480, needs=(),
        least={"seconds": 1},
    ),
}  # fmt: skip
