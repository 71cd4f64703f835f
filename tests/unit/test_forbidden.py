"""Constructs and secrets that ``make check`` refuses."""

from __future__ import annotations

import os
import re
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


def test_every_dangerous_construct_is_refused(tmp_path: Path) -> None:
    (tmp_path / "services").mkdir()
    (tmp_path / "src").mkdir()
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for number, source in enumerate(CONSTRUCTS):
        (tmp_path / "services" / f"new_{number}.py").write_text(source + "\n")
    command = [BIN / "ruff", "check", "--no-cache", "--output-format", "concise", "services"]
    checked = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    passed = [
        source
        for number, (source, rule) in enumerate(CONSTRUCTS.items())
        if not re.search(rf"new_{number}\.py:.* {rule} ", checked.stdout)
    ]
    assert passed == []
    assert checked.returncode == 1


def forbidden(folder: Path, text: str, name: str = "new.py") -> subprocess.CompletedProcess[str]:
    """Run .ci/forbidden on a file with this text."""
    (folder / name).write_text(text + "\n")
    environment = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    script = shutil.copy(ROOT / ".ci" / "forbidden", folder / "forbidden")
    return subprocess.run([script, name], capture_output=True, text=True, cwd=folder, env=environment)


# Each text is assembled from parts, because .ci/forbidden checks this file, too.
TRUST = "trust_remote" + "_code"
SECRETS = {
    "private key": "-----BEGIN RSA " + "PRIVATE KEY-----",
    "AWS key": "key = '" + "AKIA" + "Z7QK4MPX2RWTN9LD" + "'",
    "GitHub token": "ghp" + "_" + "aB3dE5fG7hI9jK1lM3nO5pQ7rS9tU1vW3xY5",
    "JSON web token": "eyJhbGciOiJIUzI1NiIsInR5cCI6IkpXVCJ9"
    + ".eyJzdWIiOiIxMjM0NTY3ODkwIn0."
    + "dozjgNryP4J3jVmNHl0w5N",
    "password in a URL": "redis:" + "//quartet:hT7xqLw2@redis:6379/0",
    "password": "pass" + "word = 'hT7xqLw2vB9'",  # pragma: allowlist secret - in two parts
}


def test_harmless_text_passes(tmp_path: Path) -> None:
    checked = forbidden(tmp_path, f"url = 'redis://redis:6379/0'\nload({TRUST}=False)\nload({TRUST} = False)")
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


@pytest.mark.parametrize(
    "text",
    [f"load({TRUST}=True)", f"load({TRUST} = given)", f'{{"{TRUST}": True}}', f"{TRUST}: true", f'o["{TRUST}"] = True'],
)
def test_code_from_a_model_is_refused(tmp_path: Path, text: str) -> None:
    checked = forbidden(tmp_path, text)
    assert checked.returncode == 1
    assert "runs code that comes with a model" in checked.stderr
    assert "new.py" in checked.stdout + checked.stderr or "1:" in checked.stdout


def test_a_secret_is_refused_unless_its_line_allows_it(tmp_path: Path) -> None:
    checked = forbidden(tmp_path, "\n".join(SECRETS.values()), "settings.yaml")
    assert checked.returncode == 1
    for line, kind in enumerate(SECRETS, 1):
        assert f"settings.yaml:{line}\n" in checked.stdout, kind
    said = "\n".join(f"{secret}  # pragma: allowlist secret" for secret in SECRETS.values())
    assert forbidden(tmp_path, said, "settings.yaml").returncode == 0


def test_a_call_without_files_fails(tmp_path: Path) -> None:
    assert subprocess.run([ROOT / ".ci" / "forbidden"], capture_output=True, cwd=tmp_path).returncode == 2
