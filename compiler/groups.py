"""The folders that config groups are looked for in."""

from __future__ import annotations

from pathlib import Path

from shipway.compiler.frozen import frozen

SUFFIXES = (".yaml", ".yml")


def our_folder() -> Path:
    """The folder of the blueprints that come with Shipway."""
    import shipway.blueprints

    (folder,) = shipway.blueprints.__path__
    return Path(folder)


@frozen
class SearchPath:
    """Folders in order of precedence."""

    folders: tuple[Path, ...]

    def find(self, name: str) -> Path | None:
        """The file that a config such as `model/k3` names."""
        for folder in self.folders:
            found = find_in(folder, name)
            if found is not None:
                return found
        return None

    def is_group(self, name: str) -> bool:
        """Whether some folder has a group of this name."""
        return any(is_group_in(folder, name) for folder in self.folders)

    def options(self, group: str) -> tuple[str, ...]:
        """Configs of a group, over all folders; `""` gives the complete blueprints."""
        names: set[str] = set()
        for folder in self.folders:
            place = folder / group
            if place.is_dir():
                names |= {file.stem for file in place.iterdir() if file.suffix in SUFFIXES}
        return tuple(sorted(names))


def find_in(folder: Path, name: str) -> Path | None:
    """The file of config `name` in one folder."""
    if not name or "\0" in name:
        return None
    for candidate in (folder / name, *(folder / f"{name}{suffix}" for suffix in SUFFIXES)):
        if candidate.suffix in SUFFIXES and candidate.is_file():
            return candidate
    return None


def is_group_in(folder: Path, name: str) -> bool:
    """Whether `folder` has a group: a sub-folder with at least one config file in it."""
    place = folder / name
    return place.is_dir() and any(file.suffix in SUFFIXES for file in place.iterdir())
