"""Play the undisturbed run and the rounds on several machines, and print what they prove."""

import random
import re
import shutil

from .departures import draw_events
from .disks import about_disks
from .distance import Distance, distance
from .lab import Lab
from .on_machine import fewest_machines
from .options import LIMIT
from .records import Round
from .reference import read_reference
from .staging import play_on_machines
from .telling import about_machines, about_spares, describe_machines, summary_of_machines
from .verdicts import MachinesVerdict, judge_machines
from .words import about_reference, say, stop, with_bar

DRAWS = 5  # so often may a round end before its first event
ENDPOINT = re.compile(r"--(rdzv[-_]endpoint|master[-_]addr)(?:=(.*))?")


def run_on_machines(test, base):
    """Make the machines, play all on them, print what it proves, and return the status."""
    check_command(test.options)
    with Lab(test.options.machines, test.options.rate) as test.lab:
        say(f"{test.options.rounds} rounds, drawn with --seed {test.options.seed}")
        test.fewest = min(fewest_machines(test.options.command), test.options.machines)
        test.reference = play_reference(test, base)
        for text in about_machines(test):
            say(text)
        say(f"undisturbed: {test.reference.run.seconds:.1f} s, {test.reference.result}")
        undisturbed = test.reference.run
        for text in [
            *about_reference(test),
            *about_spares(undisturbed),
            *about_disks(undisturbed),
        ]:
            say(f"note: {text}")
        rounds = play_rounds(test, base)
    say("\n".join(summary_of_machines(test.options, rounds, undisturbed.worlds)))
    failed = any(played.verdict.failure for played in rounds)
    proven = any(played.verdict.proves for played in rounds)
    return 1 if failed or not proven else 0


def check_command(options):
    """Stop if the machines could not meet by this command."""
    words = options.command = [
        word.replace("{endpoint}", "node1:29603") for word in options.command
    ]
    if "--standalone" in words:
        stop(
            "--standalone lets each machine train alone. Give torchrun --nnodes=1:2 --rdzv-id=345"
            " --rdzv-backend=c10d --rdzv-endpoint=node1:29603"
        )
    for place, word in enumerate(words):
        found = ENDPOINT.fullmatch(word)
        if not found:
            continue
        address = found[2] if found[2] is not None else "".join(words[place + 1 : place + 2])
        host, _, port = address.partition(":")
        if host not in ("node1", "10.77.0.1"):
            stop(
                f"the machines of the lab cannot meet at {address}: the first is node1. Write"
                f" --{found[1]}=node1" + (":29603" if "rdzv" in found[1] else "")
            )
        if port == "0":
            stop("several machines cannot meet at port 0: write --rdzv-endpoint=node1:29603")


def play_reference(test, base):
    """Play the undisturbed run; return its Reference. base: the folder for all runs."""
    limit = test.options.limit or LIMIT
    run = play_on_machines(test, f"{base}/undisturbed", limit=limit)
    if run.failure and test.options.named_files:
        # Not taken along before: an old run may have left them.
        test.copies = test.options.named_files
        run = play_on_machines(test, f"{base}/with_files", limit=limit)
    reference = read_reference(test.options, run)
    if "rank" not in reference.seen:
        stop("no process has a RANK: start the command by torchrun, or set RANK={number}")
    leaders = {leader.machine for leader in run.leaders.values()}
    if len(leaders) > 1:
        stop(
            f"{' and '.join(sorted(leaders))} have a rank 0 each: they did not meet, and each"
            " trained alone. Give torchrun --nnodes=1:2 --rdzv-backend=c10d"
            " --rdzv-endpoint=node1:29603"
        )
    return reference


def play_rounds(test, base):
    """Play all rounds and print how they went; return a list of Round."""
    rounds = []
    for number in with_bar(range(1, test.options.rounds + 1)):
        played = play_round(test, number, f"{base}/round{number}", base)
        rounds.append(played)
        say("\n".join(describe_machines(played, test.reference)))
        test.keep_or_remove(played)
    return rounds


def play_round(test, number, folder, base):
    """Draw events and play them, until one has happened; then judge the result. Return a Round."""
    reference, options = test.reference, test.options
    part = 1.0
    for draw in range(DRAWS):
        shutil.rmtree(folder, ignore_errors=True)  # of a run in which nothing has happened
        draws = random.Random(f"{options.seed}/{number}/{draw}")
        plan = draw_events(options, draws, reference, part)
        limit = reference.round_limit
        run = play_on_machines(test, folder, plan, limit, name=f"round {number}")
        if run.kills or run.failure:
            return Round(number, run, judge_machines(test, run, lambda: measure(test, base)))
        part = 0.7 * min(part, run.seconds / reference.run.seconds)  # each time earlier
    return Round(number, run, MachinesVerdict("it ended before the first event, each time"))


def measure(test, base):
    """Return the Distance of an undisturbed run on as few machines as may be; None if it fails."""
    if test.fewer is None:
        limit, count = test.reference.round_limit, test.fewest
        run = play_on_machines(
            test, f"{base}/fewer", limit=limit, count=count, name="fewer machines"
        )
        undisturbed = f"{test.reference.run.folder}/work"
        test.fewer = Distance()
        if not run.failure:
            test.fewer = distance(run.machines[0].work, undisturbed, test.options.file)
    return test.fewer
