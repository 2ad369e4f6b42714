"""What is left when a process ends early, or several write at once: whole files, and nobody."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import torchgw
from torchgw import InvalidInputError
from torchgw._boundary import archive
from torchgw._boundary.cache import Cache
from torchgw.cli import main

SOLVE = ["--distances", "sqeuclidean", "--epsilon", "0.1", "--n-init", "1", "--seed", "0"]
OLD = b"what was there before"


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for name, count in (("X", 40), ("Y", 30)):
        np.save(f"{name}.npy", rng.normal(size=(count, 2)))
    Path("out.npz").write_bytes(OLD)
    return {"X.npy", "Y.npy", "out.npz"}


ALIGN = ["align", "X.npy", "Y.npy", "-o", "out.npz", *SOLVE]


def names():
    return {path.name for path in Path.cwd().iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize("closed", [">&- 2>&-", ">&-", "2>&-"])
def test_closed_streams(files, closed):
    """Started without output, or error, or both, as some schedulers do."""
    command = " ".join([sys.executable, "-m", "torchgw", *ALIGN])
    done = subprocess.run(["sh", "-c", f"{command} {closed}"], check=False, capture_output=True)
    assert done.returncode == 0
    assert torchgw.load("out.npz").converged
    assert names() == files


def test_streams_of_none(files, monkeypatch):
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    points = np.random.default_rng(0).normal(size=(9, 2))
    options = {"distances": "sqeuclidean", "epsilon": 0.1, "n_init": 1}
    assert torchgw.solve(points, points, verbose=True, **options).converged
    assert main(ALIGN) == 0
    assert torchgw.load("out.npz").converged
    # which the command line has opened in their place
    sys.stdout.close()
    sys.stderr.close()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_an_output_that_takes_nothing(files):
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "torchgw", "info"],
            stdout=full, stderr=subprocess.PIPE, check=False, text=True,
        )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.strip() == f"torchgw: error: [Errno {errno.ENOSPC}] No space left on device"


@pytest.mark.parametrize("output", ["out.npz", "new.npz"])
def test_a_full_disk_leaves_the_old_output(files, output, capsys):
    """A limit on the size of files is the same to whoever writes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    arguments = [output if each == "out.npz" else each for each in ALIGN]
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        code = main(arguments)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 2
    assert f"torchgw: error: cannot write {output}: " in capsys.readouterr().err
    assert Path("out.npz").read_bytes() == OLD
    assert names() == files


