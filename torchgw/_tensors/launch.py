"""The one place where a Triton kernel is launched."""

from __future__ import annotations

from typing import Any

import torch

from torchgw._tensors.ahead import ready

__all__ = ["launch"]


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch a kernel on the device of its first argument, a tensor."""
    ready(kernel, arguments, options)
    # Triton itself launches on the current device, wherever the tensors are
    with torch.cuda.device_of(arguments[0]):
        kernel[grid](*arguments, **options)
