"""Make a Python process write line by line, though its output may be no terminal.

start() copies this file into a folder of PYTHONPATH, as sitecustomize.py: Python runs a module of
that name when it starts. It may be any version of Python that the command uses.
"""

import os
import sys
from importlib.machinery import PathFinder


def write_line_by_line():
    for stream in sys.stdout, sys.stderr:
        try:
            stream.reconfigure(line_buffering=True, write_through=False)
        except Exception:  # noqa: S110 the stream is closed, or it is another object
            pass


def run_hidden_sitecustomize():
    """Run the environment's own sitecustomize, which this module hides."""
    here = os.path.dirname(__file__)
    sys.path[:] = [folder for folder in sys.path if folder != here]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec:
        from importlib.util import module_from_spec

        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    write_line_by_line()
    run_hidden_sitecustomize()
