"""Drawings of results. Needs matplotlib."""

from __future__ import annotations

from torchgw.plotting._figures import plot_alternatives as plot_alternatives
from torchgw.plotting._figures import plot_confusion as plot_confusion
from torchgw.plotting._figures import plot_convergence as plot_convergence
from torchgw.plotting._figures import plot_demo as plot_demo
from torchgw.plotting._figures import plot_match as plot_match
from torchgw.plotting._figures import plot_plan as plot_plan
from torchgw.plotting._figures import plot_points as plot_points

__all__ = [
    "plot_alternatives",
    "plot_confusion",
    "plot_convergence",
    "plot_demo",
    "plot_match",
    "plot_plan",
    "plot_points",
]
