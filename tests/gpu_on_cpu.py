"""fused_layers.cu as a library for the CPU: functions of gpu_on_cpu.h in the place of PTX, the rest C++ as it is."""
import ctypes
import re
import subprocess
from pathlib import Path

PTX = {   # begins with: in its place, with the operands
    "cvt.rn.bf16x2.f32": "{0} = to_bf16({2}) | to_bf16({1}) << 16",
    "bar.sync": "running->of->workers.meet({0})",
    "st.relaxed.gpu.global.u32": "*(u32 *){0} = {1}",
    "ld.relaxed.gpu.global.v4.u32": "load({0}, {1}, {2}, {3}, {4})",
    "{.reg .pred p; mbarrier.try_wait": "{0} = try_wait({1}, {2})",
    "createpolicy": "{0} = 0",
    "mbarrier.arrive.expect_tx.shared.b64 _, [%0], 2048; cp.async.bulk": "bring({0}, {1}, {2})",
    "mma.sync.aligned.m16n8k16": "mma({0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}, {8}, {9})",
    "mbarrier.arrive.shared": "arrive({0})",
    "mbarrier.init.shared.b64 [%0], 8;": "start_barrier({0}, 8)",
    "fence.proxy.async": "",
}


def end_of(text, start):
    """Where the parenthesis that opens at `start` closes. Those of strings are in pairs."""
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if depth == 0:
            return place


def without_ptx(source):
    done, parts = 0, []
    for match in re.finditer(r"\basm(?: volatile)?\(", source):
        end = end_of(source, match.end() - 1)
        body, operands = source[match.end():end], []
        words = re.match(r'(?:\s*"[^"]*")+', body)
        for operand in re.finditer(r'"[=+]?[a-z]"(?=\()', body):
            operands.append(body[operand.end():end_of(body, operand.end()) + 1])
        ptx = "".join(re.findall(r'"([^"]*)"', words[0]))
        call, = (call for begin, call in PTX.items() if ptx.startswith(begin))
        parts += [source[done:match.start()], call.format(*operands)]
        done = end + 1
    return "".join(parts) + source[done:]


def build(source, folder):
    """Returns a function of the address of the kernel's arguments, blocks, threads of each, and bytes for each."""
    source = without_ptx(source).replace(" step(", " the_step(")                         # libc has one, too
    source = source.replace("extern __shared__ Shared shared[];", "#define shared ((Shared *)block_memory())")
    library, cpp = folder / "step.so", folder / "step.cpp"
    cpp.write_text(f'#include "{Path(__file__).with_suffix(".h")}"\n{source}'
                   'extern "C" int run(const void *arguments, int grid, int threads, int memory) {\n'
                   "    return launch(the_step, arguments, grid, threads, memory);\n}\n")
    options = "-std=c++20", "-O2", "-w", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE", "-shared", "-fPIC"
    subprocess.run(["g++", *options, "-o", library, cpp], check=True)
    run = ctypes.CDLL(str(library)).run
    run.argtypes = [ctypes.c_void_p, *[ctypes.c_int] * 3]
    return run
