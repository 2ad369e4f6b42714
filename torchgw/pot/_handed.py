"""Names of POT's that POT does as well as we would: they are its own functions, and need POT."""

from typing import Any

from torchgw._errors import UnsupportedError

# Why a name is POT's, and the names: of ``ot.gromov``, and of ``ot`` itself.
GROMOV: dict[str, tuple[str, ...]] = {
    "the same values, in less time": (
        "BAPG_fused_gromov_wasserstein", "BAPG_fused_gromov_wasserstein2",
        "BAPG_gromov_wasserstein", "BAPG_gromov_wasserstein2",
        "entropic_semirelaxed_fused_gromov_wasserstein",
        "entropic_semirelaxed_fused_gromov_wasserstein2", "entropic_semirelaxed_gromov_wasserstein",
        "entropic_semirelaxed_gromov_wasserstein2", "fgw_barycenters",
        "fused_unbalanced_across_spaces_divergence", "fused_unbalanced_gromov_wasserstein",
        "fused_unbalanced_gromov_wasserstein2", "gromov_barycenters",
        "semirelaxed_fgw_barycenters", "semirelaxed_gromov_barycenters",
        "unbalanced_co_optimal_transport", "unbalanced_co_optimal_transport2",
    ),
    "the same steps": (
        "GW_distance_estimation", "fused_gromov_wasserstein_dictionary_learning",
        "fused_gromov_wasserstein_linear_unmixing", "gromov_wasserstein_dictionary_learning",
        "gromov_wasserstein_linear_unmixing", "pointwise_gromov_wasserstein",
        "sampled_gromov_wasserstein",
    ),
    "a piece of POT's solvers": (
        "div_between_product", "div_to_product", "fused_unbalanced_across_spaces_cost", "gwggrad",
        "gwloss", "init_matrix", "init_matrix_semirelaxed", "semirelaxed_init_plan",
        "solve_gromov_linesearch", "solve_partial_gromov_linesearch",
        "solve_semirelaxed_gromov_linesearch", "tensor_product", "uot_cost_matrix",
        "uot_parameters_and_measures", "update_barycenter_feature", "update_barycenter_structure",
    ),
}  # fmt: skip
TOP: dict[str, tuple[str, ...]] = {
    "many at once, where ours took them one by one": ("solve_gromov_batch",)
}


def names(table: dict[str, tuple[str, ...]]) -> list[str]:
    """List the names of a table."""
    return [name for group in table.values() for name in group]


def handed(name: str) -> Any:
    """Find a function of POT, of ``ot.gromov`` or of ``ot`` itself."""
    try:
        import ot
    except ImportError:
        raise UnsupportedError(
            f"`{name}` is POT's own function, which torchgw.pot hands out: pip install POT."
        ) from None
    return getattr(ot if name in names(TOP) else ot.gromov, name)
