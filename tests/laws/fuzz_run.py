"""Random cases by the thousand, in processes of their own: ``python tests/laws/fuzz_run.py``.

Eleven kinds of case, each made from its number alone: combinations of options and geometries,
derivatives, crafted files, problems whose answer is known, twins of a problem, problems of few
points beside all their plans, batches, values of relaxed problems, options that take long, matches
that are hard to find, and defaults up to 500 points. A case that takes too long, or kills its
process, is a failure like a wrong answer; the run goes on. Numbers begin anew with each run, unless
``--start`` is given. Each outcome is a line of ``--out`` as soon as it is there, below a line of
the commit and the call; ``--keep`` appends the table of families to a file. The exit code is 1 if
anything failed.

    python tests/laws/fuzz_run.py --jobs 32 --seconds 480 --solves 10000 --derivatives 2000
    python tests/laws/fuzz_run.py --only enumerated,batches --start 7000
    python tests/laws/fuzz_run.py --show known:17
"""

from __future__ import annotations

import argparse
import collections
import json
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import time
import traceback
from multiprocessing.connection import wait
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]
sys.path.insert(0, str(Path(__file__).parent))

# Seconds that cases under way have once the time is up.
_GRACE = 15.0


def kinds():
    """Return what tries a case of each kind; imported late, in the processes that try them."""
    import fuzz_best
    import fuzz_cases
    import fuzz_hard
    import fuzz_more
    import fuzz_twins
    import fuzz_values
    import test_files

    return {
        "solves": fuzz_cases.attempt,
        "derivatives": fuzz_more.attempt_derivative,
        "files": test_files.attempt,
        "known": fuzz_more.attempt_known,
        "twins": fuzz_twins.attempt,
        "enumerated": fuzz_best.attempt_enumerated,
        "batches": fuzz_best.attempt_batch,
        "values": fuzz_values.attempt_values,
        "corners": fuzz_values.attempt_corner,
        "hard": fuzz_hard.attempt,
        "sizes": fuzz_hard.attempt_size,
    }


# Each kind of case, and how many of it there are in a run that is not told.
KINDS = {
    "solves": 1000, "derivatives": 200, "files": 500, "known": 300, "twins": 200,
    "enumerated": 100, "batches": 200, "values": 315, "corners": 100, "hard": 100, "sizes": 30,
}  # fmt: skip


def effort():
    """CPU seconds of a fixed piece of work: more where a core is shared with other processes."""
    import torch

    began, table = time.process_time(), torch.linspace(0, 1, 4800, dtype=torch.float64)
    for step in range(200):
        table = torch.logsumexp(table.view(60, 80) - 1, step % 2, keepdim=True) - table.view(60, 80)
    return time.process_time() - began


def attempt(kind, number, cuda, quiet=None):
    """Try one case; an error that is no refusal is a crash.

    Given the effort of a ``quiet`` core, a case is slow by the seconds that it would take there.
    """
    device = "cuda" if cuda and number % 2 else None
    began = time.process_time()
    try:
        outcome = kinds()[kind](number, device)
    except Exception as error:  # noqa: BLE001 - a crash is what is looked for
        where = traceback.format_exc().splitlines()[-3].strip()
        outcome = {"ended": "crash", "wrong": [f"{type(error).__name__}: {error} ({where})"]}
    outcome = {
        "kind": kind, "number": number, "device": device or "cpu",
        "seconds": round(time.process_time() - began, 2), **outcome,
    }  # fmt: skip
    most = outcome.pop("most", None)
    outcome["slow"] = most is not None and outcome["seconds"] > most
    if outcome["slow"] and quiet:
        outcome["busy"] = round(max(1.0, statistics.median(effort() for _ in range(9)) / quiet), 2)
        outcome["slow"] = outcome["seconds"] > most * outcome["busy"]
    return outcome


def verdict(outcome):
    """In one word, what became of a case."""
    if outcome["ended"] in ("crash", "died"):
        return "crashed"
    if outcome["wrong"] and outcome["ended"] != "hang":
        return "silent"
    if outcome["ended"] == "hang" or outcome.get("slow"):
        return "slow"
    if outcome["ended"] == "refused":
        return "refused"
    return "said" if outcome.get("said") else "solved"


VERDICTS = ("solved", "said", "refused", "silent", "slow", "crashed")


