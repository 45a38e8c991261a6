"""Kill your own training script at random moments: does it still end with the same result?

Try this before a long job. The script may be any that torchrun (or python) starts:

    python tools/kill_test.py --rounds 3 --seed 2 -- torchrun --standalone \
        --nproc-per-node=2 --max-restarts=3 template/train.py

    undisturbed: 9.8 s, sha256 dbccb0cc1754
    round 1: equal, went on; 1 killed, command started 2 times, 0% of the work done again, 15.0 s
        6.7 s  launcher killed after: [rank 0/2] step 40/60 | training loss 2.8999 | validation...
               [rank 0/2] resumed from train.pt after step 60, saved on node1
    ...
    3 of 3 rounds ended equal, 3 of these went on; killed: launcher 3, rank 2, worker 1

The command runs once undisturbed. Then come the rounds. In each, SIGKILL hits one to three victims:
a rank (a process of the job), a worker (a child of a rank, such as a DataLoader's), or the launcher
(torchrun). The line below a victim is the next one with "resum" (--resumed), unless the undisturbed
run prints it, too. torchrun starts ranks again. If the command itself fails, it is started again.

A round fails if it ends with another result, if the last start prints none, if a step of the
undisturbed run was done by nobody, if the work is begun anew though half of it was done, if it
hangs (--limit), leaves processes behind, or if what a killed process had started works on
(--orphans), so that the next start meets it. Its folder is kept then, and the exit status is 1.

What your script needs: it saves to a relative path, and goes on from there. (Each round has a
folder of its own. Programs and .py files run where they are. Give data by absolute paths.) It
prints a checksum of its weights at the end, "sha256 ..." or what --line matches, also when it finds
that all is done. Or it leaves a file for torch.load(), or a text: with --file snapshot.pt, all
tensors and values in it must be equal. It prints how far it has come: "step 3".

With --machines 2, the same on machines that launch/lab makes of this one: they die, are cut off,
leave and come back. README.md shows it. Not tested: power cuts. Not tried: GPUs.
"""

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # while the imports below take their time

import sys

import foreign_command

# The folder beside this file: Python prefers it to a file of the same name.
from kill_test.comparing import difference
from kill_test.options import LIMIT, parse
from kill_test.playing import play, play_round
from kill_test.records import KillTest
from kill_test.reference import read_reference
from kill_test.rounds_on_machines import run_on_machines
from kill_test.words import about_reference, describe, say, stop, summary, with_bar


def main():
    """Run the test, and end the process with its status, also if a signal has come."""
    test = KillTest(parse(sys.argv[1:], description=__doc__.partition("\n")[0]))
    try:
        with foreign_command.cleaning_up(test.folders):
            sys.exit(run_test(test))
    except OSError as error:  # no such command, a full disk, a closed terminal
        stop(f"cannot go on: {error}")
    except SystemExit as end:
        tell_kept(test)
        if not isinstance(end.code, int) or end.code <= 128:
            raise
        what = "Ctrl-C" if end.code == 130 else signal.Signals(end.code - 128).name
        stop(f"ended by {what}, with all that it had started", end.code)


def run_test(test):
    """Play the undisturbed run and the rounds, print what they prove, and return the status."""
    options = test.options
    base = test.base = test.new_folder("kill_test_")
    if options.keep:
        test.folders.remove(base)
    if options.machines:
        return run_on_machines(test, base)
    say(f"{options.rounds} rounds, drawn with --seed {options.seed}")
    run = play_undisturbed(test, base)
    reference = read_reference(options, run)
    test.reference = reference
    say(f"undisturbed: {run.seconds:.1f} s, {reference.result}")
    for text in about_reference(test):
        say(f"note: {text}")
    rounds = play_rounds(test, base)
    if any(played.verdict.unequal for played in rounds):
        say(f"note: {compare_undisturbed(test, base)}")
    say("\n".join(summary(options, reference, rounds)))
    failed = any(played.verdict.failure for played in rounds)
    proven = any(played.verdict.proves for played in rounds)
    return 1 if failed or not proven else 0


def tell_kept(test):
    """Print where the folder of all runs is, if it stays."""
    if test.base and test.base not in test.folders:
        say(f"kept: {test.base}")


def play_undisturbed(test, base):
    """Play the undisturbed run; return the Run. base: the folder for all runs."""
    limit = test.options.limit or LIMIT
    run = play(test, f"{base}/undisturbed", limit=limit)
    if run.failure and test.options.named_files:
        # Not taken along before: an old run may have left them.
        test.copies = test.options.named_files
        run = play(test, f"{base}/with_files", limit=limit)
    return run


def play_rounds(test, base):
    """Play all rounds and print how they went; return a list of Round."""
    rounds = []
    numbers = range(1, test.options.rounds + 1)
    for number in with_bar(numbers):
        played = play_round(test, number, f"{base}/round{number}")
        rounds.append(played)
        say("\n".join(describe(played, test.reference)))
        test.keep_or_remove(played)
    return rounds


def compare_undisturbed(test, base):
    """Play the command once more undisturbed; return in words whether that run was equal."""
    reference = test.reference
    again = play(test, f"{base}/undisturbed_again", limit=reference.round_limit)
    differs = difference(test.options, reference, again)
    if again.failure or differs:
        where = f" ({again.failure or differs.text})"
        cure = "First seed all that is random"
        if test.options.file:
            cure += ", and leave out files with times in them"
        return f"two undisturbed runs differ, too{where}. {cure}"
    return (
        "one more undisturbed run was equal (as it may be, if the script differs by itself now"
        " and then)"
    )


if __name__ == "__main__":
    main()
