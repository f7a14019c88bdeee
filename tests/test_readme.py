"""README.md, CONTRIBUTING.md and docs/: every measured number is one that a results file has, links lead somewhere, and
what the examples import exists."""

import ast
import importlib
import re
from collections.abc import Iterator

from helpers import ROOT
from numbers_in_docs import NOT_MEASURED, NUMBER, compare, corrected, differences, read_pages, tables

from qwen3_tts_cuda_graphs.common.published import LANGUAGE_IDS, SPEAKERS

# ---- Numbers


def test_every_number_is_what_was_measured():
    assert differences(read_pages()) == []


def alter(text: str, start: int, end: int) -> str:
    """Another digit in place of the last one."""
    place = max(match.start() for match in re.finditer(r"\d", text[start:end])) + start
    return text[:place] + str((int(text[place]) + 1) % 10) + text[place + 1 :]


def numbers_in_tables(text: str) -> Iterator[tuple[int, int]]:
    """Where the measured tables have their numbers: not in the first column."""
    for table in tables(text):
        if table.header not in NOT_MEASURED:
            for cells in table.rows:
                for start, end in cells[1:]:
                    for number in re.finditer(NUMBER, text[start:end]):
                        yield start + number.start(), start + number.end()


def test_an_altered_number_is_found():
    """In every table and every sentence that has figures, and it is put right again."""
    pages = read_pages()
    places = {(page, *span) for page, text in pages.items() for span in numbers_in_tables(text)}
    places |= {
        (figure.page, figure.start, figure.end)
        for figure in compare(pages)[0]
        if re.fullmatch(NUMBER, pages[figure.page][figure.start : figure.end])
    }
    assert len(places) > 200
    for page, start, end in places:
        altered = pages | {page: alter(pages[page], start, end)}
        assert differences(altered), f"{page}: {pages[page][start - 40 : end]!r} can be altered"
        assert corrected(altered) == pages


def test_a_lost_or_unknown_row_is_found():
    pages = read_pages()
    page = pages["docs/results.md"]
    row = next(line for line in page.splitlines() if line.startswith("| peak memory"))
    other = "| a row of my own | 1 | 2 |"
    assert differences(pages | {"docs/results.md": page.replace(row + "\n", "")})
    assert differences(pages | {"docs/results.md": page.replace(row, f"{row}\n{other}")})
    assert differences(pages | {"docs/results.md": page + "\n| a | table |\n|---|---|\n| of mine | 3 ms |\n"})
    assert differences(pages | {"docs/results.md": re.sub(r"^\| 64 streams at once.*\n", "", page, flags=re.MULTILINE)})
    assert differences(pages | {"docs/other_gpus.md": ""})


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
    """Files and folders of the project that a page names between backticks."""
    folders = "benchmarks|cli|common|docs|examples|fast|package|results|serving|speech|tests|tools"
    for name in re.findall(rf"`(?:python )?((?:(?:{folders})/[\w./*-]*|[\w-]+\.(?:py|sh|md)))[ `]", text):
        if "that_file" not in name and not any(ROOT.glob(name.rstrip("/"))):
            yield f"{page}: there is no {name}"


def test_links_and_files_are_there():
    pages = read_pages()
    assert [*pages][0] == "README.md" and len(pages) >= 7
    for page, text in pages.items():
        assert [*broken_links(page, text, pages), *missing_files(page, text)] == []


def test_a_broken_link_is_found():
    pages = read_pages()
    for link in ("docs/none.md", "docs/results.md#none", "#none", "../README.md"):
        assert [*broken_links("README.md", f"a [link]({link})", pages)], link
    assert not [*broken_links("docs/usage.md", "a [link](../README.md#how-it-works)", pages)]
    assert [*missing_files("README.md", "in `speech/none.py`, `none.py`")] == [
        "README.md: there is no speech/none.py",
        "README.md: there is no none.py",
    ]


def test_the_code_imports_what_there_is():
    """Every name that a Python example imports from the project exists."""
    blocks = [
        code for text in read_pages().values() for code in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    ]
    imports = [node for code in blocks for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom)]
    names = [(node.module, name.name) for node in imports for name in node.names]
    own = [(module, name) for module, name in names if module.split(".")[0] in ("generate", "speech")]
    assert {"stream", "Engine", "stream_long"} <= {name for _, name in own}
    for module, name in own:
        assert hasattr(importlib.import_module(module), name), f"{module} has no {name}"


def test_the_readme_is_short_and_says_how_to_test():
    """And which voices and languages there are; use comes before how it works."""
    readme = read_pages()["README.md"]
    assert len(readme.splitlines()) <= 230
    assert all(f"`{name}`" in readme for name in SPEAKERS) and all(name.title() in readme for name in LANGUAGE_IDS)
    assert readme.index("## Use") < readme.index("## How it works")
    assert "./setup.sh test" in readme


def placeholders(text: str) -> list[str]:
    """What a reader would have to replace in a shell command: <address of this page>."""
    commands = re.findall(r"^```bash\n(.*?)^```", text, re.M | re.S) + re.findall(r"`([^`\n]+ [^`\n]+)`", text)
    return [found for command in commands for found in re.findall(r"<[a-zA-Z][^<>\n]*>", command)]


def test_commands_can_be_pasted():
    assert {page: found for page, text in read_pages().items() if (found := placeholders(text))} == {}
    assert placeholders("```bash\ngit clone <this repository> here\n```") == ["<this repository>"]
    assert placeholders('or `pip install "git+<address>"`, which writes `out_<size>.wav`') == ["<address>"]
    assert placeholders("```bash\npython generate.py --text - < in.txt > out.wav\n```") == []
