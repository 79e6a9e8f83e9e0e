"""What the Markdown files say exists: commands with their options, files, links, exit codes, recipes."""

import importlib.metadata
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from p2p_dilocox import errors
from p2p_dilocox.recipe import recipes
from tests.unit.test_architecture import ARROWS

ROOT = Path(__file__).parents[2]
PROGRAMS = ("dilocox-peer", "dilocox-bootstrap")
# Files that a reader writes or receives: no part of the repository.
READERS_FILES = {"run.toml", "my-run.toml"}

_FENCE = re.compile(r"^ *```([a-z]*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:^ {4}\S.*\n)+", re.MULTILINE)
_INLINE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_FILE = re.compile(r"[\w.][\w./-]*\.(?:py|md|toml|yaml|Dockerfile|png|svg)|Makefile|LICENSE")
_PLACEHOLDER = re.compile(r"<[^<>]*>")


def markdown_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [ROOT / name for name in sorted(listed.stdout.split("\0")) if name and (ROOT / name).exists()]


FILES = markdown_files()


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def lines_of_code(text: str) -> Iterator[str]:
    """Every line of a code block, long lines joined, and every piece of `inline code`."""
    blocks = [block for _, block in _FENCE.findall(text)]
    prose = _FENCE.sub("", text)
    for block in (*blocks, *_INDENTED.findall(prose)):
        yield from block.replace("\\\n", " ").splitlines()
    yield from _INLINE.findall(prose)


def commands(text: str, program: str) -> Iterator[list[str]]:
    """The arguments of every line that starts `program`, by its name or by a path to it."""
    for line in lines_of_code(text):
        words = _words(line)
        if words and Path(words[0]).name == program:
            yield words[1:]


def _words(line: str) -> list[str]:
    try:
        return shlex.split(_PLACEHOLDER.sub("PLACEHOLDER", line.strip().removeprefix("$ ")), comments=True)
    except ValueError:  # prose or a drawing with a quotation mark in it
        return []


def group_of(program: str) -> click.Group:
    """What the installed script runs."""
    (entry,) = importlib.metadata.entry_points(group="console_scripts", name=program)
    group = entry.load()
    assert isinstance(group, click.Group)
    return group


def objection(program: str, arguments: list[str]) -> str:
    """Why `program` would refuse these arguments; "" if it would start."""
    words = [word for word in arguments if word not in ("-v", "--verbose", "...")]
    if not words or words[0] in ("--help", "--version"):  # the program itself
        return ""
    group = group_of(program)
    command = group.commands.get(words[0])
    if command is None:
        return f"no command {words[0]!r}"
    rest = words[1:]
    # A command named in a sentence stands without its arguments; an option has to exist anyhow.
    try:
        command.make_context(words[0], rest, parent=click.Context(group), resilient_parsing=not rest)
    except click.exceptions.MissingParameter:
        return ""
    except click.exceptions.Exit:  # --help
        return ""
    except click.ClickException as error:
        return error.format_message()
    return ""


@pytest.mark.parametrize("path", FILES, ids=name_of)
@pytest.mark.parametrize("program", PROGRAMS)
def test_every_command_that_a_page_shows_is_accepted(path: Path, program: str) -> None:
    wrong = {
        " ".join([program, *arguments]): why
        for arguments in commands(path.read_text(encoding="utf-8"), program)
        if (why := objection(program, arguments))
    }
    assert wrong == {}


