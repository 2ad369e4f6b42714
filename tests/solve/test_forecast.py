import logging
import warnings

import numpy as np
import pytest

import torchgw
from torchgw._errors import PerformanceWarning
from torchgw._solve import forecast


def test_long_work_is_announced(monkeypatch, caplog):
    X = np.random.default_rng(0).normal(size=(60, 3))
    with caplog.at_level(logging.INFO, logger="torchgw"):
        torchgw.solve(X, X, distances="sqeuclidean", random_state=0)
    assert "forecast" in caplog.text
    monkeypatch.setattr(forecast, "_LONG", 0.0)
    with pytest.warns(PerformanceWarning, match="60 x 60 points take about .* s for each"):
        torchgw.solve(X, X, distances="sqeuclidean", random_state=0)


@pytest.mark.parametrize(
    ("options", "told"),
    [({"epsilon": 1e-7}, "natural scale"), ({"regularization": "proximal"}, "proximal steps")],
)
def test_slow_corners_are_announced(options, told, caplog):
    X = np.random.default_rng(0).normal(size=(20, 3))
    with caplog.at_level(logging.INFO, logger="torchgw"), warnings.catch_warnings():
        warnings.simplefilter("ignore", torchgw.TorchGWWarning)
        torchgw.solve(X, X, max_iter=1, inner_max_iter=1, n_init=1, random_state=0, **options)
        assert told in caplog.text
        caplog.clear()
        torchgw.solve(X, X, max_iter=1, inner_max_iter=1, n_init=1, random_state=0)
        assert told not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("distances", ["sqeuclidean", "euclidean"])
def test_the_forecast_is_of_the_right_order(distances, caplog):
    rng = np.random.default_rng(0)
    X, Y = rng.normal(size=(1200, 10)), rng.normal(size=(1200, 10))
    with caplog.at_level(logging.INFO, logger="torchgw"), warnings.catch_warnings():
        warnings.simplefilter("ignore", torchgw.ConvergenceWarning)
        result = torchgw.solve(
            X,
            Y,
            distances=distances,
            n_init=1,
            search="fast",
            max_iter=8,
            inner_max_iter=100,
            random_state=0,
        )
    told = float(caplog.text.split("forecast: ")[1].split()[0])
    spent = sum(result.timings[name] for name in ("cost", "sinkhorn", "coupling"))
    assert told / 6 < spent / result.n_iters < 6 * told
