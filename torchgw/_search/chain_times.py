"""What chains will take on a CPU, and the warnings and log lines that say so."""

import itertools
import logging

from torchgw._errors import PerformanceWarning, warn_user
from torchgw._problem.limits import Limits
from torchgw._search.alternatives import SearchName
from torchgw._search.chain import REFINED
from torchgw._search.kinds import COMPARED_AT, FIRST, LATER, QUICK, Ladder
from torchgw._search.world import World

logger = logging.getLogger(__name__)

# A warning comes first if the chains to come will take more than so many seconds; seconds of one
# multiplication of an outer iteration on a CPU. [L549]
_LONG, _MULTIPLICATION = 5.0, 2e-11


def chain_products(n: int, m: int) -> int:
    """Count the multiplications of a chain until it is compared with others."""
    return QUICK.outer * len(QUICK.stages(COMPARED_AT)) * n * m * (n + m)


def affordable_chains(limits: Limits, how: SearchName, n: int, m: int) -> int:
    """Count the chains between n and m points that a search may follow."""
    most = limits.chain_products * (limits.thorough if how == "thorough" else 1)
    return int(most / chain_products(n, m))


def tell(done: int, count: int, seconds: float, objective: float) -> None:
    """Log how far a search is, and what all its chains would take; they may agree before."""
    logger.info(
        "search: %d of at most %d chains on all points in %.1f s, best objective %.6g; at most "
        "about %.0f s more until they are compared", done, count, seconds, objective,
        seconds / done * (count - done),
    )  # fmt: skip


def tell_repaired(done: int, most: int, objective: float) -> None:
    """Log how many chains have been repaired."""
    logger.info(
        "search: %d of at most %d chains repaired, best objective %.6g", done, most, objective
    )


def chain_seconds(world: World, numbers: range, low: float) -> float:
    """Model the time of chains on a CPU by dense products, the best of them down to the target."""
    if world.base.device.type != "cpu" or world.sparse is not None:
        return 0.0
    level = max(low, COMPARED_AT)
    kinds = [
        *FIRST,
        *itertools.islice(itertools.cycle(LATER), max(0, numbers.stop - len(FIRST))),
    ]
    ladders = [(kind.ladder, level) for kind in kinds[numbers.start : numbers.stop]]
    ladders += [(world.refine, low)] * REFINED if low < level else []
    work = (ladder.outer * sum(map(world.work, ladder.stages(last))) for ladder, last in ladders)
    return _MULTIPLICATION * sum(work)


def warn_if_long(world: World, count: int, low: float) -> bool:
    """Say what even the first chains will take on a CPU, if that is long; return whether it is."""
    least = chain_seconds(world, range(len(FIRST)), low)
    if least <= _LONG:
        return False
    most = least + chain_seconds(world, range(len(FIRST), count), low)
    warn_user(
        f"A few points do not represent these, and starts are followed on all of them: about "
        f"{least:.0f} s on this CPU if the first ones agree, up to {most:.0f} s if not. "
        "search='fast' leaves them out, and a start that is known (`init`) needs none.",
        PerformanceWarning,
    )
    return True


def warn_if_more(world: World, count: int, low: float) -> None:
    """Say what the chains that follow the first ones will take on a CPU, if that is long."""
    seconds = chain_seconds(world, range(len(FIRST), count), low)
    if seconds > _LONG:
        warn_user(
            f"The first starts, followed on all points, did not agree, and up to "
            f"{count - len(FIRST)} more follow: about {seconds:.0f} s on this CPU. search='fast' "
            "leaves them out, and a start that is known (`init`) needs none.",
            PerformanceWarning,
        )


def within_time(world: World, done: int, count: int, low: float) -> int:
    """Count the chains, those that are done among them, that are followed to the target in time."""
    # each chain is followed to the target, not the best ones alone
    each = chain_seconds(world, range(len(FIRST)), low) / len(FIRST)
    return count if each == 0 else min(count, max(done, int(_LONG / each)))


def repairs_within(world: World, ladder: Ladder, most: int) -> int:
    """Count the repairs that may be made in time, which end with a ladder's first stage."""
    if world.base.device.type != "cpu":
        return most
    again = QUICK.outer * sum(map(world.work, QUICK.stages(ladder.start)))
    each = _MULTIPLICATION * (again + ladder.outer * world.work(ladder.start))
    return min(most, int(_LONG / each))
