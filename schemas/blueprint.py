"""The blueprint: what a user writes, whole."""

from pydantic import Field

from shipway.schemas.base import Schema
from shipway.schemas.cluster import Cluster
from shipway.schemas.model import Model
from shipway.schemas.training import Training


class Blueprint(Schema):
    """A model, how it is trained, and on what."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    """Name of the build folder and of the runs."""
    model: Model
    """Architecture."""
    training: Training
    """Training programme."""
    cluster: Cluster
    """Cluster."""
