"""What mkdocs does besides reading the pages.

Before it reads them, the optimization log and the changelog, which lie above the pages, are copied
among them, and the pictures of the first pages and of the performance page are drawn into
docs/made/.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

mpl.use("Agg")

from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.collections import LineCollection  # noqa: E402

DOCS = Path(__file__).resolve().parent
MADE = DOCS / "made"
STANDING = DOCS.parent / "benchmarks" / "results" / "standing.jsonl"
SNARE = DOCS.parents[1] / "shared" / "data" / "snare.npz"
# One colour for a solver, to be told apart on white and on black.
SOLVERS = {"torchgw": "#2a78d6", "torchgw 0.4.2": "#d97706", "POT, entropic": "#16a34a"}


def on_config(config: Any) -> None:
    """Tell the example of single cells where its data are, if they lie beside the checkout."""
    if SNARE.is_file():
        os.environ.setdefault("TORCHGW_SNARE", str(SNARE))


def on_pre_build(config: Any) -> None:
    """Write the files that are made."""
    for above, page in (("OPTIMIZATION_LOG", "optimization-log"), ("CHANGELOG", "changelog")):
        shutil.copy(DOCS.parent / f"{above}.md", DOCS / f"{page}.md")
    MADE.mkdir(exist_ok=True)
    for draw in (match, cells, graphs, shapes, training):
        draw()
        plt.savefig(MADE / f"{draw.__name__}.png", dpi=160, transparent=True)
        plt.close("all")
    for scheme, colour in (("light", "#333333"), ("dark", "#dddddd")):
        chart(colour)
        plt.savefig(MADE / f"time-{scheme}.svg", transparent=True)
        plt.close("all")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put the links to script and notebook of an example below its title.

    Those of the gallery's first page get the suffix that the files of the site have.
    """
    if page.file.src_uri == "gallery/index.md":
        return re.sub(r'(class="reference internal" href="\w+)"', r'\1.html"', markdown)
    name = re.fullmatch(r"gallery/(?!index)(\w+)\.md", page.file.src_uri)
    if not name:
        return markdown
    # the pages are read from files too, where a srcset of the plugin leads nowhere
    markdown = re.sub(r' srcset="[^"]*"', "", markdown)
    markdown = re.sub(r"^!!! note\n\n(?:    .*\n)+\n", "", markdown, count=1, flags=re.M)
    links = " ".join(
        f"[:material-download: {what}]({name[1]}.{suffix}){{ .md-button }}"
        for what, suffix in (("script", "py"), ("notebook", "ipynb"))
    )
    markdown = re.sub(r"^(# .*)$", rf"\1\n\n{links}", markdown, count=1, flags=re.M)
    return markdown.partition('<div id="download_links">')[0]


def on_page_content(html: str, page: Any, files: Any, **_: Any) -> str:
    """Make links of the roles of Sphinx that docstrings have, such as :func:`torchgw.solve`.

    Pages that they name as files are links too, by their titles. Products such as <C, P>, which
    Markdown takes for tags, are shown.
    """

    def link(role: re.Match[str]) -> str:
        name = role[1].lstrip("~")
        shown = f"<code>{name.removeprefix('torchgw.')}</code>"
        if not name.startswith("torchgw."):
            return shown
        return f'<autoref identifier="{name}" optional>{shown}</autoref>'

    def titled(name: re.Match[str]) -> str:
        file = files.get_file_from_path(f"{name[1]}.md")
        return f'<a href="{file.url_relative_to(page.file)}">{file.page.title}</a>'

    if page.file.src_uri.startswith("api/"):
        html = re.sub(r"\bdocs/([a-z-]+)\.md\b", titled, html)
    html = re.sub(r'<(?=[^!<>="][^<>="]*,[^<>="]*>)', "&lt;", html)
    return re.sub(r":(?:attr|class|func|meth|mod):<code>([^<]+)</code>", link, html)


