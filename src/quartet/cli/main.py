"""The `quartet` command: each subcommand parses, delegates, and prints. Heavy imports wait until they are needed."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from quartet import __version__
from quartet.durable_files import in_words
from quartet.errors import ConfigError, QuartetError
from quartet.train_extra import explain_missing_package

app = typer.Typer(
    name="quartet",
    help="RLHF training as microservices.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(help="Look at a config without starting anything.", no_args_is_help=True)
app.add_typer(config_app, name="config")

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file.")]
Overrides = Annotated[
    Optional[list[str]],  # noqa: UP045 - typer reads the annotation at run time
    typer.Option("--set", metavar="KEY=VALUE", help="Override one setting, for example run.steps=10. May be repeated."),
]
Overlays = Annotated[
    Optional[list[Path]],  # noqa: UP045
    typer.Option(
        "--overlay",
        metavar="FILE",
        help="Laid over CONFIG, as a further --config of python -m quartet.services. May be repeated.",
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Drop an earlier run of the same name.")]

Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run of this name where it broke off.")]

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it: 128 + SIGINT."""


@app.command()
def train(
    config: ConfigPath, overrides: Overrides = None, overwrite: Overwrite = False, resume: Resume = False
) -> None:
    """Train: start whatever the config does not point at, run PPO, stop what was started."""
    from quartet.cli.start_run import train as run

    run(config, overrides or [], overwrite, resume)


@app.command()
def up(config: ConfigPath, overrides: Overrides = None, overwrite: Overwrite = False, resume: Resume = False) -> None:
    """Start everything, train, and keep the services up afterwards, until Ctrl-C."""
    from quartet.cli.start_run import up as run

    run(config, overrides or [], overwrite, resume)


RunOrURL = Annotated[
    str, typer.Argument(metavar="RUN|URL", help="A run that is going on: runs/NAME, or http://HOST:PORT/runs/NAME.")
]
RunName = Annotated[Optional[str], typer.Option("--run", metavar="NAME", help="The run, where the URL names none.")]  # noqa: UP045
TokenFile = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(metavar="FILE", help="Holds the token that a URL needs; otherwise QUARTET_GATEWAY_TOKEN does."),
]


@app.command()
def watch(run: RunOrURL, name: RunName = None, token_file: TokenFile = None) -> None:
    """Show a run that is going on elsewhere."""
    from quartet.cli.remote.gateway_client import find
    from quartet.cli.remote.watch import watch as show

    show(find(run, name, token_file))


@app.command()
def pause(run: RunOrURL, name: RunName = None, token_file: TokenFile = None) -> None:
    """Let a run wait after the step in hand."""
    from quartet.cli.remote.control import pause as ask
    from quartet.cli.remote.gateway_client import find

    ask(find(run, name, token_file))


@app.command()
def resume(run: RunOrURL, name: RunName = None, token_file: TokenFile = None) -> None:
    """Let a paused run go on."""
    from quartet.cli.remote.control import resume as ask
    from quartet.cli.remote.gateway_client import find

    ask(find(run, name, token_file))


@app.command()
def stop(run: RunOrURL, name: RunName = None, token_file: TokenFile = None) -> None:
    """End a run after the step in hand; its policy is saved."""
    from quartet.cli.remote.control import stop as ask
    from quartet.cli.remote.gateway_client import find

    ask(find(run, name, token_file))


@app.command()
def checkpoint(run: RunOrURL, name: RunName = None, token_file: TokenFile = None) -> None:
    """Let a run write a checkpoint after the step in hand."""
    from quartet.cli.remote.control import checkpoint as ask
    from quartet.cli.remote.gateway_client import find

    ask(find(run, name, token_file))


@app.command("set")
def change(
    run: RunOrURL,
    settings: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Argument(metavar="[SETTING=NUMBER...]", help="Such as kl_coefficient=0.1; none: say which there are."),
    ] = None,
    name: RunName = None,
    token_file: TokenFile = None,
) -> None:
    """Change settings of a run while it goes on."""
    from quartet.cli.remote.control import change as ask
    from quartet.cli.remote.gateway_client import find

    ask(find(run, name, token_file), settings or [])


