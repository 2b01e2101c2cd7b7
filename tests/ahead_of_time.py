"""Compiles what the Triton kernels will be asked to run, for GPUs that are not there, and says what it takes of them.

    python tests/ahead_of_time.py RESULT.json [--only NAME ...] [--sm 80 90 100]      with the Triton that it imports
    python tests/ahead_of_time.py RESULT.json --cuda                                  csrc/*.cu, with nvcc
    python tests/ahead_of_time.py --update RESULT.json ...                            results into the budget file

Every ``foldspec/kernels/OPERATOR/triton.py`` has ``configurations(arch)``: launches by name, of tensors without memory.
Each is bound and specialised by Triton's own code and compiled as it would be at its first launch. What was compiled is
kept under ``build/``, so that only what changed takes time.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.util
import json
import os
import pkgutil
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from foldspec.kernels.build import GPU_CODE_FLAGS

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "build" / "ahead-of-time"
BUDGET = ROOT / "tests" / "golden" / "aot_budget.json"

# bytes of shared memory that a block may have at launch (a kernel that asks for more compiles, and does not start)
SHARED = {"sm_80": 166912, "sm_90": 232448, "sm_100": 232448}
REGISTERS = 255  # of a thread
GROWTH = 1.1  # more than that much of what the budget says is too much

PTXAS = (  # what it says of a kernel
    r"Compiling entry function '(\w+)'"
    r".*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers(.*?)\n"
)

Numbers = dict[str, Any]  # registers, spills, shared, hgmma; in the budget also a reason for spills. Zeros are left out
Table = dict[str, dict[str, Numbers]]  # configuration -> architecture -> numbers


def configurations(sm: int) -> dict[str, Any]:
    """Everything that Triton kernels may be asked for on an architecture, by OPERATOR/NAME: a :class:`jit.Launch`, or
    an object that spells out ``name``, ``kernel``, ``signature``, ``constants``, ``aligned`` and ``options``.
    """
    import foldspec.kernels

    found: dict[str, Any] = {}
    for package in pkgutil.iter_modules(foldspec.kernels.__path__, "foldspec.kernels."):
        if package.ispkg and importlib.util.find_spec(f"{package.name}.triton"):
            some = importlib.import_module(f"{package.name}.triton").configurations(sm)
            named = some if isinstance(some, dict) else {each.name: each for each in some}
            found.update({f"{package.name.rpartition('.')[2]}/{name}": each for name, each in named.items()})
    return found


def product_rows(configuration: Any) -> int:
    if hasattr(configuration, "signature"):
        return int(configuration.constants.get("BLOCK_M", 0))
    return int(configuration.product)


def measured(configuration: Any, sm: int, kept: Path = KEPT) -> Numbers:
    """What it takes of an architecture. Calls Triton: in a process without ``TRITON_INTERPRET``."""
    import triton
    from triton.backends.compiler import GPUTarget

    target, product = GPUTarget("cuda", sm, 32), product_rows(configuration)
    asked, options = source(configuration, target)
    compiled = triton.compile(asked, target=target, options=options)
    numbers: Numbers = _kept(
        kept / f"{compiled.hash}-{bool(product)}.json",
        lambda: {"shared": compiled.metadata.shared} | _resources(compiled.asm["cubin"], bool(product)),
    )
    return numbers


def source(configuration: Any, target: Any) -> tuple[Any, dict[str, Any]]:
    """What Triton compiles of a configuration, and with which options."""
    return (_spelt if hasattr(configuration, "signature") else _bound)(configuration, target)


def _bound(launch: Any, target: Any) -> tuple[Any, dict[str, Any]]:
    """The source that a launch is specialised to, by Triton's own code, and options."""
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    kernel, backend = launch.kernel, make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialised, _ = bind(**launch.arguments, **launch.options)
    options, signature, constants, attributes = kernel._pack_args(
        backend, dict(launch.options), bound, specialised, launch.options
    )
    return ASTSource(kernel, signature, constants, attributes), options.__dict__


def _spelt(configuration: Any, target: Any) -> tuple[Any, dict[str, Any]]:
    """The same of one whose launch specialises nothing but what it says."""
    from triton.compiler import ASTSource

    kernel, constants = configuration.kernel, configuration.constants
    signature = {name: configuration.signature.get(name, "constexpr") for name in kernel.arg_names}
    aligned = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in configuration.aligned}
    return ASTSource(kernel, signature, dict(constants), aligned), dict(configuration.options)


