"""``torchgw --gpus N`` and ``--processes N``: the same command in processes that share a solve."""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from torchgw._errors import InvalidInputError, RankError

# Whether this process is one of several, by its number.
_RANK = "TORCHGW_RANK"


def rank() -> int | None:
    """Find the number of this process among those of a command, or nothing if it is alone."""
    number = os.environ.get(_RANK)
    return None if number is None else int(number)


def in_processes(
    count: int, main: Callable[[Sequence[str]], int], arguments: Sequence[str], *, gpus: bool
) -> int:
    """Run a command in ``count`` processes by PyTorch's launcher; the first alone has output."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    found = torch.cuda.device_count()
    if gpus and count > found:
        raise InvalidInputError(
            f"--gpus {count}: PyTorch sees {found} GPUs here. Ask for as many as there are, or "
            "share the work among processes of the CPU with --processes."
        )
    # the same for any number of processes, as threads change the order of sums
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=count, run_id="torchgw", max_restarts=0,
        rdzv_backend="c10d", rdzv_endpoint="localhost:0", monitor_interval=0.2,
    )  # fmt: skip
    try:
        codes = elastic_launch(config, _one)(main, list(arguments), gpus)
    except ChildFailedError as error:
        number, failure = error.get_first_failure()
        raise RankError(
            f"process {number} of {count} has ended with code {failure.exitcode}; the others were "
            "ended."
        ) from error
    return int(codes[0])


def _one(main: Callable[[Sequence[str]], int], arguments: Sequence[str], gpus: bool) -> int:
    """Run the command in one of the processes."""
    number = os.environ[_RANK] = os.environ["RANK"]
    if gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo")
    if number != "0":
        sys.stdout = sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    try:
        return main(arguments)
    finally:
        torch.distributed.destroy_process_group()
