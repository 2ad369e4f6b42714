"""The names of ``ot.gromov``, with its signatures, defaults, return values and logs.

Small dense problems: plans are stored, and computed in float64 on the CPU. Each function starts
where POT starts, at the given plan or at the product plan, without a search for better optima;
:func:`torchgw.solve` has that, points in place of matrices, large problems and GPUs.
"""

from __future__ import annotations

from torchgw.pot.gromov._balanced import fused_gromov_wasserstein as fused_gromov_wasserstein
from torchgw.pot.gromov._balanced import fused_gromov_wasserstein2 as fused_gromov_wasserstein2
from torchgw.pot.gromov._balanced import gromov_wasserstein as gromov_wasserstein
from torchgw.pot.gromov._balanced import gromov_wasserstein2 as gromov_wasserstein2
from torchgw.pot.gromov._barycenters import (
    entropic_fused_gromov_barycenters as entropic_fused_gromov_barycenters,
)
from torchgw.pot.gromov._barycenters import (
    entropic_gromov_barycenters as entropic_gromov_barycenters,
)
from torchgw.pot.gromov._barycenters import fgw_barycenters as fgw_barycenters
from torchgw.pot.gromov._barycenters import gromov_barycenters as gromov_barycenters
from torchgw.pot.gromov._barycenters import (
    semirelaxed_fgw_barycenters as semirelaxed_fgw_barycenters,
)
from torchgw.pot.gromov._barycenters import (
    semirelaxed_gromov_barycenters as semirelaxed_gromov_barycenters,
)
from torchgw.pot.gromov._barycenters import update_barycenter_feature as update_barycenter_feature
from torchgw.pot.gromov._barycenters import (
    update_barycenter_structure as update_barycenter_structure,
)
from torchgw.pot.gromov._entropic import (
    BAPG_fused_gromov_wasserstein as BAPG_fused_gromov_wasserstein,
)
from torchgw.pot.gromov._entropic import (
    BAPG_fused_gromov_wasserstein2 as BAPG_fused_gromov_wasserstein2,
)
from torchgw.pot.gromov._entropic import BAPG_gromov_wasserstein as BAPG_gromov_wasserstein
from torchgw.pot.gromov._entropic import BAPG_gromov_wasserstein2 as BAPG_gromov_wasserstein2
from torchgw.pot.gromov._entropic import (
    entropic_fused_gromov_wasserstein as entropic_fused_gromov_wasserstein,
)
from torchgw.pot.gromov._entropic import (
    entropic_fused_gromov_wasserstein2 as entropic_fused_gromov_wasserstein2,
)
from torchgw.pot.gromov._entropic import entropic_gromov_wasserstein as entropic_gromov_wasserstein
from torchgw.pot.gromov._entropic import (
    entropic_gromov_wasserstein2 as entropic_gromov_wasserstein2,
)
from torchgw.pot.gromov._estimators import GW_distance_estimation as GW_distance_estimation
from torchgw.pot.gromov._estimators import (
    pointwise_gromov_wasserstein as pointwise_gromov_wasserstein,
)
from torchgw.pot.gromov._estimators import sampled_gromov_wasserstein as sampled_gromov_wasserstein
from torchgw.pot.gromov._lowrank import (
    lowrank_gromov_wasserstein_samples as lowrank_gromov_wasserstein_samples,
)
from torchgw.pot.gromov._partial import (
    entropic_partial_fused_gromov_wasserstein as entropic_partial_fused_gromov_wasserstein,
)
from torchgw.pot.gromov._partial import (
    entropic_partial_fused_gromov_wasserstein2 as entropic_partial_fused_gromov_wasserstein2,
)
from torchgw.pot.gromov._partial import (
    entropic_partial_gromov_wasserstein as entropic_partial_gromov_wasserstein,
)
from torchgw.pot.gromov._partial import (
    entropic_partial_gromov_wasserstein2 as entropic_partial_gromov_wasserstein2,
)
from torchgw.pot.gromov._partial import (
    partial_fused_gromov_wasserstein as partial_fused_gromov_wasserstein,
)
from torchgw.pot.gromov._partial import (
    partial_fused_gromov_wasserstein2 as partial_fused_gromov_wasserstein2,
)
from torchgw.pot.gromov._partial import partial_gromov_wasserstein as partial_gromov_wasserstein
from torchgw.pot.gromov._partial import partial_gromov_wasserstein2 as partial_gromov_wasserstein2
from torchgw.pot.gromov._pieces import div_between_product as div_between_product
from torchgw.pot.gromov._pieces import div_to_product as div_to_product
from torchgw.pot.gromov._pieces import gwggrad as gwggrad
from torchgw.pot.gromov._pieces import gwloss as gwloss
from torchgw.pot.gromov._pieces import init_matrix as init_matrix
from torchgw.pot.gromov._pieces import init_matrix_semirelaxed as init_matrix_semirelaxed
from torchgw.pot.gromov._pieces import semirelaxed_init_plan as semirelaxed_init_plan
from torchgw.pot.gromov._pieces import solve_gromov_linesearch as solve_gromov_linesearch
from torchgw.pot.gromov._pieces import (
    solve_partial_gromov_linesearch as solve_partial_gromov_linesearch,
)
from torchgw.pot.gromov._pieces import (
    solve_semirelaxed_gromov_linesearch as solve_semirelaxed_gromov_linesearch,
)
from torchgw.pot.gromov._pieces import tensor_product as tensor_product
from torchgw.pot.gromov._refused import REFUSED
from torchgw.pot.gromov._semirelaxed import (
    entropic_semirelaxed_fused_gromov_wasserstein as entropic_semirelaxed_fused_gromov_wasserstein,
)
from torchgw.pot.gromov._semirelaxed import (
    entropic_semirelaxed_fused_gromov_wasserstein2 as entropic_semirelaxed_fused_gromov_wasserstein2,  # noqa: E501
)
from torchgw.pot.gromov._semirelaxed import (
    entropic_semirelaxed_gromov_wasserstein as entropic_semirelaxed_gromov_wasserstein,
)
from torchgw.pot.gromov._semirelaxed import (
    entropic_semirelaxed_gromov_wasserstein2 as entropic_semirelaxed_gromov_wasserstein2,
)
from torchgw.pot.gromov._semirelaxed import (
    semirelaxed_fused_gromov_wasserstein as semirelaxed_fused_gromov_wasserstein,
)
from torchgw.pot.gromov._semirelaxed import (
    semirelaxed_fused_gromov_wasserstein2 as semirelaxed_fused_gromov_wasserstein2,
)
from torchgw.pot.gromov._semirelaxed import (
    semirelaxed_gromov_wasserstein as semirelaxed_gromov_wasserstein,
)
from torchgw.pot.gromov._semirelaxed import (
    semirelaxed_gromov_wasserstein2 as semirelaxed_gromov_wasserstein2,
)
from torchgw.pot.gromov._unbalanced import (
    fused_unbalanced_across_spaces_cost as fused_unbalanced_across_spaces_cost,
)
from torchgw.pot.gromov._unbalanced import (
    fused_unbalanced_across_spaces_divergence as fused_unbalanced_across_spaces_divergence,
)
from torchgw.pot.gromov._unbalanced import (
    fused_unbalanced_gromov_wasserstein as fused_unbalanced_gromov_wasserstein,
)
from torchgw.pot.gromov._unbalanced import (
    fused_unbalanced_gromov_wasserstein2 as fused_unbalanced_gromov_wasserstein2,
)
from torchgw.pot.gromov._unbalanced import (
    unbalanced_co_optimal_transport as unbalanced_co_optimal_transport,
)
from torchgw.pot.gromov._unbalanced import (
    unbalanced_co_optimal_transport2 as unbalanced_co_optimal_transport2,
)
from torchgw.pot.gromov._unbalanced import uot_cost_matrix as uot_cost_matrix
from torchgw.pot.gromov._unbalanced import (
    uot_parameters_and_measures as uot_parameters_and_measures,
)

