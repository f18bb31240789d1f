"""How the shim gets into a process, beside what is there already: FR-39, FR-40."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpususpend import errors, launch
from tests.programs.setting import ROOT, SIMCUDA

Build = Callable[..., Path]
MAPPED = "print(*sorted({l.split()[-1] for l in open('/proc/self/maps') if 'nvsnap' in l or 'libbeside' in l}))"


@pytest.fixture(scope="session")
def beside(built: Build) -> Path:
    """Another library to be preloaded."""
    return built("libbeside.so", "int nothing;", "-shared", "-fPIC")


def started(words: list[str], preload: str, python: str = MAPPED) -> str:
    """Return what a Python prints that the tool starts while LD_PRELOAD has a value."""
    command = [sys.executable, "-m", "gpususpend", "run", *words, "--", sys.executable, "-c", python]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"LD_PRELOAD": preload}, capture_output=True, text=True,
                          timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("separator", [":", " "])
def test_fr39_run_keeps_what_is_preloaded(beside: Path, separator: str) -> None:
    """FR-39: both are loaded, ours first and once, whichever separator the launcher had used and however often."""
    assert started([], str(beside)).split() == sorted([str(launch.SHIM), str(beside)])
    before = separator.join([str(beside), str(launch.SHIM), str(beside)])
    after = started([], before, "import os; print(os.environ['LD_PRELOAD'])")
    assert after.split(":")[0] == str(launch.SHIM) and after.count(str(launch.SHIM)) == 1
    assert str(beside) in after.split(":")


def test_fr39_env_prints_the_same(beside: Path) -> None:
    """FR-39: a script that evaluates `env` has what `run` sets."""
    command = f'eval "$({sys.executable} -m gpususpend env)"; printf %s "$LD_PRELOAD"'
    done = subprocess.run(["sh", "-uc", command], cwd=ROOT, env=os.environ | {"LD_PRELOAD": str(beside)},
                          capture_output=True, text=True, timeout=100)
    assert done.stdout == f"{launch.SHIM}:{beside}", done


@pytest.mark.parametrize("name", ["with space", "with:colon"])
def test_fr39_a_path_that_cannot_be_preloaded_is_refused(tmp_path: Path, name: str) -> None:
    """FR-39: the loader would silently load nothing."""
    folder = tmp_path / name
    folder.mkdir()
    (folder / "lib.so").touch()
    with pytest.raises(errors.BadCommand, match="space or a colon"):
        launch.shim_path(folder / "lib.so")


PROGRAM = (
    "import ctypes, os; before = len(os.listdir('/proc/self/task')); "
    "code = ctypes.CDLL('libcuda.so.1').cuInit(0); "
    "print(code, before, open('/proc/self/maps').read().count('nvsnap_gpushare') > 0, "
    "'nvsnap-gpushare' in [open(f'/proc/self/task/{t}/comm').read().strip() for t in os.listdir('/proc/self/task')])"
)


def test_fr40_etc_ld_so_preload(machine: object, shim_path: Path, tmp_path: Path) -> None:
    """FR-40, pitfall 26: named in /etc/ld.so.preload it is in every program, is silent, and works once CUDA starts."""
    if os.geteuid() != 0:
        pytest.skip("only root can make a mount namespace")
    listed = tmp_path / "ld.so.preload"
    listed.write_text(f"{shim_path}\n")
    inside = (
        "mount --make-rprivate / && mkdir -p $1/upper $1/work && "
        "mount -t tmpfs none $1/upper && cp -a /etc/. $1/upper/ && cp $2 $1/upper/ld.so.preload && "
        "mount --bind $1/upper /etc || exit 77; shift 2; "
        'bash -c "echo shell; true | cat" && perl -e "print 5" && exec "$@"'
    )
    command = ["unshare", "--mount", "sh", "-c", inside, "sh", str(tmp_path), str(listed), sys.executable, "-c",
               PROGRAM]
    environment = machine.environ() | {"LD_LIBRARY_PATH": str(SIMCUDA.parent)}  # type: ignore[attr-defined]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, cwd=ROOT)
    if done.returncode == 77:
        pytest.skip(f"/etc cannot be replaced in a mount namespace: {done.stderr}")
    assert (done.stdout, done.stderr, done.returncode) == ("shell\n50 1 True True\n", "", 0)
