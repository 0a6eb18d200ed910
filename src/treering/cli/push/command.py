"""`treering push`: uploads a checkpoint, and prints where it is."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from treering.cli.display.tables import figures_table
from treering.cli.hub import bars_for_people_only, is_hub_id
from treering.cli.push.options import PushOptions
from treering.cli.push.staging import find_checkpoint, stage
from treering.errors import InputError


def run(options: PushOptions) -> None:
    """Uploads a checkpoint and its card, and prints the files as JSON or as a table.

    Raises:
        InputError: bad arguments, or the hub refuses.
        StateError: the checkpoint is damaged.
    """
    for option, name in (("REPO_ID", options.repo_id), ("--base-model", options.base_model)):
        if name is not None and not is_hub_id(name, []):
            raise InputError(f"{option} reads ORGANISATION/NAME or USER/NAME, and it is {name!r}; correct it")
    checkpoint, repo_id, url = find_checkpoint(options.folder, options.step), options.repo_id, None
    with TemporaryDirectory(prefix="treering-push-") as name:
        files = stage(checkpoint, Path(name), repo_id=repo_id, base_model=options.base_model)
        sizes = {file.name: file.stat().st_size for file in files}
        if not options.dry_run:
            url = upload(Path(name), repo_id, private=options.private, message=f"Upload {checkpoint.name}")
    if options.json_output:
        print(json.dumps({"repo_id": repo_id, "checkpoint": str(checkpoint), "url": url, "files": sizes}, indent=2))
        return
    title = f"{checkpoint} {'would go' if url is None else 'is now'} at {repo_id if url is None else url}"
    rows = [(name, f"{size:,}") for name, size in sizes.items()]
    Console().print(figures_table(title, ("file", "bytes"), rows))


def upload(folder: Path, repo_id: str, *, private: bool, message: str) -> str:
    """Uploads a folder as one commit, and returns the address of the repository.

    Raises:
        InputError: the hub refuses or cannot be reached.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        with bars_for_people_only():
            # None leaves it to the settings of the organisation.
            url = api.create_repo(repo_id, private=True if private else None, exist_ok=True)
            api.upload_folder(repo_id=repo_id, folder_path=str(folder), commit_message=message)
    except Exception as error:  # of the hub's client, of its transport, or of the disk
        raise InputError(_reason(error, repo_id)) from error
    return str(url)


def _reason(error: Exception, repo_id: str) -> str:
    from huggingface_hub import errors

    rule = f"pushing needs a token that may write to {repo_id}"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return "pushing needs a network, and HF_HUB_OFFLINE is set; unset it, or look at the files with --dry-run"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.LocalTokenNotFoundError) or status in (401, 403):
        return f"{rule}, and the hub refuses yours; log in with `hf auth login`, or set HF_TOKEN"
    return f"{repo_id} was not written ({type(error).__name__}: {error}); try again"
