"""Symmetries of a problem: which other plans cost exactly what one costs, and how many there are.

A permutation of X beside one of Y that keeps distances, weights and the linear cost takes a plan to
another one of the same objective. Those of both sides are the automorphisms of one table of n + m
points, and those that keep the plan too are the automorphisms of that table with the plan in it: as
many times as the first are the second, so many images the plan has. Points are told apart by colour
refinement, one is chosen where that ends, and what is found is checked [1]_.

References
----------
.. [1] B. McKay, A. Piperno. Practical graph isomorphism, II. Journal of Symbolic Computation 2014.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchgw._problem.problem import Problem
from torchgw._sinkhorn.duals import Array
from torchgw._starts import alternatives
from torchgw._starts.coarse import CoarseProblem, coarse_problem
from torchgw._tensors.operations import EQUAL

Colours = NDArray[np.uint64]
Order = NDArray[np.int64]

# Refinements after which symmetries are not counted; symmetries that are drawn, of which the one
# that leads farthest is listed. [L1550]
_MOST, _DRAWN = 4_000, 16


class Symmetries:
    """The permutations of N points that keep a table of classes (N, N), at least in some colours.

    Attributes
    ----------
    count : int
        How many there are; 0 if counting them takes too long.
    generators : list of ndarray, shape (N,), int64
        Some, of which all others are made.
    """

    def __init__(self, classes: Order) -> None:
        generator = np.random.default_rng(0)
        both = np.unique(classes + (classes.max() + 1) * classes.T, return_inverse=True)[1]
        self._classes: Order = both.reshape(classes.shape)
        names = generator.integers(2**63, size=int(both.max()) + 1, dtype=np.uint64)
        self._names = 2 * names[self._classes] + 1
        self._marks = 2 * generator.integers(2**62, size=len(classes), dtype=np.uint64) + 1
        self._left = _MOST
        self.generators: list[Order] = []
        count = self._count(self._refined(self._names.diagonal().copy()), 0)
        self.count = count if self._left > 0 else 0

    def _refined(self, colours: Colours) -> Colours:
        """Tell points apart by the colours of all others, until that tells no more."""
        self._left -= 1
        known = len(np.unique(colours))
        while True:
            told = colours * np.uint64(0x9E3779B97F4A7C15) + self._names @ colours
            # powers of two would lose digits
            told ^= told >> np.uint64(29)
            colours, before, known = told, known, len(np.unique(told))
            if known in (before, len(colours)):
                return colours

    def _chosen(self, colours: Colours, point: int, depth: int) -> Colours:
        """Give a point a colour of its own."""
        marked = colours.copy()
        marked[point] = self._marks[depth]
        return self._refined(marked)

    def _count(self, colours: Colours, depth: int) -> int:
        """Count those that keep some colours: where a point may go, times those that keep it."""
        cell = _first_cell(colours)
        if len(cell) == 0 or self._left < 0:
            return 1
        first = self._chosen(colours, int(cell[0]), depth)
        below = self._count(first, depth + 1)
        orbit = self._orbit(int(cell[0]))
        for point in cell[1:].tolist():
            if point not in orbit:
                found = self._swap(int(cell[0]), point)
                if found is None:
                    other = self._chosen(colours, point, depth)
                    found = next(self._between(first, other, depth + 1), None)
                if found is not None:
                    self.generators.append(found)
                    orbit = self._orbit(int(cell[0]))
        return below * len(orbit)

    def _swap(self, point: int, other: int) -> Order | None:
        """Exchange two points, if all others are the same to both."""
        order = np.arange(len(self._classes))
        order[[point, other]] = other, point
        one, two = self._classes[point], self._classes[other]
        return order if (one[order] == two).all() else None

    def _between(self, first: Colours, second: Colours, depth: int) -> Iterator[Order]:
        """Find the symmetries that take some colours to others."""
        one, two = np.argsort(first), np.argsort(second)
        if not (first[one] == second[two]).all() or self._left < 0:
            return
        cell = _first_cell(first)
        if len(cell) == 0:
            found = np.empty(len(one), dtype=np.int64)
            found[one] = two
            if (self._classes[np.ix_(found, found)] == self._classes).all():
                yield found
            return
        chosen = self._chosen(first, int(cell[0]), depth)
        for point in np.flatnonzero(second == first[cell[0]]).tolist():
            yield from self._between(chosen, self._chosen(second, point, depth), depth + 1)

    def _orbit(self, point: int) -> set[int]:
        """Collect where the generators take a point."""
        orbit, new = {point}, [point]
        while new:
            there = {int(each[one]) for each in self.generators for one in new}
            new = list(there - orbit)
            orbit |= there
        return orbit


def _first_cell(colours: Colours) -> Order:
    """Find the points of the first colour that several have; none if all differ."""
    _, places, counts = np.unique(colours, return_inverse=True, return_counts=True)
    several = np.flatnonzero(counts[places] > 1)
    return several if len(several) == 0 else np.flatnonzero(places == places[several[0]])


def _classes(values: Array, same: float) -> Order:
    """Give numbers to values, the same where these are about the same."""
    order = np.argsort(values, axis=None)
    steps = np.diff(values.ravel()[order], prepend=-np.inf) > same * float(np.abs(values).max())
    numbers = np.empty(values.size, dtype=np.int64)
    numbers[order] = np.cumsum(steps)
    return numbers.reshape(values.shape)


def with_images(search: alternatives.Search, problem: Problem) -> alternatives.Search:
    """Count the images of the first plan of a search of all points, and list some of them after it.

    Those are what it has found of the same cost and with the same entries, or one that leads far.
    """
    if not alternatives.is_whole(problem, search) or problem.restriction is not None:
        return search
    first, *others = search.alternatives
    plan = first.plan.cpu().numpy()
    table = _table_of(problem, first)
    every = Symmetries(table)
    if every.count <= 1:
        return search
    # entries of rows of X and columns of Y, which are as exact as the plan has settled
    table[: len(plan), len(plan) :] += (table.max() + 1) * _classes(plan, alternatives.AGREED)
    keeping = Symmetries(table).count
    count = every.count // keeping if keeping else 1
    if count == 1:
        return search
    first, entries = replace(first, images=count), np.sort(plan, axis=None)
    whole = coarse_problem(problem, max(problem.shape)).problem
    highest = first.value + alternatives.AGREED * abs(first.value) + whole.rounding()
    found, rest = [], []
    for each in others:
        missed = np.abs(np.sort(each.plan.cpu(), axis=None) - entries).max()
        if each.value <= highest and missed <= alternatives.AGREED * entries[-1]:
            found.append(replace(each, images=count))
        else:
            rest.append(each)
    found = found or _far_image(first, every, whole)
    ambiguity = 1.0 if found else search.ambiguity
    return search._replace(alternatives=(first, *found, *rest), ambiguity=ambiguity)


def _far_image(
    first: alternatives.Alternative, every: Symmetries, whole: CoarseProblem
) -> list[alternatives.Alternative]:
    """Draw images, and take the one that sends points farthest elsewhere; none if none does."""
    drawn = [replace(first, plan=first.plan.new_tensor(each), label="symmetry")
             for each in _images(first.plan.cpu().numpy(), every.generators)]  # fmt: skip
    tables = torch.stack([alternatives.among_all(each, whole)[0] for each in (first, *drawn)])
    apart = alternatives.all_sent_apart(whole, tables)[0, 1:]
    return [drawn[int(apart.argmax())]] if float(apart.max()) > alternatives.OTHER else []


def _table_of(problem: Problem, found: alternatives.Alternative) -> Order:
    """Give numbers to what each point of both sides is to each other one (N, N)."""
    n, size = len(found.source), len(found.source) + len(found.target)
    table = np.zeros((size, size), dtype=np.int64)
    for side, (provider, weights, some, place) in enumerate(
        zip(
            problem.sides, problem.marginals, (found.source, found.target),
            (slice(0, n), slice(n, size)), strict=True,
        )
    ):  # fmt: skip
        own = _classes(_host(provider.between(some, some)), EQUAL)
        own += (own.max() + 1) * np.diag(_classes(_host(weights[some]), EQUAL))
        table[place, place] = 2 * own + side
    for cross in (problem.linear and problem.linear.dense().matrix, problem.support):
        if cross is not None:
            both = _classes(_host(cross[found.source[:, None], found.target]), EQUAL)
            table[:n, n:] += (table.max() + 1) * both
    return table


def _host(values: Tensor) -> Array:
    copied: Array = values.double().cpu().numpy()
    return copied


def _images(plan: Array, generators: list[Order]) -> Iterator[Array]:
    """Draw images of a plan (n, m) under products of symmetries."""
    n, generator, order = len(plan), np.random.default_rng(0), np.arange(sum(plan.shape))
    for _ in range(_DRAWN):
        for each in generators:
            order = each[order] if generator.random() < 0.5 else order
        yield plan[order[:n, None], order[n:] - n]
