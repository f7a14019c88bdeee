"""Tiny checkpoints of the three model types, made once, and each model twice: upstream's own and accelerated."""
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from generate import accelerate, load_upstream
from random_checkpoint import write_checkpoint

KINDS = ("base", "custom_voice", "voice_design")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """checkpoint(kind) -> folder"""
    folders = {}

    def make(kind="base", size="tiny"):
        if (kind, size) not in folders:
            folders[kind, size] = tmp_path_factory.mktemp(f"{size}-{kind}")
            write_checkpoint(folders[kind, size], size, kind)
        return folders[kind, size]
    return make
