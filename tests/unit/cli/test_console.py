"""The console prints names and paths as they are."""

from __future__ import annotations

import pytest
from rich.table import Table

from quartet.cli.console import make_console, plain

ODD = "runs/[red]a[/red] [/] :key: 1.5 {x} %s"


def test_names_are_no_markup_and_no_emoji(capsys: pytest.CaptureFixture[str]) -> None:
    console = make_console(file_width=200)
    console.print(f"policy: {ODD}", soft_wrap=True)
    table = Table(ODD)
    table.add_row(ODD)
    console.print(table)
    console.print(plain(ODD))
    assert capsys.readouterr().out.count(ODD) == 4


def test_errors_go_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    make_console(stderr=True).print(ODD)
    assert capsys.readouterr() == ("", f"{ODD}\n")
