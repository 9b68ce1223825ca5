"""The ops of DeepSeek-V4, registered under ``torch.ops.dsv4``; importing this package registers all of them."""

if __name__ != "dsv4.ops":
    raise ImportError(f"import this package as dsv4.ops, not as {__name__}: a second copy would register ops twice")

from ._registry import OpSpec, PrewarmCase, boundary_ops, spec, specs  # noqa: E402
from .rms_norm import rms_norm  # noqa: E402
