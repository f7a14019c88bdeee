"""The folder of the user's cache where compiled kernels are kept, and what Python has compiled. Needs Python alone.

$QWEN3_TTS_KERNEL_CACHE names another folder, or is "off". Its files are executed: they must belong to this user and be
writable by no one else.
"""

import os
from pathlib import Path

VARIABLE = "QWEN3_TTS_KERNEL_CACHE"


def choose_folder() -> Path | None:
    """None: the cache is off."""
    chosen = os.environ.get(VARIABLE, "").strip()
    if chosen.lower() == "off":
        return None
    if chosen:
        return Path(chosen).expanduser().absolute()
    parent = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification: a relative path is to be ignored.
    return (Path(parent) if os.path.isabs(parent) else Path.home() / ".cache") / "qwen3-tts-cuda-graphs" / "kernels"


def open_folder(*inside: str) -> Path | None:
    """The folder of the cache, or one inside of it, created if it does not exist."""
    folder = choose_folder()
    if folder is None:
        return None
    folder.parent.mkdir(parents=True, exist_ok=True)
    for place in (folder, *map(folder.joinpath, inside)):
        place.mkdir(mode=0o700, exist_ok=True)
        check_owner(place, place.stat())
    return place


def check_owner(path: Path, status: os.stat_result) -> None:
    """PermissionError if another user may have written it. Windows has no such modes; there a home is private."""
    if os.name == "posix" and status.st_uid != os.getuid():
        raise PermissionError(f"{path} belongs to user {status.st_uid}, not to user {os.getuid()}")
    if os.name == "posix" and status.st_mode & 0o022:
        raise PermissionError(f"{path} can be written by others (mode {status.st_mode & 0o7777:o}, chmod go-w)")
