"""Many cases at once, one process for each core: ``python tests/laws/fuzz_run.py START MINUTES``.

With ``cuda`` as a third argument half of the processes solve on a GPU. With no minutes at all, the
case START alone is solved, and shown. The exit code is 1 if anything was wrong.
"""

from __future__ import annotations

import collections
import multiprocessing
import os
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]


def work(place, count, start, seconds, cuda, queue):
    import fuzz_cases
    import torch

    torch.set_num_threads(1)
    end, number = time.monotonic() + seconds, start + place
    while time.monotonic() < end:
        case = fuzz_cases.make_case(number)
        if cuda and place % 2:
            case.arguments["device"] = "cuda"
        began = time.process_time()
        try:
            verdict = fuzz_cases.run(case)
            ended = "refused" if verdict.refusal else verdict.result.status.name
            wrong = verdict.wrong
        except Exception as error:  # noqa: BLE001 - a crash is what is looked for
            ended, wrong, verdict = "crash", [f"{type(error).__name__}: {error}"], None
        refusal = verdict.refusal if verdict else ""
        queue.put((number, ended, wrong, refusal, time.process_time() - began, place % 2))
        number += count
    queue.put(None)


def main():
    start, minutes = int(sys.argv[1]), float(sys.argv[2])
    cuda = sys.argv[3:] == ["cuda"]
    if minutes == 0:
        import fuzz_cases

        case = fuzz_cases.make_case(start)
        print(case.arguments, case.described)
        verdict = fuzz_cases.run(case)
        print(verdict.refusal or verdict.result, verdict.wrong)
        return bool(verdict.wrong)
    count = len(os.sched_getaffinity(0))
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    given = (count, start, 60 * minutes, cuda, queue)
    workers = [context.Process(target=work, args=(place, *given)) for place in range(count)]
    for worker in workers:
        worker.start()
    statuses, refusals, seconds, left = collections.Counter(), collections.Counter(), [], count
    failed = False
    while left:
        entry = queue.get()
        if entry is None:
            left -= 1
            continue
        number, ended, wrong, refusal, took, odd = entry
        statuses[ended] += 1
        seconds.append((round(took, 1), number))
        if refusal:
            refusals[" ".join(refusal.split()[:9])] += 1
        if wrong:
            failed = True
            print(
                f"case {number}{' on cuda' if cuda and odd else ''}: {ended}: {wrong}", flush=True
            )
    print(sum(statuses.values()), "cases:", dict(statuses))
    print("CPU seconds, slowest:", sorted(seconds)[::-1][:12])
    for refusal, times in refusals.most_common():
        print(f"{times:6d}  {refusal}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