@app.command()
def view(
    runs: Annotated[Path, typer.Argument(metavar="RUNS", help="A folder of runs, or one run in it.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 0,
    allow_host: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(metavar="NAME", help="A further name by which it may be addressed. May be repeated."),
    ] = None,
    allow_plaintext: Annotated[
        bool, typer.Option("--allow-plaintext", help="Listen without TLS on an address other than loopback.")
    ] = False,
) -> None:
    """Open runs on the disk in the dashboard, until Ctrl-C."""
    from quartet.cli.view_runs import view as show

    show(runs, host, port, allow_host or [], allow_plaintext)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run: runs/NAME.")],
    output: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="FILE", help="Where to write it; otherwise report.html in the run's directory."),
    ] = None,
) -> None:
    """Write one HTML file of a run: curves, tables, texts, settings."""
    from quartet.cli.report.command import report as write

    write(run, output)


checkpoints_app = typer.Typer(help="The checkpoints of a run.", no_args_is_help=True)
app.add_typer(checkpoints_app, name="checkpoints")
AnyRun = Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run: runs/NAME.")]
Which = Annotated[str, typer.Argument(metavar="STEP|NAME", help="A step that has a checkpoint, or the name of one.")]


@checkpoints_app.command("list")
def checkpoints_list(run: AnyRun) -> None:
    """List a run's checkpoints."""
    from quartet.cli.checkpoint.manage import show

    show(run, verify=False)


@checkpoints_app.command("verify")
def checkpoints_verify(run: AnyRun) -> None:
    """Hold every file of a run's checkpoints against its checksum. Exit status 1 where one is damaged."""
    from quartet.cli.checkpoint.manage import show

    if not show(run, verify=True):
        raise typer.Exit(1)


@checkpoints_app.command("name")
def checkpoints_name(
    run: AnyRun, step: Which, name: Annotated[str, typer.Argument(metavar="NAME", help="Such as best.")]
) -> None:
    """Give a checkpoint a name: it is then kept, however many come after it."""
    from quartet.cli.checkpoint.manage import name as give

    give(run, step, name)


@checkpoints_app.command("forget")
def checkpoints_forget(
    run: AnyRun, name: Annotated[str, typer.Argument(metavar="NAME", help="A name that was given.")]
) -> None:
    """Take a name away: the checkpoint goes when it is no longer one of the newest."""
    from quartet.cli.checkpoint.manage import forget

    forget(run, name)


@checkpoints_app.command("export")
def checkpoints_export(
    run: AnyRun, step: Which, directory: Annotated[Path, typer.Argument(help="A new directory, or an empty one.")]
) -> None:
    """Write the policy of a checkpoint as a Hugging Face model: weights, config, tokenizer; an adapter merged."""
    from quartet.cli.checkpoint.export import export

    export(run, step, directory)


@app.command()
def rollback(run: AnyRun, step: Which) -> None:
    """Forget what came after a checkpoint; train --resume goes on from there."""
    from quartet.cli.checkpoint.manage import rollback as roll

    roll(run, step)


@app.command()
def branch(
    run: AnyRun,
    step: Which,
    name: Annotated[str, typer.Option(help="Name of the new run, beside the old one.")],
    overrides: Overrides = None,
) -> None:
    """Make a new run out of a checkpoint, with other settings; train --resume goes on with it."""
    from quartet.cli.checkpoint.manage import branch as make

    make(run, step, name, overrides or [])


@app.command()
def demo(
    directory: Annotated[Path, typer.Option(help="Where the demo keeps its toy task and its run.")] = Path("runs"),
    overrides: Overrides = None,
) -> None:
    """Make a toy task, train on it with PPO, and show completions before and after."""
    from quartet.cli.demo import demo as run

    run(directory, overrides or [])


@app.command()
def generate(
    model: Annotated[str, typer.Argument(help="Checkpoint directory or hub id.")],
    prompts: Annotated[Optional[list[str]], typer.Argument(metavar="PROMPT...", help="Texts to complete.")] = None,  # noqa: UP045
    file: Annotated[Optional[Path], typer.Option(help="JSON Lines of prompts instead.")] = None,  # noqa: UP045
    max_tokens: Annotated[int, typer.Option(min=1, help="Token limit of a completion.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 1.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Nucleus sampling; 1 is off.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Keep this many tokens; 0 is off.")] = 0,
    samples: Annotated[int, typer.Option(min=1, help="Completions for each prompt.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random streams.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda:0, ...")] = "cpu",
    json_lines: Annotated[bool, typer.Option("--json", help="One JSON object for each completion.")] = False,
) -> None:
    """Complete prompts with any checkpoint."""
    from quartet.cli.inference.generate import generate as run
    from quartet.types import SamplingParameters

    if top_p == 0:
        raise ConfigError("--top-p 0: expected more than 0 and at most 1")
    run(
        model,
        prompts or [],
        file,
        SamplingParameters(max_tokens, temperature, top_p, top_k),
        samples,
        seed,
        device,
        json_lines,
    )


