"""Trajectories: search with filters, and one trajectory token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import Path, Query

from quartet.gateway.access.callers import Viewer
from quartet.gateway.http.api_router import api_router
from quartet.gateway.http.http_errors import NotFound, WrongField
from quartet.gateway.http.pagination import cursor_after, read_cursor
from quartet.gateway.readers.jsonl_records import Record
from quartet.gateway.readers.token_texts import token_texts
from quartet.gateway.readers.trajectory_index import SortKey, TrajectoryFilter, page_of, step_window
from quartet.gateway.routes.dependencies import Cursor, Limit, Step, TheReaders, TheRunFiles
from quartet.gateway.schemas import Branch, Page, Segment, Token, TrajectoryDetail, TrajectorySummary, VersionSpan
from quartet.run_directory.token_files import TrajectoryTokens, read_tokens

router = api_router("trajectories")

DEFAULT_STEPS = 50
"""Number of newest steps that are searched by default."""
MAX_STEPS = 1000
"""Number of steps that one request can search."""

StepBound = Annotated[
    int | None,
    Query(
        ge=1,
        le=1_000_000_000,
        description=f"Without `step`, `first_step` and `last_step`, the newest {DEFAULT_STEPS} steps are searched. With "
        f"`last_step` only, the {DEFAULT_STEPS} steps up to it are searched. The maximum is {MAX_STEPS} steps.",
    ),
]
Bound = Annotated[float | None, Query(allow_inf_nan=False)]
TokenBound = Annotated[int | None, Query(ge=0, le=1_000_000_000)]
Sort = Literal["id", "score", "-score", "kl", "-kl", "response_tokens", "-response_tokens"]


@router.get("/runs/{run}/trajectories")
def list_trajectories(
    _: Viewer,
    files: TheRunFiles,
    readers: TheReaders,
    step: Annotated[int | None, Query(ge=1, le=1_000_000_000, description="Only this step.")] = None,
    first_step: StepBound = None,
    last_step: StepBound = None,
    min_score: Bound = None,
    max_score: Bound = None,
    min_kl: Bound = None,
    max_kl: Bound = None,
    min_response_tokens: TokenBound = None,
    max_response_tokens: TokenBound = None,
    finished: Annotated[bool | None, Query(description="Whether the response ended before the token limit.")] = None,
    text: Annotated[
        str | None,
        Query(min_length=1, max_length=200, description="Text in the prompt or the response, ignoring case."),
    ] = None,
    sort: Annotated[
        Sort, Query(description="`-` in front sorts the largest value first. `id` sorts by step, prompt and sample.")
    ] = "id",
    limit: Limit = 50,
    cursor: Cursor = None,
) -> Page[TrajectorySummary]:
    """List the trajectories of committed steps that match all conditions."""
    if step is not None and (first_step is not None or last_step is not None):
        raise WrongField("query.step", "cannot be combined with first_step or last_step")
    matching = TrajectoryFilter(
        min_score, max_score, min_kl, max_kl, min_response_tokens, max_response_tokens, finished, text
    )
    request = ["trajectories", files.root.name, step, first_step, last_step, sort, str(matching)]
    newest = readers.metrics(files.metrics).count()
    after: SortKey | None = None
    if cursor is not None:
        # All pages search the same steps as the first one, even if more steps are committed meanwhile.
        newest_of_first_page, *position = read_cursor(cursor, request, (int, float, int, int, int))
        newest, after = min(newest, int(newest_of_first_page)), _sort_key(position)
    steps = _steps(step, first_step, last_step, newest)
    indexes = [index for each in steps if (index := readers.trajectories(files.trajectories, each)) is not None]
    page = page_of(indexes, matching, sort, limit, after)
    return Page(
        items=[_summary(number, record) for number, record in page.records],
        total=page.total,
        next=None if page.last_key is None else cursor_after([newest, *page.last_key], request),
    )


@router.get("/runs/{run}/trajectories/{step}/{prompt}/{sample}")
def get_trajectory(
    _: Viewer,
    step: Step,
    prompt: Annotated[int, Path(ge=0, le=2**53, description="Number of the prompt in the prompts file, from 0.")],
    sample: Annotated[
        int, Path(ge=0, le=2**53, description="Number of the response to the prompt in this step, from 0.")
    ],
    files: TheRunFiles,
    readers: TheReaders,
) -> TrajectoryDetail:
    """Return one trajectory, token by token if the run kept the tokens of its step."""
    columns = readers.metrics(files.metrics)
    index = readers.trajectories(files.trajectories, step) if step <= columns.count() else None
    line = None if index is None else index.line_of(prompt, sample)
    if index is None or line is None:
        raise NotFound(
            f"trajectory {step}/{prompt}/{sample}: does not exist; steps 1 to {columns.count()} are committed"
        )
    lower, higher = index.neighbours(line)
    neighbours = [number for number in (lower, higher) if number is not None]
    record, *others = index.read([line, *neighbours])
    ids = {number: str(other["id"]) for number, other in zip(neighbours, others, strict=True)}
    tokens = read_tokens(files.tokens / f"step-{step:06d}.safetensors", line)
    tokenizer = None if tokens is None else readers.tokenizer(files.tokenizer)
    return TrajectoryDetail(
        **_summary(step, record).model_dump(),
        generator=record.get("generator", ""),
        weights_digest=record.get("weights_digest", ""),
        version_spans=[VersionSpan(**span) for span in record.get("version_spans", [])],
        segments=_segments(record),
        further_branches=_further_branches(record, tokenizer, () if tokens is None else tokens.further_branches),
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
    steps = step_window(first, last, newest, DEFAULT_STEPS)
    if len(steps) > MAX_STEPS:
        raise WrongField(
            "query.first_step",
            f"selects {len(steps)} steps; expected at most {MAX_STEPS}; set last_step closer to it",
        )
    return steps


def _sort_key(position: list[Any]) -> SortKey:
    value, step, prompt, sample = position
    return value, step, prompt, sample


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


def _segments(record: Record) -> list[Segment]:
    return [Segment(**segment) for segment in record.get("segments", [])]


def _further_branches(record: Record, tokenizer: Any | None, tokens: Sequence[TrajectoryTokens]) -> list[Branch]:
    """Return the other branches of an episode, with the ``tokens`` of each if they were kept."""
    branches = record.get("further_branches", [])
    kept: Sequence[TrajectoryTokens | None] = tokens or [None] * len(branches)
    return [
        Branch(
            parent=branch["parent"],
            shared_tokens=branch["shared_tokens"],
            prompt=branch["prompt"],
            prompt_length=branch["prompt_tokens"],
            segments=_segments(branch),
            prompt_tokens=[] if own is None else _prompt_tokens(tokenizer, own),
            tokens=[] if own is None else _response_tokens(tokenizer, own),
        )
        for branch, own in zip(branches, kept, strict=False)
    ]


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
        if own
        else Token(id=number, text=text, observation=True)
        for number, text, own, log_prob, reference_log_prob, kl, value, advantage, return_ in zip(
            ids,
            token_texts(tokenizer, ids),
            tokens.response_mask.tolist(),
            tokens.log_probs.tolist(),
            tokens.reference_log_probs.tolist(),
            tokens.kl.tolist(),
            values,
            tokens.advantages.tolist(),
            tokens.returns.tolist(),
            strict=True,
        )
    ]
