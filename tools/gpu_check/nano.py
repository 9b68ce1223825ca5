"""The trained nano checkpoint against its goldens: references in fp32, kernels in exact and official mode."""

import json

import torch
from safetensors.torch import load_file

from dsv4 import evaluate
from dsv4.ops import _runtime
from dsv4.runner import Sequence

from .common import Record
from .models import nano_runner, using_backend
from .place import GOLDEN, Place

WINDOW = 1024
REFERENCE_WINDOWS = (0, 3)


def _prompts() -> list[list[int]]:
    return json.loads((GOLDEN / "prompts.json").read_text())


def references(place: Place, record: Record) -> None:
    """Nano in fp32 through the references (``--ops reference``), on the GPU."""
    golden, prompts = load_file(GOLDEN / "exact_logits.safetensors"), _prompts()
    recorded = json.loads((GOLDEN / "exact_nll.json").read_text())
    with _runtime.use_references():
        runner = nano_runner(place, "exact", dtype=torch.float32)
        with record.block("references_logits_max", "references_logits_mean") as (worst, mean):
            for index, prompt in enumerate(prompts):
                if place.dry and len(prompt) > 40:
                    continue
                error = (evaluate.last_logits(runner, prompt).cpu() - golden[f"logits_{index}"]).abs()
                worst[str(index)], mean[str(index)] = error.max().item(), error.mean().item()
        with record.block("references_nll") as (found,):
            for index in range(1 if place.dry else 2):
                tokens = recorded["tokens"][index * WINDOW : (index + 1) * WINDOW + 3]
                score = evaluate.score(runner, tokens, window=WINDOW)
                found[str(index)] = abs(score.nll - recorded["nll_per_window"][index])


def exact(place: Place, record: Record) -> None:
    """Exact mode with bf16 activations through the kernels."""
    recorded = json.loads((GOLDEN / "exact_nll.json").read_text())
    with record.block("exact_nll", "exact_mtp_nll") as (found, mtp):
        runner = nano_runner(place, "exact")
        windows = 1 if place.dry else recorded["windows"]
        score = evaluate.score(runner, recorded["tokens"][: windows * WINDOW + 3], window=WINDOW, mtp=True)
        for index, nll in enumerate(score.nll_per_window):
            found[str(index)] = nll - recorded["nll_per_window"][index]
        mtp["mean"] = score.mtp_nll - recorded["mtp_nll"]
    with record.block("exact_top1") as (found,):
        golden, prompts = load_file(GOLDEN / "exact_logits.safetensors"), _prompts()
        chosen = json.loads((GOLDEN / "exact_argmax.json").read_text())
        runner = nano_runner(place, "exact")
        last = [evaluate.last_logits(runner, p).argmax().item() for p in (prompts[:4] if place.dry else prompts)]
        want = [golden[f"logits_{i}"].argmax().item() for i in range(len(last))]
        found["prompts"] = _agreed(torch.tensor(last), torch.tensor(want))
        for index, tokens in chosen.items():
            logits, _ = runner.run([Sequence().segment(prompts[int(index)], range(len(tokens)))])
            found[f"prompt_{index}"] = _agreed(logits.argmax(-1).cpu(), torch.tensor(tokens))
        exact32 = nano_runner(place, "exact", dtype=torch.float32)
        for index in REFERENCE_WINDOWS[: 1 if place.dry else None]:
            tokens = recorded["tokens"][index * WINDOW : (index + 1) * WINDOW]
            segment = Sequence().segment(tokens, range(len(tokens)))
            with _runtime.use_references():
                want = exact32.run([segment])[0].argmax(-1)
            found[f"window_{index}"] = _agreed(runner.run([segment])[0].argmax(-1), want)
    with record.profiling():
        runner.run([Sequence().segment(_prompts()[9], (0,))])


def _agreed(got: torch.Tensor, want: torch.Tensor) -> dict[str, int]:
    return {"agreed": int((got == want).sum()), "rows": want.numel()}


def official(place: Place, record: Record, backend: str) -> None:
    """Official mode, sublayers alone on recorded inputs, with both cache formats."""
    kinds = {f"official_{kind}_{backend}": kind for kind in evaluate.KINDS}
    recorded = load_file(GOLDEN / "layers_official.safetensors")
    if place.dry:
        recorded = {n: t for n, t in recorded.items() if n.startswith(("p300.", "p140.layer2.ffn", "p140.ids"))}
    for name in ("bf16", "fp8", "fp8.fp8_experts"):
        with record.block(*kinds) as found, using_backend(backend, place):
            storage, *more = name.split(".")
            runner = nano_runner(place, "official", storage=storage, expert_weights="fp8" if more else "fp4")
            layers = evaluate.compare(runner, recorded).layers
            for samples, kind in zip(found, kinds.values(), strict=True):
                own = {name: value for name, value in layers.items() if name.endswith(kind)}
                samples[name] = own
    with record.profiling(), using_backend(backend, place):
        runner.run([Sequence().segment(_prompts()[9], (0,))])