def test_the_readme_shows_both_programs_and_make() -> None:
    """Else the test above could pass by finding nothing."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = {program: [words[0] for words in commands(text, program) if words] for program in PROGRAMS}
    assert {"join", "leave", "status", "validate"} <= set(shown["dilocox-peer"])
    assert "serve" in shown["dilocox-bootstrap"]
    assert {"demo", "test"} <= {words[0] for words in commands(text, "make") if words}


def test_a_wrong_command_is_seen() -> None:
    text = "   ```\n   .venv/bin/dilocox-peer join L --devicez cpu\n   ```\nand `dilocox-peer fly` and\n\n"
    text += "    dilocox-peer demo 3\n"
    found = [objection("dilocox-peer", words) for words in commands(text, "dilocox-peer")]
    assert len(found) == 3
    assert all(found)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_every_make_target_that_a_page_shows_is_in_the_makefile(path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (phony,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    shown = {word for words in commands(path.read_text(encoding="utf-8"), "make") for word in words}
    assert shown <= set(phony.split())


def test_the_command_that_installs_can_be_run() -> None:
    installs = list(commands((ROOT / "README.md").read_text(encoding="utf-8"), "make-venv"))
    assert installs
    assert (ROOT / ".ci" / "make-venv").stat().st_mode & 0o100


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_relative_link_is_broken(path: Path) -> None:
    targets = [t for t in _LINK.findall(path.read_text(encoding="utf-8")) if "://" not in t]
    broken = [t for t in targets if not t.startswith("#") and not (path.parent / t.split("#")[0]).exists()]
    assert broken == []


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_every_file_that_a_page_names_exists(path: Path) -> None:
    """Looked for where a reader would: in the root, beside the page, in the library, by its name."""
    missing = []
    for code in _INLINE.findall(_FENCE.sub("", path.read_text(encoding="utf-8"))):
        if not _FILE.fullmatch(code) or code in READERS_FILES or code.startswith("runs/demo/"):
            continue
        places = (ROOT / code, path.parent / code, ROOT / "p2p_dilocox" / code)
        if not any(place.exists() for place in places) and not ("/" not in code and known(code)):
            missing.append(code)
    assert missing == []


def known(name: str) -> bool:
    """Whether some file of the library or of the two programs has this name."""
    return any(True for folder in ("p2p_dilocox", "peers", "bootstrap") for _ in (ROOT / folder).rglob(name))


def rows(page: str) -> list[list[str]]:
    """The cells of every table row of a page, without the back quotes."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    return [
        [c.strip().strip("`") for c in line.strip("|").split("|")] for line in lines if line.startswith("|")
    ]


def test_the_page_of_exit_codes_has_every_error_with_its_code() -> None:
    written = {(row[1], row[0]) for row in rows("docs/errors.md")}
    for name in errors.__all__:
        assert (name, str(getattr(errors, name).exit_code)) in written


def test_the_page_of_recipes_has_the_settings_of_every_recipe() -> None:
    written = {row[0]: row[1:] for row in rows("docs/recipes.md") if len(row) == 9}
    for name, recipe in recipes().items():
        c, outer = recipe.compression, recipe.outer
        kind = "Nesterov" if outer.nesterov else "SGD"
        schedule, delay = recipe.schedule, f", {recipe.overlap.delay}" * (recipe.overlap.mode == "delay")
        part = f"1 of {schedule.fragments} fragments" if schedule.fragments > 1 else "everything"
        assert written.pop(name) == [
            f"{schedule.fraction:g} of the values" if schedule.fraction < 1 else part,
            recipe.overlap.mode + delay,
            f"{recipe.overlap.keep:g}",
            f"{kind}, lr {outer.lr:g}, momentum {outer.momentum:g}"
            if outer.average == "pseudo-gradient"
            else "AdamW of `[inner]",
            str(c.lowrank or "all"),
            f"{c.bits}, strongest {c.strong_bits}"
            if c.strong_bits > c.bits
            else f"{c.bits}, of the largest {c.top:.1%}".replace("%", " %")
            if c.top < 1
            else str(c.bits),
            f"{c.feedback}, {c.gamma:g}" if c.feedback != "none" else "none",
            recipe.source,
        ]
    assert written.keys() <= {"recipe", "---"}


def test_the_page_of_the_architecture_has_the_arrows_between_the_parts() -> None:
    written = {
        part: set(re.findall(r"\w+", row[1])) - {"nothing"}
        for row in rows("docs/architecture.md")
        for part in re.findall(r"\w+", row[0])
        if len(row) == 2
    }
    assert {part: written.get(part) for part in ARROWS} == ARROWS
