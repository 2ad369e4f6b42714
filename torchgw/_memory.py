"""What fits into the memory that a device has left."""

from __future__ import annotations

import torch

from torchgw._errors import PlanTooLargeError

__all__ = ["check_fits", "free_memory"]


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on a device."""
    if device.type == "cuda":
        # PyTorch keeps what it has freed, and gives it out again
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + kept
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable"):
                    return int(line.split()[1]) * 1024
    except FileNotFoundError:
        pass
    # Other systems do not say what is free; refuse only what exceeds a generous fixed bound.
    return 16 * 2**30


def check_fits(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device, others: str
) -> None:
    """Refuse to build a dense plan beyond the free memory, and name what does without it."""
    needed, free = shape[0] * shape[1] * dtype.itemsize, free_memory(device)
    if needed > free:
        raise PlanTooLargeError(
            f"The dense plan of shape {shape} needs {needed:,} bytes and {free:,} are free on "
            f"{device}. Use {others}, which never store it."
        )