def test_a_table_and_a_picture_are_written_whole(files, monkeypatch, capsys):
    from matplotlib.figure import Figure

    assert main([each.replace("out", "result") for each in ALIGN]) == 0

    def half(target, *_, **__):
        target.write(b"half of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "save", half)
    monkeypatch.setattr(Figure, "savefig", lambda self, target, **_: half(target))
    for output, command in (
        ("mapped.npy", ["transform", "result.npz", "X.npy"]),
        ("picture.png", ["plot", "result.npz"]),
    ):
        Path(output).write_bytes(OLD)
        assert main([*command, "-o", output]) == 2
        assert "No space left" in capsys.readouterr().err
        assert Path(output).read_bytes() == OLD
    assert names() == files | {"mapped.npy", "picture.png", "result.npz"}


def test_a_folder_that_takes_no_files(files, capsys):
    """For anybody, the administrator included."""
    if not Path("/proc/self").exists():
        pytest.skip("no folder of the system's")
    assert main(["/proc/out.npz" if each == "out.npz" else each for each in ALIGN]) == 2
    assert "torchgw: error: cannot write /proc/out.npz: " in capsys.readouterr().err


def test_an_interrupt_while_writing_leaves_the_old_output(files, monkeypatch):
    def interrupted(file, **_):
        file.write(b"half of it")
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez", interrupted)
    assert main(ALIGN) == 130
    assert Path("out.npz").read_bytes() == OLD
    assert names() == files


SLOW_WRITER = """
import sys, time
import numpy as np
from torchgw.cli import main

def slow(file, **_):
    file.write(b"half of it")
    file.flush()
    print("writing", flush=True)
    time.sleep(60)

np.savez = slow
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_termination_while_writing_leaves_the_old_output(files):
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_WRITER, *ALIGN], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout.readline() == b"writing\n"
    process.terminate()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143
    assert errors.endswith(b"torchgw: terminated\n")
    assert Path("out.npz").read_bytes() == OLD
    assert names() == files


def test_the_handlers_of_signals_are_given_back(files):
    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    assert main(ALIGN) == 0
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == before


WORKERS = """
import sys
import numpy as np
import scipy.sparse
from torchgw.cli import main
from torchgw.distances import geodesics

geodesics._PROCESS_PAIRS = 1
steps = scipy.sparse.diags_array([np.ones(2999)] * 2, offsets=[-1, 1]).tocsr()

def work(*_, **__):
    from torchgw.distances.precomputed import geodesic_matrix

    for _ in range(1000):
        geodesic_matrix(steps, n_jobs=2)
        print("working", flush=True)

import torchgw
torchgw.solve = work
sys.exit(main(sys.argv[1:]))
"""


def of_group(group):
    """Processes of a group, by the table of the system, zombies aside."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, of = path.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(of) == group and state != "Z":
            found.append(path.parent.name)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_workers_end_with_their_process(files, number):
    process = subprocess.Popen(
        [sys.executable, "-c", WORKERS, *ALIGN],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout.readline() == b"working\n"
        assert len(of_group(process.pid)) >= 3
        process.send_signal(number)
        process.wait(60)
        process.stdout.close()
        expected = {signal.SIGTERM: 143, signal.SIGINT: 130}[number]
        assert process.returncode == expected
        end = time.monotonic() + 30
        while of_group(process.pid) and time.monotonic() < end:
            time.sleep(0.2)
        assert not of_group(process.pid)
    finally:
        for left in of_group(process.pid):
            os.kill(int(left), signal.SIGKILL)
    assert Path("out.npz").read_bytes() == OLD
    assert names() == files


def test_writers_at_once_never_tear_a_file(tmp_path):
    """Whoever reads finds one of the results, whole."""
    path, stop = tmp_path / "shared.npz", threading.Event()
    archive.write_archive(path, {"writer": -1}, {"a": np.full(4000, -1)})

    def write(number):
        for _ in range(25):
            archive.write_archive(path, {"writer": number}, {"a": np.full(4000, number)})

    def read():
        count = 0
        while not stop.is_set():
            tree, arrays = archive.read_archive(path)
            assert set(arrays["a"]) == {tree["writer"]}
            count += 1
        return count

    with ThreadPoolExecutor(5) as pool:
        reader = pool.submit(read)
        try:
            for done in [pool.submit(write, number) for number in range(4)]:
                done.result()
        finally:
            stop.set()
        assert reader.result() > 5
    assert list(tmp_path.iterdir()) == [path]


WRITER = """
import sys
from pathlib import Path
import numpy as np
import torch
from torchgw._boundary import archive
from torchgw._boundary.cache import Cache

folder, number = Path(sys.argv[1]), int(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
for round in range(60):
    archive.write_archive(folder / "one.npz", {"writer": number}, {"a": np.full(40_000, number)})
    tree, arrays = archive.read_archive(folder / "one.npz")
    assert set(arrays["a"]) == {tree["writer"]}
    parts = Cache(folder / "cache").fetch(
        "stage", f"{round:032d}", torch.device("cpu"), lambda: {"a": torch.arange(20_000)}
    )
    assert torch.equal(parts["a"], torch.arange(20_000))
"""


@pytest.mark.slow
def test_processes_at_once_never_tear_a_file(tmp_path):
    """The same of two processes, which read what the other writes, and of a cache."""
    (tmp_path / "cache").mkdir()
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", WRITER, str(tmp_path), str(number)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for number in range(2)
    ]  # fmt: skip
    for process in processes:
        assert process.stdout.readline() == b"ready\n"
    for process in processes:
        process.stdin.write(b"go\n")
        process.stdin.flush()
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors.decode()
    assert {path.name for path in tmp_path.iterdir()} == {"one.npz", "cache"}
    assert len(list((tmp_path / "cache").iterdir())) == 60


def test_one_cache_for_all(tmp_path):
    """Each makes what is missing, and none reads half of what another writes."""
    import torch

    def fetch(number):
        cache = Cache(tmp_path)
        return [
            cache.fetch("stage", f"{key:032d}", torch.device("cpu"), lambda: {"a": torch.arange(9)})
            for key in range(20)
        ]

    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(fetch, range(6)))
    assert all(torch.equal(parts["a"], torch.arange(9)) for each in found for parts in each)
    assert len(list(tmp_path.iterdir())) == 20


def test_a_name_that_cannot_be_written_is_an_input_error(tmp_path):
    with pytest.raises(InvalidInputError, match="no directory"):
        archive.write_archive(tmp_path / "absent" / "x.npz", {}, {})
