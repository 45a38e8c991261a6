"""What is left of a run on two machines, of which the second alone has a file that differs."""

from unittest import mock

import torch


def two_runs(folder, events, last_start, last_value=4.0, ranks=2):
    """Return (a test with its undisturbed run, the run of a round).

    events: that file of kill_test. last_start: the moment when ranks were last started, for the
    second time. last_value: of the weight in the round; it is 3 in the undisturbed run.
    """
    runs = []
    for name, value in ("undisturbed", 3.0), ("round", last_value):
        run = events.MachinesRun("/none")
        for node in ("node1", "node2"):
            work = folder / name / node
            work.mkdir(parents=True)
            run.machines.append(events.Machine(node, [], str(work), ""))
        torch.save({"weight": torch.tensor([value])}, work / "best.pt")
        runs.append(run)
    undisturbed, run = runs
    run.at_the_end, run.worlds = (
        run.machines,
        [events.World(when, ranks) for when in (0, last_start)],
    )
    test = mock.Mock()
    test.reference.run, test.options.file = undisturbed, []
    return test, run
