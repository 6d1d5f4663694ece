"""`./run`: when it sets up, and what it survives. A stand-in for uv installs nothing, so that this takes no network."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UV = """#!/bin/sh
echo "$@" >>"$STATE/calls"
if [ "$1" = venv ]; then
    for last; do :; done
    exec "$PYTHON" -m venv --without-pip "$last"
fi
touch "$STATE/begun"
while [ -e "$STATE/slow" ]; do sleep 0.02; done
if [ -e "$STATE/broken" ]; then echo "no such host" >&2; exit 1; fi
case "$*" in *--editable*)
    for last; do :; done
    printf '#!/bin/sh\\necho "keyturn $*"\\npwd\\n' >"$last/.venv/bin/keyturn"
    chmod +x "$last/.venv/bin/keyturn"
esac
"""
TOOLS = ("sh", "cat", "cksum", "tr", "grep", "rm", "mv", "dirname", "sleep", "touch", "chmod")


class Checkout:
    """A checkout with the real script in it."""

    def __init__(self, tmp_path: Path) -> None:
        self.path = tmp_path / "key turn"
        self.path.mkdir()
        shutil.copy(ROOT / "run", self.path / "run")
        for name, text in {
            "requirements.lock": "one==1\n", "requirements-dev.lock": "one==1\ntwo==2\n", "pyproject.toml": "",
            "pytest.py": "import sys\nprint('pytest', *sys.argv[1:])\n",
        }.items():  # fmt: skip
            (self.path / name).write_text(text)
        self.state = tmp_path / "state"
        self.bin = tmp_path / "bin"
        self.state.mkdir()
        self.bin.mkdir()
        for tool in TOOLS:
            (self.bin / tool).symlink_to(str(shutil.which(tool)))
        (self.bin / "uv").write_text(UV)
        (self.bin / "uv").chmod(0o755)
        self.env = {"PATH": str(self.bin), "PYTHON": sys.executable, "STATE": str(self.state)}

    def start(self, *args: str, cwd: Path | None = None) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [str(self.path / "run"), *args],
            cwd=cwd or self.path, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, *args: str, cwd: Path | None = None) -> tuple[int, list[str], list[str]]:
        """Exit code, lines of stdout, lines of stderr."""
        with self.start(*args, cwd=cwd) as process:
            out, err = process.communicate(timeout=60)
        return process.returncode, out.splitlines(), err.splitlines()

    def installs(self) -> int:
        """How often packages were installed so far."""
        calls = self.state / "calls"
        return calls.read_text().count("--require-hashes") if calls.exists() else 0

    def until_begun(self) -> None:
        deadline = time.monotonic() + 30
        while not (self.state / "begun").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Checkout]:
    made = Checkout(tmp_path)
    yield made
    (made.state / "slow").unlink(missing_ok=True)


def test_sets_up_once_and_hands_over(checkout: Checkout, tmp_path: Path) -> None:
    code, out, err = checkout.run("serve", "--port", "1", cwd=tmp_path)
    assert (code, out) == (0, ["keyturn serve --port 1", str(tmp_path)]), "paths mean what they mean to the caller"
    assert err == [
        "Setting up, once: a virtual environment in .venv",
        "Setting up: 1 packages of requirements.lock",
        "Setting up: done",
    ]
    assert checkout.run() == (0, ["keyturn ", str(checkout.path)], [])
    assert checkout.run("keys", "list")[1][0] == "keyturn keys list"
    assert checkout.installs() == 1


def test_tests_get_the_other_lock_and_the_options(checkout: Checkout) -> None:
    assert checkout.run("test", "-k", "two words")[1] == ["pytest -n 2 --cov --cov-report=term -k two words"]
    assert "requirements-dev.lock" in (checkout.state / "calls").read_text()
    # The environment of a developer serves too.
    assert checkout.run() == (0, ["keyturn ", str(checkout.path)], [])
    assert checkout.installs() == 1


@pytest.mark.parametrize("name", ["requirements.lock", "pyproject.toml"])
def test_sets_up_again_when_a_file_changed(checkout: Checkout, name: str) -> None:
    checkout.run()
    with (checkout.path / name).open("a") as file:
        file.write("# changed\n")
    assert checkout.run()[2][-1] == "Setting up: done"
    assert checkout.installs() == 2


def _moved(checkout: Checkout) -> None:
    checkout.path = checkout.path.rename(checkout.path.with_name("elsewhere"))


def _without_interpreter(checkout: Checkout) -> None:
    for link in (checkout.path / ".venv" / "bin").glob("python*"):
        link.unlink()
        link.symlink_to("/nowhere/python")


@pytest.mark.parametrize("change", [_moved, _without_interpreter])
def test_an_environment_that_does_not_work_any_more_is_made_anew(
    checkout: Checkout, change: Callable[[Checkout], None]
) -> None:
    checkout.run()
    change(checkout)
    code, out, err = checkout.run()
    assert (code, out) == (0, ["keyturn ", str(checkout.path)])
    assert err[0] == "Setting up, once: a virtual environment in .venv"


def test_kill_in_the_middle_and_again(checkout: Checkout) -> None:
    (checkout.state / "slow").touch()
    with checkout.start() as killed:
        checkout.until_begun()
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        with checkout.start() as other:
            assert other.stderr is not None
            # What the killed one has started is still writing: wait for that.
            assert other.stderr.readline() == f"Waiting for another set-up in {checkout.path}\n"
            (checkout.state / "slow").unlink()
            assert other.communicate(timeout=60)[0].splitlines()[0] == "keyturn "
    assert checkout.installs() == 2
    assert checkout.run()[2] == []


def test_two_at_once_install_once(checkout: Checkout) -> None:
    both = [checkout.start() for _ in range(2)]
    ends = [process.communicate(timeout=60) for process in both]
    assert [out.splitlines()[0] for out, _ in ends] == ["keyturn "] * 2
    assert checkout.installs() == 1


def test_an_installation_that_failed_is_told_and_tried_again(checkout: Checkout) -> None:
    (checkout.state / "broken").touch()
    code, out, err = checkout.run()
    assert (code, out) == (1, [])
    assert err[-2:] == ["no such host", "run: the packages could not be installed; the reason stands above"]
    (checkout.state / "broken").unlink()
    assert checkout.run()[0] == 0


def test_no_python_that_is_supported(checkout: Checkout) -> None:
    for name in ("python3", "python3.12"):
        (checkout.bin / name).write_text("#!/bin/sh\nexit 1\n")  # as one that is too old answers
        (checkout.bin / name).chmod(0o755)
    del checkout.env["PYTHON"]
    code, out, err = checkout.run()
    assert (code, out) == (1, [])
    assert err == ["run: Keyturn needs Python 3.11, 3.12 or 3.13. Install one, or name it: PYTHON=/path/to/python3.12 ./run"]


def test_a_debian_without_venv(checkout: Checkout) -> None:
    """Neither uv nor ensurepip: one line says what to install."""
    (checkout.bin / "uv").unlink()
    checkout.env["PYTHON"] = str(checkout.bin / "python3")
    (checkout.bin / "python3").write_text(
        f'#!/bin/sh\ncase "$*" in *ensurepip*) echo Traceback >&2; exit 1 ;; esac\nexec "{sys.executable}" "$@"\n'
    )
    (checkout.bin / "python3").chmod(0o755)
    code, out, err = checkout.run()
    assert (code, out) == (1, [])
    [line] = err
    assert line.endswith("On Debian and Ubuntu: apt-get install -y python3-venv")
    assert not (checkout.path / ".venv").exists()
