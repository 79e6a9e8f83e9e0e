"""Crews of real processes, ended with the test that started them, whatever became of it."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .crew import Crew

StartCrew = Callable[..., Crew]


@pytest.fixture
def start_crew(tmp_path: Path) -> Iterator[StartCrew]:
    with contextlib.ExitStack() as stack:

        def start(text: str, **options: object) -> Crew:
            return stack.enter_context(Crew(tmp_path / "crew", text, **options))  # type: ignore[arg-type]

        yield start
