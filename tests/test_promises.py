"""What the project says of itself."""
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_files_are_short():
    for limit, names in ((500, ("cudagraph_talker.py", "cudagraph_predictor.py", "generate.py")),
                         (450, ("fused_layers.py", "fused_layers.cu")), (150, ("cudagraph_codec.py",))):
        assert sum(len((ROOT / name).read_text().splitlines()) for name in names) <= limit, names


def test_import_is_silent_and_needs_no_more_than_the_12_hz_models_do():
    program = ("import sys, generate; "
               "print(*{'torchaudio', 'sox', 'onnxruntime', 'gradio', 'flash_attn'} & set(sys.modules), end='')")
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_imports_run_one_way():
    """generate -> predictor -> talker -> fused_layers, generate -> codec -> talker; nothing imports a script."""
    allowed = {"cudagraph_talker": {"fused_layers"}, "cudagraph_predictor": {"cudagraph_talker", "fused_layers"},
               "cudagraph_codec": {"cudagraph_talker", "fewer_kernels"}, "fused_layers": set(), "fewer_kernels": set(),
               "paths": {"fused_layers"}, "voices": set(), "turns": set(), "wav": set()}
    own = {path.stem for path in ROOT.glob("*.py")}
    for name, others in allowed.items():
        imports = re.findall(r"^(?:from|import) (\w+)", (ROOT / f"{name}.py").read_text(), re.MULTILINE)
        assert own & set(imports) <= others, name
