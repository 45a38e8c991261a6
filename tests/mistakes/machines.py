"""What is left of a run on two machines, of which the second alone has a file that differs."""

from unittest import mock

import torch


def two_runs(folder, events, last_start):
    """Return (a test with its undisturbed run, the run of a round).

    events: that file of kill_test. last_start: the moment when ranks were last started.
    """
    runs = []
    for name, value in ("undisturbed", 3.0), ("round", 4.0):
        run = events.MachinesRun("/none")
        for node in ("node1", "node2"):
            work = folder / name / node
            work.mkdir(parents=True)
            run.machines.append(events.Machine(node, [], str(work), ""))
        torch.save({"weight": torch.tensor([value])}, work / "best.pt")
        runs.append(run)
    undisturbed, run = runs
    run.at_the_end, run.worlds = run.machines, [events.World(last_start, 2)]
    test = mock.Mock()
    test.reference.run, test.options.file = undisturbed, []
    return test, run
