"""The arguments of `quartet checkpoints`, `quartet rollback` and `quartet fork`. Their modules are imported when they run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

checkpoints_app = typer.Typer(help="List, verify, tag and export the checkpoints of a run.", no_args_is_help=True)
AnyRun = Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run: runs/NAME.")]
Which = Annotated[str, typer.Argument(metavar="STEP|TAG", help="Step or tag of a checkpoint, or latest.")]


@checkpoints_app.command("list")
def checkpoints_list(run: AnyRun) -> None:
    """List the checkpoints of a run."""
    from quartet.cli.checkpoint.list_and_tag import list_checkpoints

    list_checkpoints(run, verify=False)


@checkpoints_app.command("verify")
def checkpoints_verify(run: AnyRun) -> None:
    """Compare the files of all checkpoints with their checksums. Exit status 1 if a checkpoint is damaged."""
    from quartet.cli.checkpoint.list_and_tag import list_checkpoints

    if not list_checkpoints(run, verify=True):
        raise typer.Exit(1)


@checkpoints_app.command("tag")
def checkpoints_tag(
    run: AnyRun, step: Which, tag: Annotated[str, typer.Argument(metavar="TAG", help="Tag to add, such as best.")]
) -> None:
    """Tag a checkpoint. A tagged checkpoint is kept regardless of checkpoint.keep_last."""
    from quartet.cli.checkpoint.list_and_tag import tag_checkpoint

    tag_checkpoint(run, step, tag)


@checkpoints_app.command("untag")
def checkpoints_untag(run: AnyRun, tag: Annotated[str, typer.Argument(metavar="TAG", help="Tag to remove.")]) -> None:
    """Remove a tag. The checkpoint is deleted once it is no longer one of the latest."""
    from quartet.cli.checkpoint.list_and_tag import untag_checkpoint

    untag_checkpoint(run, tag)


@checkpoints_app.command("export")
def checkpoints_export(
    run: AnyRun,
    step: Which,
    directory: Annotated[
        Path | None,
        typer.Argument(help="New or empty directory to write to. Not needed with --push."),
    ] = None,
    push: Annotated[
        str | None,
        typer.Option(
            metavar="OWNER/NAME", help="Upload to this model of the Hugging Face Hub, with the token of the hub."
        ),
    ] = None,
    private: Annotated[
        bool, typer.Option("--private/--public", help="Visibility of a model that --push creates.")
    ] = True,
    ema: Annotated[
        bool, typer.Option("--ema", help="Export the moving average of the weights, which actor.ema_decay keeps.")
    ] = False,
) -> None:
    """Export the policy of a checkpoint as a Hugging Face model with a model card. An adapter is merged into the weights."""
    from quartet.cli.checkpoint.export import export

    export(run, step, directory, push, private, ema)


def rollback(
    run: AnyRun,
    step: Which,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove without a question.")] = False,
) -> None:
    """Remove everything after a checkpoint, after a question. `quartet train --resume` continues from there."""
    from quartet.cli.checkpoint.list_and_tag import rollback as roll

    roll(run, step, yes)


def fork(
    run: AnyRun,
    step: Which,
    name: Annotated[str, typer.Option(help="Name of the new run.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override a setting, such as run.steps=10. Repeatable."),
    ] = None,
) -> None:
    """Create a new run from a checkpoint, with other settings. `quartet train --resume` continues it."""
    from quartet.cli.checkpoint.fork import fork as create

    create(run, step, name, overrides or [])
