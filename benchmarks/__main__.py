"""Command line of the benchmarks: ``python -m benchmarks COMMAND``."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path

from benchmarks.harness.harness import PEER_PYTHON, RunOptions, gate, measure_all
from benchmarks.harness.profiling import profile
from benchmarks.harness.registry import PROBLEMS
from benchmarks.harness.report import plot, read_records, table
from benchmarks.harness.runners import RUNNERS
from benchmarks.quality import problems as quality_problems
from benchmarks.quality.real import DATA_VARIABLE
from benchmarks.quality.solvers import SOLVERS
from benchmarks.quality.sweep import SweepOptions, sweep
from benchmarks.quality.tables import quality_table

# Commands that are modules of their own, with options of their own.
STUDIES = {
    "batch": ("batch.many", "many small problems a second, beside POT"),
    "certificates": ("quality.certificates", "how far answers are from the best there is"),
    "confidence": ("quality.confidence", "how often partners of each confidence are right"),
    "coldstart": ("solves.coldstart", "first calls of fresh processes, and what they compile"),
    "digits": ("batch.digits", "all pairs of digits beside POT's loop"),
    "distributed": ("solves.distributed", "bits and seconds of processes that share a solve"),
    "first-use": ("solves.first_use", "clusters, spirals, networks and cells by defaults"),
    "freeze": ("freeze.study", "what the package makes of 400 problems, frozen and compared"),
    "forecasts": ("solves.forecasts", "what solves were said to take, and took"),
    "fused": ("solves.fused", "features too, 200,000 points"),
    "graphs": ("distances.graphs", "neighbours, shortest paths and landmarks of up to 1e6 points"),
    "heldout": ("quality.heldout", "families drawn after the defaults, beside other starts"),
    "hvp": ("solves.hessians", "products with the Hessian beside their solve"),
    "kernels": ("sinkhorn.kernels", "one Triton variant a line, beside its floor"),
    "known": ("solves.known", "groups and known pairs at scale, beside nothing known"),
    "ledger": ("harness.ledger", "rows of the ledger, by id or by words"),
    "loss": ("batch.loss", "steps of a training loop, beside the gradient of a tight solve"),
    "low-rank": ("solves.low_rank", "low rank beside full rank and POT's"),
    "memory": ("solves.memory", "peak memory of one large solve on a CPU"),
    "networks": ("quality.sparse", "sparse networks that lost edges, beside published numbers"),
    "overlaps": ("quality.overlaps", "slices and clouds that share a part, beside POT's partial"),
    "pot-tests": ("solves.pot_tests", "POT's own tests, on torchgw.pot"),
    "pot-times": ("solves.pot_times", "small dense problems by torchgw.pot and by POT"),
    "precision": ("sinkhorn.precision", "plan error and time of each precision"),
    "qap": ("quality.assignments", "quadratic assignment problems beside the best known"),
    "quantized": ("solves.quantized", "large problems beside POT's quantized solver"),
    "random-matrices": ("quality.random_study", "random matrices: is the best optimum found?"),
    "rows": ("solves.rows", "tables of any size from files, in one or more processes"),
    "scaling": ("solves.scaling", "whole calls from 1e3 to 1e6 points"),
    "seeds": ("solves.seeds", "is the better optimum found? many seeds of one problem"),
    "snare": ("solves.snare", "SNARE-seq, beside POT"),
    "strangers": ("quality.strangers", "families unlike those, and the law of the search on them"),
    "tiles": ("sinkhorn.tiles", "what skipping tiles saves, by cloud and epsilon"),
    "log-tables": ("harness.studies", "print what a study measured as Markdown"),
    "tables": ("harness.pages", "write the tables of a documentation page from what was measured"),
    "trees": ("distances.trees", "a random tree in the hyperbolic plane and its copy"),
    "unseen": ("quality.unseen_study", "problems that no default was tuned on, by defaults"),
}


def main(arguments: list[str] | None = None) -> int:
    """Run a command; return the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    if given and given[0] in STUDIES:
        study = importlib.import_module(f"benchmarks.{STUDIES[given[0]][0]}")
        return int(study.main(given[1:]) or 0)
    options = _parser().parse_args(given)
    if options.command == "run":
        return _run(options)
    if options.command == "quality":
        return _quality(options)
    if options.command == "table":
        print(table(read_records(options.results)))
    elif options.command == "quality-table":
        print(quality_table(read_records(options.results)))
    elif options.command == "plot":
        plot(read_records(options.results), options.output)
        print(f"written {options.output}")
    else:
        print(profile(PROBLEMS[options.problem], options.device, options.trace, options.widths))
    return 0


