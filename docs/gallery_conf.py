"""How mkdocs-gallery builds the gallery."""

from __future__ import annotations

from pathlib import Path

# Examples that are not named come last.
ORDER = (
    "spiral",
    "real",
    "digits",
    "many_digits",
    "cells",
    "snare",
    "graphs",
    "roads",
    "hierarchies",
    "surfaces",
    "slices",
    "out_of_sample",
    "differentiable",
    "training",
    "registration",
    "barycenter",
    "several_spaces",
    "representations",
    "scaling",
)


class Order:
    """Sort examples as in ORDER."""

    def __call__(self, file: Path) -> tuple[int, str]:
        """Return the place of an example."""
        place = ORDER.index(file.stem) if file.stem in ORDER else len(ORDER)
        return place, file.stem


conf = {
    "filename_pattern": r"\.py$",
    "within_subsection_order": Order,
    "abort_on_example_error": True,
    "capture_repr": (),
    "show_signature": False,
    "remove_config_comments": True,
}
