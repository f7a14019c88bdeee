"""The names of things for those who have installed the project: qwen3-tts speak, not python generate.py."""

import os
import sys
from pathlib import Path

COMMAND = "qwen3-tts"  # package/qwen3_tts_cuda_graphs/__main__.py; its subcommands are the scripts of a checkout
INSTALLED_NAMES = {  # in a message or a help text
    "python generate.py": "qwen3-tts speak",
    "for generate.py": "for qwen3-tts speak",
    "with extract_speaker.py": "with qwen3-tts clone",
    "python bench.py": "qwen3-tts bench",
    "run ./setup.sh none --server": 'run pip install "qwen3-tts-cuda-graphs[server]"',
    "run ./setup.sh none, and use .venv/bin/python": "install the package with its dependencies",
}


def is_installed() -> bool:
    """Whether a subcommand of the installed command runs, which has put its name there."""
    return sys.argv[0].startswith(f"{COMMAND} ")


def with_installed_names(text: str) -> str:
    if is_installed():
        for name, installed in INSTALLED_NAMES.items():
            text = text.replace(name, installed)
    return text


def install_command(package: str) -> str:
    """What installs a package into the environment of this Python, which need not be the one of the shell's pip."""
    python = Path(sys.executable)
    pip = python.with_name("pip")
    command = (
        f"{shown(pip)} install" if pip.exists() else f"uv pip install --python {shown(python)}"
    )  # uv brings no pip
    return f"{command} {package}"


def shown(path: Path) -> str:
    """As somebody in this folder would type it."""
    return os.path.relpath(path) if path.is_relative_to(os.getcwd()) else str(path)