@app.command()
def evaluate(
    checkpoint: Annotated[str, typer.Argument(help="Saved policy or adapter: runs/NAME/policy, or of a checkpoint.")],
    config: Annotated[Optional[Path], typer.Option(help="YAML file; otherwise that of the run it lies in.")] = None,  # noqa: UP045
    overrides: Overrides = None,
    device: Annotated[str, typer.Option(help="cpu, cuda:0, ...")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="The means as one JSON object.")] = False,
    output: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="FILE", help="Write the responses as JSON Lines, one object for each prompt."),
    ] = None,
) -> None:
    """Hold a saved policy against the initial one, on the validation prompts."""
    from quartet.cli.inference.evaluate import evaluate as run

    run(checkpoint, config, overrides or [], device, as_json, output)


@app.command()
def doctor(
    config: Annotated[Path | None, typer.Argument(metavar="[CONFIG]", help="Say what this config needs, too.")] = None,
    overrides: Overrides = None,
    overlays: Overlays = None,
) -> None:
    """What this machine offers: cores, GPUs, bf16, Redis, ports; and what a config needs."""
    from quartet.cli.doctor import doctor as run

    if not run(config, overrides or [], overlays or []):
        raise typer.Exit(1)


@app.command()
def certificates(
    folder: Annotated[Path, typer.Argument(help="A new folder, or an empty one.")],
    days: Annotated[int, typer.Option(min=1, max=3650, help="Days for which they are good.")] = 365,
    process: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            metavar="ROLE+ROLE", help="Model services that share a process, as critic+reward. May be repeated."
        ),
    ] = None,
    redis_name: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(metavar="HOST", help="A further name or address of the Redis. May be repeated."),
    ] = None,
) -> None:
    """Make certificates for mutual TLS between all processes."""
    from quartet.cli.make_certificates import certificates as make

    make(folder, days, process or [], redis_name or [])


@config_app.command("check")
def config_check(config: ConfigPath, overrides: Overrides = None, overlays: Overlays = None) -> None:
    """Check a config, its prompts, its local checkpoints, its certificates, tokens and passwords."""
    from quartet.config import load_config
    from quartet.launcher.security_checks import check_access
    from quartet.preflight import check_inputs

    found = load_config(config, overrides or [], overlays or [])
    for note in [*check_inputs(found), *check_access(found)]:
        typer.echo(note)
    typer.echo(f"{config}: fine")


@config_app.command("show")
def config_show(config: ConfigPath, overrides: Overrides = None, overlays: Overlays = None) -> None:
    """Print a config as resolved, defaults included."""
    from quartet.config import load_config

    typer.echo(load_config(config, overrides or [], overlays or []).to_yaml(), nl=False)


@config_app.command("reference")
def config_reference() -> None:
    """Print every setting with its type, default and meaning, as Markdown."""
    from quartet.cli.config_reference import reference

    typer.echo(reference(), nl=False)


@config_app.command("schema")
def config_schema() -> None:
    """Print the JSON Schema of config files, by which editors complete and check them."""
    from quartet.config import json_schema

    typer.echo(json.dumps(json_schema(), indent=2, ensure_ascii=False))


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def main() -> None:
    """Runs the command. Exit status: 0; 2 for input that the user can mend; 130 after Ctrl-C; 1 for anything else."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    # gRPC tells people of every connection that a service ends.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGHUP, interrupt)
    try:
        app()
    except (SystemExit, KeyboardInterrupt) as end:
        # Typer itself reports mistyped options (2), and makes an exit of KeyboardInterrupt.
        if isinstance(end, SystemExit) and end.code != INTERRUPTED:
            raise
        print("stopped", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except QuartetError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except ModuleNotFoundError as error:
        explained = explain_missing_package(error)
        if explained is error:
            raise
        print(f"error: {explained}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        print(f"error: {in_words(error)}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
