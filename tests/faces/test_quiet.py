from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import torchgw


def test_nothing_is_said_from_below():
    """Warnings of PyTorch, SciPy and the others about what we call do not reach users."""
    script = Path(__file__).with_name("every_kind.py")
    command = [sys.executable, "-W", "error", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_sparse_tensors_are_constructed_in_one_module():
    """In torch 2.11 constructors warn, whatever they are told; here another may run."""
    package = Path(torchgw.__file__).parent
    constructor = re.compile(r"sparse_\w+_tensor\(|\.to_sparse_(csr|csc|bsr|bsc)\(")
    found = [path for path in package.rglob("*.py") if constructor.search(path.read_text())]
    assert [path.relative_to(package).as_posix() for path in found] == ["_tensors/operations.py"]
