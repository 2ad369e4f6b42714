"""``torchgw align``: match two files and write the result."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import torchgw
from torchgw._boundary.arrays import to_numpy
from torchgw._boundary.console import progress
from torchgw._errors import InvalidInputError, PlanTooLargeError, warn_user
from torchgw._problem.table import TABLE
from torchgw.cli._arguments import add_columns, add_output_options, flag_of, positive, spoken
from torchgw.cli._files import (
    Side,
    check_output,
    has_column,
    read_array,
    read_side,
    read_weights,
    write_table,
)
from torchgw.cli._processes import rank

if TYPE_CHECKING:
    from torchgw._results.result import GWResult

EXIT_CONVERGED = 0
EXIT_INCOMPLETE = 1
EXIT_DOUBTFUL = 3

EXIT_CODES = """exit codes:
  0  converged
  1  not converged, or without the dense plan that was asked for; the result is written
  2  bad usage or input, or a solve that was refused; nothing is written
  3  converged, and another match costs nearly the same or may cost less; the result is written
  130  interrupted, or 143 terminated; nothing is written
"""

_EXAMPLES = """examples:
  torchgw align X.npy Y.npy -o out.npz
  torchgw align cells.csv data.npz:atac -o out.npz --partners partners.csv --n-neighbors 15
  torchgw align a.csv:x,y b.csv --id-column name --label-column kind -o out.npz --time-limit 10m
  torchgw align cat.off dog.ply -o out.npz --partners partners.csv
  torchgw align worm.graphml fly.edges -o out.npz --partners partners.csv
  torchgw --gpus 4 align large.npy other.npy -o folder/
  torchgw align atac.h5ad:obsm/X_lsi rna.h5ad:obsm/X_pca -o out.npz --distances cosine

