"""Doubts that are reported where a search cannot vouch for its optimum: why, and what to do."""

WHY_SINGLE = {
    "auto": "A few points do not represent these distances, and there are too many to search them "
    "all by default, so this is the optimum of a single start; there may be a better one. Pass "
    "search='thorough', or an `init` that you know.",
    "thorough": "A few points do not represent these distances, and there are too many to search "
    "them all, so this is the optimum of a single start; there may be a better one. Pass an `init` "
    "that you know, or fewer points.",
}
WHY_FAST = (
    "A few points, or rough plans, do not tell which optimum is best here, and search='fast' "
    "follows no start to its end on all points; there may be a better one. Pass search='auto', or "
    "an `init` that you know."
)
WHY_APART = (
    "A few points do not represent these distances. A rough start and the best match of all points"
    " led to different optima, of which this is the better one; there may be a better one still. "
    "See `result.trials`; pass an `init` that you know."
)
WHY_RELAXED = (
    "Starts of this problem, whose marginals are relaxed, did not agree on an optimum; there may "
    "be a better one. See `result.alternatives`; pass an `init` that you know."
)
WHY_SUBSAMPLE = (
    "The problem is so large that its solve began on a subsample, and no starts were followed on "
    "all points; there may be a better optimum. Pass search='auto', or an `init` that you know."
)
WHY_TIME = (
    "The time limit ended the search before it had followed everything that it found; there may be "
    "a better optimum. Pass a larger `time_limit`, or an `init` that you know."
)
WHY_EDGES = (
    "The plan sends few of the edges of X to edges of Y, and starts that matched these alone did "
    "not agree on how; there may be a better optimum. Pass search='thorough' to search longer, or "
    "an `init` that you know."
)
WHY_OPEN = {
    "auto": "{count} starts, followed on all points, did not agree on an optimum; there may be a "
    "better one. See `result.trials`; pass search='thorough' to search longer.",
    "thorough": "{count} starts, followed on all points, did not agree on an optimum; there may be "
    "a better one. See `result.trials`; pass a larger `n_init` to search longer.",
}
WHY_NO_ELBOW = (
    "The cost of more mass rises without a break, so how much of the two sides matches is open: "
    "{share:g} of the mass was taken. See `result.report.masses`; pass the `mass` that you know."
)
WHY_UNSEARCHED = (
    "This problem was solved from a single start, as those of more points are in a batch; there "
    "may be a better optimum. Pass it to torchgw.solve, or n_init=16."
)
WHY_BATCH = (
    "Starts of this problem did not agree on an optimum; there may be a better one. Pass it to "
    "torchgw.solve, which searches longer, or from a plan that you know."
)
