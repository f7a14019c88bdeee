"""What the project says of itself."""
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_core_is_short():
    files = ("cudagraph_talker.py", "cudagraph_predictor.py", "generate.py")
    assert sum(len((ROOT / name).read_text().splitlines()) for name in files) <= 500


def test_import_is_silent_and_needs_no_more_than_the_12_hz_models_do():
    program = ("import sys, generate; "
               "print(*{'torchaudio', 'sox', 'onnxruntime', 'gradio', 'flash_attn'} & set(sys.modules), end='')")
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_imports_run_one_way():
    """generate -> predictor -> talker; nothing imports a script."""
    talker, predictor = ((ROOT / f"cudagraph_{name}.py").read_text() for name in ("talker", "predictor"))
    assert "import cudagraph" not in talker and "from cudagraph" not in talker
    assert "generate" not in [line.split()[1] for line in predictor.splitlines() if line.startswith(("import", "from"))]
