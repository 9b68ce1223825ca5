"""``fp8_linear`` whose products are added in fp32 whatever the backend: for results that lead to a discrete choice.

FP8 tensor cores add in about 14 bits, which is within the tolerance of a value but moves a score across the border of
the picks. So the indexer's query projection, the product that leads to index scores alone, is this op.

Shapes, numerics and errors: those of ``fp8_linear``, which the errors name.
Kernels: ours of ``fp8_linear``, under the same keys.
Source: ``fp8_gemm`` of the official inference code.
"""

from dataclasses import replace

import torch

from ._registry import Arguments, PrewarmCase, register
from .fp8_linear import cuda_decoded, decoded_cases, example as fp8_linear_example, fake, reference
from .shapes import Shape


def matrix(shape: Shape) -> tuple[int, int]:
    """``(out, in)`` of the matrix of a model of ``shape`` that this op multiplies with."""
    return shape.index_heads * shape.index_dim, shape.q_lora_rank


def example(shape: Shape, *, num_tokens: int, device: torch.device, dtype: torch.dtype, seed: int) -> Arguments:
    outs, width = matrix(shape)
    sizes = replace(shape, q_lora_rank=outs, hidden=width)  # of the matrix that the other op's example takes
    return fp8_linear_example(sizes, num_tokens=num_tokens, device=device, dtype=dtype, seed=seed)


def cuda_cases(shape: Shape, device: torch.device, max_tokens: int) -> tuple[PrewarmCase, ...]:
    """What bf16 results of up to ``max_tokens`` rows can need."""
    return tuple(decoded_cases("fp8_linear_decoded", matrix(shape), max_tokens, device).values())


fp8_linear_decoded = register(
    "fp8_linear_decoded",
    "(Tensor x, Tensor x_scale, Tensor weight, Tensor weight_scale, *, ScalarType dtype, bool deterministic) -> Tensor",
    reference=reference,
    fake=fake,
    example=example,
    cuda=cuda_decoded,
    cuda_cases=cuda_cases,
)
