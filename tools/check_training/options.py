"""The options of the command, and what is wrong with them."""

import argparse
import os
import sys

SECONDS, STALL = 60, 30  # of a command that is watched


def stop(message):
    """Say on stderr that the call is wrong, and exit with status 2."""
    print(f"check_training.py: error: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


def parse():
    """Return the options, and the words after -- as command."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s [options] -- torchrun [options] SCRIPT ...",
        description="Watch any training script, unchanged: is it right, where does its time go, who"
        " waits for whom?",
    )
    parser.error = stop
    parser.add_argument(
        "--seconds",
        type=float,
        help=f"end the command so long after the ranks have met; default {SECONDS}; with"
        " --records: 0, which is never",
    )
    parser.add_argument(
        "--stall",
        type=float,
        help=f"or when it stands still for so many seconds; default {STALL}",
    )
    parser.add_argument("--picture", help="write some steps to this SVG")
    parser.add_argument("--json", help="write all that is said to this file")
    parser.add_argument(
        "--records", help="keep the records in this folder, and judge nothing", metavar="FOLDER"
    )
    parser.add_argument(
        "--print-environment",
        action="store_true",
        help="start nothing; print the variables with which any launcher keeps such records",
    )
    parser.add_argument(
        "--judge",
        nargs="+",
        help="start nothing; judge the records in these folders",
        metavar="FOLDER",
    )
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args = parser.parse_args(sys.argv[1:at])
    args.command = sys.argv[at + 1 :]
    check(args)
    if args.seconds is None:
        args.seconds = 0 if args.records else SECONDS
    args.stall = args.stall or STALL
    return args


def check(args):
    """Stop if the options are wrong."""
    if args.judge:
        if args.command or args.records is not None or args.print_environment:
            stop("--judge starts nothing, and takes no command: give it the folders alone")
    elif args.print_environment:
        if not args.records:
            stop("--print-environment needs --records FOLDER: where shall the records go?")
        if args.command:
            stop("--print-environment starts nothing: leave out the command")
    elif not args.command:
        stop(
            "the command is missing. For example: python tools/check_training.py -- torchrun"
            " --standalone --nproc-per-node=2 train.py"
        )
    if args.records is not None:
        check_of_records(args)
    elif any(each is not None and each <= 0 for each in (args.seconds, args.stall)):
        stop("--seconds and --stall must be more than 0")
    for path in filter(None, (args.picture, args.json)):
        if not os.path.isdir(os.path.dirname(os.path.abspath(path))):
            stop(f"cannot write {path}: there is no such folder")


def check_of_records(args):
    """Stop if what is given beside --records is wrong."""
    if not args.records:
        stop("--records needs the name of a folder")
    if args.picture or args.json or args.stall is not None:
        stop("--records judges nothing: --picture, --json and --stall do not go with it")
    if args.seconds is not None and args.seconds < 0:
        stop("--seconds must not be less than 0 (0: the command is never ended)")
