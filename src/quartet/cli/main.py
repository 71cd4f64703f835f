"""The `quartet` command and its subcommands. Modules are imported when a command needs them, so that others start fast."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from quartet import __version__
from quartet.cli.checkpoint.arguments import AnyRun, checkpoints_app, fork, rollback
from quartet.cli.conformance_arguments import check_conformance
from quartet.cli.inference.arguments import generate
from quartet.cli.remote.arguments import change_settings, checkpoint, pause, profile, resume, stop, watch
from quartet.cli.sweep.arguments import sweep
from quartet.errors import ConfigError, QuartetError
from quartet.system.compute_environment import set_cpu_environment
from quartet.system.durable_files import describe_os_error
from quartet.system.missing_packages import explain_missing_package

app = typer.Typer(
    name="quartet",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(help="Check and print configs.", no_args_is_help=True)
app.add_typer(config_app, name="config")
helm_app = typer.Typer(help="Check values of the Helm chart.", no_args_is_help=True)
app.add_typer(helm_app, name="helm")

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="Config file (YAML).")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a setting, such as run.steps=10. Repeatable."),
]
Overlays = Annotated[
    list[Path] | None,
    typer.Option(
        "--overlay",
        metavar="FILE",
        help="Another config file whose keys override those of CONFIG. Repeatable.",
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an earlier run of the same name.")]

Resume = Annotated[bool, typer.Option("--resume", help="Resume the run of this name from its last committed step.")]
ResumeStage = Annotated[bool, typer.Option("--resume", help="Resume the run of this name from its last checkpoint.")]

INTERRUPTED = 130
"""Exit status after Ctrl-C: 128 + SIGINT, as in shells."""


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"quartet {__version__}")
        raise typer.Exit


@app.callback()
def quartet(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train language models with RLHF. Actor, critic, reward and reference model run as separate services."""


