"""What calls of ``expert_ffn`` and loading add to the memory of a GPU, beside what stays resident."""

from pathlib import Path

import torch

from dsv4 import ops
from dsv4.checkpoint import Checkpoint
from dsv4.ops import _expert_blocks_kernel, expert_ffn_kernel
from dsv4.ops.shapes import Shape
from dsv4.weights import load_weights

CUDA = torch.device("cuda")
ALLOCATION, REMAINDER = 512, 1 << 20  # bytes to which the allocator rounds; what it leaves attached to a large block


def random_fp4(shape: Shape, device: torch.device) -> tuple[torch.Tensor, ...]:
    """w13, w13_scale, w2, w2_scale of all experts: random bytes, scales from 2^-9 to 2^-6."""
    experts, hidden, inner = shape.num_experts, shape.hidden, shape.expert_hidden
    tensors = []
    for rows, cols in ((2 * inner, hidden), (hidden, inner)):
        tensors.append(torch.randint(0, 256, (experts, rows, cols // 2), dtype=torch.uint8, device=device))
        tensors.append(torch.randint(118, 122, (experts, rows, cols // 32), dtype=torch.uint8, device=device))
    return tuple(tensors)


def random_rows(shape: Shape, num_tokens: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """x, x_scale, ids and weights as a model passes them; every row has its distinct experts."""
    x, x_scale = ops.quant_fp8(torch.randn(num_tokens, shape.hidden, device=device).bfloat16())
    scores = torch.rand(num_tokens, shape.num_experts, device=device)
    ids = scores.topk(min(shape.experts_per_token, shape.num_experts), dim=-1).indices.int()
    return x, x_scale, ids, torch.rand(ids.shape, device=device)


def workspace_bytes(shape: Shape, num_tokens: int) -> int:
    """Result and workspaces of one call with FP4 experts, from its documentation: nothing grows with the weights but
    one slot block per expert and the counters."""
    topk, experts, inner = shape.experts_per_token, shape.num_experts, shape.expert_hidden
    pairs, block = num_tokens * topk, expert_ffn_kernel.block_m(num_tokens, topk, experts, torch.uint8, False, CUDA)
    parts = [
        4 * num_tokens * shape.hidden,  # result
        2 * num_tokens * shape.hidden,  # rows expanded to 16 bits
        2 * pairs * shape.hidden,  # parts of the pairs
    ]
    if block:
        blocks = _expert_blocks_kernel.num_blocks(pairs, experts, block)
        parts += [
            2 * blocks * block * inner,  # activations
            4 * blocks * block,  # slots
            4 * blocks,  # their experts
            4 * experts,  # counters
        ]
    else:
        parts += [
            4 * pairs * inner,  # gate and up
            2 * pairs * inner,  # activations
            4 * pairs * -(-inner // 128),  # their scales
        ]
    return sum(part + (REMAINDER if part >= REMAINDER else ALLOCATION) for part in parts)


def bytes_of_an_8_bit_copy(shape: Shape) -> int:
    return 3 * shape.num_experts * shape.hidden * shape.expert_hidden


def peak_of(call) -> int:
    """Bytes by which the allocated memory rises at most during ``call``, over what it is before."""
    call()  # kernels are loaded
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def load_peak(directory: Path, expert_weights: str) -> tuple[int, int, int]:
    """Of loading onto the GPU: bytes that stay, the peak above them, and bytes of the experts' weights that stay."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    checkpoint = Checkpoint.open(directory)
    weights = load_weights(
        checkpoint, checkpoint.config, "official", torch.bfloat16, CUDA, progress=False, expert_weights=expert_weights
    )
    torch.cuda.synchronize()
    stays = torch.cuda.memory_allocated() - before
    experts = sum(t.nbytes for key, t in weights.items() if ".experts." in key and key.endswith(".weight"))
    return stays, torch.cuda.max_memory_allocated() - before - stays, experts
