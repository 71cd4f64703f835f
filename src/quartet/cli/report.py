"""`quartet report RUN`: one HTML file with the dashboard's own page and the data of a finished or active run.

The data are responses of the gateway's REST API, which runs in this process. `gateway/static/recording.js` reads them.
"""

from __future__ import annotations

import asyncio
import base64
import datetime
import hashlib
import json
import re
from html import escape
from pathlib import Path
from typing import Any

import httpx2
from structlog.testing import capture_logs

from quartet import __version__
from quartet.cli.console import make_console
from quartet.errors import ConfigError
from quartet.gateway.app import create_app
from quartet.gateway.http.api_router import PREFIX
from quartet.gateway.routes.dashboard_files import FOLDER, plotly_script
from quartet.gateway.settings import GatewaySettings
from quartet.run_directory.run_files import RunFiles
from quartet.run_directory.selection import run_files
from quartet.system.durable_files import write_durably

MARK = "<!doctype html>\n<!-- A report of a run of Quartet. -->\n"
"""First bytes of every report, which identify the file."""
POINTS = 1500
"""Maximum number of points of a curve. With more steps, a point is the mean of several consecutive steps."""
STEPS, RESPONSES, EVALUATION_ROWS = 50, 15, 200
"""Limits of the file: newest steps, responses of the first and of the last step, and rows of an evaluation."""

console = make_console()


def report(run: Path, output: Path | None) -> None:
    """Write the report, by default to ``report.html`` in the directory of the run. Raises ConfigError."""
    files = run_files(run)
    target = output if output is not None else files.report
    _check_replaceable(target)
    write_durably(target, page(asyncio.run(_recorded(RunFiles(files.root.resolve())))))
    console.print(f"report: {target}", soft_wrap=True)


def _check_replaceable(target: Path) -> None:
    """Check that the target does not exist or is an earlier report. Raises ConfigError."""
    if not target.absolute().parent.is_dir():
        raise ConfigError(f"--output {target}: no directory {target.parent}; create it, or choose another file")
    try:
        with target.open(encoding="utf-8") as file:
            begins = file.read(len(MARK))
    except FileNotFoundError:
        return
    except (IsADirectoryError, UnicodeDecodeError):
        begins = ""
    if begins != MARK:
        raise ConfigError(f"{target}: exists and is not a report; choose another file with --output, or move it")


async def _recorded(files: RunFiles) -> dict[str, Any]:
    """Return a line about the report, and the gateway's responses by path. Raises ConfigError."""
    name, token = files.root.name, "0"
    app = create_app(GatewaySettings(files.root.parent, name, "localhost:0", "1", token, requests_per_second=1e6))
    client = httpx2.AsyncClient(
        transport=httpx2.ASGITransport(app),
        base_url=f"http://localhost{PREFIX}",
        headers={"Authorization": f"Bearer {token}"},
    )
    # The command reports a refused request itself.
    with capture_logs():
        async with app.router.lifespan_context(app), client:
            responses = await _responses(client, f"/runs/{name}", files.trajectories)
    written = datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    return {"about": f"Report of Quartet {__version__}, {written}", "responses": responses}


