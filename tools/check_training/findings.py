"""What a rule yields, and which rule hides which: causes are said, their consequences are not."""

from dataclasses import dataclass

RULES = []  # all rules, in the order of their files


@dataclass(slots=True)
class Finding:
    """One thing that is said of a run."""

    what: str  # with ranks, step and line of the script
    why: str = ""  # what it costs, or what to do
    read: str = ""  # the page that cures it, from the collection's top folder
    once: str = ""  # of all findings with this text, the first alone is said; "": what


class Found(Finding):
    """The records prove it."""


class Question(Finding):
    """It may be meant so; the owner of the script knows."""


@dataclass(slots=True)
class Rule:
    """A function that takes a Run and yields findings, and when it is asked."""

    function: object
    subject: str
    unless: frozenset

    @property
    def name(self):
        return self.function.__name__


def rule(subject="", unless=()):
    """Make a function a rule.

    subject: what is wrong in a run of which it yields something ("data", "weights"); "" if no other
        rule need know.
    unless: it is not asked if one of these subjects is wrong: it would see consequences alone.
    """

    def register(function):
        RULES.append(Rule(function, subject, frozenset(unless)))
        return function

    return register


def in_order(rules):
    """Return the rules, each behind those that may hide it, else in the order given."""
    todo, done = list(rules), []
    while todo:
        waiting = {each.subject for each in todo}
        ready = [each for each in todo if not each.unless & waiting - {each.subject}]
        if not ready:
            raise ValueError(f"these rules hide each other: {[each.name for each in todo]}")
        done += ready
        todo = [each for each in todo if each not in ready]
    return done


def judge(run, rules=None):
    """Ask the rules of a run; return (findings, subjects that are wrong)."""
    findings, wrong, said = [], set(), set()
    for each in in_order(RULES if rules is None else rules):
        if each.unless & wrong:
            continue
        for finding in each.function(run):
            wrong |= {each.subject} - {""}
            if (key := finding.once or finding.what) not in said:
                said.add(key)
                findings.append(finding)
    return findings, wrong