def times() -> dict[str, list[tuple[int, float]]]:
    """Return size and seconds of whole solves of spirals on one GPU, by solver."""
    series: dict[str, list[tuple[int, float]]] = {name: [] for name in SOLVERS}
    for line in STANDING.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        size = re.fullmatch(r"spiral ([\d,]+) x [\d,]+(?:, all pairs)?", row["goal"])
        if row["group"] != "whole solves" or not size or not row.get("seconds"):
            continue
        name = next(
            name for name in sorted(SOLVERS, reverse=True) if row["solver"].startswith(name)
        )
        seconds = float(np.mean(row["seconds"]))
        series[name].append((int(size[1].replace(",", "")), seconds))
    return {name: sorted(points) for name, points in series.items()}


def chart(ink: str) -> None:
    """Draw time over size, ours and the peers'."""
    with plt.rc_context(
        {"text.color": ink, "axes.labelcolor": ink, "xtick.color": ink, "ytick.color": ink}
    ):
        _, ax = plt.subplots(figsize=(7.5, 4), layout="constrained")
        for name, points in times().items():
            ax.loglog(*zip(*points, strict=True), "o-", color=SOLVERS[name], label=name)
            # the end of this one is beside another curve
            where = points[0] if name.startswith("POT") else points[-1]
            ax.annotate(f" {name}", where, color=SOLVERS[name], va="bottom")
        ax.set_xlim(right=1e7)
        ax.set(xlabel="points of the smaller side", ylabel="seconds, from points to result")
        ax.grid(color=ink, alpha=0.15)
        ax.spines[:].set_visible(False)


def empty(width: float, height: float) -> plt.Axes:
    """Make axes for a picture without a frame."""
    _, ax = plt.subplots(figsize=(width, height), layout="constrained")
    ax.set_aspect("equal")
    ax.axis("off")
    return ax


def side_by_side(
    points: np.ndarray, other: np.ndarray, gap: float
) -> tuple[np.ndarray, np.ndarray]:
    """Scale two flat clouds alike and put the second to the right of the first."""
    points, other = (
        (cloud - (cloud.max(0) + cloud.min(0)) / 2) / np.ptp(cloud, axis=0).max()
        for cloud in (points, other)
    )
    return points, other + [1 + gap, 0]


def match() -> None:
    """Draw the match of a spiral with a Swiss roll."""
    import torchgw
    from torchgw.datasets import spiral, swiss_roll

    (x, angle), (y, _) = spiral(400, random_state=0), swiss_roll(500, random_state=1)
    partner = np.asarray(torchgw.solve(x, y, random_state=0).lazy_plan.argmax())
    # the roll, seen from above and aside
    seen = np.asarray(y) @ np.array([[0.9, 0.25], [0.1, 0.75], [-0.45, 0.6]])
    left, right = side_by_side(np.asarray(x), seen, 0.5)
    ax = empty(10, 4)
    shown = np.argsort(angle)[::12]
    lines = np.stack([left[shown], right[partner[shown]]], axis=1)
    # without the ends of the scale, which are too dark on a dark page
    shade = plt.get_cmap("turbo")(0.12 + 0.75 * (angle - angle.min()) / np.ptp(angle))
    ax.add_collection(LineCollection(lines, colors=shade[shown], alpha=0.45, linewidths=0.8))
    ax.scatter(*right.T, s=9, color="#999999", linewidths=0)
    ax.scatter(*right[partner].T, s=14, color=shade, linewidths=0)
    ax.scatter(*left.T, s=14, color=shade, linewidths=0)


def cells() -> None:
    """Draw cells of four kinds in two measurements, coloured by the labels of the first."""
    import torchgw

    rng = np.random.default_rng(0)
    kind = rng.choice(4, 240, p=[0.4, 0.3, 0.2, 0.1])
    x = rng.normal(size=(4, 6))[kind] * 4 + rng.normal(size=(240, 6))
    order = rng.permutation(240)
    y = (x @ np.linalg.qr(rng.normal(size=(6, 6)))[0] + 0.1 * rng.normal(size=x.shape))[order]
    result = torchgw.solve(x, y, distances="euclidean", random_state=0)
    carried = kind[np.asarray(result.lazy_plan.T.argmax())]
    flat = [cloud @ np.linalg.svd(cloud - cloud.mean(0))[2][:2].T for cloud in (x, y)]
    ax = empty(4, 2.4)
    for cloud, colour in zip(side_by_side(*flat, 0.25), (kind, carried), strict=True):
        ax.scatter(*cloud.T, c=colour, cmap="Set1", vmin=0, vmax=8, s=7, linewidths=0)