def _run(options: argparse.Namespace) -> int:
    if options.list:
        for problem in PROBLEMS.values():
            print(problem)
        return 0
    problems = options.problems or [name for name in PROBLEMS if "tiny" not in name]
    runners = options.runners.split(",")
    _check_names("problem", problems, list(PROBLEMS))
    _check_names("runner", runners, list(RUNNERS))
    if options.gate:
        print("gate: running the solver's tests ...", flush=True)
        red = gate(options.device)
        if red is not None:
            print(f"gate: red, nothing is measured.\n{red}", file=sys.stderr)
            return 1
    settings = RunOptions(
        device=options.device, repeat=options.repeat, budget_s=options.budget,
        timeout_s=options.timeout, peer_python=options.peer_python, commit=options.commit,
    )  # fmt: skip
    measure_all(problems, runners, settings, options.output)
    print(f"written {options.output}")
    return 0


def _quality(options: argparse.Namespace) -> int:
    known = quality_problems.PROBLEMS
    if options.list:
        for problem in known.values():
            sign = "<=" if problem.lower_is_better else ">="
            print(f"{problem.name:26s} {problem.metric} {sign} {problem.threshold:g}")
        return 0
    problems = options.problems or [name for name in known if name != "tiny"]
    runners = options.runners.split(",")
    _check_names("problem", problems, list(known))
    _check_names("runner", runners, list(SOLVERS))
    if options.data is not None:
        # solves have processes of their own
        os.environ[DATA_VARIABLE] = str(options.data.resolve())
    settings = SweepOptions(
        device=options.device, jobs=options.jobs, limit_s=options.limit,
        peer_python=options.peer_python, commit=options.commit,
    )  # fmt: skip
    count = sweep(problems, runners, range(options.seeds), settings, options.out)
    print(f"{count} new records in {options.out}")
    return 0


def _check_names(what: str, names: list[str], known: list[str]) -> None:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"unknown {what} {', '.join(unknown)}; known: {', '.join(known)}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, (_, help_text) in STUDIES.items():
        commands.add_parser(name, help=help_text, add_help=False)
    run = commands.add_parser("run", help="measure runners on problems, one JSON line each")
    run.add_argument("problems", nargs="*", metavar="PROBLEM", help="all but the tiny ones if none")
    run.add_argument("--runners", default="ours,pot,torchgw042,flash", help="comma-separated")
    run.add_argument("--repeat", type=int, default=10)
    run.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    run.add_argument("--output", type=Path, default=Path("benchmarks/out/results.jsonl"))
    run.add_argument("--budget", type=float, default=120.0, help="seconds of repeats of one runner")
    run.add_argument("--timeout", type=float, default=1800.0, help="seconds of one process")
    run.add_argument("--peer-python", default=os.environ.get(PEER_PYTHON), help=f"or {PEER_PYTHON}")
    run.add_argument("--commit", help="for a copy without its git directory")
    run.add_argument("--gate", action=argparse.BooleanOptionalAction, default=True)
    run.add_argument("--list", action="store_true", help="list the problems and stop")
    judge = commands.add_parser("quality", help="is the right optimum found? problems x seeds")
    judge.add_argument("problems", nargs="*", metavar="PROBLEM", help="all but tiny if none")
    judge.add_argument("--seeds", type=int, default=20, help="seeds 0 to SEEDS - 1")
    judge.add_argument("--runners", default=",".join(SOLVERS), help="comma-separated")
    judge.add_argument(
        "--data", type=Path, help=f"folder of words.npz, ppi.npz; or {DATA_VARIABLE}"
    )
    judge.add_argument("--jobs", type=int, default=1, help="processes, of one thread if several")
    judge.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    judge.add_argument("--limit", type=float, default=120.0, help="seconds of one solve")
    judge.add_argument("--out", type=Path, default=Path("benchmarks/out/quality.jsonl"))
    judge.add_argument("--peer-python", default=os.environ.get(PEER_PYTHON))
    judge.add_argument("--commit", help="for a copy without its git directory")
    judge.add_argument("--list", action="store_true", help="list the problems and stop")
    judged = commands.add_parser("quality-table", help="Markdown, one table a problem")
    judged.add_argument("results", type=Path)
    show = commands.add_parser("table", help="Markdown table of the latest records")
    show.add_argument("results", type=Path)
    draw = commands.add_parser("plot", help="PNG of the latest records")
    draw.add_argument("results", type=Path)
    draw.add_argument("--output", type=Path, default=Path("benchmarks/out/results.png"))
    trace = commands.add_parser("profile", help="where the time goes, and what bounds it")
    trace.add_argument("problem", choices=list(PROBLEMS), metavar="PROBLEM")
    trace.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    trace.add_argument("--trace", type=Path, default=Path("benchmarks/out/trace.json"))
    trace.add_argument("--widths", action=argparse.BooleanOptionalAction, default=True)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
