"""Watch any training script, unchanged: is it right, where does its time go, who waits for whom?

    python tools/check_training.py [--seconds 60] [--picture steps.svg] [--json found.json] \
        -- torchrun --standalone --nproc-per-node=2 train.py

Nothing to import, no line to change: check_training/recorder comes into each Python process of the
command by PYTHONPATH, and notes there what torch is asked to do. Afterwards check_training/rules
compare the ranks. What is wrong is "found". What may be meant so is a "question". Then come the
parts of a step. Status 0: nothing found; 1: found, or the script fails or stands still; 2: a wrong
call. "Nothing found" is no proof: it says what was looked at, and what was not seen.
"""

import argparse
import os
import pathlib
import sys
import tempfile

import foreign_command
from check_training import picture, report, runs, watching


def stop(message):
    """Say on stderr that the call is wrong, and exit with status 2."""
    print(f"check_training.py: error: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


def parse_args():
    """Return the options, and the words after -- as command."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s [options] -- torchrun [options] SCRIPT ...",
        description=__doc__.partition("\n")[0],
    )
    parser.error = stop
    parser.add_argument(
        "--seconds",
        type=float,
        default=60,
        help="end the command so long after the ranks have met; default 60",
    )
    parser.add_argument(
        "--stall",
        type=float,
        default=30,
        help="or when it stands still for so many seconds; default 30",
    )
    parser.add_argument("--picture", help="write some steps to this SVG")
    parser.add_argument("--json", help="write all that is said to this file")
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args = parser.parse_args(sys.argv[1:at])
    args.command = sys.argv[at + 1 :]
    check(args)
    return args


def check(args):
    """Stop if the options are wrong."""
    if not args.command:
        stop(
            "the command is missing. For example: python tools/check_training.py -- torchrun"
            " --standalone --nproc-per-node=2 train.py"
        )
    if min(args.seconds, args.stall) <= 0:
        stop("--seconds and --stall must be more than 0")
    for path in filter(None, (args.picture, args.json)):
        if not os.path.isdir(os.path.dirname(os.path.abspath(path))):
            stop(f"cannot write {path}: there is no such folder")


def watch_and_report(args, folder):
    """Run the command, print what is said of it, and return the exit status.

    folder: for the records.
    """
    try:
        watched = watching.watch(args.command, folder, args.seconds, args.stall)
    except OSError as error:
        stop(f"cannot start the command, or watch it: {error}")
    cut = bool(watched.ended) or watched.status != 0
    records = runs.read(folder, cut, stalled=watched.ended == "stall")
    said = report.put_together(records, watched, args.seconds, args.stall)
    drawing = picture.draw(said.steps) if args.picture and said.steps else None
    if drawing:
        pathlib.Path(args.picture).write_text(drawing)
        said.lines.append(f"the picture: {args.picture}")
    report.show(said)
    if args.json:
        pathlib.Path(args.json).write_text(report.as_json(said, watched))
    return watching.CTRL_C if watched.ended == "Ctrl-C" else said.status


def main():
    """Watch the command; exit with the status."""
    args = parse_args()
    try:
        os.getcwd()
    except OSError:
        stop("the current folder has been removed: change to another one")
    try:
        folder = tempfile.mkdtemp(prefix="check_training_")
    except OSError as error:
        stop(f"cannot write temporary files: {error}")
    with foreign_command.cleaning_up(folder):
        sys.exit(watch_and_report(args, folder))


if __name__ == "__main__":
    main()
