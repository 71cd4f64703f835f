"""HTML of a report: one file without external resources."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from typing import Any

MARK = "<!doctype html>\n<!-- A report of a run of Quartet. -->\n"
"""First bytes of every report, which identify the file."""

_STYLE = """
:root { color-scheme: light dark; --text: #1b1f27; --dim: #566070; --back: #fbfbfd; --card: #fff; --line: #dfe3ea;
  --link: #1f5fd0; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e9ef; --dim: #9aa4b5; --back: #12151b; --card: #1a1e26; --line: #2c323d; --link: #8ab4ff; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1.5rem 1rem 4rem; background: var(--back); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { margin: 0; font-size: 1.7rem; } h2 { margin: 2.2rem 0 .6rem; font-size: 1.2rem; }
h3 { margin: 1rem 0 .3rem; font-size: 1rem; }
a { color: var(--link); } p, .dim { color: var(--dim); } header p { margin: .2rem 0 0; }
nav { display: flex; flex-wrap: wrap; gap: .3rem 1rem; margin-top: .8rem; }
.charts { display: grid; gap: .8rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 23rem), 1fr)); }
figure { margin: 0; padding: .6rem; background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
figcaption { font-weight: 600; } figcaption span { font-weight: 400; color: var(--dim); font-size: .85em; }
.plot { height: 15rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; background: var(--card); font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; border: 1px solid var(--line); text-align: left; vertical-align: top; }
th { font-weight: 600; } td.number { text-align: right; white-space: nowrap; }
article { margin: .6rem 0; padding: .7rem .9rem; background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; margin: .4rem 0 0; } .prompt { color: var(--dim); }
pre { overflow-x: auto; padding: .8rem; background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
@media print { .charts { grid-template-columns: 1fr 1fr; } figure, article { break-inside: avoid; } nav { display: none; } }
"""

_SCRIPT = """
"use strict";
const charts = JSON.parse(document.getElementById("charts").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const colors = () => dark.matches ? ["#6ea8ff", "#ffb454", "#5fd3a6", "#f28fb2"] : ["#1f5fd0", "#b45f06", "#0b7a55", "#a8326a"];
const drawn = new Set();
function draw(element) {
  const chart = charts[element.dataset.chart], palette = colors(), traces = [];
  const text = dark.matches ? "#c6cdd9" : "#3a4250", grid = dark.matches ? "#2c323d" : "#e6e9ef";
  chart.lines.forEach((line, index) => {
    const color = palette[index % palette.length];
    if (line.low) {
      const edge = {x: line.x, mode: "lines", line: {width: 0}, hoverinfo: "skip", showlegend: false};
      traces.push({...edge, y: line.low}, {...edge, y: line.high, fill: "tonexty", fillcolor: color + "26"});
    }
    const mode = line.x.length > 1 ? "lines" : "markers";
    traces.push({x: line.x, y: line.y, name: line.name, mode, line: {color, width: 1.6}, marker: {color}});
  });
  const layout = {
    margin: {l: 52, r: 10, t: 8, b: 34}, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: {color: text, size: 11}, hovermode: "x unified", hoverlabel: {bgcolor: dark.matches ? "#1a1e26" : "#fff"},
    xaxis: {title: {text: "step"}, gridcolor: grid, zeroline: false}, yaxis: {gridcolor: grid, zerolinecolor: grid},
    showlegend: chart.lines.length > 1, legend: {orientation: "h", y: 1.12},
    shapes: chart.target === null ? [] : [{type: "line", xref: "paper", x0: 0, x1: 1, y0: chart.target, y1: chart.target,
      line: {color: text, width: 1, dash: "dash"}}],
  };
  Plotly.react(element, traces, layout, {responsive: true, displaylogo: false, displayModeBar: false});
  drawn.add(element);
}
const seen = new IntersectionObserver(entries => entries.forEach(entry => {
  if (entry.isIntersecting && !drawn.has(entry.target)) draw(entry.target);
}), {rootMargin: "400px"});
const plots = [...document.querySelectorAll(".plot")];
plots.forEach(element => seen.observe(element));
dark.addEventListener("change", () => drawn.forEach(draw));
addEventListener("beforeprint", () => plots.forEach(draw));
"""


def page(title: str, subtitle: str, sections: Sequence[tuple[str, str]], charts: Sequence[dict[str, Any]]) -> str:
    """Return the file. ``sections``: titles and HTML. ``charts``: drawn at the placeholders of ``chart_placeholders``."""
    plotly = (resources.files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")
    # HTML parsers normalize line ends: the checksums below must be those of the script that the browser runs.
    plotly = plotly.replace("\r\n", "\n").replace("\r", "\n")
    assert "</script" not in plotly.lower(), "plotly's script would end early"
    policy = (
        f"default-src 'none'; script-src {_checksum(plotly)} {_checksum(_SCRIPT)}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    # In a script, "<" could end it.
    data = json.dumps(charts, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    links = "".join(f'<a href="#section-{number}">{escape(name)}</a>' for number, (name, _) in enumerate(sections))
    body = "".join(
        f'<section id="section-{number}"><h2>{escape(name)}</h2>{content}</section>\n'
        for number, (name, content) in enumerate(sections)
    )
    return (
        f'{MARK}<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style></head>\n<body>"
        f"<header><h1>{escape(title)}</h1><p>{escape(subtitle)}</p><nav>{links}</nav></header>\n<main>{body}</main>\n"
        f'<script id="charts" type="application/json">{data}</script>\n'
        f"<script>{plotly}</script>\n<script>{_SCRIPT}</script></body></html>\n"
    )


def _checksum(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def chart_placeholders(charts: Sequence[dict[str, Any]], first: int) -> str:
    """Return the placeholders of charts. ``first`` is the index of the first one in the page's list of charts."""
    return (
        '<div class="charts">'
        + "".join(
            f"<figure><figcaption>{escape(chart['title'])} <span>{escape(chart['unit'])}</span></figcaption>"
            f'<div class="plot" data-chart="{number}"></div></figure>'
            for number, chart in enumerate(charts, first)
        )
        + "</div>"
    )


def table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table. Cells are escaped, and numbers are right-aligned."""
    head = "".join(f'<th scope="col">{escape(title)}</th>' for title in titles)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def facts(rows: Iterable[tuple[str, object]]) -> str:
    """Return a table of names and values."""
    body = "".join(f'<tr><th scope="row">{escape(name)}</th>{_cell(value)}</tr>' for name, value in rows)
    return f'<div class="scroll"><table><tbody>{body}</tbody></table></div>'


def _cell(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"<td>{escape('' if value is None else str(value))}</td>"
    return f'<td class="number">{number(value)}</td>'


def number(value: float) -> str:
    """Format a number for readers."""
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def texts(title: str, about: str, prompt: str, response: str) -> str:
    """Return a prompt and its response."""
    return (
        f'<article><strong>{escape(title)}</strong> <span class="dim">{escape(about)}</span>'
        f'<div class="text prompt">{escape(prompt)}</div><div class="text">{escape(response)}</div></article>'
    )


def preformatted(text: str) -> str:
    """Return preformatted text."""
    return f"<pre>{escape(text)}</pre>"


def paragraph(text: str) -> str:
    """Return a paragraph."""
    return f"<p>{escape(text)}</p>"
