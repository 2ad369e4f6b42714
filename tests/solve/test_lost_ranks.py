"""A process that ends takes the others with it, and they say which it was."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from test_distributed import finish, start

STATED = 10  # seconds of docs/distributed.md, beside what a loaded machine takes to start

WAITING = """
import os, signal, sys, time, warnings
sys.path.insert(0, {folder!r})
import distributed_cases as cases
import torchgw
warnings.simplefilter("ignore")
rank, size, folder, kind = sys.argv[1:]
cases.enter(int(rank), int(size), folder)

def trouble(entry):
    if entry.iteration == 1 and rank == "1":
        open(folder + "/when", "w").write(str(time.time()))
        if kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise KeyError("a callback of one process")

try:
    torchgw.solve(**cases.LITTLE | cases.CASES["dense"], distributed=True, callback=trouble)
except torchgw.RankError as error:
    print(time.time(), error, flush=True)
    os._exit(7)
except KeyError:
    os._exit(8)
"""


@pytest.mark.parametrize(
    ("kind", "size", "words", "code"),
    [
        ("killed", 2, "rank 1 does not answer", -signal.SIGKILL),
        ("killed", 3, "rank 1 does not answer", -signal.SIGKILL),
        ("raises", 3, "rank 1 ended with KeyError: 'a callback of one process'", 8),
    ],
)
def test_the_others_end_and_name_it(tmp_path, kind, size, words, code):
    script = tmp_path / "script.py"
    script.write_text(WAITING.format(folder=str(Path(__file__).parent)))
    processes = start(size, tmp_path, kind, script=script)
    said = finish(processes)
    assert [process.returncode for process in processes] == [7, code, 7][:size], said
    died = float((tmp_path / "when").read_text())
    for rank in range(0, size, 2):
        moment, _, message = processes[rank].output.partition(" ")
        assert words in message
        assert float(moment) - died < STATED
