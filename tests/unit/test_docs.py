"""What the documents say is there: links, commands, targets, folders."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from gpususpend import cli
from tests.programs.setting import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
COMMAND = re.compile(r"nvsnap-gpu-suspend ([a-z][a-z-]*)")
MAKE = re.compile(r"\bmake ([a-z][a-z-]*)\b")
PROSE_AFTER_MAKE = {"it", "the", "a", "and"}


def name(page: Path) -> str:
    """Return the page's path as test ids show it."""
    return str(page.relative_to(ROOT))


@cache
def text(page: Path) -> str:
    """Return a page."""
    return page.read_text()


def code(page: Path) -> str:
    """Return what stands as code on a page: indented and fenced lines, and spans between backticks."""
    blocks = re.findall(r"^ {4}.*$", text(page), re.M) + re.findall(r"```.*?```", text(page), re.S)
    return "\n".join(blocks + re.findall(r"`([^`\n]+)`", text(page)))


def links(page: Path) -> list[str]:
    """Return the links of a page that lead into the tree, without anchors."""
    return [link.split("#")[0] for link in LINK.findall(text(page)) if "://" not in link and not link.startswith("#")]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_b11_links_lead_somewhere(page: Path) -> None:
    missing = [link for link in links(page) if not (page.parent / link).exists()]
    assert not missing


def test_every_page_is_reached_from_the_readme() -> None:
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in reached:
            continue
        reached.add(page)
        targets = [(page.parent / link).resolve() for link in links(page)]
        waiting += [target for target in targets if target.suffix == ".md"]
    assert not [name(page) for page in PAGES if page not in reached]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_named_exist(page: Path) -> None:
    assert set(COMMAND.findall(code(page))) <= set(cli.COMMANDS)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_make_targets_named_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(MAKE.findall(code(page))) - PROSE_AFTER_MAKE <= targets


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_paths_named_exist(page: Path) -> None:
    named = re.findall(r"`((?:shim|gpususpend|tests|docs|\.ci)/[\w./-]+)`", text(page))
    assert not [path for path in named if not (ROOT / path).exists() and "NAME" not in path]


def test_architecture_has_a_line_for_every_folder() -> None:
    page = text(ROOT / "docs" / "explanation" / "architecture.md")
    listed = set(re.findall(r"^\| `([\w/]+)/` \|", page, re.M))
    folders = [folder for folder in (ROOT / "gpususpend").iterdir() if any(folder.glob("*.py"))]
    inner = [f"gpususpend/{folder.name}" for folder in folders]
    there = [folder.name for folder in ROOT.iterdir() if folder.is_dir() and folder.name in {"shim", "k8s"}]
    wanted = {*inner, *there, "gpususpend", "chunkstore", "tests", "docs"}
    assert wanted <= listed


def test_every_decision_is_in_the_index() -> None:
    folder = ROOT / "docs" / "decisions"
    assert {page.name for page in folder.glob("*.md")} - {"README.md"} == set(links(folder / "README.md"))
