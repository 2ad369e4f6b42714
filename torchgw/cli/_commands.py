"""Commands that read a result of ``torchgw align``: info, score, plot, transform; and benchmark."""

from __future__ import annotations

import argparse
import json
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import torchgw
from torchgw._boundary.archive import check_writable
from torchgw._errors import InvalidInputError, UnsupportedError
from torchgw._sinkhorn.choose import unavailable_backends
from torchgw.cli._files import check_output, read_array, read_labels, write_array
from torchgw.metrics import foscttm, label_accuracy

if TYPE_CHECKING:
    from torchgw._results.result import GWResult
    from torchgw.distances.new_points import Space

__all__ = ["add_commands", "add_output_options", "check_picture", "positive"]

_OPTIONAL = ("matplotlib", "tqdm", "scikit-learn", "anndata", "pandas", "pyarrow", "networkx")


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands of this module."""
    info = commands.add_parser(
        "info", help="say what can run here, or what a result file holds",
        description="Without a file: versions, devices and backends. With one: its result.",
    )  # fmt: skip
    info.set_defaults(run=_info)
    info.add_argument("result", nargs="?", help="file written by torchgw align or result.save")
    add_output_options(info)

    score = commands.add_parser(
        "score", help="score a result against known partners or labels",
        description="Print the value and errors of a result, and scores where answers are given.",
    )  # fmt: skip
    score.set_defaults(run=_score)
    score.add_argument("result", help="file written by torchgw align or result.save")
    score.add_argument(
        "--truth", metavar="FILE", help="for each row of X the row of Y that is its partner, from 0"
    )
    _add_labels(score)
    score.add_argument("--json", action="store_true", help="print one JSON object")
    add_output_options(score)

    plot = commands.add_parser(
        "plot", help="draw a result", description="Draw a result to a picture file."
    )
    plot.set_defaults(run=_plot)
    plot.add_argument("result", help="file written by torchgw align or result.save")
    plot.add_argument("-o", "--output", required=True, type=Path, help="picture, such as plan.png")
    plot.add_argument(
        "--kind", default="plan",
        choices=("plan", "clouds", "convergence", "confusion", "alternatives"),
    )  # fmt: skip
    _add_labels(plot)
    add_output_options(plot)

    transform = commands.add_parser(
        "transform", help="map new points by a result",
        description="Map new points of X to the space of Y, or back, without solving again.",
    )  # fmt: skip
    transform.set_defaults(run=_transform)
    transform.add_argument("result", help="file written by torchgw align or result.save")
    transform.add_argument("points", help="new points, in the forms that align takes")
    transform.add_argument(
        "-o", "--output", required=True, type=Path, help=".npy, .csv or .tsv file to write"
    )
    transform.add_argument("--inverse", action="store_true", help="map points of Y to X")
    add_output_options(transform)

    benchmark = commands.add_parser(
        "benchmark", help="time a solve on this machine",
        description="Match a spiral with a Swiss roll of given sizes, and report time and quality.",
    )  # fmt: skip
    benchmark.set_defaults(run=_benchmark)
    benchmark.add_argument("--n", type=positive, default=1000, help="points of the spiral")
    benchmark.add_argument("--m", type=positive, default=1200, help="points of the Swiss roll")
    benchmark.add_argument(
        "--repeat", type=positive, default=3, help="solves; the first one warms up"
    )
    benchmark.add_argument("--device", help="torch device, such as cpu or cuda:0")
    benchmark.add_argument("--json", action="store_true", help="print one JSON object")
    add_output_options(benchmark)


def _add_labels(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--labels-x", metavar="FILE", help="a label for each row of X")
    parser.add_argument("--labels-y", metavar="FILE", help="a label for each row of Y")


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how much is reported."""
    volume = parser.add_mutually_exclusive_group()
    volume.add_argument("-q", "--quiet", action="store_true", help="report errors only")
    volume.add_argument("-v", "--verbose", action="count", default=0, help="log more; -vv for all")