def work(pipe, cuda, quiet):
    """Try what comes through a pipe."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    torch.set_num_threads(1)
    kinds()
    if cuda:
        torch.zeros(1, device="cuda")
    pipe.send(None)
    while (task := pipe.recv()) is not None:
        pipe.send(attempt(*task, cuda, quiet))


class Worker:
    """A process, what it is at, and since when."""

    def __init__(self, context, cuda, quiet):
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=work, args=(other, cuda, quiet), daemon=True)
        self.process.start()
        other.close()
        self.task, self.since, self.used, self.ready = None, time.monotonic(), 0.0, False

    def give(self, task):
        self.task, self.since, self.used = task, time.monotonic(), self.computed()
        self.pipe.send(task)

    def computed(self):
        """CPU seconds of the process, which wait where the machine is shared; NaN if not told."""
        try:
            parts = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        except FileNotFoundError:
            return float("nan")
        return (int(parts[11]) + int(parts[12])) / os.sysconf("SC_CLK_TCK")

    def is_late(self, limit):
        """Whether a case takes more CPU seconds than it may, or ten times as many by the clock."""
        taken, used = time.monotonic() - self.since, self.computed() - self.used
        if used != used:
            return taken > limit
        return taken > limit and (used > limit or taken > 10 * limit)

    def end(self):
        self.process.kill()
        self.process.join()
        self.pipe.close()


def tasks(options):
    """Yield the cases, kinds mixed in proportion, so that a part of the run has all of them."""
    wanted = {kind: getattr(options, kind) for kind in KINDS}
    shares = sorted(
        ((index + 0.5) / count, kind, options.start + index)
        for kind, count in wanted.items()
        for index in range(count)
    )
    return [(kind, number) for _, kind, number in shares]


def run(options, keep):
    """Try all cases, as far as time allows; return how many were left."""
    context = multiprocessing.get_context("spawn")
    end = time.monotonic() + options.seconds
    left = collections.deque(tasks(options))
    quiet = min(effort() for _ in range(20))
    workers = [Worker(context, options.cuda, quiet) for _ in range(options.jobs)]

    def lost(worker, ended, why):
        kind, number = worker.task
        device = "cuda" if options.cuda and number % 2 else "cpu"
        taken = round(time.monotonic() - worker.since, 1)
        keep({"kind": kind, "number": number, "device": device, "seconds": taken, "ended": ended,
              "wrong": [why]})  # fmt: skip

    while any(worker.task or not worker.ready for worker in workers) or left:
        now = time.monotonic()
        if now > end + _GRACE or (now > end and not any(worker.task for worker in workers)):
            break
        ready = wait([worker.pipe for worker in workers], timeout=0.5)
        for place, worker in enumerate(workers):
            died = False
            if worker.pipe in ready:
                try:
                    outcome = worker.pipe.recv()
                except (EOFError, ConnectionError):
                    died = True
                else:
                    worker.ready = True
                    worker.task = None
                    if outcome is not None:
                        keep(outcome)
                        if options.cuda and outcome["ended"] == "crash":
                            # what a GPU asserts is lost with the process that used it
                            worker.end()
                            workers[place] = Worker(context, options.cuda, quiet)
                            continue
            if died and not worker.ready:
                raise SystemExit("a process ended before its first case; see above")
            late = worker.task and worker.is_late(options.limit)
            if died or late:
                if late:
                    lost(worker, "hang", f"no end within {options.limit:g} CPU s")
                else:
                    worker.process.join()
                    lost(worker, "died", f"the process ended with {worker.process.exitcode}")
                worker.end()
                workers[place] = Worker(context, options.cuda, quiet)
            elif worker.ready and not worker.task and left and time.monotonic() < end:
                worker.give(left.popleft())
    under_way = [worker.task for worker in workers if worker.task]
    for worker in workers:
        worker.end()
    return len(left), under_way


def grouped(message):
    """Return the first words of a message, without its numbers and the names of parts of files."""
    message = re.sub(r"^\S+\.npz: ", "", message)
    message = re.sub(r"^`[^`]*`(: `[^`]*`)?", "`...`", re.sub(r"[-+]?\d[\d.,e+-]*", "#", message))
    return " ".join(
        re.sub(r"('#:[^']*'|names '[^']*'|\{.*|; got .*|parts, .*)", "...", message).split()[:14]
    )


def families(outcomes):
    """Count what became of the cases of each kind and family."""
    found = {}
    for one in outcomes:
        counts = found.setdefault((one["kind"], one.get("family", "-")), collections.Counter())
        counts[verdict(one)] += 1
    order = list(KINDS)
    return sorted(found.items(), key=lambda item: (order.index(item[0][0]), item[0][1]))


def print_families(counted):
    """Print a table of all families, a line of the sums of each kind above its families."""
    width = max((len(name) for (_, name), _ in counted), default=0) + 2
    print(f"\n{'':{width}}{'cases':>8}" + "".join(f"{name:>9}" for name in VERDICTS))

    def line(name, counts):
        shown = [f"{counts[one] or '':>9}" for one in VERDICTS]
        print(f"{name:{width}}{counts.total():>8}" + "".join(shown))

    for kind in KINDS:
        some = [(name, counts) for (of, name), counts in counted if of == kind]
        if some:
            line(kind, sum((counts for _, counts in some), collections.Counter()))
            for name, counts in some:
                line(f"  {name}", counts)


def summarise(outcomes, left, under_way):
    """Print what became of the cases, and what failed."""
    for kind in KINDS:
        some = [one for one in outcomes if one["kind"] == kind]
        if not some:
            continue
        ended = collections.Counter(one["ended"] for one in some)
        said = collections.Counter(note for one in some for note in one.get("notes", ()))
        taken = sorted(((one["seconds"], one["number"]) for one in some), reverse=True)
        above = {limit: sum(one > limit for one, _ in taken) for limit in (5, 20)}
        print(f"\n{kind}: {len(some)} cases, {sum(bool(one['wrong']) for one in some)} failed")
        print("  ended:", dict(ended.most_common()))
        if said:
            print("  noted:", dict(said.most_common()))
        print(f"  CPU seconds: {above[5]} above 5, {above[20]} above 20; slowest", taken[:6])
    refusals = collections.Counter(
        (one["kind"], grouped(one["refusal"])) for one in outcomes if one.get("refusal")
    )
    print("\nrefusals:")
    for (kind, refusal), times in refusals.most_common():
        print(f"{times:6d}  {kind}: {refusal}")
    print_families(families(outcomes))
    failed = [one for one in outcomes if one["wrong"] or one.get("slow")]
    print(f"\n{len(failed)} failures:")
    for one in sorted(failed, key=lambda one: (one["kind"], one["number"])):
        device = " --cuda" if one["device"] == "cuda" else ""
        slow = f" {one['seconds']} s" if one.get("slow") else ""
        print(
            f"  --show {one['kind']}:{one['number']}{device}: {one['ended']}:{slow} {one['wrong']}"
        )
    if left or under_way:
        print(f"\nthe time was up: {left} cases not begun, under way {under_way}")
    return bool(failed)


def described(options):
    """The commit, the machine and the call of a run."""
    import numpy
    import torch

    call = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        commit = subprocess.run(call, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        commit = ""
    return {
        "commit": commit or os.environ.get("TORCHGW_COMMIT", "unknown"),
        "date": time.strftime("%Y-%m-%d %H:%M:%S"), "torch": torch.__version__,
        "numpy": numpy.__version__, "vectors": torch.backends.cpu.get_cpu_capability(),
        "start": options.start, "jobs": options.jobs, "cuda": options.cuda,
        "asked": {kind: getattr(options, kind) for kind in KINDS},
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for kind, count in KINDS.items():
        parser.add_argument(f"--{kind}", type=int, metavar="COUNT", help=f"{count} by default")
    parser.add_argument("--only", help="kinds, by commas: no others but what is counted out")
    fresh = int(time.time()) % 10**8 * 10
    parser.add_argument("--start", type=int, default=fresh, help="number of the first case")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--limit", type=float, default=120, help="CPU seconds a case may take")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="seconds of the run")
    parser.add_argument("--out", type=Path, default=Path("fuzz.jsonl"))
    parser.add_argument("--keep", type=Path, help="append the families to this file")
    parser.add_argument("--cuda", action="store_true", help="odd numbers on a GPU")
    parser.add_argument("--show", metavar="KIND:NUMBER", help="try one case here, and show it")
    options = parser.parse_args()
    only = options.only.split(",") if options.only else list(KINDS)
    if unknown := sorted(set(only) - set(KINDS)):
        parser.error(f"--only takes {', '.join(KINDS)}; got {', '.join(unknown)}")
    for kind, count in KINDS.items():
        if getattr(options, kind) is None:
            setattr(options, kind, count if kind in only else 0)
    if options.show:
        kind, number = options.show.split(":")
        outcome = attempt(kind, int(number), options.cuda)
        print(json.dumps(outcome, indent=1))
        return bool(outcome["wrong"])
    outcomes, run_of = [], described(options)
    print(json.dumps(run_of), flush=True)
    with options.out.open("w") as file:
        file.write(json.dumps(run_of) + "\n")

        def keep(outcome):
            outcomes.append(outcome)
            file.write(json.dumps(outcome) + "\n")
            file.flush()
            if outcome["wrong"] or outcome.get("slow"):
                print(f"{outcome['kind']}:{outcome['number']} {outcome['ended']}, "
                      f"{outcome['seconds']} s: {outcome['wrong']}"[:400], flush=True)  # fmt: skip

        left, under_way = run(options, keep)
    if options.keep:
        with options.keep.open("a") as file:
            for (kind, family), counts in families(outcomes):
                line = {"commit": run_of["commit"], "date": run_of["date"], "kind": kind,
                        "start": run_of["start"], "family": family, **counts}  # fmt: skip
                file.write(json.dumps(line) + "\n")
    return summarise(outcomes, left, under_way)


if __name__ == "__main__":
    sys.exit(main())
