"""Plans of one problem: balanced, semi-relaxed (the second marginal is free) and partial."""

# Functions here are declarations, with POT's signatures for people and for readers of types;
# `takes` says what answers them.

from typing import Any

from torchgw._errors import InvalidInputError
from torchgw.pot.gromov._read import Call, takes, valued
from torchgw.pot.gromov._steps import entropic_answer, exact_answer


@takes(exact_answer, "balanced", "gw_dist", warning=None)
def gromov_wasserstein(
    C1: Any, C2: Any, p: Any = None, q: Any = None, loss_fun: str = "square_loss",
    symmetric: bool | None = None, log: bool = False, armijo: bool = False, G0: Any = None,
    max_iter: float = 1e4, tol_rel: float = 1e-9, tol_abs: float = 1e-9, **kwargs: Any,
) -> Any:  # fmt: skip
    """Find a Gromov-Wasserstein plan, as ``ot.gromov.gromov_wasserstein``.

    Returns
    -------
    T : array of shape (n, m)
    log : dict, only with log=True
        ``loss`` of each step, ``gw_dist``; of the last linear problem ``cost``, and dual potentials
        ``u`` and ``v``.
    """


@takes(exact_answer, "balanced", "gw_dist", warning=None)
def fused_gromov_wasserstein(
    M: Any, C1: Any, C2: Any, p: Any = None, q: Any = None, loss_fun: str = "square_loss",
    symmetric: bool | None = None, alpha: Any = 0.5, armijo: bool = False, G0: Any = None,
    log: bool = False, max_iter: float = 1e4, tol_rel: float = 1e-9, tol_abs: float = 1e-9,
    **kwargs: Any,
) -> Any:  # fmt: skip
    """Find a plan with a linear cost, as ``ot.gromov.fused_gromov_wasserstein``.

    Returns
    -------
    T, log
        As :func:`gromov_wasserstein`; the value is ``fgw_dist``.
    """


gromov_wasserstein2 = valued(gromov_wasserstein, "with gradients to C1, C2, p and q")
fused_gromov_wasserstein2 = valued(
    fused_gromov_wasserstein, "with gradients to M, C1, C2, p, q and alpha"
)


def _entropic_answer(call: Call) -> Any:
    if call.solver not in ("PGD", "PPA"):
        raise InvalidInputError(f"`solver` must be 'PGD' or 'PPA'; got {call.solver!r}.")
    call.check_known("numItermax", "stopThr", "method", "warn")
    return entropic_answer(
        call, "balanced", "gw_dist", "epsilon", sharp=call.solver == "PPA",
        most=int(call.kwargs.get("numItermax", 1000)), tol=float(call.kwargs.get("stopThr", 1e-9)),
    )  # fmt: skip


@takes(_entropic_answer)
def entropic_gromov_wasserstein(
    C1: Any, C2: Any, p: Any = None, q: Any = None, loss_fun: str = "square_loss",
    epsilon: float = 0.1, symmetric: bool | None = None, G0: Any = None, max_iter: int = 1000,
    tol: float = 1e-9, solver: str = "PGD", warmstart: bool = False, verbose: bool = False,
    log: bool = False, **kwargs: Any,
) -> Any:  # fmt: skip
    """Find an entropic plan, as ``ot.gromov.entropic_gromov_wasserstein``.

    Sinkhorn's iterations begin at the last potentials whatever ``warmstart`` says, and are stable
    at any ``epsilon``, so that ``method`` makes no difference.

    Returns
    -------
    T : array of shape (n, m)
    log : dict, only with log=True
        ``err`` of each step and ``gw_dist``, without entropy.
    """


@takes(_entropic_answer)
def entropic_fused_gromov_wasserstein(
    M: Any, C1: Any, C2: Any, p: Any = None, q: Any = None, loss_fun: str = "square_loss",
    epsilon: float = 0.1, symmetric: bool | None = None, alpha: float = 0.5, G0: Any = None,
    max_iter: int = 1000, tol: float = 1e-9, solver: str = "PGD", warmstart: bool = False,
    verbose: bool = False, log: bool = False, **kwargs: Any,
) -> Any:  # fmt: skip
    """Find an entropic plan with a linear cost, as ``ot.gromov``'s function of this name.

    Returns
    -------
    T, log
        As :func:`entropic_gromov_wasserstein`; the value is ``fgw_dist``.
    """


entropic_gromov_wasserstein2 = valued(entropic_gromov_wasserstein, "without entropy")
entropic_fused_gromov_wasserstein2 = valued(entropic_fused_gromov_wasserstein, "without entropy")


@takes(exact_answer, "semirelaxed", "srgw_dist", "armijo")
def semirelaxed_gromov_wasserstein(
    C1: Any, C2: Any, p: Any = None, loss_fun: str = "square_loss", symmetric: bool | None = None,
    log: bool = False, G0: Any = None, max_iter: float = 1e4, tol_rel: float = 1e-9,
    tol_abs: float = 1e-9, random_state: Any = 0, **kwargs: Any,
) -> Any:  # fmt: skip
    """Find a semi-relaxed plan, as ``ot.gromov.semirelaxed_gromov_wasserstein``.

    Returns
    -------
    T : array of shape (n, m)
    log : dict, only with log=True
        ``loss`` of each step and ``srgw_dist``.
    """


