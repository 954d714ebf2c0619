"""The folders that config groups are looked for in, and Hydra's way into them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import OmegaConf

from shipway.compiler.documents import Document, read_document

SUFFIXES = (".yaml", ".yml")


def our_folder() -> Path:
    """The folder of the blueprints that come with Shipway."""
    import shipway.blueprints

    (folder,) = shipway.blueprints.__path__
    return Path(folder)


@dataclass(frozen=True)
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


class BlueprintSource(ConfigSource):
    """Hydra's view of one folder of config files, read by our own parser (public plugin interface)."""

    def __init__(self, provider: str, path: str) -> None:
        super().__init__(provider, path)
        self.folder = Path(unquote(self.path))

    @staticmethod
    def scheme() -> str:
        """The scheme of these sources in Hydra's search path."""
        return "shipway"

    def load_config(self, config_path: str) -> ConfigResult:
        """One file as Hydra wants it; what is wrong with it is reported from its document, not here."""
        path = find_in(self.folder, config_path)
        assert path is not None, config_path
        document = read_document(path)
        data = document.data if isinstance(document.data, dict) else {}
        return ConfigResult(
            provider=self.provider,
            path=self.full_path(),
            config=OmegaConf.create(data),
            header=header_of(document) or {"package": None},
        )

    def is_group(self, config_path: str) -> bool:
        """Whether this folder has the group."""
        return is_group_in(self.folder, config_path)

    def is_config(self, config_path: str) -> bool:
        """Whether this folder has the config."""
        return find_in(self.folder, config_path) is not None

    def available(self) -> bool:
        """Whether the folder exists."""
        return self.folder.is_dir()

    def list(self, config_path: str, results_filter: ObjectType | None) -> Any:
        """Names in a group."""
        if results_filter is ObjectType.GROUP:
            return sorted(p.name for p in (self.folder / config_path).iterdir() if p.is_dir())
        return list(SearchPath((self.folder,)).options(config_path))


def header_of(document: Document) -> dict[str, str | None] | None:
    """Hydra's `# @package` header; None where it is malformed."""
    try:
        return dict(ConfigSource._get_header_dict("\n".join(document.lines[:20])))
    except ValueError:
        return None


def extend_hydra(loader: Any, path: SearchPath) -> None:
    """Give Hydra's config loader these folders, before its own and in this order."""
    Plugins.instance().register(BlueprintSource)
    search_path = loader.get_search_path()
    for folder in path.folders:
        uri = f"{BlueprintSource.scheme()}://{quote(str(folder))}"
        search_path.prepend(provider="shipway", path=uri, anchor="schema")
    loader.repository.initialize_sources(search_path)
