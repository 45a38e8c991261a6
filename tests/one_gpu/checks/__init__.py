"""All checks, in the order of their worth: each file has those of one subject."""

from one_gpu.check import Check
from one_gpu.checks import benchmarks, features, recipes, scripts, tools

SUBJECTS = (scripts, features, recipes, benchmarks, tools)
# {name: Check}; a file brings its checks in the order in which they stand there.
CHECKS = {
    value.name: value
    for subject in SUBJECTS
    for value in vars(subject).values()
    if isinstance(value, Check)
}