@takes(exact_answer, "semirelaxed", "srgw_dist", "armijo")
def semirelaxed_fused_gromov_wasserstein(
    M: Any, C1: Any, C2: Any, p: Any = None, loss_fun: str = "square_loss",
    symmetric: bool | None = None, alpha: Any = 0.5, G0: Any = None, log: bool = False,
    max_iter: float = 1e4, tol_rel: float = 1e-9, tol_abs: float = 1e-9, random_state: Any = 0,
    **kwargs: Any,
) -> Any:  # fmt: skip
    """Find a semi-relaxed plan with a linear cost, as ``ot.gromov``'s function of this name.

    Returns
    -------
    T, log
        As :func:`semirelaxed_gromov_wasserstein`; the value is ``srfgw_dist``.
    """


semirelaxed_gromov_wasserstein2 = valued(
    semirelaxed_gromov_wasserstein, "with gradients to C1 and C2"
)
semirelaxed_fused_gromov_wasserstein2 = valued(
    semirelaxed_fused_gromov_wasserstein, "with gradients to M, C1, C2 and alpha"
)


@takes(exact_answer, "partial", "partial_gw_dist", warning=None)
def partial_gromov_wasserstein(
    C1: Any, C2: Any, p: Any = None, q: Any = None, m: float | None = None,
    loss_fun: str = "square_loss", nb_dummies: int = 1, G0: Any = None, thres: float = 1,
    numItermax: float = 1e4, tol: float = 1e-8, symmetric: bool | None = None, warn: bool = True,
    log: bool = False, verbose: bool = False, **kwargs: Any,
) -> Any:  # fmt: skip
    """Find a partial plan, as ``ot.gromov.partial_gromov_wasserstein``.

    One dummy point is enough here, so ``nb_dummies`` makes no difference; ``thres`` has none in POT
    either.

    Returns
    -------
    T : array of shape (n, m), of mass m
    log : dict, only with log=True
        ``loss`` of each step and ``partial_gw_dist``.
    """


@takes(exact_answer, "partial", "partial_gw_dist", warning=None)
def partial_fused_gromov_wasserstein(
    M: Any, C1: Any, C2: Any, p: Any = None, q: Any = None, m: float | None = None,
    loss_fun: str = "square_loss", alpha: Any = 0.5, nb_dummies: int = 1, G0: Any = None,
    thres: float = 1, numItermax: float = 1e4, tol: float = 1e-8, symmetric: bool | None = None,
    warn: bool = True, log: bool = False, verbose: bool = False, **kwargs: Any,
) -> Any:  # fmt: skip
    """Find a partial plan with a linear cost, as ``ot.gromov``'s function of this name.

    Returns
    -------
    T, log
        As :func:`partial_gromov_wasserstein`; the value is ``partial_fgw_dist``.
    """


partial_gromov_wasserstein2 = valued(
    partial_gromov_wasserstein, "with gradients to C1 and C2", tol=1e-7, warn=False
)
partial_fused_gromov_wasserstein2 = valued(
    partial_fused_gromov_wasserstein, "with gradients to M, C1, C2 and alpha", tol=1e-7, warn=False
)


@takes(entropic_answer, "partial", "partial_gw_dist", "reg")
def entropic_partial_gromov_wasserstein(
    C1: Any, C2: Any, p: Any = None, q: Any = None, reg: float = 1.0, m: float | None = None,
    loss_fun: str = "square_loss", G0: Any = None, numItermax: int = 1000, tol: float = 1e-7,
    symmetric: bool | None = None, log: bool = False, verbose: bool = False,
) -> Any:  # fmt: skip
    """Find an entropic partial plan, as ``ot.gromov.entropic_partial_gromov_wasserstein``.

    Returns
    -------
    T : array of shape (n, m), of mass m
    log : dict, only with log=True
        ``err`` of each step and ``partial_gw_dist``, without entropy.
    """


@takes(entropic_answer, "partial", "partial_gw_dist", "reg")
def entropic_partial_fused_gromov_wasserstein(
    M: Any, C1: Any, C2: Any, p: Any = None, q: Any = None, reg: float = 1.0,
    m: float | None = None, loss_fun: str = "square_loss", alpha: float = 0.5, G0: Any = None,
    numItermax: int = 1000, tol: float = 1e-7, symmetric: bool | None = None, log: bool = False,
    verbose: bool = False,
) -> Any:  # fmt: skip
    """Find an entropic partial plan with a linear cost, as ``ot.gromov``'s function of this name.

    POT 0.9.7 adds the number <M, T> to its gradient where M belongs, so that M has no influence on
    its plan; here it has.

    Returns
    -------
    T, log
        As :func:`entropic_partial_gromov_wasserstein`; the value is ``partial_fgw_dist``.
    """


entropic_partial_gromov_wasserstein2 = valued(
    entropic_partial_gromov_wasserstein, "without entropy"
)
entropic_partial_fused_gromov_wasserstein2 = valued(
    entropic_partial_fused_gromov_wasserstein, "without entropy"
)
