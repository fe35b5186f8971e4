"""Logs where the system's encoding is not UTF-8: Windows' pipes have cp1252, and here Python is told so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import samples

from sage_factory import ROOT
from sage_factory.git import git

# The encoding of Windows' pipes for this process's own streams, and nothing but ASCII for what it reads of others.
LOCALE = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C", "PYTHONIOENCODING": "cp1252:strict"}


def python(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    environment = os.environ | LOCALE | {"PYTHONPATH": str(ROOT / "scripts")}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, check=False)


def test_a_command_prints_what_cp1252_has_not(tmp_path: Path) -> None:
    one, other = samples.a_wheel(tmp_path / "one"), samples.a_wheel(tmp_path / "other")
    samples.rewrite(other, samples.contents(other) | {"sageattention/__init__.py": "╭─ ▶ → ✔\n".encode()})
    done = python(str(ROOT / "scripts"), "compare", str(one), str(other))
    assert done.returncode == 1, done.stderr.decode()
    assert "'╭─ ▶ → ✔'" in done.stdout.decode()


def test_a_childs_log_is_read_as_what_it_is(tmp_path: Path) -> None:
    """rattler-build's own lines have boxes; a byte that is no UTF-8, as another program may print it, ends nothing."""
    (tmp_path / "child.py").write_text("import sys; sys.stdout.buffer.write(b'\\xe2\\x95\\xad step\\n\\x81\\xff\\n')")
    code = f"""
import sys
from pathlib import Path
from sage_factory import child
folder = Path({str(tmp_path)!r})
print(ascii(child.run("x", [sys.executable, folder / "child.py"], log=folder / "log")))
"""
    done = python("-c", code)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().strip() == ascii(["╭ step", "\ufffd\ufffd"])
    assert (tmp_path / "log").read_text(encoding="utf-8").startswith("╭ step\n")


def test_git_may_say_anything(tmp_path: Path) -> None:
    git("init", "--quiet", root=tmp_path)
    who = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    git(*who, "commit", "--quiet", "--allow-empty", "-m", "Wärme → Ö", root=tmp_path)
    code = f"""
from pathlib import Path
from sage_factory.git import git
print(ascii(git("log", "--format=%s", root=Path({str(tmp_path)!r}))))
"""
    done = python("-c", code)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().strip() == ascii("Wärme → Ö")
