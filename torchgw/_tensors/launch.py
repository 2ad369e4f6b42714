"""The one place where a Triton kernel is launched."""

import logging
from time import perf_counter
from typing import Any

import torch

from torchgw._tensors.ahead import ready

logger = logging.getLogger(__name__)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch a kernel on the device of its first argument, a tensor."""
    if not ready(kernel, arguments, options):
        return
    told = logger.isEnabledFor(logging.INFO)
    before, begun = (_known(kernel), perf_counter()) if told else (0, 0.0)
    # Triton itself launches on the current device, wherever the tensors are
    with torch.cuda.device_of(arguments[0]):
        kernel[grid](*arguments, **options)
    if told and _known(kernel) > before:
        logger.info(
            "a launch waited %.2f s for %s, which was compiled or read from the cache on disk",
            perf_counter() - begun, kernel.__name__,
        )  # fmt: skip


def _known(kernel: Any) -> int:
    """Count the variants of a kernel that this process has loaded; none where it is interpreted."""
    return sum(len(loaded) for loaded, *_ in getattr(kernel, "device_caches", {}).values())
