"""Semi-relaxed problems: the first marginal is held, the second is free."""

from typing import Any

from torchgw.pot import _mirror
from torchgw.pot.gromov._call import Call, fused, takes, valued
from torchgw.pot.gromov._steps import entropic, exact_answer

_EXACT = """C1, C2, p=None, loss_fun="square_loss", symmetric=None, log=False, G0=None,
    max_iter=1e4, tol_rel=1e-9, tol_abs=1e-9, random_state=0, **kwargs"""
_EXACT_FUSED = """M, C1, C2, p=None, loss_fun="square_loss", symmetric=None, alpha=0.5, G0=None,
    log=False, max_iter=1e4, tol_rel=1e-9, tol_abs=1e-9, random_state=0, **kwargs"""
_ENTROPIC = """C1, C2, p=None, loss_fun="square_loss", epsilon=0.1, symmetric=None, G0=None,
    max_iter=1e4, tol=1e-9, log=False, verbose=False, random_state=0"""
_ENTROPIC_FUSED = """M, C1, C2, p=None, loss_fun="square_loss", symmetric=None, epsilon=0.1,
    alpha=0.5, G0=None, max_iter=1e4, tol=1e-9, log=False, verbose=False, random_state=0"""


@takes(_EXACT)
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
semirelaxed_fused_gromov_wasserstein = fused(semirelaxed_gromov_wasserstein, _EXACT_FUSED)
semirelaxed_fused_gromov_wasserstein2 = valued(
    semirelaxed_fused_gromov_wasserstein, "with gradients to M, C1, C2 and alpha"
)


@takes(_ENTROPIC)
def entropic_semirelaxed_gromov_wasserstein(call: Call) -> Any:
    """Take proximal steps, as ``ot.gromov.entropic_semirelaxed_gromov_wasserstein``.

    Returns
    -------
    T : array of shape (n, m)
    log : dict, only with ``log=True``
        ``err`` of each step and ``srgw_dist``; ``lin_loss`` and ``quad_loss`` with a linear cost.
    """
    return _entropic(call)


entropic_semirelaxed_gromov_wasserstein2 = valued(
    entropic_semirelaxed_gromov_wasserstein, signature=_ENTROPIC + ", **kwargs"
)
entropic_semirelaxed_fused_gromov_wasserstein = fused(
    entropic_semirelaxed_gromov_wasserstein, _ENTROPIC_FUSED
)
entropic_semirelaxed_fused_gromov_wasserstein2 = valued(
    entropic_semirelaxed_fused_gromov_wasserstein
)


def _entropic(call: Call) -> Any:
    call.check_known()
    problem = call.problem(differentiable=False)
    stop = _mirror.Stop(int(call.max_iter), call.tol, call.verbose)
    state = call.random_state
    plan, found = entropic(problem, "semirelaxed", call.G0, call.epsilon, stop, random_state=state)
    return call.answer(problem, plan, "srgw_dist", {"err": found.errors}, with_parts=True)
