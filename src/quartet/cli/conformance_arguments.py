"""Arguments of `quartet conformance`. Imports the checks only when the command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def check_conformance(
    role: Annotated[
        str, typer.Argument(metavar="ROLE", help="reward, reference, critic, actor, generator, environment or agent.")
    ],
    address: Annotated[str, typer.Argument(metavar="ADDRESS", help="HOST:PORT of the service.")],
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="ID", help="Run only the checks whose ids begin with this. Repeatable."),
    ] = None,
    show_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    allow_changes: Annotated[
        bool,
        typer.Option("--allow-changes", help="Also run the checks that train, save and generate. They need --buffer."),
    ] = False,
    buffer: Annotated[
        str | None,
        typer.Option(metavar="URL", help="The service's rollout buffer, redis://HOST:PORT."),
    ] = None,
    seconds: Annotated[float, typer.Option(min=1.0, help="Time for each call, in seconds.")] = 30.0,
    vocabulary_size: Annotated[
        int | None,
        typer.Option(min=2, help="Number of token ids. Default: as the status says."),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=2, help="Maximum tokens of a sequence. Default: as the status says."),
    ] = None,
    fields: Annotated[
        str | None,
        typer.Option(metavar="JSON", help="Fields of every prompt, for a reward that needs them. Default: none."),
    ] = None,
    failing_fields: Annotated[
        str | None,
        typer.Option(metavar="JSON", help="Fields with which a reward or an environment fails. Default: not checked."),
    ] = None,
    distinct_response: Annotated[
        str | None,
        typer.Option(
            metavar="IDS",
            help="Token ids of a response whose score is not that of random ones, such as [12, 7]. Default: unknown.",
        ),
    ] = None,
    certificates: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder that `quartet certificates` has written. Default: no TLS."),
    ] = None,
    identity: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Certificate in that folder that the calls use. Default: orchestrator; actor for the calls of an environment.",
        ),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File with the token of the services. Default: no token."),
    ] = None,
) -> None:
    """Hold a service, in any language, to the contract in proto/quartet/v1.

    Exit with 0 if it conforms, with 1 if it does not, and with 2 for a wrong argument or an address without such a server.
    """
    from quartet.cli.conformance import Access, token_ids
    from quartet.cli.conformance import conformance as check
    from quartet.conformance.target import Limits

    limits = Limits(
        seconds,
        vocabulary_size,
        max_tokens,
        allow_changes,
        buffer,
        fields=fields,
        failing_fields=failing_fields,
        distinct_response=token_ids(distinct_response),
    )
    access = Access(certificates, identity, token_file)
    if not check(role, address, limits, access, only or [], show_json):
        raise typer.Exit(1)
