"""README.md, CONTRIBUTING.md and docs/: every measured number is in a results file, every link has a target, and what
the examples import exists."""

import ast
import importlib
import re
import shutil
from collections.abc import Iterator

import pytest
import torch
from helpers import ROOT

from qwen3_tts_cuda_graphs.__main__ import SUBCOMMANDS
from qwen3_tts_cuda_graphs.bench import SIZES
from qwen3_tts_cuda_graphs.bench.bounds import meta_model
from qwen3_tts_cuda_graphs.bench.random_checkpoint import codec_config
from qwen3_tts_cuda_graphs.bench.tables import BLOCK, BLOCKS, cell, up_to_date, write_tables
from qwen3_tts_cuda_graphs.common.published import LANGUAGE_IDS, SPEAKERS
from qwen3_tts_cuda_graphs.upstream import Qwen3TTSTokenizerV2Config, Qwen3TTSTokenizerV2Model


def read_pages() -> dict[str, str]:
    paths = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    return {str(path.relative_to(ROOT)): path.read_text() for path in paths}


# ---- Numbers

TABLES = {  # first lines of tables without figures that were measured here
    "| project | GPU, size | figure |",  # what others published
    "| file or folder | what it is |",
    "| option | meaning |",
    "| phase | every block reads | and writes |",
    "| program | file |",
    "| program | version | how |",
    "| route | what it does |",
    "| field | meaning |",
    "| name | also | rate | content type |",
    "| tag | meaning |",
    "| command | in a checkout also |",
    "| word | is | is not |",
}
FIGURE = r"\d[\d.,]* (?:ms|GiB|audio seconds|x real time)"
NOT_MEASURED = {"80 ms", "1.5 GiB", "4 GiB"}  # a frame, what the server leaves free, the limit of a WAV


def measured_by_hand(text: str) -> set[str]:
    """Tables and figures that look measured, but are outside of the blocks that `--tables` writes."""
    text = re.sub(r"^Figures published by others(?:.+\n)+", "", BLOCK.sub("", text), flags=re.M)
    tables = re.findall(r"^(\|.*\|)\n\|-", text, re.M)
    prose = re.sub(r"^\|.*", "", text, flags=re.M)
    return {*tables, *re.findall(FIGURE, prose)} - TABLES - NOT_MEASURED


def test_every_figure_is_what_was_measured():
    """`bench.py --tables` would change nothing, and all measured figures are in its blocks, except on one page."""
    pages = read_pages()
    names = [name for text in pages.values() for name in re.findall(r"^<!-- results: (\w+)", text, re.M)]
    assert len(names) == sum(len(BLOCK.findall(text)) for text in pages.values()) and {*names} == BLOCKS.keys()
    for page, text in pages.items():
        assert up_to_date(BLOCK.sub(r"\1", text)) == text, f"{page}: run python bench.py --tables"
        assert page == "docs/what_did_not_work.md" or measured_by_hand(text) == set(), page


