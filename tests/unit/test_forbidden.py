"""What ``make check`` refuses: each construct is tried once, as it could stand in a file of the product."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent

CONSTRUCTS = {
    "import pickle": "TID251",
    "from pickle import loads": "TID251",
    "import pickle\npickle.loads(b'')": "S301",
    "import dill": "TID251",
    "import cloudpickle": "TID251",
    "import joblib": "TID251",
    "import marshal": "TID251",
    "import shelve": "TID251",
    "import torch\ntorch.load('weights.pt')": "TID251",
    "import torch as t\nt.load('weights.pt')": "TID251",
    "from torch import load": "TID251",
    "import torch\ntorch.hub.load('a', 'b')": "TID251",
    "import subprocess\nsubprocess.run('ls', shell=True)": "S602",
    "import subprocess as s\ns.Popen('ls', shell=1)": "S602",
    "import os\nos.system('ls')": "TID251",
    "from os import popen": "TID251",
    "import yaml\nyaml.load('', Loader=yaml.Loader)": "S506",
    "import yaml\nyaml.load('')": "S506",
    "eval('1')": "S307",
    "exec('1')": "S102",
    "import hashlib\nhashlib.md5(b'')": "S324",
    "import ssl\nssl._create_unverified_context()": "S323",
    "import tempfile\ntempfile.mktemp()": "S306",
    "HOST = '0.0.0.0'": "S104",
}


@pytest.mark.parametrize("source", CONSTRUCTS)
def test_a_dangerous_construct_is_refused(source: str) -> None:
    command = [
        BIN / "ruff",
        "check",
        "--no-cache",
        "--output-format",
        "concise",
        "--stdin-filename",
        "services/new.py",
        "-",
    ]
    checked = subprocess.run(command, input=source, capture_output=True, text=True, cwd=ROOT)
    assert checked.returncode == 1
    assert f" {CONSTRUCTS[source]} " in checked.stdout


def forbidden(folder: Path, text: str, name: str = "new.py") -> subprocess.CompletedProcess[str]:
    """Return what the check says of a file of this text."""
    (folder / name).write_text(text + "\n")
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    script = shutil.copy(ROOT / ".ci" / "forbidden", folder / "forbidden")
    return subprocess.run([script, name], capture_output=True, text=True, cwd=folder, env=environment)


# Put together here: written out, each would be what the check refuses.
TRUST = "trust_remote" + "_code"
SECRETS = {
    "private key": "-----BEGIN RSA " + "PRIVATE KEY-----",
    "AWS key": "key = '" + "AKIA" + "Z7QK4MPX2RWTN9LD" + "'",
    "GitHub token": "ghp" + "_" + "aB3dE5fG7hI9jK1lM3nO5pQ7rS9tU1vW3xY5",
    "token of a JSON web": "eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9"
    + ".eyJzdWIiOiIxMjM0NTY3ODkwIn0."
    + "dozjgNryP4J3jVmNHl0w5N",
    "password in a URL": "redis:" + "//quartet:hT7xqLw2@redis:6379/0",
    "password": "pass" + "word = 'hT7xqLw2vB9'",  # pragma: allowlist secret - in two parts
}


def test_what_is_not_forbidden_passes(tmp_path: Path) -> None:
    checked = forbidden(tmp_path, f"url = 'redis://redis:6379/0'\nload({TRUST}=False)\nload({TRUST} = False)")
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


@pytest.mark.parametrize(
    "text",
    [f"load({TRUST}=True)", f"load({TRUST} = given)", f'{{"{TRUST}": True}}', f"{TRUST}: true", f'o["{TRUST}"] = True'],
)
def test_code_that_comes_with_a_model_is_refused(tmp_path: Path, text: str) -> None:
    checked = forbidden(tmp_path, text)
    assert checked.returncode == 1
    assert "runs code that comes with a model" in checked.stderr
    assert "new.py" in checked.stdout + checked.stderr or "1:" in checked.stdout


def test_a_secret_is_refused_unless_it_is_said_to_be_none(tmp_path: Path) -> None:
    checked = forbidden(tmp_path, "\n".join(SECRETS.values()), "settings.yaml")
    assert checked.returncode == 1
    for line, kind in enumerate(SECRETS, 1):
        assert f"settings.yaml:{line}\n" in checked.stdout, kind
    said = "\n".join(f"{secret}  # pragma: allowlist secret" for secret in SECRETS.values())
    assert forbidden(tmp_path, said, "settings.yaml").returncode == 0


def test_no_files_at_all_are_no_pass(tmp_path: Path) -> None:
    assert subprocess.run([ROOT / ".ci" / "forbidden"], capture_output=True, cwd=tmp_path).returncode == 2
