"""Build a wheel: the checkout's flat files become submodules of the package. pyproject.toml has everything else."""

import shutil
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "package"))
from qwen3_tts_cuda_graphs.checkout import PACKAGE, as_submodule, project_files  # noqa: E402


class BuildPackage(build_py):
    def run(self):
        shutil.rmtree(Path(self.build_lib, PACKAGE), ignore_errors=True)  # of an earlier build
        super().run()
        if self.editable_mode:
            return
        for path in project_files():
            target = Path(self.build_lib, PACKAGE, path.relative_to(ROOT))
            target.parent.mkdir(parents=True, exist_ok=True)
            source = path.read_bytes()
            target.write_bytes(as_submodule(source, str(path)) if path.suffix == ".py" else source)

    def get_source_files(self):
        """For a source distribution, from which a wheel can be built as well."""
        paths = [*project_files(), *ROOT.glob("requirements*.txt")]
        return super().get_source_files() + [str(path.relative_to(ROOT)) for path in paths]


EXACT = "uvicorn==", "httptools==", "websockets=="  # serving/connections.py uses private parts of them


def tested(name: str) -> list[str]:
    """A requirements file's packages, from the tested version on."""
    lines = (ROOT / name).read_text().splitlines()
    return [line if line.startswith(EXACT) else line.replace("==", ">=") for line in lines if "==" in line]


server = tested("requirements-server.txt")
setup(
    cmdclass={"build_py": BuildPackage},
    # torch as fast/paths.py requires it: an environment keeps its own. qwen-tts has the pair of transformers.
    install_requires=[
        "torch>=2.5",
        "qwen-tts==0.1.1",
        *(line for line in tested("requirements.txt") if not line.startswith("torch>")),
    ],
    extras_require={"server": server, "ray": server + tested("requirements-ray.txt")},
)
