"""The numbers at which the path of a problem changes, one set for each kind of device.

Nothing else holds such numbers: ``_solve/route.py`` and the search read them from here. What they
were measured on stands in the rows of the ledger that each group cites.
"""

from typing import NamedTuple

import torch

from torchgw.distances.sampling import SAME_POINTS


class Limits(NamedTuple):
    """Where paths part; entries are pairs of points, n m, unless something else is said."""

    # Distances. Points of a side that are looked at to choose them, or a weight beside them that
    # more would change by less than a percent; up to which neighbour graphs may have short cuts,
    # and all paths are read; and up to which they tell nothing, so that graphs
    # are taken. [L356, L843]
    looked_at: int
    doubted_points: int
    untold_points: int
    # Points of a side up to which distances of all pairs are computed, as geodesics, or to match
    # points by their distributions: beyond it takes minutes. [L95, L279]
    all_pairs_points: int
    # Points of a side up to which "dijkstra" computes all pairs too: a sampled solve asks for
    # nearly every row in the end. Larger tables are too large for an exact gradient, and on a CPU,
    # where products of tables take seconds, landmarks are tried first. [L95, L126, L127]
    all_rows_points: int
    # Entries from which on a solve without structure takes minutes on a CPU. [L359]
    unstructured: float

    # Gradients. Entries of a square of the larger side up to which the exact gradient is made by
    # dense products: three tables and two products of them in every iteration; and up to which
    # distances are stored that are compared with those of a copy. [L269, L589]
    dense: float
    # Triples of points, n m min(n, m), up to which a loss that is no product is exact, and up to
    # which it may be asked to be. [L260]
    triples: float
    most_triples: float

    # Precision. Entries up to which float64 throughout costs less than settling in it, and from
    # which on a GPU makes float32 products of the dense gradient of half-precision ones; and up to
    # which marginals settle in float64 whatever its rounding, no cells lie between a subsample and
    # all points on a GPU, and those that may hold mass are listed where a table of all is not kept:
    # some 80 bytes each. [L89, L298, L1459, L1981]
    float64: float
    settled: float

    # Storage. Bytes of a cost up to which it is stored where that is faster: the memory of
    # streaming does not grow with n m. [L92]
    stored_bytes: float
    # Entries above which a factored solve begins on a subsample, and from which on it ends on cells
    # of near points. [L298, L424, L458]
    subsample: float
    cells: float
    # Entries of cells up to which they are solved in float64, so that finer cells begin at their
    # fixed point. [L424]
    precise_cells: int
    # Entries of a table that no factors stand for up to which it is kept: Euclidean distances
    # between features, densities of plans that derivatives read again and again. Up to as many a
    # mixed solve goes on in float64 once float32 has settled. [L266, L273, L296]
    kept_tables: float

    # Ends. Entries up to which linear problems are solved exactly unless that is refused: those of
    # a polish after dense proximal steps, and of the best lower bound. [L329, L950]
    exact: float
    # Multiplications of an exact cost up to which a sampled solve is checked by it; or minima, for
    # a loss that is no product, which take a thousand times as long. [L545]
    checked: int
    checked_minima: int
    # Derivatives. Entries up to which tables of that size are kept, of which their linear system
    # keeps sixty: 1 GB; columns up to which that of the columns is factorised; and numbers of a
    # coupling of factors up to which moments, as many as its square, are made. [L385, L492, L524]
    differentiated: int
    solved_columns: int
    moments: int

    # The search. Points of a side of the coarse problem, up to which relaxed ones have starts of
    # their own; up to which all are searched where those say little; and up to which problems
    # are put in a standard form, which all ways to write them share. [L110, L116, L109, L219, L240,
    # L1331]
    few_points: int
    all_points: int
    # Points of the larger side from which on chains are of use; points of equal weight up to which
    # partners are exchanged, and up to which all matchings are looked at. [L662, L1274, L546]
    ordered_points: int
    least_points: int
    exchanged_points: int
    all_matchings: int
    # Entries up to which a plane is laid on another at many turns: 3 s for a million. [L1476]
    turned: float
    # Entries up to which relaxed problems are also begun at pairs at equal distances of all points;
    # of larger ones some points, with as many entries, are looked at. [L1394, L1468]
    congruent: int
    # Entries up to which plans are followed to their ends side by side; and up to which the product
    # plan is followed by a whole solve. [L1291]
    stacked: int
    product: int
    # Entries up to which every optimum that may end lower is solved from; and by which share of the
    # best value one may be higher, of few points, or of chains on all: they do not tell more.
    # [L1254, L1291, L1381, L1705]
    followed: float
    few_above: float
    all_above: float
    # Chains of a search; the fewest that are worth while; multiplications that all may take; and
    # how many times as many chains a thorough search has, each of which may take as much more.
    # [L331]
    chains: int
    fewest_chains: int
    chain_products: float
    thorough: int
    # What few points tell. Resolution above which that is little: all points are then searched,
    # from half as many starts, if there are few enough; and one as small as does not occur for
    # distances, but for those of very few points or on a line. Loneliness (see there) above which
    # they say nothing about the others: 0.05 to 0.9 for curves, clouds in up to 10 dimensions,
    # clusters; 0.9 to 14 for word vectors, networks, noise. [L109, L219, L332, L335]
    coarsest: float
    no_distance: float
    lonely: float
    # Ambiguity above which few points leave open which optimum is the best, and plans that are no
    # matchings are not walked from, as that is told; and, where they are so far from others that
    # the first search was one of all points, above which chains are followed as if few points told
    # nothing: merges of clusters have optima within optima. [L1270, L1274, L1287, L1966]
    left_open: float
    unclear: float
    # L1 distance to the product plan, at most 2, up to which an optimum is too blurred to start
    # from: .4 to .5 of random graphs with entropy, 1.7 to 2 elsewhere. [L1127]
    smeared: float
    # Correlation of the distances among matches by distance distributions from which on these are
    # believed, and the fewest of them. [L233, L279]
    believed: float
    fewest_matches: int
    # Chains between few points, where these leave open which optimum is the best: of clusters,
    # starts find others. A GPU waits for their launches. [L1688]
    few_chains: int
    # Chains where few points tell where all go but leave open which optimum is the best, and up to
    # how many entries. Up to as many, guesses are also followed at the target alone and from a
    # larger epsilon, and edges are matched from more starts. [L1270, L1274, L1278, L1283, L1347]
    open_chains: int
    open_most: int
    # Value of a plan, as a share of the scale, up to which a small problem that few points tell
    # clearly is not searched again: chains and matchings have never found a better one. Noise of a
    # twentieth of the size of clouds leads to half of it. The same of a plan of all points that
    # keeps all distances. [L335, L1380]
    copies: float
    isometric: float
    # Entries of plans that advance together: a CPU does best with what its cache holds. [L333]
    together: int
    # Entries up to which a search takes next to nothing: two starts of graphs that have met do not
    # end it, rows and columns of the best plan are exchanged though starts agree, and problems of a
    # batch have one by default. [L661, L1315, L1867]
    tiny: int
    # Shares of entries that are not zero up to which tables are taken for graphs; and up to which
    # partners are exchanged along edges, and products on a CPU are sums over these. [L333, L337,
    # L1363]
    graph_density: float
    edge_density: float
    # Share of the squares of a table, about the median, that entries hold which matter: where they
    # are as few as edges, starts by them alone are followed too. [L1851]
    matter: float
    # Graphs whose plans are in no doubt are matched by their edges up to so many entries, unless
    # the plan keeps such a share of the edges, or its value is no more than a share of the natural
    # scale of the cost. [L1283]
    edges: float
    kept_edges: float
    well: float
    # Messages along the edges of graphs that are too large for chains, edges times nodes. [L1362]
    messages: float
    # The same, edges times places, where those of walks that never turn back are told too. [L1650]
    walks: float
    # Those among all nodes that take as long as one among candidates, which give way to them where
    # there would be more. [L1816]
    squares: int
    # Regions of a matching that are matched anew at a time: a GPU waits for launches. [L1655]
    regions: int

    # Doubts. Shares of the cost of a plan that a part of its mass has to cost less than, after one
    # outer iteration and at its end, for other matches of that part to be looked for; and share of
    # what the part costs by the plan that is enough for one of these. [L1680, L1760]
    part_begun: float
    part_ended: float
    part_otherwise: float
    # Ends of relaxed problems with the lowest objective that are enough to be sure of it; share of
    # the second best value below which a match of edges is found, by whatever chain: what two
    # graphs have in common is kept as a whole or not at all; and by how many times what two lines
    # leave the cost of more mass has to rise at a break that is clear: where nothing matches costs
    # rise everywhere, and not more evenly. [L1401, L1283, L1386]
    relaxed_met: int
    edges_found: float
    clear_break: float

    # Points of a side up to which work that grows with the cube of it is done: spaces are compared
    # by eigenvalues, and matchings improved. [L326, L415]
    cubed_points: int

    # Results. Entries of a table, or of the square of the larger side, up to which all are read:
    # sorted for a bound, correlated, assigned exactly or certified, in some seconds each. [L324,
    # L328, L329]
    read: int

    # Matchings. Triples of points up to which one is improved for a loss that is no product; points
    # up to which all matchings are searched, and beyond, rows up to which partners are exchanged:
    # that takes products of tables. [L327, L1341, L1589]
    improved_triples: int
    matched_points: int
    exchanged_rows: int

    # Surfaces. Mean difference of the logarithms of the first squares of frequencies up to which
    # two may be poses of one shape; and share of the area of each that has to have partners where a
    # map is refined, a choice. [L1532]
    alike: float
    whole: float

    # Certificates. Points up to which distances are sorted and decomposed, pairs of points up to
    # which they are lifted, and points up to which matchings have a semidefinite relaxation;
    # products of factors up to which cutting planes are tried, and up to which cuts need not be
    # deep: in more dimensions vertices are dearer. [L1355, L1377, L1551]
    sorted_points: int
    lifted: int
    semidefinite: int
    cut_products: int
    shallow_cuts: int

    def stores(self, n: int, m: int) -> bool:
        """Whether a table that no factors stand for is kept."""
        return n * m <= self.kept_tables

    def checks(self, n: int, m: int, *, products: bool) -> bool:
        """Whether a sampled solve is checked by an exact cost, of products or of minima."""
        return n * m * max(n, m) <= (self.checked if products else self.checked_minima)

    def certifies(self, n: int, m: int) -> bool:
        """Whether so many points may have a certificate."""
        return max(n, m) ** 2 <= self.read

    def chains_of(self, how: str) -> int:
        """Count the chains of a search of some name."""
        return self.chains * (self.thorough if how == "thorough" else 1)


