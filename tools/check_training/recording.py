"""How the recorder comes into Python processes: a folder in their path, and two variables."""

import os
import pathlib
import shlex
import shutil
import tempfile
import zlib

SITE = "site-packages"  # so foreign_command.error() takes the recorder for a package
PACKAGE = "check_training_recorder"  # this package, as the recorder's processes know it
HERE = pathlib.Path(__file__).absolute().parent
NEEDED = ["__init__.py", "lines.py", "records", "recorder"]  # of this package, by the recorder


def environment(records):
    """Return {variable: value} with which processes write to a folder; it gets links to this one.

    The folder in Python's path has the recorder's sitecustomize.py, and this package by another
    name: nothing else of tools/ can be imported from there.
    """
    site = pathlib.Path(records, SITE)
    site.mkdir()
    (site / "sitecustomize.py").symlink_to(HERE / "recorder/sitecustomize.py")
    (site / PACKAGE).symlink_to(HERE)
    return variables(records, site)


def environment_to_keep(records):
    """Return the same for a folder that stays, and that other machines may see.

    It is made, and gets a copy of the recorder. So the folder is all that must be there. Several
    machines may call this at once. OSError: it cannot be written.
    """
    records = pathlib.Path(records).absolute()
    site = records / SITE / f"{version():08x}"
    site.parent.mkdir(parents=True, exist_ok=True)
    if not site.is_dir():
        new = pathlib.Path(tempfile.mkdtemp(prefix="new-", dir=site.parent))
        new.chmod(0o755)
        copy_to(new)
        try:
            new.rename(site)
        except OSError:  # another machine was faster
            shutil.rmtree(new)
    return variables(records, site)


def copy_to(site):
    """Copy what the recorder needs."""
    (site / PACKAGE).mkdir()
    shutil.copyfile(HERE / "recorder/sitecustomize.py", site / "sitecustomize.py")
    for name in NEEDED:
        if (HERE / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(HERE / name, site / PACKAGE / name, ignore=ignored)
        else:
            shutil.copyfile(HERE / name, site / PACKAGE / name)


def version():
    """Return a checksum of what the recorder needs: a folder may have several versions of it."""
    files = [path for name in NEEDED for path in [HERE / name, *(HERE / name).glob("*.py")]]
    texts = [path.read_bytes() for path in sorted(files) if path.is_file()]
    return zlib.crc32(b"".join(texts))


def variables(records, site):
    """Return {variable: value}, with what PYTHONPATH is here behind the recorder's folder.

    Another recorder's folder, which this shell has exported before, is left out.
    """
    old = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = [each for each in old if each and not os.path.isdir(os.path.join(each, PACKAGE))]
    return {"CHECK_TRAINING": str(records), "PYTHONPATH": os.pathsep.join([str(site), *path])}


def as_exports(environment):
    """Return the lines by which a shell exports {variable: value}."""
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in environment.items())
