"""Comes into each Python process by PYTHONPATH, and starts the recorder when torch is imported.

It stands in a folder beside the package, which is called check_training_recorder there: a link to
it, or a copy of what the recorder needs. Nothing else of the tools can be imported from there.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import traceback

HERE = os.path.dirname(os.path.abspath(__file__))
FOLDER = os.environ.get("CHECK_TRAINING", "")  # for the records; "": the recorder stays out
NAME = "check_training_recorder"  # of the package, in this process


class AfterTorch(importlib.abc.MetaPathFinder):
    """Starts the recorder when torch has been imported.

    A package may ask before whether torch is there, by importlib.util.find_spec().
    """

    searching = False

    def find_spec(self, name, path, target=None):
        """Return the spec of torch, whose module starts the recorder as soon as it has run."""
        if name != "torch" or self.searching:
            return None
        self.searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.searching = False
        if spec is None:
            return None
        execute = spec.loader.exec_module

        def execute_then_start(module):
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            execute(module)
            start()

        spec.loader.exec_module = execute_then_start
        return spec


def start():
    """Import the package and start the recorder. If that fails, say so in a file."""
    try:
        spec = importlib.util.spec_from_file_location(
            NAME,
            os.path.join(HERE, NAME, "__init__.py"),
            submodule_search_locations=[os.path.join(HERE, NAME)],
        )
        sys.modules[NAME] = package = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(package)
        importlib.import_module(f"{NAME}.recorder").start(FOLDER)
    except Exception:
        with open(f"{FOLDER}/{os.uname().nodename}-{os.getpid()}.failed", "w") as file:
            file.write(traceback.format_exc())


def come_in():
    """Wait for torch, and run the sitecustomize.py that this one stands in the way of."""
    sys.path[:] = [place for place in sys.path if os.path.abspath(place) != HERE]
    if FOLDER:
        sys.meta_path.insert(0, AfterTorch())
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec:
        sys.modules["sitecustomize"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    come_in()
