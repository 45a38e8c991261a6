"""Run all that one GPU can show of this collection, in at most eight minutes.

    python tests/one_gpu FOLDER             # --only NAME ... runs some checks, --list names them
    python tests/one_gpu FOLDER --pretend   # on a CPU: what starts without a GPU, at its smallest

Of several GPUs, it takes the first. It needs torch, torchvision and tqdm, and no network. What it
finds is on disk after each check, so that a run that is cut short keeps it:

    FOLDER/one_gpu.json          each check: ok, failed, or skipped with the reason; its figures
    FOLDER/one_gpu.txt           all that the checks have printed
    FOLDER/throughput-cuda.json  and other results of benchmarks; pictures, if matplotlib is there

What puts the figures of one or several folders into tests/README.md:

    python tests/one_gpu FOLDER ... --write
"""

import argparse
import importlib.util
import pathlib
import sys

# The folder tests, in which this package stands, in the place of the package's own folder.
sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)

from one_gpu.checks import CHECKS
from one_gpu.page import write_page
from one_gpu.report import REPORT
from one_gpu.running import run_checks

NEEDED = ("torch", "torchvision", "tqdm")


def main():
    """Do what the arguments ask for; return the exit status."""
    args = arguments()
    if args.list:
        for check in CHECKS.values():
            print(f"{check.name:35} {check.seconds:4} s  {check.what}")
        return 0
    if args.write:
        try:
            write_page(args.folders)
        except (OSError, ValueError) as error:
            stop(error, status=1)
        return 0
    look_for_packages_and_gpu(args.pretend)
    [folder] = args.folders
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    checks = [check for check in CHECKS.values() if not args.only or check.name in args.only]
    report = run_checks(checks, folder, args.seconds, args.pretend, go_on=bool(args.only))
    failed = [name for name, entry in report.checks.items() if entry.failed]
    print(
        f"{len(report.checks) - len(failed)} of {len(report.checks)} checks did not fail;"
        f" {folder / REPORT} has the figures",
        flush=True,
    )
    return 1 if failed else 0


def arguments():
    """What the caller asks for; a wrong call ends this process."""
    parser = argparse.ArgumentParser(
        prog="python tests/one_gpu", description=__doc__.partition("\n")[0]
    )
    parser.error = stop
    parser.add_argument(
        "folders", type=pathlib.Path, nargs="*", metavar="FOLDER", help="for what is found"
    )
    parser.add_argument("--pretend", action="store_true", help="on a CPU, at the smallest")
    parser.add_argument("--seconds", type=int, default=440, help="for all checks; default 440")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="run these checks alone")
    parser.add_argument("--list", action="store_true", help="name the checks, and run none")
    parser.add_argument("--write", action="store_true", help="write the page from these folders")
    args = parser.parse_args()
    for name in args.only or []:
        if name not in CHECKS:
            stop(f"--only: there is no check {name!r}; --list names them")
    if args.list:
        return args
    if not args.folders:
        stop("which FOLDER is for what the checks find? python tests/one_gpu FOLDER")
    if len(args.folders) > 1 and not args.write:
        stop("one FOLDER is enough; only --write takes several")
    return args


def look_for_packages_and_gpu(pretend):
    """End this process if a package is missing, or the GPU that the checks are for."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        stop(f"{sys.executable} has no {', '.join(missing)}: pip install -r requirements.txt")
    import torch  # here, as --list and --write work without it

    if not pretend and not torch.cuda.is_available():
        stop("torch sees no GPU here: --pretend runs what a CPU can run", status=1)


def stop(message, status=2):
    """End this process with one line and no traceback: for what the caller can mend."""
    print(f"one_gpu: error: {message}", file=sys.stderr, flush=True)
    sys.exit(status)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)  # 128 and the number of SIGINT
