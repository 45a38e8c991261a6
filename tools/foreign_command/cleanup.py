"""Leave nothing behind: end what runs, remove what is temporary, also when a signal comes."""

import contextlib
import shutil
import signal

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)

running = []  # the commands that have been started and not ended: one, or one a namespace
_deferring = []  # an element for each block of later() that is being run
_waiting = []  # the numbers of the signals that have come


@contextlib.contextmanager
def cleaning_up(*folders):
    """A context that leaves nothing behind: no process of a command, and none of these folders.

    Ctrl-C, SIGTERM, SIGHUP (the terminal is closed) and SIGQUIT raise SystemExit in it, with status
    128 + the signal's number. From then on they are ignored: a second one cuts no cleaning short.
    folders: a list may be given, which grows later.
    """

    def leave(number, _):
        ignore(old)
        _waiting.append(number)
        if not _deferring:
            raise SystemExit(128 + number)

    # nohup has SIGHUP ignored: so it stays.
    old = {
        number: signal.getsignal(number)
        for number in SIGNALS
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    for number in old:
        signal.signal(number, leave)
    try:
        yield
    finally:
        ignore(old)
        for command in [*running]:
            command.end()
        for folder in folders:
            for path in [folder] if isinstance(folder, str) else folder:
                shutil.rmtree(path, ignore_errors=True)
        _waiting.clear()
        for number, handler in old.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def later():
    """A context in which a signal does not raise: at its end it does. (For what must be noted.)"""
    _deferring.append(True)
    try:
        yield
    finally:
        _deferring.pop()
        if _waiting and not _deferring:
            raise SystemExit(128 + _waiting[0])


def ignore(numbers):
    """Let these signals have no effect."""
    for number in numbers:
        signal.signal(number, do_nothing)


def do_nothing(*_):
    """Take a signal. (Of a SIG_IGN that is set while a signal comes, Python prints a complaint.)"""
