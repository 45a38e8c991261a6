"""All that one GPU can show of this collection, in one call of at most eight minutes.

    python tests/one_gpu FOLDER

__main__.py     the command: its options
running.py      runs the checks, and writes the report after each of them
checks/         the checks, a file for each subject; __init__.py has their order
check.py        what a check is
shell.py        runs the commands of one check, until its time is up
printed.py      what is read from the output of a command
inside/         what the checks start under torchrun, in processes of its own
report.py       what came of the checks: FOLDER/one_gpu.json
page.py         --write: shows a report in tests/README.md
"""