globals().update(REFUSED)

__all__ = [
    "BAPG_fused_gromov_wasserstein",
    "BAPG_fused_gromov_wasserstein2",
    "BAPG_gromov_wasserstein",
    "BAPG_gromov_wasserstein2",
    "GW_distance_estimation",
    "div_between_product",
    "div_to_product",
    "entropic_fused_gromov_barycenters",
    "entropic_fused_gromov_wasserstein",
    "entropic_fused_gromov_wasserstein2",
    "entropic_gromov_barycenters",
    "entropic_gromov_wasserstein",
    "entropic_gromov_wasserstein2",
    "entropic_partial_fused_gromov_wasserstein",
    "entropic_partial_fused_gromov_wasserstein2",
    "entropic_partial_gromov_wasserstein",
    "entropic_partial_gromov_wasserstein2",
    "entropic_semirelaxed_fused_gromov_wasserstein",
    "entropic_semirelaxed_fused_gromov_wasserstein2",
    "entropic_semirelaxed_gromov_wasserstein",
    "entropic_semirelaxed_gromov_wasserstein2",
    "fgw_barycenters",
    "format_partitioned_graph",
    "format_partitioned_samples",
    "fused_gromov_wasserstein",
    "fused_gromov_wasserstein2",
    "fused_gromov_wasserstein_dictionary_learning",
    "fused_gromov_wasserstein_linear_unmixing",
    "fused_unbalanced_across_spaces_cost",
    "fused_unbalanced_across_spaces_divergence",
    "fused_unbalanced_gromov_wasserstein",
    "fused_unbalanced_gromov_wasserstein2",
    "get_graph_partition",
    "get_graph_representants",
    "get_partition_and_representants_samples",
    "gromov_barycenters",
    "gromov_wasserstein",
    "gromov_wasserstein2",
    "gromov_wasserstein_dictionary_learning",
    "gromov_wasserstein_linear_unmixing",
    "gwggrad",
    "gwloss",
    "init_matrix",
    "init_matrix_semirelaxed",
    "lowrank_gromov_wasserstein_samples",
    "partial_fused_gromov_wasserstein",
    "partial_fused_gromov_wasserstein2",
    "partial_gromov_wasserstein",
    "partial_gromov_wasserstein2",
    "pointwise_gromov_wasserstein",
    "quantized_fused_gromov_wasserstein",
    "quantized_fused_gromov_wasserstein_partitioned",
    "quantized_fused_gromov_wasserstein_samples",
    "sampled_gromov_wasserstein",
    "semirelaxed_fgw_barycenters",
    "semirelaxed_fused_gromov_wasserstein",
    "semirelaxed_fused_gromov_wasserstein2",
    "semirelaxed_gromov_barycenters",
    "semirelaxed_gromov_wasserstein",
    "semirelaxed_gromov_wasserstein2",
    "semirelaxed_init_plan",
    "solve_gromov_linesearch",
    "solve_partial_gromov_linesearch",
    "solve_semirelaxed_gromov_linesearch",
    "tensor_product",
    "unbalanced_co_optimal_transport",
    "unbalanced_co_optimal_transport2",
    "uot_cost_matrix",
    "uot_parameters_and_measures",
    "update_barycenter_feature",
    "update_barycenter_structure",
]
