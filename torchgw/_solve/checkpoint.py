"""The state of a solve in a file, from which another solve can go on."""

import math
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchgw._boundary.archive import check_writable, read_archive, write_archive
from torchgw._boundary.trees import Decoder, Encoder
from torchgw._errors import InvalidInputError
from torchgw._gradients.dense import PlanMatrix
from torchgw._gradients.factored import Encoding
from torchgw._gradients.relaxed import RelaxedCoupling
from torchgw._gradients.sampled import AnchorCoupling
from torchgw._sinkhorn.annealing import Annealing
from torchgw._solve.state import LoopState, Setting
from torchgw._solve.strategy import Strategy
from torchgw._tensors.ranks import Ranks
from torchgw._typing import Marginals, Potentials

# Seconds between two writes: a restart loses so many at most, and one iteration. A choice. [L418]
EVERY = 60.0

_KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        Annealing, AnchorCoupling, Encoding, Marginals, PlanMatrix, Potentials, RelaxedCoupling,
    )
}  # fmt: skip


class Saved(NamedTuple):
    """What a checkpoint holds."""

    state: LoopState
    anneal: Annealing


class Checkpoint:
    """A file that the first rank writes every so many seconds, and all ranks read."""

    def __init__(self, path: str | os.PathLike[str], ranks: Ranks | None) -> None:
        self.path = Path(check_writable(path))
        self._ranks = ranks
        self._problem: list[float] = []
        self._written = time.monotonic()

    def read(self, strategy: Strategy, device: torch.device) -> Saved | None:
        """Read the state of a solve of the same problem, if there is a file."""
        self._problem = [*strategy.fingerprint()[1][:4], float(len(strategy.gradient))]
        there = self.path.is_file()
        if self._ranks is not None:
            self._ranks.agree(f"whether there is a checkpoint {self.path}", [there])
        if not there:
            return None
        tree, arrays = read_archive(self.path)
        if not isinstance(tree, dict) or tree.get("kind") != "checkpoint":
            raise InvalidInputError(f"{self.path}: no checkpoint of a solve. Pass another path.")
        found = Decoder(arrays, device, _build).decode(tree["fields"])
        same = all(
            math.isclose(old, new, rel_tol=1e-6)
            for old, new in zip(found["problem"], self._problem, strict=True)
        )
        if not same:
            raise InvalidInputError(
                f"{self.path}: a checkpoint of another problem (n, m, scale, epsilon are "
                f"{found['problem'][:4]} there and {self._problem[:4]} now). Remove the file, or "
                "pass another path."
            )
        names = ("coupling", "latest", "potentials", "start", "done", "annealed")
        return Saved(LoopState(**{name: found[name] for name in names}), found["anneal"])

    def keep(self, setting: Setting, state: LoopState, *, now: bool = False) -> None:
        """Write the state of the loop, if it is time or ``now``; the file is always whole."""
        due = now or time.monotonic() - self._written >= EVERY
        if not due or (self._ranks is not None and self._ranks.rank > 0):
            return
        arrays: dict[str, Any] = {}
        values = {
            "problem": self._problem,
            "coupling": state.coupling,
            "latest": state.latest,
            "potentials": state.potentials,
            "start": state.start,
            "done": state.done,
            "annealed": state.annealed,
            "anneal": setting.anneal,
        }
        fields = Encoder(_parts, arrays).encode(values, "checkpoint")
        write_archive(self.path, {"kind": "checkpoint", "fields": fields}, arrays)
        self._written = time.monotonic()

    def done(self) -> None:
        """Remove the file of a solve that has ended."""
        if self._ranks is None or self._ranks.rank == 0:
            self.path.unlink(missing_ok=True)


def _parts(value: Any) -> tuple[str, dict[str, Any]] | None:
    """Name a part of a state and take it apart."""
    name = type(value).__name__
    if _KINDS.get(name) is not type(value):
        return None
    return name, value._asdict() if hasattr(value, "_asdict") else dict(vars(value))


def _build(name: str, parts: dict[str, Any]) -> Any:
    """Make a part of a state again."""
    return _KINDS[name](**parts)
