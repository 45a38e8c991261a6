"""The rules, by subject. To add one, write a function in the file of its subject.

The order of the files below, and of the rules in a file, is the order of what is said: causes
before their consequences. findings.rule() says how one rule hides another.
"""

# ruff: noqa: F401, I001
from ..findings import RULES
from . import groups, models, weights, data, batches, modes
from . import evaluation, gradients, optimizers, files, resumes, settings
