"""Trajectories: found by what they are like, and shown token by token."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import Path, Query

from quartet.gateway.access import Viewer
from quartet.gateway.http_errors import NotFound, WrongField
from quartet.gateway.pagination import cursor_after, read_cursor
from quartet.gateway.readers.jsonl_records import Record
from quartet.gateway.readers.tokens import token_texts
from quartet.gateway.readers.trajectories import Filter, Order, steps_of
from quartet.gateway.routing import Cursor, Limit, Step, TheReading, TheRun, api_router
from quartet.gateway.schemas import Page, Token, TrajectoryDetail, TrajectorySummary
from quartet.run_directory.token_files import TrajectoryTokens, read_tokens

router = api_router("trajectories")

NEWEST = 50
"""Steps that are looked at where none are named."""
MAX_STEPS = 1000
"""Steps that are looked at at once."""

StepBound = Annotated[
    int | None,
    Query(
        ge=1,
        le=1_000_000_000,
        description=f"Without any of `step`, `first_step`, `last_step` only the newest {NEWEST} steps are looked at, "
        f"with `last_step` alone the {NEWEST} up to it; at most {MAX_STEPS} in any case.",
    ),
]
Bound = Annotated[float | None, Query(allow_inf_nan=False)]
TokenBound = Annotated[int | None, Query(ge=0, le=1_000_000_000)]
Sort = Literal["id", "score", "-score", "kl", "-kl", "response_tokens", "-response_tokens"]


@router.get("/runs/{run}/trajectories")
def list_trajectories(
    _: Viewer,
    files: TheRun,
    reading: TheReading,
    step: Annotated[int | None, Query(ge=1, le=1_000_000_000, description="Only this step.")] = None,
    first_step: StepBound = None,
    last_step: StepBound = None,
    min_score: Bound = None,
    max_score: Bound = None,
    min_kl: Bound = None,
    max_kl: Bound = None,
    min_response_tokens: TokenBound = None,
    max_response_tokens: TokenBound = None,
    finished: Annotated[bool | None, Query(description="Whether the model ended the response itself.")] = None,
    text: Annotated[
        str | None,
        Query(min_length=1, max_length=200, description="Stands in the prompt or the response, in whatever case."),
    ] = None,
    sort: Annotated[Sort, Query(description="`-`: the greatest first. `id`: by step, prompt, sample.")] = "id",
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Page[TrajectorySummary]:
    """Trajectories of committed steps that meet every condition."""
    if step is not None and (first_step is not None or last_step is not None):
        raise WrongField("query.step", "stands for a first and last step at once; give it alone")
    wanted = Filter(min_score, max_score, min_kl, max_kl, min_response_tokens, max_response_tokens, finished, text)
    question = ["trajectories", files.root.name, step, first_step, last_step, sort, str(wanted)]
    newest = reading.metrics.of(files.metrics).count()
    after: Order | None = None
    if cursor is not None:
        # The window of a question without steps stays where it was when the first page was given.
        newest_then, *place = read_cursor(cursor, question, (int, float, int, int, int))
        newest, after = min(newest, int(newest_then)), _order(place)
    steps = _steps(step, first_step, last_step, newest)
    found = reading.trajectories.find(files.trajectories, steps, wanted, sort, limit, after)
    return Page(
        items=[_summary(number, record) for number, record in found.records],
        total=found.total,
        next=None if found.after is None else cursor_after([newest, *found.after], question),
    )


@router.get("/runs/{run}/trajectories/{step}/{prompt}/{sample}")
def get_trajectory(
    _: Viewer,
    step: Step,
    prompt: Annotated[int, Path(ge=0, le=2**53, description="Of the prompt, in the prompts file.")],
    sample: Annotated[int, Path(ge=0, le=2**53, description="Of the prompt's responses in this step.")],
    files: TheRun,
    reading: TheReading,
) -> TrajectoryDetail:
    """One trajectory token by token, where the run kept its tokens."""
    columns = reading.metrics.of(files.metrics)
    index = reading.trajectories.index(files.trajectories, step) if step <= columns.count() else None
    line = None if index is None else index.place(prompt, sample)
    if index is None or line is None:
        raise NotFound(
            f"trajectory {step}/{prompt}/{sample}: the run has no such one; steps 1 to {columns.count()} are committed"
        )
    lower, higher = index.neighbours(line)
    beside = [place for place in (lower, higher) if place is not None]
    record, *others = index.read([line, *beside])
    ids = {place: str(other["id"]) for place, other in zip(beside, others, strict=True)}
    tokens = read_tokens(files.tokens / f"step-{step:06d}.safetensors", line)
    tokenizer = None if tokens is None else reading.tokenizers.of(files.tokenizer)
    return TrajectoryDetail(
        **_summary(step, record).model_dump(),
        kl_coefficient=columns.row(step).get("kl_coefficient"),
        prompt_tokens=[] if tokens is None else _prompt_tokens(tokenizer, tokens),
        tokens=[] if tokens is None else _response_tokens(tokenizer, tokens),
        lower=None if lower is None else ids[lower],
        higher=None if higher is None else ids[higher],
    )


def _steps(step: int | None, first: int | None, last: int | None, newest: int) -> range:
    if step is not None:
        return range(step, min(step, newest) + 1)
    if first is not None and last is not None and first > last:
        raise WrongField("query.first_step", f"expected at most query.last_step {last}, not {first}")
    steps = steps_of(first, last, newest, NEWEST)
    if len(steps) > MAX_STEPS:
        raise WrongField(
            "query.first_step",
            f"these are {len(steps)} steps; expected at most {MAX_STEPS} at once, give a last_step nearer to it",
        )
    return steps


def _order(place: list[Any]) -> Order:
    figure, step, prompt, sample = place
    return figure, step, prompt, sample


def _summary(step: int, record: Record) -> TrajectorySummary:
    prompt, sample = str(record["id"]).rsplit("/", 2)[1:]
    return TrajectorySummary(
        id=record["id"],
        step=step,
        prompt_index=int(prompt),
        sample=int(sample),
        policy_version=record["policy_version"],
        prompt=record["prompt"],
        response=record["response"],
        score=record["score"],
        parts=record.get("parts", {}),
        kl=record["kl"],
        response_tokens=record["response_tokens"],
        finished=record["finished"],
    )


def _prompt_tokens(tokenizer: Any | None, tokens: TrajectoryTokens) -> list[Token]:
    ids = tokens.prompt_ids.tolist()
    return [Token(id=number, text=text) for number, text in zip(ids, token_texts(tokenizer, ids), strict=True)]


def _response_tokens(tokenizer: Any | None, tokens: TrajectoryTokens) -> list[Token]:
    ids = tokens.response_ids.tolist()
    values: list[float | None] = [None] * len(ids) if tokens.values is None else tokens.values.tolist()
    return [
        Token(
            id=number,
            text=text,
            log_prob=log_prob,
            reference_log_prob=reference_log_prob,
            kl=kl,
            value=value,
            advantage=advantage,
            return_=return_,
        )
        for number, text, log_prob, reference_log_prob, kl, value, advantage, return_ in zip(
            ids,
            token_texts(tokenizer, ids),
            tokens.log_probs.tolist(),
            tokens.reference_log_probs.tolist(),
            tokens.kl.tolist(),
            values,
            tokens.advantages.tolist(),
            tokens.returns.tolist(),
            strict=True,
        )
    ]
