"""Curves that the tests of mappings and files share."""

from __future__ import annotations

import pytest

from torchgw.datasets import spiral, swiss_roll


@pytest.fixture(scope="module")
def curves():
    return spiral(90, random_state=0)[0], swiss_roll(110, random_state=1)[0]
