"""The names of ``ot.gromov``, with its signatures, defaults, return values and logs.

Small dense problems: plans are stored, and computed in float64 on the CPU. Each function starts
where POT starts, at the given plan or at the product plan, without a search for better optima;
:func:`torchgw.solve` has that, points in place of matrices, large problems and GPUs.

A function whose name ends in 2 returns the value of the plan that the one without the 2 finds: a
number, or a tensor of those inputs that it has gradients to. With ``log=True`` it also returns the
log of that one, with the plan ``T``, and of a fused problem ``lin_loss`` and ``quad_loss``.
"""

from torchgw.pot.gromov._barycenters import *
from torchgw.pot.gromov._dictionary import *
from torchgw.pot.gromov._estimators import *
from torchgw.pot.gromov._lowrank import *
from torchgw.pot.gromov._pieces import *
from torchgw.pot.gromov._plans import *
from torchgw.pot.gromov._quantized import *
from torchgw.pot.gromov._unbalanced import *

__all__ = [
    "BAPG_fused_gromov_wasserstein", "BAPG_fused_gromov_wasserstein2", "BAPG_gromov_wasserstein",
    "BAPG_gromov_wasserstein2", "GW_distance_estimation", "div_between_product", "div_to_product",
    "entropic_fused_gromov_barycenters", "entropic_fused_gromov_wasserstein",
    "entropic_fused_gromov_wasserstein2", "entropic_gromov_barycenters",
    "entropic_gromov_wasserstein", "entropic_gromov_wasserstein2",
    "entropic_partial_fused_gromov_wasserstein", "entropic_partial_fused_gromov_wasserstein2",
    "entropic_partial_gromov_wasserstein", "entropic_partial_gromov_wasserstein2",
    "entropic_semirelaxed_fused_gromov_wasserstein",
    "entropic_semirelaxed_fused_gromov_wasserstein2", "entropic_semirelaxed_gromov_wasserstein",
    "entropic_semirelaxed_gromov_wasserstein2", "fgw_barycenters", "format_partitioned_graph",
    "format_partitioned_samples", "fused_gromov_wasserstein", "fused_gromov_wasserstein2",
    "fused_gromov_wasserstein_dictionary_learning", "fused_gromov_wasserstein_linear_unmixing",
    "fused_unbalanced_across_spaces_cost", "fused_unbalanced_across_spaces_divergence",
    "fused_unbalanced_gromov_wasserstein", "fused_unbalanced_gromov_wasserstein2",
    "get_graph_partition", "get_graph_representants", "get_partition_and_representants_samples",
    "gromov_barycenters", "gromov_wasserstein", "gromov_wasserstein2",
    "gromov_wasserstein_dictionary_learning", "gromov_wasserstein_linear_unmixing", "gwggrad",
    "gwloss", "init_matrix", "init_matrix_semirelaxed", "lowrank_gromov_wasserstein_samples",
    "partial_fused_gromov_wasserstein", "partial_fused_gromov_wasserstein2",
    "partial_gromov_wasserstein", "partial_gromov_wasserstein2", "pointwise_gromov_wasserstein",
    "quantized_fused_gromov_wasserstein", "quantized_fused_gromov_wasserstein_partitioned",
    "quantized_fused_gromov_wasserstein_samples", "sampled_gromov_wasserstein",
    "semirelaxed_fgw_barycenters", "semirelaxed_fused_gromov_wasserstein",
    "semirelaxed_fused_gromov_wasserstein2", "semirelaxed_gromov_barycenters",
    "semirelaxed_gromov_wasserstein", "semirelaxed_gromov_wasserstein2", "semirelaxed_init_plan",
    "solve_gromov_linesearch", "solve_partial_gromov_linesearch",
    "solve_semirelaxed_gromov_linesearch", "tensor_product", "unbalanced_co_optimal_transport",
    "unbalanced_co_optimal_transport2", "uot_cost_matrix", "uot_parameters_and_measures",
    "update_barycenter_feature", "update_barycenter_structure",
]  # fmt: skip


def __dir__() -> list[str]:
    return sorted(__all__)
