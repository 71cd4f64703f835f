"""Contents of the wheel, built from a checkout or from the source distribution, and the demo outside a checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


def build(source: Path, hook: str, target: Path) -> Path:
    """Build a wheel or a source distribution from a source tree, and return its path."""
    target.mkdir(exist_ok=True)
    command = [sys.executable, "-c", BUILD, hook, str(target)]
    result = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return target / result.stdout.split()[-1]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the files that git tracks, so that earlier builds leave no modules in the wheel."""
    copy = tmp_path_factory.mktemp("checkout")
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run([git, "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, listed.stdout.split("\0")):
        if name.startswith(("src/", "services/", "gateway/", "contrib/")) or "/" not in name:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name, follow_symlinks=False)
    return copy


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(checkout, "build_wheel", tmp_path_factory.mktemp("wheel"))


def members(wheel: Path) -> set[str]:
    """Return the files of a wheel, without its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


def test_the_wheel_has_one_top_level_package(wheel: Path) -> None:
    assert {name.partition("/")[0] for name in members(wheel)} == {"quartet"}


def test_the_wheel_has_every_module_and_data_file(wheel: Path, checkout: Path) -> None:
    expected = set()
    for folder, inside in (
        ("src/quartet", ""),
        ("services", "services/"),
        ("gateway", "gateway/"),
        ("contrib", "contrib/"),
    ):
        for path in (checkout / folder).rglob("*"):
            if {"__pycache__", "tests"} & set(path.parts[len(checkout.parts) :]) or path.name == "README.md":
                continue
            if path.is_file():
                expected.add(f"quartet/{inside}{path.relative_to(checkout / folder).as_posix()}")
    assert members(wheel) == expected
    assert {"quartet/demo/demo.yaml", "quartet/gateway/static/index.html", "quartet/services/__main__.py"} <= expected


def test_a_wheel_built_from_the_source_distribution_is_the_same(wheel: Path, checkout: Path, tmp_path: Path) -> None:
    with tarfile.open(build(checkout, "build_sdist", tmp_path / "sdist")) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    [source] = (tmp_path / "unpacked").iterdir()
    assert (source / "LICENSE").is_file()
    assert members(build(source, "build_wheel", tmp_path / "wheel")) == members(wheel)


def test_the_license_is_apache_2(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        [metadata] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        text = archive.read(metadata).decode()
        [license_file] = [name for name in archive.namelist() if name.endswith("/LICENSE")]
        assert "Apache License" in archive.read(license_file).decode()
    assert "License-Expression: Apache-2.0" in text
    base = [line for line in text.splitlines() if line.startswith("Requires-Dist:") and "extra ==" not in line]
    assert not any(package in line for line in base for package in ("torch", "transformers", "peft", "tokenizers"))
    assert any(line.startswith("Requires-Dist: torch") and 'extra == "train"' in line for line in text.splitlines())


def test_the_command_is_also_installed_under_the_name_of_the_package(wheel: Path) -> None:
    """Then ``uvx`` and ``pipx run`` find it without another option."""
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith("/entry_points.txt")]
        scripts = archive.read(name).decode().partition("[quartet.engines]")[0].split()
    main = ["=", "quartet.cli.main:main"]
    assert scripts == ["[console_scripts]", "quartet", *main, "quartet-rlhf", *main]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_runs_from_the_wheel_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    [packages] = (environment / "lib").glob("python3*/site-packages")
    before = {path.name for path in packages.iterdir()}
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", wheel], check=True)
    installed = sorted({path.name for path in packages.iterdir()} - before)
    print("new in site-packages:", *installed)
    assert installed == ["quartet", "quartet_rlhf-0.1.0.dist-info"]
    # The dependencies come from the environment of the tests: only the packages, without their .pth files.
    [dependencies] = {path for path in sys.path if path.endswith("site-packages")}
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (packages / "dependencies.pth").write_text(dependencies + "\n")
    command = [environment / "bin" / "quartet", "demo", "--set", "run.steps=2", "--set", "rollout.prompts_per_step=4"]
    result = subprocess.run(command, cwd=elsewhere, env=clean, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "the same prompts, before and after" in result.stdout
    located = subprocess.run(
        [python, "-c", "import quartet; print(quartet.__file__)"],
        cwd=elsewhere,
        env=clean,
        capture_output=True,
        text=True,
    )
    assert Path(located.stdout.strip()).is_relative_to(packages)
