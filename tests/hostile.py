"""Values that no argument of any kind should crash on."""

from __future__ import annotations

import numpy as np
import torch

ANYTHING = [
    "word", b"bytes", "", -1, 0, 2.5, float("nan"), float("inf"), 1e300, 1e-300, True, [],
    {}, (), object(), np.array("x"), np.array([], dtype=object), 1 + 2j, np.nan, None,
    torch.tensor([]), torch.tensor(1j), [[1, 2], [3]], {"a": 1}, lambda: None, range(3),
    slice(None), np.datetime64("2020-01-01"), torch.float16, "cuda:99", "meta", 10**30,
]  # fmt: skip