def test_tables_are_written(tmp_path):
    """Figures that differ from results/ are replaced, and the changed pages are returned."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    (tmp_path / "README.md").write_text(read_pages()["README.md"].replace("| 0.23 |", "| 0.22 |"))
    assert write_tables(tmp_path) == [tmp_path / "README.md"] and write_tables(tmp_path) == []
    assert (tmp_path / "README.md").read_text() == read_pages()["README.md"]
    with pytest.raises(ValueError, match="results/ has no ms_per_frame of 'upstream': measure it"):
        cell({"megakernel": {"ms_per_frame": 1.0}}, "upstream", "ms_per_frame")


# ---- Links, files and code


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def broken_links(page: str, text: str, pages: dict[str, str]) -> Iterator[str]:
    without_code = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)]+)\)", without_code):
        if link.startswith("https://"):
            continue
        target, _, anchor = re.sub(r"\s", "", link).partition("#")
        path = ((ROOT / page).parent / target).resolve() if target else ROOT / page
        if not path.exists() or not path.is_relative_to(ROOT):
            yield f"{page}: {link}: there is no such file"
        elif anchor:
            linked = pages[str(path.relative_to(ROOT))] if path.suffix == ".md" else ""
            if anchor not in map(slug, re.findall(r"^#+ (.+)$", linked, re.MULTILINE)):
                yield f"{page}: {link}: there is no such heading"


def missing_files(page: str, text: str) -> Iterator[str]:
    """Files, folders, modules and commands that a page names, and that do not exist. Paths begin at the root or in the
    package."""
    folders = "bench|cli|common|docs|examples|fast|prompts|qwen3_tts_cuda_graphs|results|serving|speech|tests"
    for name in re.findall(rf"`(?:python )?((?:(?:{folders})/[\w./*-]*|[\w-]+\.(?:py|sh|md)))[ `]", text):
        places = (ROOT, ROOT / "qwen3_tts_cuda_graphs")
        if "that_file" not in name and not any(path for place in places for path in place.glob(name.rstrip("/"))):
            yield f"{page}: there is no {name}"
    for module in re.findall(r"qwen3_tts_cuda_graphs(?:\.\w+)+", text):
        if not any(ROOT.glob(f"{module.replace('.', '/')}*")):
            yield f"{page}: there is no {module}"
    for command in re.findall(r"(?<![\w-])qwen3-tts (\w+)", text):
        if command not in SUBCOMMANDS:
            yield f"{page}: there is no command {command}"


def test_links_and_files_are_there():
    pages = read_pages()
    assert [*pages][0] == "README.md" and len(pages) >= 7
    for page, text in pages.items():
        assert [*broken_links(page, text, pages), *missing_files(page, text)] == []


def test_the_code_imports_what_there_is():
    """Every name that a Python example imports from the project exists."""
    blocks = [
        code for text in read_pages().values() for code in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    ]
    imports = [node for code in blocks for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom)]
    names = [(node.module, name.name) for node in imports for name in node.names]
    own = [(module, name) for module, name in names if module.split(".")[0] in ("generate", "qwen3_tts_cuda_graphs")]
    assert {"stream", "Engine", "stream_long", "FasterQwen3TTS"} <= {name for _, name in own}
    for module, name in own:
        assert hasattr(importlib.import_module(module), name), f"{module} has no {name}"


def download_bytes(size: str) -> int:
    """Bytes of the weights of a Base model in bfloat16 and of its codec in float32. Other models have 1% less, as they
    lack a speaker encoder."""
    with torch.device("meta"):
        codec = Qwen3TTSTokenizerV2Model(Qwen3TTSTokenizerV2Config(**codec_config(size)))
    return sum(weight.nbytes for part in (meta_model(size), codec) for weight in part.state_dict().values())


def test_the_readme_is_short_and_says_how_to_test():
    """It also names all voices and languages, and its use comes before how it works."""
    readme = read_pages()["README.md"]
    assert len(readme.splitlines()) <= 230
    assert all(f"`{name}`" in readme for name in SPEAKERS) and all(name.title() in readme for name in LANGUAGE_IDS)
    assert readme.index("## Use") < readme.index("## How it works")
    assert "./setup.sh test" in readme
    small, large = (f"{download_bytes(size) / 1e9:.1f} GB" for size in SIZES)
    assert f"{small} to download for a 0.6B, {large} for a 1.7B" in readme


def placeholders(text: str) -> list[str]:
    """Placeholders such as <address of this page> in shell commands. <break/> is SSML and no placeholder."""
    commands = re.findall(r"^```bash\n(.*?)^```", text, re.M | re.S) + re.findall(r"`([^`\n]+ [^`\n]+)`", text)
    return [found for command in commands for found in re.findall(r"<[a-zA-Z][^<>\n]*(?<!/)>", command)]


def test_commands_can_be_pasted():
    assert {page: found for page, text in read_pages().items() if (found := placeholders(text))} == {}
