"""A process that compiles DeepGEMM kernels for others: ``python -m dsv4.ops._deep_gemm_compile cuda:0 '[[m, n, k]]'``.

DeepGEMM holds Python's lock while it compiles, 2 to 8 seconds a kernel, so threads gain nothing; its cache directory is
shared by processes, and a kernel that lies there loads in a fraction of a millisecond.
"""

import json
import sys

import torch

from . import _deep_gemm


def compile_all(calls: list[tuple[int, int, int]], device: torch.device) -> None:
    """Make calls of ``fp8_linear.deep_gemm_calls``; a kernel is complete in the cache directory when one returns."""
    fp8 = torch.float8_e4m3fn
    for rows, outs, width in calls:
        x, weight = (torch.zeros(n, width, device=device).to(fp8) for n in (rows, outs))
        block = _deep_gemm.keys.BLOCK
        scales, weight_scales = (torch.ones(n, width // block, device=device) for n in (rows, -(-outs // block)))
        out = torch.empty(rows, outs, dtype=torch.bfloat16, device=device)
        _deep_gemm.gemm_nt(x, scales, weight, weight_scales, out)


if __name__ == "__main__":
    where = torch.device(sys.argv[1])
    with torch.cuda.device(where):
        compile_all([tuple(call) for call in json.loads(sys.argv[2])], where)
        torch.cuda.synchronize()
