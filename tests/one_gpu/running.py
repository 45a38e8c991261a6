"""Runs the checks, and writes down what came of each as soon as it has ended."""

import concurrent.futures
import os
import shutil
import sys
import threading
import time
import traceback

from one_gpu.check import Skipped
from one_gpu.report import REPORT, Entry, Machine, Report, load, sources
from one_gpu.shell import Shell

AT_ONCE = 7  # checks side by side on one GPU, while nothing is timed
PRETENDED_SECONDS = 600  # that a check may take on a CPU of few cores


def run_checks(checks, folder, seconds, pretend, go_on):
    """Run checks within so many seconds; return the Report, which is also in the folder.

    go_on: the report in the folder stays, but for what these checks bring.
    """
    path = folder / REPORT
    report = Report(this_machine(pretend))
    if go_on and path.exists():
        report.checks = load(path).checks
    stop = time.monotonic() + seconds
    lock = threading.Lock()

    def run(check):
        entry, printed = run_check(check, folder, stop, pretend)
        with lock:
            report.checks[check.name] = entry
            report.save(path)
            with open(folder / "one_gpu.txt", "a") as file:
                file.write(f"\n======== {check.name}: {entry.result}\n{printed}")
            print(f"{check.name:35} {entry.seconds:6.1f} s  {entry.result[:150]}", flush=True)

    together = [check for check in checks if not check.alone]
    with concurrent.futures.ThreadPoolExecutor(1 if pretend else AT_ONCE) as pool:
        list(pool.map(run, together))  # the list brings an error of run() to light
    for check in checks:
        if check.alone:
            run(check)
    return report


def run_check(check, folder, stop, pretend):
    """Run one check; return its Entry, and the text that its commands printed.

    stop: the time.monotonic() at which all checks must have ended.
    """
    begin = time.monotonic()
    if begin > stop - 5:
        return Entry("not run: the time was up"), ""
    printed = []
    seconds = PRETENDED_SECONDS if pretend else check.seconds
    shell = Shell(printed.append, min(begin + seconds, stop), pretend, folder)
    if not check.alone:  # several at once: each has a core
        shell.environment["OMP_NUM_THREADS"] = "1"
    try:
        entry = Entry("ok", figures=check.function(shell))
    except Skipped as reason:
        entry = Entry(f"skipped: {reason}")
    except Exception as error:
        entry = Entry(f"failed: {error}")
        printed.append(traceback.format_exc())
    shutil.rmtree(shell.folder, ignore_errors=True)
    entry.seconds = round(time.monotonic() - begin, 1)
    return entry, "".join(printed)


def this_machine(pretend):
    """The Machine on which this process runs."""
    import torch  # here, as --list and --write work without it

    machine = Machine(
        date=time.strftime("%Y-%m-%d"),
        python=sys.version.split()[0],
        torch=torch.__version__,
        cores=os.cpu_count(),
        sources=sources(),
    )
    if not pretend:
        machine.gpu = torch.cuda.get_device_name()
        machine.cuda = torch.version.cuda
        machine.nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return machine
