"""Tells setuptools which packages there are; everything else stands in pyproject.toml.

The top-level folders carry plain names and are mapped under `shipway`, which no automatic discovery of
setuptools knows how to do; a list by hand would forget folders.
"""

from setuptools import find_packages, setup

FOLDERS = ("schemas", "compiler", "templates", "blueprints", "runtime")


def packages() -> list[str]:
    """Import names of all packages below the mapped folders."""
    return [
        f"shipway.{name}"
        for folder in FOLDERS
        for name in (folder, *(f"{folder}.{child}" for child in find_packages(folder)))
    ]


setup(
    packages=packages(),
    package_dir={f"shipway.{folder}": folder for folder in FOLDERS},
)
