"""Start the scripts of this folder under check_training and kill_test: what is said of each?

    python tests/trainers --right
    python tests/trainers --mistakes all
    python tests/trainers --kill
    python tests/trainers --page tools/trainers.md

Each command takes names of trainers, too. A run lasts 20 to 60 seconds on two cores, and kill_test
takes some minutes for each script.

Each script runs in a fresh folder, right and with each of its mistakes (catalogue.py). Without
--kill, check_training watches it. With --kill, kill_test kills each right script, and its verdicts
come into the same JSON, beside what stood there. The exit status is 1 if check_training says
something of a right script that is not in catalogue.py, or if it changes a result. --page writes
the tables of tools/trainers.md. The packages are those of requirements-trainers.txt.
"""

import argparse
import importlib.metadata
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

from catalogue import TRAINERS
from page import expected, page

HERE = pathlib.Path(__file__).resolve().parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
STANDALONE = ["--standalone"]
# After a restart by torchrun, Gloo's ranks must not read the addresses of the dead.
RESTARTS = ["--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
# The JSON keeps these lines of kill_test.
KILL_LINES = r"\d+ rounds, |undisturbed: |round \d+: |note: |\d+ of |(not )?proven: "


def main():
    args = parse_args()
    rows = json.loads(args.out.read_text()) if args.out.exists() else []
    wrong = []
    for trainer, way, mistake in cases(args):
        row = find_row(rows, trainer, way, mistake)
        row |= killed(trainer, way, args) if args.kill else checked(trainer, way, mistake, args)
        args.out.write_text(json.dumps(rows, indent=1) + "\n")
        print(f"{trainer.name} {way} {mistake or 'right'}: {summary(row)}", flush=True)
        wrong += [f"{trainer.name} {way}: {each}" for each in unexpected(row, trainer)]
    if args.page:
        args.page.write_text(page(args.page.read_text(), rows, TRAINERS))
    if wrong:
        sys.exit("\n".join(["A right script must not be accused:", *wrong]))


def cases(args):
    """Yield (trainer, name of the way, mistake or "") for each run that is asked for."""
    for trainer in () if args.page else TRAINERS:
        if args.names and trainer.name not in args.names:
            continue
        for way in [""] if args.kill or args.one_way else trainer.ways:
            if not args.mistakes:
                yield trainer, way, ""
        for mistake in () if args.kill or args.right else trainer.mistakes:
            if not args.mistakes or {mistake, "all"} & set(args.mistakes):
                yield trainer, "", mistake


def find_row(rows, trainer, way, mistake):
    """Return the row of this case, which is made if it is not there yet."""
    row = {"trainer": trainer.name, "way": way, "mistake": mistake}
    for old in rows:
        if row.items() <= old.items():
            return old
    versions = {name: importlib.metadata.version(name) for name in ("torch", *trainer.packages)}
    rows.append(row | {"versions": versions, "wrong": trainer.mistakes.get(mistake, "")})
    return rows[-1]


def command(trainer, way, options):
    if trainer.ways[way].get("START") == "python":
        return [sys.executable, str(HERE / trainer.script)]
    return [*TORCHRUN, *options, str(HERE / trainer.script)]


def environment(trainer, way, mistake, args):
    return (
        os.environ
        | trainer.ways[way]
        | dict(args.set)
        | {
            "MISTAKE": mistake,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
    )


def run(words, env, limit):
    """Run a command in a fresh folder. Return (its output, its status, seconds)."""
    with tempfile.TemporaryDirectory(prefix="trainers_") as folder:
        start = time.monotonic()
        # Its own session, so that a run beyond the limit is ended with all that it has started.
        process = subprocess.Popen(
            words,
            cwd=folder,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            output = end(process)
        return output, process.returncode, round(time.monotonic() - start, 1)


def end(process):
    """End a command with all of its session, and return what it has printed."""
    for sent in signal.SIGTERM, signal.SIGKILL:
        os.killpg(process.pid, sent)
        try:
            return process.communicate(timeout=30)[0]
        except subprocess.TimeoutExpired:
            continue
    return ""


def checksums(output):
    return sorted(set(re.findall(r"sha256 ([0-9a-f]{16})", output)))


def checked(trainer, way, mistake, args):
    """Return what check_training says of the script, and whether it changes the result."""
    words, env = command(trainer, way, STANDALONE), environment(trainer, way, mistake, args)
    row = {}
    if not mistake or args.both:
        output, status, seconds = run(words, env, 2 * args.seconds)
        row["without"] = {"status": status, "seconds": seconds, "sha256": checksums(output)}
        if status and not mistake:
            print(output, file=sys.stderr)
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        tool = [sys.executable, str(args.tools / "check_training.py"), "--json", file.name]
        tool += ["--seconds", str(args.seconds), "--"]
        output, status, seconds = run([*tool, *words], env, 2 * args.seconds)
        text = pathlib.Path(file.name).read_text()
    found = json.loads(text) if text else {"status": status, "said": [], "lines": []}
    row["with"] = {"status": status, "seconds": seconds, "sha256": checksums(output)}
    row["said"] = [{"level": each["level"], "what": each["what"]} for each in found["said"]]
    unseen = ("no process", "the recorder")  # how the lines begin that say that it saw nothing
    row["unseen"] = [line for line in found["lines"] if line.startswith(unseen)]
    return row


def killed(trainer, way, args):
    """Return what kill_test says of the right script, started this way."""
    tool = [sys.executable, str(args.tools / "kill_test.py"), "--rounds", "3", "--seed", "2"]
    tool += ["--victims", "rank", *(["--keep"] if args.keep else []), "--"]
    words, env = command(trainer, way, RESTARTS), environment(trainer, way, "", args)
    output, status, seconds = run([*tool, *words], env, args.limit)
    lines = [line for line in output.splitlines() if re.match(KILL_LINES, line)]
    return {"kill": {"status": status, "seconds": seconds, "lines": lines}}


def summary(row):
    """Return the results of one row in some words."""
    parts = []
    if "with" in row:
        seconds = [row[key]["seconds"] for key in ("without", "with") if key in row]
        words = f"{' / '.join(map(str, seconds))} s; {same_result(row)}; "
        parts.append(words + "; ".join(sentences(row)))
    if "kill" in row:
        verdicts = [line for line in row["kill"]["lines"] if re.match(r"round \d+: |\d+ of ", line)]
        parts.append(f"kill_test {row['kill']['seconds']} s: " + "; ".join(verdicts))
    return " | ".join(parts)


def sentences(row):
    """Return what check_training said, its level first; what it printed else, if it saw nothing."""
    words = {"found": "found", "asked": "question"}
    said = [f"{words[each['level']]}: {each['what']}" for each in row["said"]]
    return said + row["unseen"] or ["nothing found"]


def same_result(row):
    if "without" not in row:
        return "not compared"
    same = row["without"]["sha256"] == row["with"]["sha256"] != []
    return "same bits" if same else f"{row['without']['sha256']}, {row['with']['sha256']}"


def unexpected(row, trainer):
    """Return what should not have come of a right script: words, none of them if all is well."""
    if row["mistake"] or "with" not in row:
        return []
    wrong = [each["what"] for each in row["said"] if not expected(each, trainer)] + row["unseen"]
    if row["with"]["status"] or row["without"]["status"]:
        wrong.append("it failed")
    return wrong + ([] if same_result(row) == "same bits" else [same_result(row)])


def parse_args():
    parser = argparse.ArgumentParser(prog="python tests/trainers", description=__doc__)
    known = [trainer.name for trainer in TRAINERS]
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(known))
    parser.add_argument("--mistakes", nargs="+", help="these alone, or all")
    parser.add_argument("--right", action="store_true", help="the right scripts alone")
    parser.add_argument("--one-way", action="store_true", help="each script in its first way alone")
    parser.add_argument("--page", type=pathlib.Path, help="run nothing: write this page's tables")
    parser.add_argument("--both", action="store_true", help="mistakes without the tool, too")
    parser.add_argument(
        "--set",
        nargs="+",
        default=[],
        type=lambda text: text.split("=", 1),
        metavar="NAME=VALUE",
        help="set these in the environment of each run",
    )
    parser.add_argument("--kill", action="store_true", help="kill_test, on the right scripts")
    parser.add_argument("--keep", action="store_true", help="what kill_test's rounds have left")
    parser.add_argument("--seconds", type=int, default=180, help="check_training's")
    parser.add_argument("--limit", type=float, default=1800, help="seconds for one kill_test")
    parser.add_argument("--tools", type=pathlib.Path, default=HERE.parent.parent / "tools")
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results.json")
    args = parser.parse_args()
    if unknown := set(args.names) - set(known):
        parser.error(f"no such trainer: {', '.join(sorted(unknown))}")
    args.tools = args.tools.resolve()
    return args


if __name__ == "__main__":
    main()
