"""Check the exercises in their order, up to the first that is not solved, and say how many are.

    python exercises/all.py
    python exercises/all.py --solution   # the solutions, not yours
"""

import argparse
import sys
from pathlib import Path

from checker import SOLUTIONS, solved

FOLDER = Path(__file__).resolve().parent
EXERCISES = sorted(FOLDER.glob("[0-9]*.py"))

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--solution", action="store_true", help="check the solutions, not yours")
    args = parser.parse_args()
    for done, exercise in enumerate(EXERCISES):
        print(f"== {exercise.name}", flush=True)
        if not solved(exercise, SOLUTIONS / exercise.name if args.solution else None):
            print(f"{done} of {len(EXERCISES)} solved. Next: python exercises/{exercise.name}")
            sys.exit(1)
    print(f"{len(EXERCISES)} of {len(EXERCISES)} solved")
