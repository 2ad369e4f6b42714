"""What a solve says: bars, lines, logs, summaries."""

from __future__ import annotations

import logging
import sys
from html.parser import HTMLParser

import numpy as np
import pytest

import torchgw

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(20, 2)), RNG.normal(size=(25, 3))


def lines_after_the_forecast(capsys):
    """Read what was said after what a solve was said to take, which comes first."""
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("forecast: ")
    assert sum(line.startswith("forecast: time: ") for line in lines) == 1
    return [line for line in lines if not line.startswith("forecast: ")]


class Terminal:
    """Standard error that says it is a terminal."""

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text

    def flush(self):
        pass

    def isatty(self):
        return True


def test_verbose_writes_a_line_per_iteration(capsys):
    result = torchgw.solve(X, Y, verbose=True, epsilon=0.1)
    lines = lines_after_the_forecast(capsys)
    assert len(lines) == result.n_iters
    assert lines[-1].startswith(f"iteration {result.n_iters} of at most 500 ")
    torchgw.solve(X, Y, epsilon=0.1)
    assert capsys.readouterr().err == ""


def test_verbose_moves_a_line_in_a_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    seen = []
    result = torchgw.solve(
        X, Y, verbose=True, epsilon=0.1, options=torchgw.Options(callback=seen.append)
    )
    assert "\riteration 1 of at most 500 " in sys.stderr.text
    assert sys.stderr.text.endswith("\n")
    assert seen == list(result.history)


@pytest.mark.parametrize("shown", [True, False])
def test_pairs_are_counted_in_a_terminal(shown, monkeypatch, capsys):
    call = {"n_init": 1, "epsilon": 0.1, "progress": shown}
    torchgw.pairwise([X, Y, X], **call)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys, "stderr", Terminal())
    torchgw.pairwise([X, Y, X], **call)
    text = sys.stderr.text
    assert text.startswith("\rtorchgw, pair 6 of 6 ") and text.endswith("\n") if shown else not text


# what is asked here is what is told on the way; rounding decides whether chains agree
@pytest.mark.filterwarnings("ignore::torchgw.SearchWarning")
def test_verbose_tells_how_far_a_search_is(capsys):
    rng = np.random.default_rng(0)
    first, second = (np.triu(rng.random((n, n)), 1) for n in (14, 16))
    options = {"D_X": first + first.T, "D_Y": second + second.T, "epsilon": 0.1}
    result = torchgw.solve(verbose=True, random_state=0, **options)
    told, *rest = lines_after_the_forecast(capsys)
    assert told.startswith("search: 4 of at most 16 chains on all points in ")
    assert "s more until they are compared" in told
    lines = [line for line in rest if not line.startswith("search: ")]
    assert len(lines) == result.n_iters
    torchgw.solve(random_state=0, **options)
    assert capsys.readouterr().err == ""


def test_callback_stops_a_verbose_solve(capsys):
    with pytest.warns(torchgw.ConvergenceWarning, match="Stopped by the callback or a time limit"):
        result = torchgw.solve(
            X,
            Y,
            search="fast",
            verbose=True,
            options=torchgw.Options(callback=lambda entry: entry.iteration == 3),
        )
    assert result.status is torchgw.Status.STOPPED
    assert len(lines_after_the_forecast(capsys)) == 4


def test_choices_are_logged(caplog):
    with caplog.at_level(logging.INFO, logger="torchgw"):
        torchgw.solve(X, Y, epsilon=0.1)
    assert "gradient dense: both distance matrices fit" in caplog.text
    assert not logging.getLogger("torchgw").handlers


def test_html_is_a_table():
    result = torchgw.solve(X, Y, epsilon=0.1)
    tags = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: tags.append(tag)
    parser.feed(result._repr_html_())
    assert tags.count("tr") == tags.count("th") == 6
    assert "20 &times; 25" in result._repr_html_()
    assert f"{result.value:.6g}" in result._repr_html_()
