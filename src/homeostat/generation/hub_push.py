"""Upload a folder to a model repository of the Hugging Face hub (HF_ENDPOINT names another hub).

The token is the one of `hf auth login` or of HF_TOKEN; huggingface_hub finds it, we never read it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError
from huggingface_hub.utils import validate_repo_id

from homeostat.errors import ConfigError, HubError, Problem

_REPO = re.compile(r"[\w.-]+/[\w.-]+")
# The HTTP library under huggingface_hub depends on its version; this class inherits its errors.
_CONNECTION_ERRORS = cast(tuple[type[Exception], ...], HfHubHTTPError.__bases__)
_REASONS = {
    401: "the hub does not know you. Log in with `hf auth login`, or set HF_TOKEN to a token with "
    "write access.",
    403: "your token may not write there. Use one with write access, and check the owner's name.",
    404: "the repository does not exist, or your token may not see it.",
    409: "it exists already with other settings.",
}


@dataclass(frozen=True, slots=True)
class Pushed:
    """The place of an upload."""

    url: str
    commit: str


def require_repo_name(repo: str) -> None:
    """Refuse a name that is not OWNER/NAME, before anything is exported."""
    try:
        is_name = _REPO.fullmatch(repo) is not None
        validate_repo_id(repo)
    except HFValidationError:
        is_name = False
    if not is_name:
        what = f"{repo!r} is not the name of a repository. It looks like OWNER/NAME."
        raise ConfigError([Problem("", what)])


def push_folder(folder: Path, repo: str, *, is_public: bool, message: str) -> Pushed:
    """Create the repository if it does not exist, and upload every file in one commit.

    A repository that exists keeps its visibility.
    """
    api = HfApi()
    try:
        api.create_repo(repo, private=not is_public, exist_ok=True)
        info = api.upload_folder(repo_id=repo, folder_path=str(folder), commit_message=message)
    except (LocalTokenNotFoundError, HFValidationError) as error:
        raise HubError(f"{repo}: {error}") from None
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else None
        why = _REASONS.get(status or 0) or error.server_message or str(error)
        raise HubError(f"{repo}: the hub refused it ({status}): {why}") from None
    except (OSError, RuntimeError, *_CONNECTION_ERRORS) as error:
        # Uploads of large files fail with a RuntimeError whose cause says why.
        why = error.__cause__ or error
        raise HubError(
            f"{repo}: the upload failed: {why}. Nothing was committed; the same command starts "
            "again. If errors name xet or CAS, set HF_HUB_DISABLE_XET=1."
        ) from None
    return Pushed(str(info.commit_url), str(info.oid))
