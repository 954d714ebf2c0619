"""Hydra's way into the folders that config groups are looked for in."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import OmegaConf

from shipway.compiler.documents import Document, read_document
from shipway.compiler.groups import SearchPath, find_in, is_group_in


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
