"""Random cases by the thousand, in processes of their own: ``python tests/laws/fuzz_run.py``.

Five kinds of case, each made from its number alone: combinations of options and geometries,
derivatives, crafted files, problems whose answer is known, and twins of a problem. A case that
takes too long, or kills its process, is a failure like a wrong answer; the run goes on. Each
outcome is a line of ``--out`` as soon as it is there. The exit code is 1 if anything failed.

    python tests/laws/fuzz_run.py --solves 10000 --derivatives 2000 --files 5000 --known 1000
    python tests/laws/fuzz_run.py --show known:17
"""

from __future__ import annotations

import argparse
import collections
import json
import multiprocessing
import os
import re
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
    import fuzz_cases
    import fuzz_more
    import fuzz_twins
    import test_files

    return {
        "solves": fuzz_cases.attempt,
        "derivatives": fuzz_more.attempt_derivative,
        "files": test_files.attempt,
        "known": fuzz_more.attempt_known,
        "twins": fuzz_twins.attempt,
    }


KINDS = ("solves", "derivatives", "files", "known", "twins")


def attempt(kind, number, cuda):
    """Try one case; an error that is no refusal is a crash."""
    device = "cuda" if cuda and number % 2 else None
    began = time.process_time()
    try:
        outcome = kinds()[kind](number, device)
    except Exception as error:  # noqa: BLE001 - a crash is what is looked for
        where = traceback.format_exc().splitlines()[-3].strip()
        outcome = {"ended": "crash", "wrong": [f"{type(error).__name__}: {error} ({where})"]}
    return {
        "kind": kind, "number": number, "device": device or "cpu",
        "seconds": round(time.process_time() - began, 2), **outcome,
    }  # fmt: skip


def work(pipe, cuda):
    """Try what comes through a pipe."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    torch.set_num_threads(1)
    kinds()
    if cuda:
        torch.zeros(1, device="cuda")
    pipe.send(None)
    while (task := pipe.recv()) is not None:
        pipe.send(attempt(*task, cuda))


class Worker:
    """A process, what it is at, and since when."""

    def __init__(self, context, cuda):
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=work, args=(other, cuda), daemon=True)
        self.process.start()
        other.close()
        self.task, self.since, self.ready = None, time.monotonic(), False

    def give(self, task):
        self.task, self.since = task, time.monotonic()
        self.pipe.send(task)

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
    workers = [Worker(context, options.cuda) for _ in range(options.jobs)]

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
                            workers[place] = Worker(context, options.cuda)
                            continue
            if died and not worker.ready:
                raise SystemExit("a process ended before its first case; see above")
            late = worker.task and time.monotonic() - worker.since > options.limit
            if died or late:
                if late:
                    lost(worker, "hang", f"no end within {options.limit:g} s")
                else:
                    worker.process.join()
                    lost(worker, "died", f"the process ended with {worker.process.exitcode}")
                worker.end()
                workers[place] = Worker(context, options.cuda)
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
    failed = [one for one in outcomes if one["wrong"]]
    print(f"\n{len(failed)} failures:")
    for one in sorted(failed, key=lambda one: (one["kind"], one["number"])):
        device = " --cuda" if one["device"] == "cuda" else ""
        print(f"  --show {one['kind']}:{one['number']}{device}: {one['ended']}: {one['wrong']}")
    if left or under_way:
        print(f"\nthe time was up: {left} cases not begun, under way {under_way}")
    return bool(failed)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for kind, count in zip(KINDS, (1000, 200, 500, 100, 100), strict=True):
        parser.add_argument(f"--{kind}", type=int, default=count, metavar="COUNT")
    parser.add_argument("--start", type=int, default=1000, help="number of the first case")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--limit", type=float, default=120, help="seconds a case may take")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="seconds of the run")
    parser.add_argument("--out", type=Path, default=Path("fuzz.jsonl"))
    parser.add_argument("--cuda", action="store_true", help="odd numbers on a GPU")
    parser.add_argument("--show", metavar="KIND:NUMBER", help="try one case here, and show it")
    options = parser.parse_args()
    if options.show:
        kind, number = options.show.split(":")
        os.environ["TORCHGW_FUZZ_SHOW"] = "1"
        outcome = attempt(kind, int(number), options.cuda)
        print(json.dumps(outcome, indent=1))
        return bool(outcome["wrong"])
    outcomes = []
    with options.out.open("w") as file:

        def keep(outcome):
            outcomes.append(outcome)
            file.write(json.dumps(outcome) + "\n")
            file.flush()
            if outcome["wrong"]:
                print(f"{outcome['kind']}:{outcome['number']} {outcome['ended']}: "
                      f"{outcome['wrong']}"[:400], flush=True)  # fmt: skip

        left, under_way = run(options, keep)
    return summarise(outcomes, left, under_way)


if __name__ == "__main__":
    sys.exit(main())
