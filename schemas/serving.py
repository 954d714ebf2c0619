"""What serving a model on a cluster would take: weights, state of a request, layouts and their capacity.

Sizes are bytes, times seconds.
"""

from typing import Literal

from shipway.schemas.base import Schema

WeightFormat = Literal["bf16", "fp8", "mxfp4"]


class ServingWeights(Schema):
    """The weights in one number format."""

    format: WeightFormat
    bytes: int
    """All weights of the model, scales of blocks included; prediction layers are not loaded."""
    bytes_per_token: int
    """Of these, what one token passes when it is decoded alone."""
    note: str
    """What the format covers."""


class RequestState(Schema):
    """What is kept for every request, over the whole model."""

    cache_layers: int
    """Layers that keep something of every token."""
    cache_bytes_per_token: int
    """Latents, or keys and values, in bf16."""
    constant_layers: int
    """Layers whose state does not grow with the context."""
    constant_bytes: int
    """Delta state in fp32 and tails of the convolutions."""
    page_tokens: int
    """Tokens of a page, which the cache grows by."""
    page_bytes: int
    """A page over all layers."""


class ServingPoint(Schema):
    """A group of devices at one context length."""

    context_tokens: int
    request_bytes: int
    """Cache, in whole pages, and constant state of one request, before it is spread or copied."""
    requests: int
    """Requests that the group holds at once, all at this context."""
    prefill_seconds: float
    """Time to the first token of a prompt of this length, while every data-parallel rank has one."""
    decode_seconds: float
    """Time per further token of a request that is alone."""
    decode_seconds_full: float
    """The same with `requests` requests."""
    tokens_per_second: float
    """Tokens that the group generates with `requests` requests."""


class ServingLayout(Schema):
    """One way to hold the model on a group of devices."""

    tensor_parallel: int
    """Devices that share each matrix outside the routed experts."""
    data_parallel: int
    """Parts of a pipeline stage that hold different requests, with copies of what is not an expert."""
    expert_parallel: int
    """Devices that the routed experts are spread over: tensor x data parallel, or 1 without experts."""
    pipeline_parallel: int
    """Stages of layers."""
    devices: int
    groups: int
    """Such groups that the cluster has room for."""
    weight_bytes: int
    """Weights on the fullest device."""
    reserved_bytes: int
    """Outside weights and requests: context, libraries, communicators, one chunk of a prompt, and a share
    for fragmentation."""
    state_bytes: int
    """What is left for requests on that device."""
    points: tuple[ServingPoint, ...]


class ServingFormat(Schema):
    """The model in one number format on the smallest groups that hold it."""

    weights: ServingWeights
    layouts: tuple[ServingLayout, ...]
    """Most generated tokens per second first; empty when the cluster does not hold the weights."""
    note: str = ""
    """Why there is no layout."""


class Serving(Schema):
    """Capacity of serving a blueprint's model on its cluster."""

    name: str
    device: str
    devices: int
    calibration: str
    total_parameters: int
    """What memory must hold."""
    active_parameters: int
    """What one token passes."""
    trained_context_tokens: int
    """Longest context of the blueprint's stages; longer ones are beyond what the model has seen."""
    state: RequestState
    formats: tuple[ServingFormat, ...]
    assumptions: tuple[str, ...]