def _kept(path: Path, measure: Callable[[], Any]) -> Any:
    """What was measured before, or is now, zeros left out."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps(measure()))
        os.replace(unfinished, path)
    return json.loads(path.read_text(), object_hook=lambda numbers: {name: n for name, n in numbers.items() if n})


def _resources(cubin: bytes, product: bool) -> Numbers:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()

        def says(what: str) -> str:
            return subprocess.run([tool, what, file.name], capture_output=True, text=True, check=True).stdout

        found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", says("--dump-resource-usage"))
        assert found is not None
        registers, stack, local = map(int, found.groups())
        code = says("--dump-sass") if product or stack or local else ""
    return {
        "registers": registers,
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", code)),
        "hgmma": len(re.findall(r"\bHGMMA\b", code)),
    }


def find_nvcc() -> str | None:
    return shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


def nvcc_version(nvcc: str) -> str:
    says = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"release ([\d.]+)", says)
    assert found is not None
    return found.group(1)


def cuda_measured(source: Path, sm: int, nvcc: str, kept: Path = KEPT) -> Table:
    """What every kernel of a CUDA source takes of an architecture; spills in bytes. Raises :class:`RuntimeError` with
    the compiler's words if it does not compile."""
    command = [nvcc, "-cubin", f"-arch=sm_{sm}", *GPU_CODE_FLAGS, "-Xptxas=-v", str(source)]
    files = sorted(path for path in source.parent.glob("*") if path.suffix in (".cu", ".cuh", ".h"))
    digest = hashlib.sha256(repr([command, nvcc_version(nvcc), [path.read_bytes() for path in files]]).encode())

    def measure() -> Table:
        with tempfile.TemporaryDirectory() as folder:
            output = ["-o", str(Path(folder) / "out.cubin")]
            done = subprocess.run([*command, *output], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(done.stdout + done.stderr)
        found: Table = {}
        for name, stores, loads, registers, rest in re.findall(PTXAS, done.stderr, re.DOTALL):
            shared = re.search(r"(\d+) bytes smem", rest)
            numbers = {"registers": int(registers), "spills": int(stores) + int(loads)}
            numbers["shared"] = int(shared.group(1)) if shared else 0
            found[f"{source.name}/{name}"] = {f"sm_{sm}": numbers}
        assert found, f"{source} has no kernel"
        return found

    table: Table = _kept(kept / f"{digest.hexdigest()}.json", measure)
    return table


def complaints(found: Table, budget: Mapping[str, Mapping[str, Numbers]], wide: set[str], whole: bool) -> list[str]:
    """What is wrong with what was measured, a line each; none if all is well.

    ``wide`` names configurations with products of 64 rows or more; ``whole``: everything was measured, so that the
    budget must have nothing else.
    """
    lines = []
    for name, numbers in found.items():
        for sm, now in numbers.items():
            allowed = budget.get(name, {}).get(sm)
            here = f"{name} on {sm}"
            if allowed is None:
                lines.append(f"{here}: not in the budget: {now}")
                continue
            for what in ("registers", "shared", "spills"):
                if now.get(what, 0) > GROWTH * allowed.get(what, 0):
                    lines.append(f"{here}: {now[what]} {what}, the budget has {allowed.get(what, 0)}")
            if allowed.get("spills") and not allowed.get("reason"):
                lines.append(f"{here}: {allowed['spills']} spills in the budget, without a reason")
            if now.get("registers", 0) > REGISTERS or now.get("shared", 0) > SHARED[sm]:
                lines.append(f"{here}: cannot be launched: {now}, most shared memory {SHARED[sm]}")
            if name in wide and sm == "sm_90" and not now.get("hgmma"):
                lines.append(f"{here}: no warpgroup instruction in a product of 64 rows or more")
    if whole:
        lines += [f"{name}: in the budget, and no kernel has it" for name in budget if name not in found]
    return lines


def updated(budget: dict[str, Table], version: str, found: Table) -> dict[str, Table]:
    """The budget with a version's numbers in the place of what it had. Reasons stay."""
    old = budget.get(version, {})
    for name, numbers in found.items():
        for sm, now in numbers.items():
            reason = old.get(name, {}).get(sm, {}).get("reason")
            if reason and now.get("spills"):
                now["reason"] = reason
    return {**budget, version: found}


def written(budget: dict[str, Table]) -> str:
    """The budget file, a line for each configuration."""
    parts = []
    for version, table in sorted(budget.items()):
        lines = [f'    "{name}": {json.dumps(numbers, sort_keys=True)}' for name, numbers in sorted(table.items())]
        parts.append(f'  "{version}": {{\n' + ",\n".join(lines) + "\n  }")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def triton_result(architectures: Sequence[int], only: Sequence[str] | None) -> dict[str, Any]:
    """What every configuration takes, or those named; by what compiler; which have products of 64 rows and more."""
    import triton

    found: Table = {}
    wide = set()
    for sm in architectures:
        launches = configurations(sm)
        for name in launches if only is None else only:
            found.setdefault(name, {})[f"sm_{sm}"] = measured(launches[name], sm)
            if product_rows(launches[name]) >= 64:
                wide.add(name)
    return {"version": f"triton {triton.__version__}", "found": found, "wide": sorted(wide)}


def cuda_result(architectures: Sequence[int]) -> dict[str, Any]:
    """The same of ``csrc/*.cu``."""
    nvcc = find_nvcc()
    assert nvcc is not None, "no nvcc: it comes with the CUDA toolkit"
    found: Table = {}
    for source in sorted((ROOT / "csrc").rglob("*.cu")):
        for sm in architectures:
            for name, numbers in cuda_measured(source, sm, nvcc).items():
                found.setdefault(name, {}).update(numbers)
    return {"version": f"nvcc {nvcc_version(nvcc)}", "found": found, "wide": []}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--only", nargs="*", metavar="NAME", help="OPERATOR/NAME of configurations; default: all")
    parser.add_argument("--sm", nargs="*", type=int, default=[80, 90, 100])
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--update", action="store_true")
    args = parser.parse_args()
    if args.update:
        budget = json.loads(BUDGET.read_text()) if BUDGET.exists() else {}
        for result in args.results:
            measurement = json.loads(result.read_text())
            budget = updated(budget, measurement["version"], measurement["found"])
        BUDGET.write_text(written(budget))
        return

    result = cuda_result(args.sm) if args.cuda else triton_result(args.sm, args.only)
    args.results[0].write_text(json.dumps(result))


if __name__ == "__main__":
    main()
