"""Watch any training script, unchanged: is it right, where does its time go, who waits for whom?

    python tools/check_training.py [--seconds 60] [--picture steps.svg] [--json found.json] \
        -- torchrun --standalone --nproc-per-node=2 train.py

Nothing to import, no line to change: check_training/recorder comes into each Python process of the
command by PYTHONPATH, and notes there what torch is asked to do. Afterwards check_training/rules
compare the ranks. What is wrong is "found". What may be meant so is a "question". Then come the
parts of a step. Status 0: nothing found; 1: found, or the script fails or stands still; 2: a wrong
call. "Nothing found" is no proof: it says what was looked at, and what was not seen.

On several machines, or for a job that goes on, record first, and judge afterwards or meanwhile:

    python tools/check_training.py --records FOLDER -- torchrun --nnodes=2 ... train.py
    eval "$(python tools/check_training.py --records FOLDER --print-environment)"
    python tools/check_training.py --judge FOLDER ...
"""

import math
import os
import pathlib
import sys
import tempfile

import foreign_command
from check_training import options, picture, reading, recording, report, watching
from check_training.options import stop


def watch_and_report(args, folder):
    """Run the command, print what is said of it, and return the exit status.

    folder: for the records.
    """
    try:
        variables = recording.environment(folder)
        watched = watching.watch(args.command, folder, variables, args.seconds, args.stall)
    except OSError as error:
        stop(f"cannot start the command, or watch it: {error}")
    cut = bool(watched.ended) or watched.status != 0
    records = reading.read(folder, cut=cut, stalled=watched.ended == "stall")
    status = say(args, records, watched)
    return watching.CTRL_C if watched.ended == "Ctrl-C" else status


def say(args, records, watched):
    """Print what is said of some records, and write it; return the exit status."""
    said = report.put_together(records, watched, args.seconds, args.stall)
    drawing = picture.draw(said.steps) if args.picture and said.steps else None
    if drawing:
        pathlib.Path(args.picture).write_text(drawing)
        said.lines.append(f"the picture: {args.picture}")
    report.show(said)
    if args.json:
        pathlib.Path(args.json).write_text(report.as_json(said, watched))
    return said.status


def judge(args):
    """Judge the records of a command that ran, or runs, elsewhere; return the exit status."""
    for folder in args.judge:
        if not os.path.isdir(folder):
            stop(f"there is no folder {folder}")
    try:
        records = reading.read(*args.judge, cut=None)
    except (OSError, ValueError) as error:
        stop(f"cannot read the records: {error}")
    if not (records.runs or records.strangers or records.failures):
        stop(
            f"no records in {' '.join(args.judge)}: did python start there with the variables of"
            " --records, without -I and -E, and import torch?"
        )
    return say(args, records, watching.ELSEWHERE)


def record(args):
    """Start the command so that it keeps records; return its status, if it does not replace this.

    With --print-environment, print instead what any launcher must carry.
    """
    try:
        variables = recording.environment_to_keep(args.records)
        if args.print_environment:
            print(recording.as_exports(variables))
            return 0
        print(f"check_training.py: the records go to {args.records}", file=sys.stderr, flush=True)
        if not args.seconds:  # signals, the terminal and the status are the command's own
            os.execvpe(args.command[0], args.command, {**os.environ, **variables})
        with foreign_command.cleaning_up():
            watched = watching.watch(args.command, args.records, variables, args.seconds, math.inf)
        if watched.ended == "Ctrl-C":
            return watching.CTRL_C
        return watched.status or 0  # 0, too, if its time was up
    except OSError as error:
        stop(f"cannot record in {args.records}, or start the command: {error}")


def main():
    """Do what was asked; exit with the status."""
    args = options.parse()
    try:
        os.getcwd()
    except OSError:
        stop("the current folder has been removed: change to another one")
    if args.judge:
        sys.exit(judge(args))
    if args.records:
        sys.exit(record(args))
    try:
        folder = tempfile.mkdtemp(prefix="check_training_")
    except OSError as error:
        stop(f"cannot write temporary files: {error}")
    with foreign_command.cleaning_up(folder):
        sys.exit(watch_and_report(args, folder))


if __name__ == "__main__":
    main()