"""


def add_align(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `align`, and `explain`, which takes what goes into it."""
    parser = commands.add_parser(
        "align", help="match the rows of two files",
        description="Match the rows of two files by the distances inside each.",
        epilog=_EXAMPLES + EXIT_CODES, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.set_defaults(run=align)
    _add_inputs(parser)
    parser.add_argument(
        "-o", "--output", required=True,
        help=".npz file to write, or a folder/, with its slash, for tables matched by rows",
    )  # fmt: skip
    parser.add_argument(
        "--base", metavar="N", type=positive, help="rows of each side that tables matched by rows "
        "are known by (default: as many as a sample needs)",
    )  # fmt: skip
    parser.add_argument(
        "--partners", metavar="FILE", type=Path,
        help=".csv or .tsv file to write: for each row of X its partner in Y, by their names",
    )  # fmt: skip
    stored = parser.add_argument_group("what else is stored")
    stored.add_argument("--dense", action="store_true", help="store matrices in full")
    stored.add_argument("--plan", action="store_true", help="store the dense plan")
    stored.add_argument(
        "--sparse-topk", type=positive, metavar="K",
        help="store the K largest entries of every row of the plan",
    )  # fmt: skip
    _add_solver(parser)
    parser = commands.add_parser(
        "explain",
        help="say what align would do, why, and what it would take",
        description="Say what `torchgw align` would do with two files, why, and what it would "
        "take. Nothing is solved.",
        epilog="examples:\n  torchgw explain X.npy Y.npy\n"
        "  torchgw explain X.csv Y.csv --search thorough --device cuda\n",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=explain)
    _add_inputs(parser)
    _add_solver(parser)


def _add_inputs(parser: argparse.ArgumentParser) -> None:
    """Add what names the data."""
    parser.add_argument(
        "X",
        help="source, rows are points: .npy, .npz, file.npz:array, .csv, .tsv, either "
        "with .gz, .parquet or file.h5ad:obsm/NAME; a surface: .off, .obj, .ply, .stl; or a "
        "network: .graphml, .gml, .mtx, .edgelist, .edges, or a table with columns source, target",
    )
    parser.add_argument("Y", help="target, in the same forms")
    parser.add_argument(
        "--distance-matrices", action="store_true",
        help="X and Y are square matrices of distances, not points",
    )  # fmt: skip
    parser.add_argument("--a", metavar="FILE", help="weights of the rows of X, in any unit")
    parser.add_argument("--b", metavar="FILE", help="weights of the rows of Y, in any unit")
    parser.add_argument(
        "--linear-cost", metavar="FILE", help="n x m costs of a row of X with a row of Y"
    )
    parser.add_argument(
        "--allowed", metavar="FILE",
        help="n x m numbers, not zero where a row of X may be matched with a row of Y",
    )  # fmt: skip
    parser.add_argument(
        "--pairs", metavar="FILE", help="k x 2 row numbers of X and of Y, from 0: known pairs"
    )
    parser.add_argument(
        "--same-labels", action="store_true",
        help="match rows of one label in --label-column alone",
    )  # fmt: skip
    add_columns(parser)


def _add_solver(parser: argparse.ArgumentParser) -> None:
    """Add the options of the solver and of the output."""
    solver = parser.add_argument_group("solver, with the defaults of torchgw.solve")
    parser.set_defaults(solve_options=_add_solve_options(solver))
    add_output_options(parser)


def _add_solve_options(group: argparse._ArgumentGroup) -> tuple[str, ...]:
    """Add a flag for each option of the table that has one, and return their names there."""
    names = ["momentum"]
    # what was not given is absent, so that defaults live in one place
    group.add_argument("--momentum", type=float, help=argparse.SUPPRESS, default=argparse.SUPPRESS)
    for option in TABLE.values():
        if option.flag is None:
            continue
        settings = flag_of(option)
        group.add_argument(option.flag, dest=option.name, default=argparse.SUPPRESS, **settings)
        names.append(option.name)
    return tuple(names)


def explain(options: argparse.Namespace) -> int:
    """Print what a match of two files would take, and how it would go."""
    _, given = _read_inputs(options)
    print(spoken(torchgw.explain(**given, options=torchgw.Options(**_solve_settings(options)))))
    return EXIT_CONVERGED


def _read_inputs(options: argparse.Namespace) -> tuple[list[Side], dict[str, Any]]:
    """Read both sides, weights and costs; return them by their names in `torchgw.solve` too."""
    if options.distance_matrices and hasattr(options, "distances"):
        raise InvalidInputError(
            "--distances measures points, and --distance-matrices says that X and Y are distances "
            "already. Drop one of them."
        )
    sides = _read_sides((options.X, options.Y), (options.id_column, options.label_column))
    for side in sides:
        if options.distance_matrices and side.kind != "table":
            raise InvalidInputError(
                f"--distance-matrices are square tables, and a {side.kind} is none."
            )
    names = ("D_X", "D_Y") if options.distance_matrices else ("X", "Y")
    given: dict[str, Any] = {name: side.space for name, side in zip(names, sides, strict=True)}
    for name, file in (("a", options.a), ("b", options.b)):
        if file is not None:
            given[name] = read_weights(file)
    if options.linear_cost is not None:
        given["M"] = read_array(options.linear_cost)
    if options.allowed is not None:
        given["allowed"] = read_array(options.allowed) != 0
    if options.pairs is not None:
        given["pairs"] = _row_numbers(options.pairs)
    if options.same_labels:
        labels = [side.labels for side in sides]
        if any(part is None for part in labels):
            raise InvalidInputError(
                "--same-labels compares labels, and both files need them: name their column by "
                "--label-column."
            )
        given["groups"] = tuple(labels)
    return sides, given


def _row_numbers(name: str) -> Any:
    """Read whole numbers, which tables hold as others."""
    table = read_array(name)
    if table.dtype.kind == "f" and (table == np.rint(table)).all():
        table = table.astype(np.int64)
    return table


def align(options: argparse.Namespace) -> int:
    """Match two files and write the result."""
    if options.output.endswith(("/", os.sep)):
        return _align_rows(options)
    options.output = Path(options.output)
    if options.base is not None:
        raise InvalidInputError(
            "--base: only a folder, an output that ends in /, has one. Drop it."
        )
    inputs = options.X, options.Y, options.a, options.b, options.linear_cost, options.allowed
    written = [check_output(options.output, (".npz",), *inputs)]
    if options.partners is not None:
        written.append(check_output(options.partners, (".csv", ".tsv"), *inputs))
    sides, given = _read_inputs(options)
    settings = _solve_settings(options)
    total, tol = (settings.get(name, TABLE[name].default) for name in ("max_iter", "tol"))
    together = rank() is not None
    if together and options.gpus is not None:
        settings.setdefault("device", "cuda")
    with progress(not options.quiet, total, tol, spoken) as report:
        asked = torchgw.Options(**settings, callback=report, distributed=together)
        result = torchgw.solve(**given, options=asked)
    if rank():
        # only the first process writes
        return EXIT_CONVERGED
    contents = _summary(result, {"X": options.X, "Y": options.Y, **settings})
    complete = _add_plan(contents, result, options)
    result.save(options.output, dense=options.dense, extra=contents)
    if options.partners is not None:
        write_table(options.partners, _partners(result, sides))
    if not options.quiet:
        print(f"status           {result.status.name}: {spoken(result.status.advice)}")
        print(f"value            {result.value:.6g}")
        print(f"marginal error   {result.marginal_error:.2e}")
        print(f"iterations       {result.n_iters}")
        for place, item in enumerate(result.alternatives[1:], start=1):
            print(f"alternative {place}    value {item.value:.6g}: {item.relation or item.label}")
        print(written[0])
        if options.partners is not None:
            print(f"{written[1]}, {result.lazy_plan.shape[0]} rows")
    if not (result.converged and complete):
        return EXIT_INCOMPLETE
    return EXIT_DOUBTFUL if result.is_ambiguous or result.doubt else EXIT_CONVERGED


def _align_rows(options: argparse.Namespace) -> int:
    """Match two tables by rows, and write what is found to a folder."""
    names = "distance_matrices linear_cost allowed pairs same_labels id_column label_column"
    for name in f"{names} partners dense plan sparse_topk".split():
        if getattr(options, name):
            flag = name.replace("_", "-")
            raise InvalidInputError(
                f"--{flag}: an output that ends in / is a folder, for tables that are matched by "
                "rows, by points alone. Name a .npz file."
            )
    settings = _solve_settings(options)
    own: dict[str, Any] = {
        name: settings.pop(name)
        for name in ("epsilon", "device", "random_state", "time_limit")
        if name in settings
    }
    if options.base is not None:
        own["n_base"] = options.base
    if rank() is not None and options.gpus is not None:
        own.setdefault("device", "cuda")
    result = torchgw.solve_rows(
        options.X, options.Y, options.output, a=options.a, b=options.b, **own,
        distributed=rank() is not None, verbose=not options.quiet,
        options=torchgw.Options(**settings),
    )  # fmt: skip
    if not options.quiet and not rank():
        print(f"status           {result.status}")
        print(f"value            {result.value:.6g}")
        print(f"marginal error   {result.marginal_error:.2e}")
        print(f"{result.folder}/, {result.shape[0]} and {result.shape[1]} rows")
    return EXIT_CONVERGED if result.converged else EXIT_INCOMPLETE


def _read_sides(names: tuple[str, str], columns: tuple[str | None, str | None]) -> list[Side]:
    """Read both sides; a column that is asked for has to be in one of them."""
    for column, flag in zip(columns, ("--id-column", "--label-column"), strict=True):
        if column is not None and not any(has_column(name, column) for name in names):
            raise InvalidInputError(f"{flag} {column}: neither {names[0]} nor {names[1]} has it.")
    return [
        read_side(name, *(column if has_column(name, column) else None for column in columns))
        for name in names
    ]


def _partners(result: GWResult, sides: Sequence[Side]) -> dict[str, Any]:
    """Tabulate the partner of each row of X, its share of that row's mass, names and labels."""
    values, columns = result.lazy_plan.topk(1)
    partner, mass = to_numpy(columns)[:, 0], to_numpy(result.marginal_a)
    share = np.divide(to_numpy(values)[:, 0], mass, out=np.zeros(len(mass)), where=mass > 0)
    rows = np.arange(len(partner))
    table: dict[str, Any] = {}
    for kind, name in (("ids", ""), ("labels", "_label")):
        for side, letter, index in zip(sides, "XY", (rows, partner), strict=True):
            own = getattr(side, kind)
            if own is not None:
                table[letter + name] = own[index]
            elif kind == "ids":
                table[letter] = index
    return table | {"share": share}


def _summary(result: GWResult, settings: dict[str, Any]) -> dict[str, Any]:
    """Collect the arrays that every output file holds for other readers."""
    if "unbalanced" in settings:
        # JSON has no infinity
        settings = {**settings, "unbalanced": str(settings["unbalanced"])}
    used = {
        **settings, "random_state": result.random_state, "gradient_used": result.gradient,
        "backend_used": result.backend, "precision_used": result.precision,
        "scale_used": result.scale, "torchgw": torchgw.__version__,
    }  # fmt: skip
    same = "value epsilon ambiguity doubt converged marginal_error marginal_a marginal_b n_iters"
    return {
        **{name: to_numpy(getattr(result, name)) for name in same.split()},
        "f": to_numpy(result.potential_a), "g": to_numpy(result.potential_b),
        "matching": to_numpy(result.lazy_plan.argmax(axis=1)),
        "relations": np.asarray([item.relation for item in result.alternatives], dtype=str),
        "status": np.asarray(result.status.name), "advice": np.asarray(result.status.advice),
        "settings": np.asarray(json.dumps(used)),
    }  # fmt: skip


def _add_plan(contents: dict[str, Any], result: GWResult, options: argparse.Namespace) -> bool:
    """Add what was asked for of the plan; False if the dense plan would not fit."""
    if options.sparse_topk is not None:
        count = min(options.sparse_topk, result.lazy_plan.shape[1])
        values, indices = result.lazy_plan.topk(count)
        contents["topk_values"], contents["topk_indices"] = to_numpy(values), to_numpy(indices)
    if options.plan:
        # the solve may have taken hours, so the rest of its result is written
        try:
            contents["plan"] = to_numpy(result.plan)
        except PlanTooLargeError as error:
            print(f"torchgw: the plan is not stored: {spoken(error)}", file=sys.stderr)
            return False
    return True


def _solve_settings(options: argparse.Namespace) -> dict[str, Any]:
    """Collect the arguments of `torchgw.solve` that were given."""
    settings = {
        name: getattr(options, name) for name in options.solve_options if hasattr(options, name)
    }
    if "momentum" in settings:
        warn_user("`--momentum` is now `--redraw`.", FutureWarning)
        settings["redraw"] = settings.pop("momentum")
    if settings.get("scale") == "none":
        settings["scale"] = None
    return settings