def check_picture(path: Path) -> None:
    """Refuse a picture that could not be drawn or written, before the work."""
    if find_spec("matplotlib") is None:
        raise UnsupportedError(
            "This draws with matplotlib, which is not installed: run `pip install 'torchgw[plot]'`."
        )
    from matplotlib.figure import Figure

    check_writable(path)
    kinds = Figure().canvas.get_supported_filetypes()
    # without one it is matplotlib's default
    if path.suffix and path.suffix[1:].lower() not in kinds:
        raise InvalidInputError(
            f"cannot write {path}: pictures are {', '.join(sorted(kinds))} files."
        )


def _info(options: argparse.Namespace) -> int:
    """Describe the machine or a file."""
    if options.result is not None:
        result = torchgw.load(options.result)
        print(result)
        if not isinstance(result, torchgw.GWResult):
            return 0
        for name, space in zip("XY", _spaces(result), strict=False):
            if space.points is not None:
                print(f"  {name}: points of shape {tuple(space.points.shape)}")
        for place, item in enumerate(result.alternatives):
            print(f"  alternative {place}: {item.label}, value {item.value:.6g}")
        return 0
    print(f"torchgw       {torchgw.__version__}")
    print(f"python        {platform.python_version()} on {platform.platform()}")
    print(f"torch         {torch.__version__}, {torch.get_num_threads()} threads")
    for index in range(torch.cuda.device_count()):
        print(f"cuda:{index}        {torch.cuda.get_device_name(index)}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for name, reason in unavailable_backends(device).items():
        # what a compiler says is long
        why = "runs" if reason is None else reason.splitlines()[0][:110]
        print(f"{name:13s} {why}  ({device.type})")
    for name in _OPTIONAL:
        print(f"{name:13s} {_version(name)}")
    return 0


def _alignment(path: str) -> GWResult:
    """Read a result that must be one of an alignment."""
    result = torchgw.load(path)
    if not isinstance(result, torchgw.GWResult):
        raise InvalidInputError(
            f"{path}: holds a {type(result).__name__}, and this command reads a GWResult, which "
            "`torchgw align` and `solve(...).save` write. `torchgw info` reads all."
        )
    return result


def _spaces(result: GWResult) -> tuple[Space, ...]:
    """Return what the source and the target were made from, if the result holds that."""
    return () if result.extension is None else result.extension.spaces


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _score(options: argparse.Namespace) -> int:
    """Score a result."""
    result = _alignment(options.result)
    scores: dict[str, Any] = {
        "value": result.value,
        "marginal_error": result.marginal_error,
        "status": result.status.name,
    }
    spaces = _spaces(result)
    target = spaces[1].points if spaces else None
    projected = None if target is None else result.lazy_plan.barycentric(target)
    n, m = result.lazy_plan.shape
    if options.truth is not None:
        truth = read_array(options.truth).reshape(-1)
        partners = truth.astype(np.int64)
        valid = (partners == truth) & (partners >= 0) & (partners < m)
        if len(truth) != n or not valid.all():
            raise InvalidInputError(
                f"{options.truth}: expected {n} row numbers of Y, each from 0 to {m - 1}."
            )
        found = result.lazy_plan.argmax().cpu().numpy()
        scores["matched"] = float((found == partners).mean())
        if projected is not None and target is not None:
            scores["foscttm"] = foscttm(projected, target[torch.from_numpy(partners)])
    labels = _labels(options, (n, m))
    if labels is not None:
        own, other = labels
        classes, place = np.unique(other, return_inverse=True)
        moved = (result.lazy_plan @ np.eye(len(classes))[place]).cpu().numpy()
        agreeing = moved[own[:, None] == classes].sum()
        scores["mass_on_same_label"] = float(agreeing / moved.sum())
        if projected is not None and target is not None:
            scores["label_accuracy"] = label_accuracy(projected, own, target, other)
    if options.json:
        print(json.dumps(scores))
    else:
        for name, value in scores.items():
            print(f"{name:19s} {value if isinstance(value, str) else f'{value:.6g}'}")
    return 0


def _labels(options: argparse.Namespace, shape: tuple[int, int]) -> Any:
    """Return the labels of both sides, or ``None`` without them."""
    if (options.labels_x is None) != (options.labels_y is None):
        raise InvalidInputError("--labels-x and --labels-y go together; only one was given.")
    if options.labels_x is None:
        return None
    both = read_labels(options.labels_x), read_labels(options.labels_y)
    for labels, count, name in zip(both, shape, (options.labels_x, options.labels_y), strict=True):
        if len(labels) != count:
            raise InvalidInputError(f"{name}: expected {count} labels, got {len(labels)}.")
    return both


def _plot(options: argparse.Namespace) -> int:
    """Draw a result."""
    check_picture(options.output)
    result = _alignment(options.result)
    _draw(result, options).savefig(options.output, dpi=150)
    if not options.quiet:
        print(f"written          {options.output}")
    return 0


def _draw(result: GWResult, options: argparse.Namespace) -> Any:
    from matplotlib.figure import Figure

    from torchgw import plotting

    figure = Figure(figsize=(9.0, 4.2) if options.kind == "clouds" else (6.0, 5.0))
    figure.set_layout_engine("constrained")
    labels = _labels(options, result.lazy_plan.shape)
    if options.kind == "clouds":
        points = [space.points for space in _spaces(result) if space.points is not None]
        if len(points) != 2:
            raise InvalidInputError("--kind clouds needs a result whose sides were points.")
        colour = None if labels is None else np.unique(labels[0], return_inverse=True)[1]
        source, target = (
            figure.add_subplot(1, 2, place, projection="3d" if side.shape[1] >= 3 else None)
            for place, side in enumerate(points, start=1)
        )
        plotting.plot_match(result, *points, colour=colour, ax=(source, target))
        return figure
    ax = figure.add_subplot()
    if options.kind == "plan":
        order = "structure" if labels is None else labels[0]
        plotting.plot_plan(result, order=order, ax=ax)
    elif options.kind == "convergence":
        plotting.plot_convergence(result, ax=ax)
    elif options.kind == "alternatives":
        plotting.plot_alternatives(result, ax=ax)
    elif labels is None:
        raise InvalidInputError("--kind confusion needs --labels-x and --labels-y.")
    else:
        plotting.plot_confusion(result, *labels, ax=ax)
    return figure


def _transform(options: argparse.Namespace) -> int:
    """Map new points."""
    check_output(options.output, (".npy", ".csv", ".tsv"), options.result, options.points)
    result = _alignment(options.result)
    points = read_array(options.points)
    mapped = result.inverse_transform(points) if options.inverse else result.transform(points)
    write_array(options.output, mapped.cpu().numpy())
    if not options.quiet:
        print(f"written          {options.output}, {mapped.shape[0]} points")
    return 0


def _benchmark(options: argparse.Namespace) -> int:
    """Time a solve on a problem with a known answer."""
    from scipy.stats import spearmanr

    from torchgw.datasets import spiral, swiss_roll

    X, source_angle = spiral(options.n, random_state=0)
    Y, target_angle = swiss_roll(options.m, random_state=1)
    seconds = []
    for _ in range(options.repeat):
        start = time.perf_counter()
        result = torchgw.solve(X, Y, device=options.device, random_state=0)
        matched = result.lazy_plan.argmax().cpu().numpy()
        seconds.append(time.perf_counter() - start)
    correlation = float(spearmanr(source_angle, target_angle[matched]).statistic)
    figures = {
        "n": options.n,
        "m": options.m,
        "seconds": float(np.median(seconds[1:] or seconds)),
        "abs_spearman": abs(correlation),
        "marginal_error": result.marginal_error,
        "value": result.value,
        "backend": result.backend,
        "status": result.status.name,
        "phases": {name: round(value, 4) for name, value in result.timings.items()},
    }
    if options.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:16s} {value:.5g}" if isinstance(value, float) else f"{name:16s} {value}")
    return 0 if result.converged else 1


def positive(text: str) -> int:
    """Read a whole number above zero."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return number
