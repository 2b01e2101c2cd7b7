"""What a GPU has to show, in one program for short slots: every kernel against float64, what kernels take, and rounds.

    python scripts/gpu_check.py --out FILE.json [--part 1|2|all] [--budget 340] [--only BEGINNING ...]
    python scripts/gpu_check.py --dry --out FILE.json          on a CPU, everything tiny, kernels interpreted
    python scripts/gpu_check.py report FILE.json ...           each figure beside its floor, our targets and the paper's

Part 1: correctness, the rate at which memory is copied, and kernels. Part 2: rounds of named pairs with dummy weights.
Each row has time of its own and is in FILE.json before the next one begins; what is left when the budget is over is
named there. A kernel whose numbers are not true is not timed, and the exit code is 1, as it is for a row that failed.
Only what the ahead-of-time gate knows is compiled, but for variants of verify that check its numbers. Needs this
checkout and torch with CUDA; reaches no network.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "scripts")]
BUDGET = 340.0

from _options import real  # noqa: E402  (the path is set above)


def check(options: argparse.Namespace) -> int:
    if options.dry:
        os.environ["TRITON_INTERPRET"] = "1"  # which a kernel asks for as it is defined
        missing = [name for name in ("triton", "pytest") if importlib.util.find_spec(name) is None]
        if missing:
            print(f"gpu_check: --dry needs {' and '.join(missing)}; README, 'On a GPU', has a command", file=sys.stderr)
            return 2
    import torch
    from gpu import right, rounds, timings
    from gpu.known import gate
    from gpu.rows import BAD, BUSY, WALL, Record, run
    from gpu.setting import Setting, machine

    if not options.dry and not torch.cuda.is_available():
        print("gpu_check: there is no GPU here; use --dry", file=sys.stderr)
        return 2
    torch.set_num_threads(1 if options.dry else torch.get_num_threads())
    setting, ceiling = Setting.of(options.dry), timings.Ceiling()
    with contextlib.ExitStack() as stack:
        if not options.dry:
            major, minor = torch.cuda.get_device_capability()
            stack.enter_context(gate(10 * major + minor))
        if options.small_case:
            right.small_case(setting)
            return 0
        rows = right.rows(setting) + timings.rows(setting, ceiling) if options.part != "2" else []
        rows += rounds.rows(setting, ceiling, stack) if options.part != "1" else []
        chosen = [row for row in rows if any(row.name.startswith(only) for only in options.only or [""])]
        if not chosen:
            print("gpu_check: no row of this part has a name that begins so (--only)", file=sys.stderr)
            return 2
        about = {
            "program": "gpu_check",
            "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "dry": options.dry,
            "part": options.part,
            "budget": options.budget,
            "machine": machine(setting),
        }
        record = Record(options.out, about, chosen)
        run(chosen, record, options.budget, lambda line: print(line, flush=True), BUSY if options.dry else WALL)
        record.about["machine_after"] = machine(setting)["nvidia"]
        record.write()
    ends = [line["status"] for line in record.lines.values()]
    print(", ".join(f"{ends.count(end)} {end}" for end in dict.fromkeys(ends)), "in", options.out)
    return 1 if any(end in BAD for end in ends) else 0


def main(arguments: list[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] == ["report"]:
        from gpu import report

        parser = argparse.ArgumentParser(prog="gpu_check.py report", description="each figure beside what it should be")
        parser.add_argument("files", type=Path, nargs="+")
        return report.show(parser.parse_args(words[1:]).files)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu_check.json")
    parser.add_argument("--part", choices=("1", "2", "all"), default="all")
    parser.add_argument("--budget", type=real(1, 36000), default=BUDGET, help="seconds in all")
    parser.add_argument("--only", nargs="+", metavar="BEGINNING", help="rows whose names begin so")
    parser.add_argument("--dry", action="store_true", help="on the CPU, to see that the program runs")
    parser.add_argument("--small-case", action="store_true", help=argparse.SUPPRESS)  # for compute-sanitizer
    options = parser.parse_args(words)
    if options.out.is_dir():
        parser.error(f"--out {options.out} is a folder")
    return check(options)


if __name__ == "__main__":
    sys.exit(main())
