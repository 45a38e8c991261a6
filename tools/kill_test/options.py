"""The command line of kill_test.py."""

import argparse
import os
import random
import re
from dataclasses import dataclass

from .words import stop

KINDS = ("rank", "worker", "launcher")  # of processes that may be killed
# What may happen to machines: one dies, its link is cut, it leaves by SIGTERM, it joins later; or
# the first one goes, with the rendezvous.
MACHINE_KINDS = ("machine", "link", "leave", "join", "first")
# How far the script has come: "epoch 3"; "Train: 4 [ 5/18" and "Epoch: [2] [ 5/10]"; "| 42/80" or
# "━ 42/80" in a progress bar.
MARK = (
    r"(?i)(epoch|step|iter(ation)?)\W{0,8}\d+|train\W{1,2}\d+(?=\s*\[\s*\d+/\d)"
    r"|(?<=[\d\]])\s*\[\s*\d+(?=/\d)|[|━╸╺]\s*\d+(?=/\d)"
)
SHA256 = r"(?i)sha256\W+[0-9a-f]{6,}(, [0-9a-f]{6,})*"
KILLS, KILLS_ON_MACHINES = 3, 2  # of a round, at most, if the caller does not say how many
LIMIT = 3600  # seconds for the undisturbed run
PATIENCE = 30  # seconds; more, where the first step takes more than 15, undisturbed


@dataclass
class Options:
    """What the caller has asked for."""

    rounds: int  # how many
    kills: int  # at most so many in a round
    starts: int  # of the command, at most so many in a round
    seed: int  # of the draws
    patience: int | None  # seconds for all to end after the launcher; None: by the undisturbed run
    orphans: int  # seconds in which what a victim has started may still work
    limit: int | None  # seconds for a run; None: LIMIT, and for a round by the undisturbed run
    victims: list[str]  # the kinds that may be killed, of KINDS; on machines of MACHINE_KINDS, too
    line: str | None  # a regular expression for a result; None: none is read
    file: list[str]  # paths of files with a result, in the working directory of the command
    resumed: str  # a regular expression for the line with which the script goes on
    step: str  # a regular expression for what says how far the script has come
    machines: int  # of launch/lab; 0: the command runs here
    shared: bool  # whether the machines have one folder; else each has its own
    rate: str | None  # of their links, "100mbit"; None: as fast as memory
    keep: bool  # whether the folders of all rounds stay
    command: list[str]  # with the absolute paths of its programs and .py files
    named_files: list[str]  # other files that the command names: maybe the snapshots of an old run


def parse(words, description):
    """Return the Options in the words of a command line. End the process if they make no sense."""
    parser = make_parser(description)
    at = words.index("--") if "--" in words else len(words)
    args, command = parser.parse_args(words[:at]), words[at + 1 :]
    if not command:
        stop(
            "the command is missing. For example: python tools/kill_test.py --rounds 10 --"
            " torchrun --standalone --nproc-per-node=2 --max-restarts=3 your_script.py"
        )
    complete(args)
    counts = [args.rounds, args.kills, args.starts]
    if args.limit is not None:
        counts.append(args.limit)
    if min(counts) < 1:
        stop("--rounds, --kills, --starts and --limit must be 1 or more")
    if not args.line:
        args.line = None if args.file else SHA256
    command, named_files = find_files(command, args.file)
    return Options(**vars(args), command=command, named_files=named_files)


def complete(args):
    """Fill in what depends on the number of machines; stop if it does not fit."""
    if args.machines and not 2 <= args.machines <= 9:
        stop("--machines takes a number from 2 to 9")
    if not args.machines and (args.shared or args.rate):
        stop("--shared and --rate are for --machines")
    kinds = KINDS + MACHINE_KINDS if args.machines else KINDS
    args.victims = args.victims or [*kinds]
    if unknown := [kind for kind in args.victims if kind not in kinds]:
        stop(f"--victims {' '.join(unknown)} needs --machines")
    if args.kills is None:
        args.kills = KILLS_ON_MACHINES if args.machines else KILLS


def find_files(command, results):
    """Return the command as it can be run in another folder, and other files that it names.

    results: the paths of --file, which the script is to write itself.
    """
    words, named_files = [], []
    for word in command:
        is_file = os.path.isfile(word)
        if is_file and (word.endswith(".py") or os.access(word, os.X_OK)):
            word = os.path.abspath(word)  # it may import what lies beside it
        elif is_file and word not in results and not word.startswith(("/", "..")):
            named_files.append(word)
        words.append(word)
    return words, named_files


def make_parser(description):
    """Return the parser of the options, without the command behind "--"."""
    parser = argparse.ArgumentParser(
        usage="%(prog)s [options] -- torchrun [options] SCRIPT ...", description=description
    )
    parser.error = stop
    add_numbers(parser)
    add_machines(parser)
    parser.add_argument(
        "--victims",
        nargs="+",
        choices=KINDS + MACHINE_KINDS,
        help="what may be killed, or happen; default: all",
    )
    parser.add_argument(
        "--line",
        type=regex,
        help="compare the last text printed that matches this"
        " regular expression (without --file: a sha256)",
    )
    parser.add_argument(
        "--file",
        action="append",
        default=[],
        help="compare this file of"
        " torch.save() or of safetensors, tensor by tensor, or this text, or all files of this"
        " folder; may be given several times",
    )
    parser.add_argument(
        "--resumed",
        type=regex,
        default="(?i)resum",
        help="a regular expression for the line with which the script goes on",
    )
    parser.add_argument(
        "--step",
        type=regex,
        default=MARK,
        help="a regular expression for what"
        " numbers the work in a line, up to its number; default: epoch, step, iter",
    )
    parser.add_argument("--keep", action="store_true", help="keep the folders of all rounds")
    return parser


def add_machines(parser):
    """Add the options that are about several machines."""
    parser.add_argument(
        "--machines",
        type=int,
        default=0,
        metavar="N",
        help="start the command on so many machines, which launch/lab makes of this one",
    )
    parser.add_argument("--shared", action="store_true", help="these have one folder in common")
    parser.add_argument("--rate", help="of their links: 100mbit, 1gbit")


def add_numbers(parser):
    """Add the options that are whole numbers."""

    def add(name, default, text):
        parser.add_argument(f"--{name}", type=int, default=default, help=text)

    add("rounds", 10, "how many; default: 10")
    most = f"{KILLS}; with --machines {KILLS_ON_MACHINES}"
    add("kills", None, f"at most so many in a round, or events; default: {most}")
    add("starts", 8, "start the command at most so often in a round; default: 8")
    add("seed", random.randrange(10**6), "of the draws; drawn if not given")
    add("patience", None, f"seconds for all to end after the launcher; {PATIENCE} or more")
    add("orphans", 2, "seconds in which what a victim has started may still work; default: 2")
    add("limit", None, f"seconds for a run; default: {LIMIT}; a round: 900 and 10 such runs")


def regex(text):
    """Return the text, if it is a regular expression. (For argparse.)"""
    try:
        return re.compile(text).pattern
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {error}") from None