CPU = Limits(
    looked_at=SAME_POINTS, doubted_points=200, untold_points=20, all_pairs_points=3_000,
    all_rows_points=1_000, unstructured=36e6,
    dense=12e6, triples=10e6, most_triples=1e9,
    float64=100_000, settled=100e6,
    stored_bytes=2**28, subsample=9e6, cells=4e10, precise_cells=2**28, kept_tables=25e6,
    exact=4e6, checked=2**26, checked_minima=2**20,
    differentiated=2_000_000, solved_columns=8_192, moments=4_356,
    few_points=96, all_points=512, ordered_points=1_000, least_points=5, exchanged_points=64,
    all_matchings=7, turned=2e6, congruent=2**17,
    stacked=2**13, product=2**14, followed=40e6, few_above=0.2, all_above=0.02,
    chains=16, fewest_chains=4, chain_products=1e12, thorough=4,
    coarsest=0.2, no_distance=0.01, lonely=0.9, left_open=0.5, unclear=0.02, smeared=1.0,
    believed=0.7, fewest_matches=32,
    few_chains=8, open_chains=4, open_most=2**16, copies=2.5e-3, isometric=1e-3,
    together=2**17, tiny=2**10,
    graph_density=0.2, edge_density=0.05, matter=0.95,
    edges=200_000, kept_edges=0.9, well=0.05, messages=2e8, walks=2**24,
    squares=4, regions=1,
    part_begun=0.375, part_ended=0.25, part_otherwise=0.95,
    relaxed_met=2, edges_found=0.7, clear_break=7.5,
    cubed_points=1_500, read=25_000_000,
    improved_triples=2_000_000, matched_points=128, exchanged_rows=2_048,
    alike=0.1, whole=0.75,
    sorted_points=2_500, lifted=3_600, semidefinite=30, cut_products=144,
    shallow_cuts=4,
)  # fmt: skip
CUDA = CPU._replace(
    all_rows_points=6_000, dense=40e6, triples=2e9, most_triples=1e11, float64=2e6,
    settled=1e9,
    stored_bytes=2**31, cells=1e11, kept_tables=200e6,
    chain_products=1.2e13, messages=1e10, walks=5e8, regions=16, few_chains=0,
    open_chains=CPU.chains, together=2**28,
)  # fmt: skip
LIMITS = {"cpu": CPU, "cuda": CUDA}


def limits_of(device: torch.device) -> Limits:
    """Return the limits of a device."""
    return LIMITS[device.type]
