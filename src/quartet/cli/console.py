"""The console of every command. It prints paths and names as they are: brackets are no markup, ``:key:`` is no emoji."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text


def make_console(stderr: bool = False, file_width: int | None = None) -> Console:
    """Return a console. ``file_width``: width of tables that go to a file or pipe. Defaults to that of rich."""
    console = Console(stderr=stderr, markup=False, emoji=False, highlight=False)
    if file_width is not None and not console.is_terminal:
        console.width = file_width
    return console


def plain(text: str) -> Text:
    """Return ``text`` for the parts of rich that read markup whatever the console says, such as ``Console.status``."""
    return Text(text)
