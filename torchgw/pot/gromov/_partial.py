"""Partial problems: a share of the mass moves, and no point gives or takes more than its weight."""

from typing import Any

from torchgw.pot import _mirror
from torchgw.pot.gromov._call import Call, takes, valued
from torchgw.pot.gromov._steps import entropic, exact_answer

_EXACT = """C1, C2, p=None, q=None, m=None, loss_fun="square_loss", nb_dummies=1, G0=None, thres=1,
    numItermax=1e4, tol={tol}, symmetric=None, warn={warn}, log=False, verbose=False, **kwargs"""
_EXACT_FUSED = "M, " + _EXACT.replace("nb_dummies", "alpha=0.5, nb_dummies")
_ENTROPIC = """C1, C2, p=None, q=None, reg=1.0, m=None, loss_fun="square_loss", G0=None,
    numItermax=1000, tol=1e-7, symmetric=None, log=False, verbose=False"""
_ENTROPIC_FUSED = "M, " + _ENTROPIC.replace("G0", "alpha=0.5, G0")


@takes(_EXACT.format(tol=1e-8, warn=True))
def partial_gromov_wasserstein(call: Call) -> Any:
    """Find a partial plan, as ``ot.gromov.partial_gromov_wasserstein``.

    One dummy point is enough here, so ``nb_dummies`` makes no difference; ``thres`` has none in POT
    either.

    Returns
    -------
    T : array of shape (n, m), of mass m
    log : dict, only with ``log=True``
        ``loss`` of each step and ``partial_gw_dist``.
    """
    return exact_answer(call, "partial", "partial_gw_dist", warning=None)


partial_gromov_wasserstein2 = valued(
    partial_gromov_wasserstein,
    "with gradients to C1 and C2",
    signature=_EXACT.format(tol=1e-7, warn=False),
)


@takes(_EXACT_FUSED.format(tol=1e-8, warn=True))
def partial_fused_gromov_wasserstein(call: Call) -> Any:
    """Find a fused partial plan, as ``ot.gromov.partial_fused_gromov_wasserstein``.

    Returns
    -------
    T : array of shape (n, m), of mass m
    log : dict, only with ``log=True``
        ``loss`` of each step and ``partial_fgw_dist``.
    """
    return exact_answer(call, "partial", "partial_gw_dist", warning=None)


partial_fused_gromov_wasserstein2 = valued(
    partial_fused_gromov_wasserstein,
    "with gradients to M, C1, C2 and alpha",
    signature=_EXACT_FUSED.format(tol=1e-7, warn=False),
)


@takes(_ENTROPIC)
def entropic_partial_gromov_wasserstein(call: Call) -> Any:
    """Find an entropic partial plan, as ``ot.gromov.entropic_partial_gromov_wasserstein``.

    Returns
    -------
    T : array of shape (n, m), of mass m
    log : dict, only with ``log=True``
        ``err`` of each step and ``partial_gw_dist``, without entropy.
    """
    return _entropic(call)


entropic_partial_gromov_wasserstein2 = valued(
    entropic_partial_gromov_wasserstein, "without entropy"
)


@takes(_ENTROPIC_FUSED)
def entropic_partial_fused_gromov_wasserstein(call: Call) -> Any:
    """Find a fused plan, as ``ot.gromov.entropic_partial_fused_gromov_wasserstein``.

    POT 0.9.7 adds the number <M, T> to its gradient where M belongs, so that M has no influence on
    its plan; here it has.

    Returns
    -------
    T : array of shape (n, m), of mass m
    log : dict, only with ``log=True``
        ``err`` of each step and ``partial_fgw_dist``, without entropy.
    """
    return _entropic(call)


entropic_partial_fused_gromov_wasserstein2 = valued(
    entropic_partial_fused_gromov_wasserstein, "without entropy"
)


def _entropic(call: Call) -> Any:
    problem = call.problem(differentiable=False)
    stop = _mirror.Stop(int(call.numItermax), call.tol, call.verbose)
    plan, found = entropic(problem, "partial", call.G0, float(call.reg), stop, call.m)
    return call.answer(problem, plan, "partial_gw_dist", {"err": found.errors})