def graphs() -> None:
    """Draw a network and its copy with other names, coloured by the match."""
    import networkx as nx

    import torchgw

    graph = nx.karate_club_graph()
    for _, _, edge in graph.edges(data=True):
        edge["weight"] = 1 / edge["weight"]
    order = np.random.default_rng(0).permutation(len(graph))
    copy = nx.relabel_nodes(graph, dict(enumerate(order.tolist())))
    partner = [list(copy)[j] for j in torchgw.solve(graph, copy, random_state=0).lazy_plan.argmax()]
    places = [
        np.array([place[node] for node in nodes])
        for place, nodes in (
            (nx.spring_layout(graph, seed=1), list(graph)),
            (nx.spring_layout(copy, seed=5), partner),
        )
    ]
    ax = empty(4, 2.4)
    rank = {node: place for place, node in enumerate(np.argsort(places[0][:, 0]))}
    colour = [rank[node] for node in range(len(graph))]
    for cloud, edges, nodes in zip(
        side_by_side(*places, 0.25), (graph.edges, copy.edges), (list(graph), partner), strict=True
    ):
        at = dict(zip(nodes, cloud, strict=True))
        lines = [(at[u], at[v]) for u, v in edges]
        ax.add_collection(LineCollection(lines, colors="#999999", alpha=0.5, linewidths=0.6))
        ax.scatter(*cloud.T, c=colour, cmap="turbo", vmin=-4, vmax=38, s=22, zorder=2, linewidths=0)


def shapes() -> None:
    """Draw a shape and the same one turned and bent, coloured by the match."""
    import torchgw

    rng = np.random.default_rng(0)
    angle = np.sort(rng.uniform(0, 2 * np.pi, 220))
    radius = 1 + 0.35 * np.cos(3 * angle) + 0.25 * np.sin(angle)
    x = np.column_stack([radius * np.cos(angle), radius * np.sin(angle)])
    turn = np.array([[0, 1], [-1, 0]])
    y = (x + 0.02 * rng.normal(size=x.shape))[rng.permutation(220)[:180]] @ turn
    partner = np.asarray(
        torchgw.solve(y, x, distances="euclidean", random_state=0).lazy_plan.argmax()
    )
    left, right = side_by_side(x, y, 0.25)
    ax = empty(4, 2.4)
    ax.scatter(*left.T, c=angle, cmap="hsv", vmin=0, vmax=2 * np.pi, s=9, linewidths=0)
    ax.scatter(*right.T, c=angle[partner], cmap="hsv", vmin=0, vmax=2 * np.pi, s=9, linewidths=0)


def training() -> None:
    """Draw what a map makes of hidden points of a curve, before and after it was trained."""
    import torch

    from torchgw.losses import GWLoss

    torch.manual_seed(0)
    angle = torch.linspace(0, 5.5, 64)
    curve = torch.stack([angle.cos(), angle.sin()], 1)
    hidden = torch.cat([curve, 0.3 * torch.randn(64, 3)], 1)
    encoder, loss = torch.nn.Linear(5, 2), GWLoss(epsilon=0.02)
    optimiser = torch.optim.Adam(encoder.parameters(), lr=0.02)
    before = encoder(hidden).detach().numpy()
    for _ in range(100):
        optimiser.zero_grad()
        loss(encoder(hidden), curve).backward()
        optimiser.step()
    ax = empty(4, 2.4)
    for cloud in side_by_side(before, encoder(hidden).detach().numpy(), 0.25):
        ax.scatter(*cloud.T, c=angle, cmap="turbo", vmin=-0.7, vmax=6.2, s=14, linewidths=0)
