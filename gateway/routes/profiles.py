"""Profiles of steps: their summaries, and the traces for a viewer such as Perfetto."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from fastapi import Path as PathParameter
from pydantic import TypeAdapter
from starlette.responses import FileResponse

from quartet.contract.profile import RunProfile
from quartet.gateway.access.callers import Viewer
from quartet.gateway.http.api_router import api_router
from quartet.gateway.http.http_errors import NotFound
from quartet.gateway.routes.dependencies import Step, TheRunFiles
from quartet.run_directory.run_files import PROFILE_SUMMARY

router = api_router("profiles")

MAX_PROFILES = 50
"""Newest profiles in a response."""
_PROFILE = TypeAdapter(RunProfile)


@router.get("/runs/{run}/profiles")
def list_profiles(_: Viewer, files: TheRunFiles) -> list[RunProfile]:
    """List the profiles of the run that are complete, newest first: at most 50."""
    profiles = [profile for path in files.profiles.glob(f"*/{PROFILE_SUMMARY}") if (profile := _read(path))]
    return sorted(profiles, key=lambda profile: -profile.created)[:MAX_PROFILES]


@router.get("/runs/{run}/profiles/{step}/{file}", response_class=FileResponse)
def get_trace(
    _: Viewer,
    step: Step,
    file: Annotated[str, PathParameter(min_length=1, max_length=200, description="Name of the trace, as listed.")],
    files: TheRunFiles,
) -> FileResponse:
    """Return the trace of one process: a Chrome trace, compressed with gzip."""
    folder = files.profiles / f"step-{step:06d}"
    profile = _read(folder / PROFILE_SUMMARY)
    # Only listed files are opened: a name sent by a caller never becomes a path.
    known = [each.file for each in profile.services if each.file] if profile else []
    if file not in known or not (folder / file).is_file():
        raise NotFound(
            f"trace {file!r} of step {step}: does not exist; this step has {', '.join(known) or 'no traces'}"
        )
    return FileResponse(folder / file, media_type="application/gzip", filename=f"step-{step}-{file}")


def _read(path: Path) -> RunProfile | None:
    """Return a profile; None if it is not complete, or damaged."""
    try:
        return _PROFILE.validate_json(path.read_bytes())
    except (OSError, ValueError):
        return None
