"""Sources of stand-ins for all that MindSpore's own GPU plugin takes from CUDA 11, after what its files ask for.

cuda11.py ROOT FOLDER: MindSpore's package, and where FOLDER/LIBRARY.cc, FOLDER/LIBRARY.map (the symbols' versions) and
FOLDER/bin/nvcc go, by which MindSpore finds CUDA's version. Prints the libraries' names. CMakeLists.txt builds them.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).parent
PLUGIN = ("libmindspore_gpu.so.11.6", "gpu/libcuda_ops.so.11")
# By the beginning of the functions' names: the first that fits.
LIBRARIES = {
    "cublas": "libcublas.so.11",
    "cudnn": "libcudnn.so.8",
    "cufft": "libcufft.so.10",
    "curand": "libcurand.so.10",
    "cusolver": "libcusolver.so.11",
    "cusparse": "libcusparse.so.11",
    "nvrtc": "libnvrtc.so.11.2",
    "cuda": "libcudart.so.11.0",
    "cu": "libcuda.so.1",
}
# MindSpore makes them when it takes the device, whatever it runs then.
HANDLE = re.compile(r"(cublas|cudnn|cusolverDn|cusparse)(Create|Destroy|SetStream)(_v2)?")


def definition(function: str) -> str:
    handle = HANDLE.fullmatch(function)
    if handle is not None and handle[2] == "Create":
        return f"int {function}(void** handle) {{ return *handle = &nothing, 0; }}"
    if handle is not None:
        return f"int {function}(void*) {{ return 0; }}"
    if function == "nvrtcVersion":
        return "int nvrtcVersion(int* major, int* minor) { return *major = 11, *minor = 6, 0; }"
    if function.endswith("GetErrorString"):
        return f'const char* {function}(int) {{ return "what the stand-in says"; }}'
    return f'int {function}() {{ return standin_refuse("{function}"); }}'


def write(path: Path, text: str) -> None:
    """Only what is news: the libraries would be linked again, under programs of other tests that load them just now."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def main(root: Path, folder: Path) -> None:
    functions, version = defaultdict(set), {}
    for file in PLUGIN:
        symbols = subprocess.check_output(["nm", "-D", "--undefined-only", root / "lib" / "plugin" / file], text=True)
        for function, marked in re.findall(r" U ((?:cu|nvrtc)\w+)(?:@(\S+))?", symbols):
            library = next(library for beginning, library in LIBRARIES.items() if function.startswith(beginning))
            functions[library].add(function)
            if marked:
                version[library] = marked
    written = set(re.findall(r"^EXPORT .*?\b(cuda\w+)\(", (HERE / "cudart.cc").read_text(), re.MULTILINE))
    (folder / "bin").mkdir(parents=True, exist_ok=True)
    for library, names in functions.items():
        code = "".join(f"EXPORT {definition(name)}\n" for name in sorted(names - written))
        write(
            folder / f"{library}.cc",
            '#define EXPORT extern "C" __attribute__((visibility("default"), unused))\n'
            f"EXPORT int standin_refuse(const char*);\nstatic int nothing [[maybe_unused]];\n{code}",
        )
        write(folder / f"{library}.map", f"{version.get(library, '')} {{ global: *; }};\n")
    nvcc = folder / "bin" / "nvcc"
    write(nvcc, "#!/bin/sh\necho 'Cuda compilation tools, release 11.6, V11.6.124'\n")
    nvcc.chmod(0o755)
    print(";".join(functions), end="")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
