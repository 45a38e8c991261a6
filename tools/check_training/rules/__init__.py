"""The rules, by subject: each compares what the ranks have noted, and says what is wrong.

To add a rule, write a function with the decorator findings.rule in the file of its subject:

    - It takes a Run (runs.py), which has the ranks' records (../records) and puts them together.
    - It yields a Found where the records prove a mistake, and a Question where it may be meant so.
    - Its docstring says what it sees, and what looks alike and is right.
    - Does it see the consequence of what another rule finds? Then name that rule's subject in
      unless, so that the cause alone is said.

Then add the mistake to tests/mistakes/check_training.py, and what looks alike to RIGHT there.

The order of the files below, and of the rules in a file, is the order of what is said: causes
before their consequences.
"""

# ruff: noqa: F401, I001
from ..findings import RULES
from . import machines, groups, models, weights, splits, data, batches, lengths, augmentation, modes
from . import (
    evaluation,
    figures,
    gradients,
    clipping,
    unreached,
    optimizers,
    files,
    resumes,
    restarts,
)
from . import settings