async def _responses(client: httpx2.AsyncClient, run: str, trajectories: Path) -> dict[str, Any]:
    responses: dict[str, Any] = {}

    async def get(path: str, **query: Any) -> Any:
        response = await client.get(path, params=query)
        if response.status_code != 200:
            raise ConfigError(response.json()["detail"])
        responses[path] = answer = response.json()
        if isinstance(answer, dict) and "next" in answer:
            answer["next"] = None
        return answer

    # The folder may have other runs.
    responses["/runs"] = {"items": [await get(run)], "total": 1, "next": None}
    for path in ("/session", "/metric-definitions", f"{run}/config", f"{run}/settings", f"{run}/guards"):
        await get(path)
    for path in (f"{run}/checkpoints", f"{run}/failed-trajectories", f"{run}/audit"):
        await get(path, limit=500)
    await get(f"{run}/metrics", points=POINTS)
    for step in (await get(f"{run}/steps", limit=STEPS))["items"]:
        await get(f"{run}/steps/{step['step']}")
    evaluations = (await get(f"{run}/evaluations", limit=500))["items"]
    for evaluation in (*evaluations[:1], *evaluations[1:][-1:]):
        await get(f"{run}/evaluations/{evaluation['step']}", limit=EVALUATION_ROWS)
        for set_name in evaluation["sets"]:
            await get(f"{run}/evaluations/{evaluation['step']}/sets/{set_name}", limit=EVALUATION_ROWS)
    shown: list[Any] = []
    recorded = sorted(int(path.stem.removeprefix("step-")) for path in trajectories.glob("step-*.jsonl"))
    for number in dict.fromkeys([*recorded[-1:], *recorded[:1]]):
        total = (best := await get(f"{run}/trajectories", step=number, sort="-score", limit=500))["total"]
        ranked = dict(enumerate(best["items"]))
        if total > len(ranked):
            worst = (await get(f"{run}/trajectories", step=number, sort="score", limit=500))["items"]
            ranked |= {total - 1 - place: item for place, item in enumerate(worst)}
        places = {round((total - 1) * place / (RESPONSES - 1)) for place in range(RESPONSES)}
        shown += [ranked[place] for place in sorted(places & ranked.keys())]
    for each in shown:
        await get(f"{run}/trajectories/{each['step']}/{each['prompt_index']}/{each['sample']}")
    responses[f"{run}/trajectories"] = {"items": shown, "total": len(shown), "next": None}
    return responses


def page(recording: dict[str, Any]) -> str:
    """Return the dashboard's page with its scripts, its styles and this recording in one file."""
    modules: dict[Path, str] = {}
    _add_module(FOLDER / "app.js", modules)
    theme = _static("initial_theme.js")
    # HTML parsers normalize line ends: the checksums must be those of the scripts that the browser runs.
    plotly = plotly_script().read_text(encoding="utf-8").replace("\r\n", "\n").replace("\r", "\n")
    start = "const modules = {};\n" + "".join(modules.values())
    scripts = (theme, plotly, start)
    assert not any("</script" in script.lower() for script in scripts), "a script would end early"
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_checksum, scripts))}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    # In a script, "<" could end it.
    data = json.dumps(recording, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    icon = base64.b64encode(_static("icon.svg").encode()).decode()
    html = re.sub(
        r'<link rel="stylesheet" href="/static/(.*?)">',
        lambda link: f"<style>{_static(link[1])}</style>",
        _static("index.html"),
    )
    for old, new in (
        ("<!doctype html>\n", MARK),
        (
            '<meta charset="utf-8">',
            f'<meta charset="utf-8">\n  <meta http-equiv="Content-Security-Policy" content="{escape(policy)}">',
        ),
        ("/static/icon.svg", f"data:image/svg+xml;base64,{icon}"),
        ('<script src="/static/initial_theme.js"></script>', f"<script>{theme}</script>"),
        ('  <script type="module" src="/static/app.js"></script>\n', ""),
        (
            "</body>",
            f'<script id="recording" type="application/json">{data}</script>\n<script>{plotly}</script>\n'
            f"<script>{start}</script>\n</body>",
        ),
    ):
        assert html.count(old) == 1, old
        html = html.replace(old, new)
    return html


def _static(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def _add_module(path: Path, modules: dict[Path, str]) -> None:
    """Add a module after those that it imports, as a statement that sets ``modules[PATH]`` to its exports.

    Browsers load no modules from files. A script with a checksum needs no further permission of the content security policy.
    """

    def imported(match: re.Match[str]) -> str:
        other = (path.parent / match[2]).resolve()
        if other not in modules:
            _add_module(other, modules)
        names = match[1].removeprefix("* as ").replace(" as ", ": ")
        return f"const {names} = modules[{_key(other)}];"

    path = path.resolve()
    text = re.sub(r'^import (.*?) from "(.*?)";$', imported, path.read_text(encoding="utf-8"), flags=re.M | re.S)
    names = re.findall(r"^export (?:const|class|(?:async )?function) (\w+)", text, flags=re.M)
    text = re.sub(r"^export ", "", text, flags=re.M)
    modules[path] = f"modules[{_key(path)}] = (() => {{\n{text}\nreturn {{ {', '.join(names)} }};\n}})();\n"


def _key(module: Path) -> str:
    return json.dumps(module.relative_to(FOLDER.resolve()).as_posix())


def _checksum(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
