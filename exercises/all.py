"""Go through the exercises in their order, from the first one that is not solved.

    python exercises/all.py
    python exercises/all.py --watch      # check again whenever you save the file
    python exercises/all.py --hint       # with a second hint, where there is one
    python exercises/all.py --solution   # the solutions, not yours

An exercise that was solved is not run again until its file changes.
"""

import signal
import sys
import time

signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C while torch is imported: without a traceback

from checker import FOLDER, ending_cleanly, hash_of, parse_args, remembered, solved

EXERCISES = sorted(FOLDER.glob("[0-9]*.py"))


def main():
    args = parse_args(watch=True)
    known = {} if args.solution else remembered()
    done = {one for one in EXERCISES if known.get(one.name) == hash_of(one)}
    for exercise in EXERCISES:
        if exercise in done:
            print(f"== {exercise.name}: solved", flush=True)
            continue
        print(f"== {exercise.name}", flush=True)
        while True:
            before = exercise.read_bytes()  # it may be saved during the check, too
            if solved(exercise, args):
                break
            print(f"{len(done)} of {len(EXERCISES)} solved. Next: exercises/{exercise.name}")
            if not args.watch:
                sys.exit(1)
            wait_until_saved(exercise, before)
        done.add(exercise)
    print(f"{len(done)} of {len(EXERCISES)} solved")


def wait_until_saved(exercise, before):
    print(f"-- checked again when you save exercises/{exercise.name}; Ctrl-C ends --", flush=True)
    while True:
        time.sleep(0.2)
        try:
            if exercise.read_bytes() != before:
                return
        except FileNotFoundError:  # some editors write another file, and move it here
            pass


if __name__ == "__main__":
    with ending_cleanly():
        main()
