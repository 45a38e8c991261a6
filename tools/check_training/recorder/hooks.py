"""Puts functions of the recorder around functions of torch.

The file of each subject says itself what it wraps, with one of these decorators:

    @before(Join, "__enter__")
    def joins(args, kwargs):  # is called before Join.__enter__(*args, **kwargs)

    @after(DDP, "__init__")
    def made(result, args, kwargs):  # is called after it, unless it has raised an error

    @around(DDP, "forward")
    def forward(args, kwargs):  # is a generator
        ...  # before
        result = yield
        ...  # after, unless it has raised an error

    @at_start
    def register():  # is called once, when all this is put in place

The first three take the same options:

    also               other modules that hold the same function
    closed             what the function itself calls is not noted
    even_if_it_fails   what comes after it runs after an error, too: the result is RAISED then

The owner may also be the name of another package's module, "safetensors.torch": the function is
wrapped when the script imports that module, if it does. A function that the owner does not have, in
its version, is left out.
"""

import contextlib
import functools
import importlib.abc
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import replace as replaced

import torch

from .state import switch, this_thread

RAISED = object()  # in the place of a result: there was an error, sys.exc_info()
SILENT = object()  # among what a thread is inside of: nothing is noted
# To whoever looks at the stack (torch's flight recorder, say), a wrapper is a part of torch.
FILE_OF_WRAPPERS = f"{os.path.dirname(torch.__file__)}/watched"


@dataclass(frozen=True)
class Hook:
    """What goes around a function of torch."""

    owner: object  # a class or a module; or the name of a module, as a text
    name: str  # of the function in it
    begin: Callable | None  # called before with (args, kwargs)
    end: Callable | None  # called after with (what begin has returned, result, args, kwargs)
    also: tuple = ()
    closed: bool = False
    even_if_it_fails: bool = False


_hooks = []
_starters = []


def before(owner, name, **options):
    """Call the decorated function before owner.name."""

    def register(function):
        _hooks.append(Hook(owner, name, function, None, **options))
        return function

    return register


def after(owner, name, **options):
    """Call the decorated function after owner.name."""

    def register(function):
        def end(_, result, args, kwargs):
            function(result, args, kwargs)

        _hooks.append(Hook(owner, name, None, end, **options))
        return function

    return register


def around(owner, name, **options):
    """Run the decorated generator to its yield before owner.name, and from there after it."""

    def register(function):
        def begin(args, kwargs):
            generator = function(args, kwargs)
            next(generator)
            return generator

        def end(generator, result, _args, _kwargs):
            with contextlib.suppress(StopIteration):
                generator.send(result)

        _hooks.append(Hook(owner, name, begin, end, **options))
        return function

    return register


def at_start(function):
    """Call the decorated function once, when the recorder starts."""
    _starters.append(function)
    return function


def install():
    """Put all that the subjects' files have registered in place."""
    later = AfterImport()
    for hook in _hooks:
        if not isinstance(hook.owner, str):
            _wrap(hook)
        elif hook.owner in sys.modules:
            _wrap(replaced(hook, owner=sys.modules[hook.owner]))
        else:
            later.hooks.setdefault(hook.owner, []).append(hook)
    sys.meta_path.insert(0, later)
    for function in _starters:
        function()


class AfterImport(importlib.abc.MetaPathFinder):
    """Wraps functions of modules when they are imported."""

    def __init__(self):
        """Begin without any."""
        self.hooks = {}  # {name of a module: its Hook objects}
        self.searching = False

    def find_spec(self, name, path, target=None):
        """Return the module's spec, which also wraps its functions; None for any other module."""
        if name not in self.hooks or self.searching:
            return None
        self.searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.searching = False
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_then_wrap(module):
            execute(module)
            for hook in self.hooks.pop(name, ()):
                _wrap(replaced(hook, owner=module))

        spec.loader.exec_module = execute_then_wrap
        return spec


def safely(function, *args):
    """Call a function of the recorder. If it fails, say so in a file, and note nothing more.

    What torch.compile reads in order to compile it calls nothing: the recorder is no part of that.
    """
    if torch.compiler.is_compiling() or not switch.on:
        return None
    try:
        return function(*args)
    except Exception:
        switch.on = False
        with contextlib.suppress(OSError), open(switch.failure, "w") as file:
            file.write(traceback.format_exc())  # a script may replace print()
        return None


def replace(owner, name, function, also=()):
    """Put a function in the place of owner.name, and wherever the same one stands in also."""
    old = getattr(owner, name)
    for place in (owner, *also):
        if getattr(place, name, None) is old:
            setattr(place, name, function)


def _wrap(hook):
    """Put a hook in place. What it does never reaches the script, which gets what it asked for."""
    inner = getattr(hook.owner, hook.name, None)
    if inner is None:
        return
    begin, end, closed, even_if_it_fails = (
        hook.begin,
        hook.end,
        hook.closed,
        hook.even_if_it_fails,
    )
    key = object()  # stands for this function among what a thread is inside of

    @functools.wraps(inner)
    def call(*args, **kwargs):
        # Of this, torch.compile reads the first question alone: it compiles inner.
        if torch.compiler.is_compiling() or not switch.on:
            return inner(*args, **kwargs)
        inside = this_thread.__dict__.setdefault("inside", set())
        if SILENT in inside or key in inside:
            return inner(*args, **kwargs)
        begun, result = None, RAISED
        inside |= {SILENT, key}
        try:
            if begin:
                begun = safely(begin, args, kwargs)
            if not closed:
                inside.discard(SILENT)
            result = inner(*args, **kwargs)
            return result
        finally:
            inside.add(SILENT)
            if end and (even_if_it_fails or result is not RAISED):
                safely(end, begun, result, args, kwargs)
            inside -= {key, SILENT}

    call.__code__ = call.__code__.replace(co_filename=FILE_OF_WRAPPERS)
    replace(hook.owner, hook.name, call, hook.also)