@app.command("init")
def init_config(
    path: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE|DIR]", help="Config file to write, or the folder for it. Default: my.yaml."),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy", "--actor", metavar="MODEL", help="Policy to train: directory, or Hugging Face hub id."
        ),
    ] = None,
    prompts: Annotated[Path | None, typer.Option(metavar="FILE", help="Prompts file.")] = None,
    reward: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Reward model: directory, or Hugging Face hub id."),
    ] = None,
    reward_function: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:NAME",
            help="Reward function instead of a model. An example is written if MODULE.py is missing.",
        ),
    ] = None,
    estimator: Annotated[
        str | None,
        typer.Option(
            help="Advantage estimator: ppo, reinforce, rloo, grpo, opo, remax, reinforce_plus_plus or "
            "reinforce_plus_plus_baseline. Default: ppo."
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps. Default: 200.")] = None,
    from_pairs: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Preference pairs. Writes three configs to DIR: supervised fine-tuning of --policy, a reward model, and RLHF.",
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Ask nothing: use the flags and the defaults.")] = False,
) -> None:
    """Write a commented config for your models and prompts. In a terminal, ask for what the flags do not say."""
    from quartet.cli.init_config import Answers, init

    answers = Answers(policy, prompts, reward, reward_function, estimator, steps)
    if from_pairs is None:
        init(path or Path("my.yaml"), answers, overwrite, yes)
        return
    from quartet.cli.init_from_pairs import init_from_pairs

    init_from_pairs(path or Path(), from_pairs, answers, overwrite)


@app.command()
def train(
    config: ConfigPath, overrides: Overrides = None, overwrite: Overwrite = False, resume: Resume = False
) -> None:
    """Train a policy. Start the services that have no address in the config, and stop them at the end."""
    from quartet.cli.start_run import train as start

    start(config, overrides or [], overwrite, resume)


@app.command()
def sft(
    config: ConfigPath, overrides: Overrides = None, overwrite: Overwrite = False, resume: ResumeStage = False
) -> None:
    """Fine-tune a language model on answers: demonstrations, or the chosen ones of pairs. Needs the extra trl."""
    from quartet.cli.supervised import train_stage

    train_stage("sft", config, overrides or [], overwrite, resume)


@app.command()
def reward_model(
    config: ConfigPath, overrides: Overrides = None, overwrite: Overwrite = False, resume: ResumeStage = False
) -> None:
    """Train a reward model on pairs of answers. Needs the extra trl."""
    from quartet.cli.supervised import train_stage

    train_stage("reward-model", config, overrides or [], overwrite, resume)


@app.command()
def up(config: ConfigPath, overrides: Overrides = None, overwrite: Overwrite = False, resume: Resume = False) -> None:
    """Train a policy as `train` does, and keep the services running afterwards, until Ctrl-C."""
    from quartet.cli.start_run import up as start

    start(config, overrides or [], overwrite, resume)


@app.command()
def serve(
    run: AnyRun,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Address of the endpoint of the OpenAI protocol. Default: that of the first time, or 127.0.0.1:8000.",
        ),
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Answer users with the policy of a run, and train it on the sessions that get a reward, until Ctrl-C."""
    from quartet.cli.serve_policy import serve as start

    start(run, listen, overrides or [])


app.command()(sweep)
for command in (watch, pause, resume, stop, checkpoint, profile):
    app.command()(command)
app.command("set")(change_settings)


@app.command()
def view(
    runs: Annotated[Path, typer.Argument(metavar="RUNS", help="Folder of runs, or the directory of one run.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on. 0 selects a free port.")] = 0,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Another host name that requests may use. Repeatable."),
    ] = None,
    allow_plaintext: Annotated[
        bool, typer.Option("--allow-plaintext", help="Allow an address other than loopback, without TLS.")
    ] = False,
) -> None:
    """Open recorded runs in the dashboard, until Ctrl-C."""
    from quartet.cli.serve_dashboard import view_runs

    view_runs(runs, host, port, allow_host or [], allow_plaintext)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of a run: runs/NAME.")],
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File to write. Default: report.html in the directory of the run."),
    ] = None,
) -> None:
    """Write a report of a run as one HTML file: the dashboard with the data of the run, without a server."""
    from quartet.cli.report import report as write

    write(run, output)


app.add_typer(checkpoints_app, name="checkpoints")
app.command()(rollback)
app.command()(fork)


@app.command()
def demo(
    directory: Annotated[Path, typer.Option(help="Folder for the toy task and the run of the demo.")] = Path("runs"),
    overrides: Overrides = None,
) -> None:
    """Train on a toy task with PPO, and show completions before and after."""
    from quartet.cli.demo import demo as run

    run(directory, overrides or [])


app.command()(generate)


@app.command()
def evaluate(
    checkpoint: Annotated[
        str, typer.Argument(help="Saved policy or adapter, such as runs/NAME/policy or the directory of a checkpoint.")
    ],
    config: Annotated[
        Path | None, typer.Option(help="Config file. Default: the config of the run that contains the policy.")
    ] = None,
    overrides: Overrides = None,
    device: Annotated[str, typer.Option(help="Device, such as cpu or cuda:0.")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print the means as one JSON object.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON Lines file for the responses, one object per prompt."),
    ] = None,
) -> None:
    """Compare a saved policy with the initial policy on the validation prompts."""
    from quartet.cli.inference.evaluate import evaluate as run

    run(checkpoint, config, overrides or [], device, as_json, output)


@app.command()
def doctor(
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="Config file whose requirements to check as well.")
    ] = None,
    overrides: Overrides = None,
    overlays: Overlays = None,
) -> None:
    """Check this machine: cores, GPUs, bfloat16, Redis and ports. With a config: check its requirements."""
    from quartet.cli.doctor import doctor as check

    if not check(config, overrides or [], overlays or []):
        raise typer.Exit(1)


app.command("conformance")(check_conformance)


@app.command()
def plan(
    config: ConfigPath,
    gpus: Annotated[
        str, typer.Option(metavar="COUNTxGPU", help="Devices of each node, such as 8xH100-80GB. cpu: this machine's.")
    ],
    nodes: Annotated[int, typer.Option(help="Number of nodes.")] = 1,
    overrides: Overrides = None,
    overlays: Overlays = None,
    mean_prompt_tokens: Annotated[
        int | None,
        typer.Option(metavar="N", help="Mean length of prompts, for the times. Default: data.max_prompt_tokens."),
    ] = None,
    mean_response_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Mean length of responses, for the times. Default: rollout.max_response_tokens."
        ),
    ] = None,
    one_device_per_role: Annotated[
        bool, typer.Option("--one-device-per-role", help="Only plans in which no model is split.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="New file for the proposed config."),
    ] = None,
    helm_values: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="New file for values of the Helm chart: GPUs, CPU and memory of each pod. Only plans whose pods share no GPUs.",
        ),
    ] = None,
) -> None:
    """Plan a run on given GPUs: placement of the roles, memory of each GPU, expected seconds of a step, and the bottleneck.

    Reads the models' config.json only, from their directories or the local hub cache.
    """
    from quartet.cli.plan import plan as show

    lengths = (mean_prompt_tokens, mean_response_tokens)
    show(config, gpus, nodes, overrides or [], overlays or [], *lengths, one_device_per_role, output, helm_values)


@app.command()
def certificates(
    folder: Annotated[Path, typer.Argument(help="New or empty folder to write to.")],
    days: Annotated[int, typer.Option(min=1, max=3650, help="Validity in days.")] = 365,
    process: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ROLE+ROLE", help="Model services that share a process, such as critic+reward. Repeatable."
        ),
    ] = None,
    redis_name: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST", help="Another host name or address of the Redis server. Repeatable."),
    ] = None,
) -> None:
    """Create certificates for mutual TLS between all processes."""
    from quartet.cli.make_certificates import make_certificates

    make_certificates(folder, days, process or [], redis_name or [])


@config_app.command("check")
def config_check(config: ConfigPath, overrides: Overrides = None, overlays: Overlays = None) -> None:
    """Check a config and the files that it names: prompts, models, certificates, tokens and passwords."""
    from quartet.config.root import Config
    from quartet.config.supervised import load_any_config

    loaded = load_any_config(config, overrides or [], tuple(overlays or ()))
    if not isinstance(loaded, Config):
        from quartet.supervised.stage import check_stage

        check_stage(loaded, typer.echo)
        typer.echo(f"{config}: valid")
        return
    from quartet.preflight import problems
    from quartet.preflight.findings import has_error, raise_errors

    found = problems(loaded, report=lambda line: typer.echo(line, err=True))
    for finding in found:
        if finding.level == "warning" or not has_error(found):
            typer.echo(finding)
    raise_errors(found)
    typer.echo(f"{config}: valid")


@helm_app.command("check")
def helm_check(
    values: Annotated[
        list[Path],
        typer.Argument(metavar="VALUES...", help="Files of values (YAML). Later ones override earlier ones."),
    ],
    chart: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder of the chart.")] = Path("helm/quartet"),
) -> None:
    """Check values of the Helm chart and the config in them without a cluster. Needs Helm."""
    from quartet.cli.helm_check import check

    check(values, chart)


@config_app.command("show")
def config_show(config: ConfigPath, overrides: Overrides = None, overlays: Overlays = None) -> None:
    """Print the complete config, including defaults and overrides."""
    from quartet.config.supervised import load_any_config

    typer.echo(load_any_config(config, overrides or [], tuple(overlays or ())).to_yaml(), nl=False)


@config_app.command("reference")
def config_reference() -> None:
    """Print a Markdown reference of all settings."""
    from quartet.cli.config_reference import reference

    typer.echo(reference(), nl=False)


@config_app.command("schema")
def config_schema() -> None:
    """Print the JSON Schema of config files, for completion and checks in editors."""
    from quartet.config.schema import json_schema

    typer.echo(json.dumps(json_schema(), indent=2, ensure_ascii=False))


def main() -> None:
    """Run the command. Exit status: 0 on success, 1 on failure, 2 on invalid input, 130 after Ctrl-C."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    # gRPC logs every connection that a service closes.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    set_cpu_environment(os.environ)
    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGHUP, interrupt)
    try:
        app()
    except (SystemExit, KeyboardInterrupt) as end:
        # Typer reports mistyped options itself (2), and turns KeyboardInterrupt into SystemExit.
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
        print(f"error: {describe_os_error(error)}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
