"""What a rule yields, and which rule hides which: causes are said, their consequences are not."""

from dataclasses import dataclass, field

from .machines import with_names

RULES = []  # all rules, in the order in which rules/__init__.py imports their files


@dataclass(slots=True)
class Finding:
    """One thing that is said of a run."""

    what: str  # with ranks, step and line of the script
    why: str = ""  # what it costs, or what to do
    read: str = ""  # the page that cures it, from the collection's top folder
    # Of all findings of a run with this text, the first alone is said; "": what
    once: str = field(default="", compare=False)


class Found(Finding):
    """The records prove it."""


class Question(Finding):
    """It may be meant so; the owner of the script knows."""


@dataclass(slots=True)
class Rule:
    """A function that yields findings, and when it is asked. rule() says what the fields mean."""

    function: object
    subject: str
    unless: frozenset
    asks_if: frozenset
    of_strangers: bool

    @property
    def name(self):
        """The function's name."""
        return self.function.__name__

    @property
    def heeds(self):
        """The subjects that change what it says: these must be judged before."""
        return (self.unless | self.asks_if) - {self.subject}


def rule(subject="", unless=(), asks_if=(), of_strangers=False):
    """Make a function a rule: it takes a Run of several ranks, and yields findings.

    subject: what is wrong in a run of which it yields something ("data", "weights"); "" if no other
        rule need know.
    unless: it is not asked if one of these subjects is wrong: it would see consequences alone. Its
        own subject may be one: then the rules of this subject before it hide it.
    asks_if: what it finds becomes a question if one of these subjects is wrong.
    of_strangers: it takes a list of ranks: those that have joined no group, and those that are
        alone in theirs. It is asked where no group of several ranks came together.
    """

    def register(function):
        sets = frozenset(unless), frozenset(asks_if)
        RULES.append(Rule(function, subject, *sets, of_strangers))
        return function

    return register


def in_order(rules):
    """Return the rules in the order given, but each behind those that it heeds."""
    todo, done = list(rules), []
    while todo:
        waiting = {each.subject for each in todo}
        ready = [each for each in todo if not each.heeds & waiting]
        if not ready:
            raise ValueError(f"these rules hide each other: {[each.name for each in todo]}")
        done.append(ready[0])
        todo.remove(ready[0])
    return done


@dataclass(slots=True)
class Judgement:
    """What the rules say."""

    findings: list = field(default_factory=list)  # causes before consequences
    wrong: set = field(default_factory=set)  # subjects of the rules that have found something


def judge(run, rules=None):
    """Ask the rules of a run; return their Judgement. rules: a list; None: all of them."""
    judgement, said = Judgement(), set()
    for each in in_order(RULES if rules is None else rules):
        if each.unless & judgement.wrong:
            continue
        asks = bool(each.asks_if & judgement.wrong)
        for finding in each.function(run):
            if each.subject:
                judgement.wrong.add(each.subject)
            key = finding.once or finding.what
            if key in said:
                continue
            said.add(key)
            if asks:
                finding = Question(finding.what, finding.why, finding.read, finding.once)
            judgement.findings.append(finding)
    return judgement


def judge_all(records, rules=None):
    """Ask the rules of all runs; return a Judgement, whose wrong is that of the last run.

    records: Records, as reading.read() returns them.
    """
    rules = RULES if rules is None else rules
    if not any(len(run.ranks) > 1 for run in records.runs):
        alone = [rank for run in records.runs for rank in run.ranks.values()]
        return judge(records.strangers + alone, [each for each in rules if each.of_strangers])
    whole = Judgement()
    for run in records.runs:
        judgement = Judgement()
        if len(run.ranks) > 1:
            judgement = judge(run, [each for each in rules if not each.of_strangers])
        named = [with_names(each, run) for each in judgement.findings]
        whole.findings += [each for each in named if each not in whole.findings]
        whole.wrong = judgement.wrong
    return whole
