"""Plans of one problem: balanced, semi-relaxed (the second marginal is free) and partial."""

from typing import Any

from torchgw._errors import InvalidInputError
from torchgw.pot.gromov._call import Call, fused, takes, valued
from torchgw.pot.gromov._steps import entropic_answer, exact_answer

_EXACT = """C1, C2, p=None, q=None, loss_fun="square_loss", symmetric=None, log=False,
    armijo=False, G0=None, max_iter=1e4, tol_rel=1e-9, tol_abs=1e-9, **kwargs"""
_EXACT_FUSED = """M, C1, C2, p=None, q=None, loss_fun="square_loss", symmetric=None, alpha=0.5,
    armijo=False, G0=None, log=False, max_iter=1e4, tol_rel=1e-9, tol_abs=1e-9, **kwargs"""
_ENTROPIC = """C1, C2, p=None, q=None, loss_fun="square_loss", epsilon=0.1, symmetric=None,
    G0=None, max_iter=1000, tol=1e-9, solver="PGD", warmstart=False, verbose=False, log=False,
    **kwargs"""
_ENTROPIC_FUSED = """M, C1, C2, p=None, q=None, loss_fun="square_loss", epsilon=0.1,
    symmetric=None, alpha=0.5, G0=None, max_iter=1000, tol=1e-9, solver="PGD", warmstart=False,
    verbose=False, log=False, **kwargs"""
_FREE_EXACT = """C1, C2, p=None, loss_fun="square_loss", symmetric=None, log=False, G0=None,
    max_iter=1e4, tol_rel=1e-9, tol_abs=1e-9, random_state=0, **kwargs"""
_FREE_EXACT_FUSED = """M, C1, C2, p=None, loss_fun="square_loss", symmetric=None, alpha=0.5,
    G0=None, log=False, max_iter=1e4, tol_rel=1e-9, tol_abs=1e-9, random_state=0, **kwargs"""
_PARTIAL_EXACT = """C1, C2, p=None, q=None, m=None, loss_fun="square_loss", nb_dummies=1, G0=None,
    thres=1, numItermax=1e4, tol={tol}, symmetric=None, warn={warn}, log=False, verbose=False,
    **kwargs"""
_PARTIAL_EXACT_FUSED = "M, " + _PARTIAL_EXACT.replace("nb_dummies", "alpha=0.5, nb_dummies")
_PARTIAL_ENTROPIC = """C1, C2, p=None, q=None, reg=1.0, m=None, loss_fun="square_loss", G0=None,
    numItermax=1000, tol=1e-7, symmetric=None, log=False, verbose=False"""
_PARTIAL_ENTROPIC_FUSED = "M, " + _PARTIAL_ENTROPIC.replace("G0", "alpha=0.5, G0")


@takes(_EXACT)
def gromov_wasserstein(call: Call) -> Any:
    """Find a Gromov-Wasserstein plan, as ``ot.gromov.gromov_wasserstein``.

    Returns
    -------
    T : array of shape (n, m)
    log : dict, only with ``log=True``
        ``loss`` of each step, ``gw_dist``; of the last linear problem ``cost``, and dual potentials
        ``u`` and ``v``.
    """
    return exact_answer(call, "balanced", "gw_dist", warning=None)


gromov_wasserstein2 = valued(gromov_wasserstein, "with gradients to C1, C2, p and q")
fused_gromov_wasserstein = fused(gromov_wasserstein, _EXACT_FUSED)
fused_gromov_wasserstein2 = valued(
    fused_gromov_wasserstein, "with gradients to M, C1, C2, p, q and alpha"
)


@takes(_ENTROPIC)
def entropic_gromov_wasserstein(call: Call) -> Any:
    """Find an entropic plan, as ``ot.gromov.entropic_gromov_wasserstein``.

    Sinkhorn's iterations begin at the last potentials whatever ``warmstart`` says, and are stable
    at any ``epsilon``, so that ``method`` makes no difference.

    Returns
    -------
    T : array of shape (n, m)
    log : dict, only with ``log=True``
        ``err`` of each step and ``gw_dist``, without entropy.
    """
    if call.solver not in ("PGD", "PPA"):
        raise InvalidInputError(f"`solver` must be 'PGD' or 'PPA'; got {call.solver!r}.")
    call.check_known("numItermax", "stopThr", "method", "warn")
    return entropic_answer(
        call,
        "balanced",
        "gw_dist",
        "epsilon",
        sharp=call.solver == "PPA",
        most=int(call.kwargs.get("numItermax", 1000)),
        tol=float(call.kwargs.get("stopThr", 1e-9)),
    )


entropic_gromov_wasserstein2 = valued(entropic_gromov_wasserstein, "without entropy")
entropic_fused_gromov_wasserstein = fused(entropic_gromov_wasserstein, _ENTROPIC_FUSED)
entropic_fused_gromov_wasserstein2 = valued(entropic_fused_gromov_wasserstein, "without entropy")


@takes(_FREE_EXACT)
def semirelaxed_gromov_wasserstein(call: Call) -> Any:
    """Find a semi-relaxed plan, as ``ot.gromov.semirelaxed_gromov_wasserstein``.

    Returns
    -------
    T : array of shape (n, m)
    log : dict, only with ``log=True``
        ``loss`` of each step and ``srgw_dist``.
    """
    return exact_answer(call, "semirelaxed", "srgw_dist", "armijo")


semirelaxed_gromov_wasserstein2 = valued(
    semirelaxed_gromov_wasserstein, "with gradients to C1 and C2"
)
semirelaxed_fused_gromov_wasserstein = fused(semirelaxed_gromov_wasserstein, _FREE_EXACT_FUSED)
semirelaxed_fused_gromov_wasserstein2 = valued(
    semirelaxed_fused_gromov_wasserstein, "with gradients to M, C1, C2 and alpha"
)


@takes(_PARTIAL_EXACT.format(tol=1e-8, warn=True))
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
    signature=_PARTIAL_EXACT.format(tol=1e-7, warn=False),
)
partial_fused_gromov_wasserstein = fused(
    partial_gromov_wasserstein, _PARTIAL_EXACT_FUSED.format(tol=1e-8, warn=True)
)
partial_fused_gromov_wasserstein2 = valued(
    partial_fused_gromov_wasserstein,
    "with gradients to M, C1, C2 and alpha",
    signature=_PARTIAL_EXACT_FUSED.format(tol=1e-7, warn=False),
)


@takes(_PARTIAL_ENTROPIC)
def entropic_partial_gromov_wasserstein(call: Call) -> Any:
    """Find an entropic partial plan, as ``ot.gromov.entropic_partial_gromov_wasserstein``.

    Returns
    -------
    T : array of shape (n, m), of mass m
    log : dict, only with ``log=True``
        ``err`` of each step and ``partial_gw_dist``, without entropy.
    """
    return entropic_answer(call, "partial", "partial_gw_dist", "reg")


entropic_partial_gromov_wasserstein2 = valued(
    entropic_partial_gromov_wasserstein, "without entropy"
)
entropic_partial_fused_gromov_wasserstein = fused(
    entropic_partial_gromov_wasserstein,
    _PARTIAL_ENTROPIC_FUSED,
    "POT 0.9.7 adds the number <M, T> to its gradient where M belongs, so that M has no influence "
    "on its plan; here it has.",
)
entropic_partial_fused_gromov_wasserstein2 = valued(
    entropic_partial_fused_gromov_wasserstein, "without entropy"
)
