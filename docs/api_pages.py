"""The reference: docs/api.md lists it, and each name becomes a page of its own.

So do the functions of its modules. A section whose names are short, such as errors, is one page.
"""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

from mkdocs.structure.files import File

TOGETHER = {"Backends", "Errors and warnings"}
FRONT = "---\nsearch:\n  boost: {boost}\n---\n\n"
# Readers look for names in the reference; the logs of attempts and of changes name all of them too.
# A name that others begin with is meant where it is asked for, however much its page says.
API, BEGINNING, LOG = 4, 60, 0.2


def sections(listed: str) -> dict[str, dict[str, str]]:
    """Read docs/api.md: its sections, and the names in them with their options."""
    found = re.split(r"^## (.*)\n", listed, flags=re.M)[1:]
    return {
        title: dict(re.findall(r"^::: (\S+)\n((?:[ ].*\n)*)", text, flags=re.M))
        for title, text in zip(found[::2], found[1::2], strict=True)
    }


def find(name: str) -> Any:
    """Import what a name stands for."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(name)


def summary(name: str) -> str:
    """List a name with the first sentence of what is said of it."""
    found = find(name)
    said = inspect.getdoc(found) if callable(found) or inspect.ismodule(found) else ""
    first = re.split(r"(?<=\.)\s|\n\n", said or "", maxsplit=1)[0]
    text = " ".join(re.sub(r":\w+:`~?([^`]*)`", r"`\1`", first).replace("``", "`").split())
    return f"- [`{name}`][{name}]: {text}"


def members(name: str) -> list[str]:
    """Return the names of the functions of a module."""
    module = find(name)
    own = inspect.ismodule(module) and [one for one in module.__all__ if one in vars(module)]
    return [f"{name}.{one}" for one in own or () if not inspect.ismodule(vars(module)[one])]


def entry(name: str, options: str, *, level: int = 1) -> str:
    """Write what documents a name."""
    inside = options.partition("\n")[2]
    return f"::: {name}\n    options:\n      heading_level: {level}\n{inside}"


def pages_of(names: dict[str, str]) -> dict[str, str]:
    """Write a page for each name, and for the functions of modules."""
    pages = {}
    for name, options in names.items():
        inside = members(name)
        text = entry(name, options) + ("      members: false\n" if inside else "")
        pages[name] = "\n".join([text, *map(summary, inside)])
        pages |= {one: entry(one, "") for one in inside}
    return pages


def on_files(files: Any, config: Any) -> Any:
    """Make the pages, and put them into the navigation by section."""
    page = files.get_file_from_path("api.md")
    contents, navigation = ["# API\n"], ["api.md"]
    made: dict[str, str] = {}
    for title, names in sections(page.content_string).items():
        contents += [f"## {title}\n", *map(summary, names), ""]
        if title in TOGETHER:
            where = re.sub(r"\W+", "-", title.lower())
            made[where] = f"# {title}\n\n" + "\n".join(
                entry(*one, level=2) for one in names.items()
            )
            navigation.append({title: f"api/{where}.md"})
        else:
            pages = pages_of(names)
            made |= pages
            navigation.append({title: [{one[8:]: f"api/{one[8:]}.md"} for one in pages]})
    last = [name.rpartition(".")[2] for name in made]
    for name, text in made.items():
        own = name.rpartition(".")[2]
        begins = any(other.startswith(own) and other != own for other in last)
        front = FRONT.format(boost=BEGINNING if begins else API)
        where = f"api/{name.removeprefix('torchgw.')}.md"
        files.append(File.generated(config, where, content=front + text))
    page.content_string = "\n".join(contents)
    for name in ("optimization-log", "changelog"):
        log = files.get_file_from_path(f"{name}.md")
        log.content_string = FRONT.format(boost=LOG) + log.content_string
    config.nav = [
        {"API": navigation} if entry == {"API": "api.md"} else entry for entry in config.nav
    ]
    return files
