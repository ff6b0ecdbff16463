"""RouterLoads: a plan with the loads that routers had, as data for every report."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Quantiles:
    """The spread of a number over the steps. Every quantile is the number of one of the steps.

    Attributes:
      mean: the mean.
      p50: the smallest number that half of the steps do not exceed.
      p90: the same for 90% of the steps.
      p99: the same for 99% of the steps.
      worst: the largest.
    """

    mean: float
    p50: float
    p90: float
    p99: float
    worst: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerLoads:
    """The loads of the experts and devices of one layer.

    Attributes:
      layer: path of the layer.
      router: name of the router's class.
      dispatch: name of the dispatch's class.
      experts: number of experts.
      devices: number of devices that the experts are divided over.
      busiest_expert: the expert with the most choices in all steps.
      busiest_over_mean: its choices over those of the mean expert.
      slowest: rows of the device that gets the most, over those of the mean device, by step.
      slowest_device: position along the axes of the experts of the device that gets the most rows
        in all steps.
      placement: the experts of each device under the placement that was found.
      replicas: further copies of experts, on all devices together, that it has.
      placed: as `slowest`, under the placement.
      gap: by how much the largest load of a device, over all steps, exceeds the lower bound of any
        placement; 0.01 is 1%.
      later: mean of `slowest` over the later half of the steps; None with a single step.
      later_placed: the same under a placement that was found from the earlier half.
      dropped_share: share of the requests that are dropped, by step; None if the file does not
        tell.
      capacity: capacity slots of an expert for each group; None with a dropless dispatch.
      capacity_factor: the factor that gives them.
      sufficient_factor: the smallest capacity factor that drops nothing, by step; None if unknown.
      bound: the dropless dispatch's bound, 0 for none; None with another dispatch.
      sufficient_bound: the smallest bound that drops nothing, by step; None if unknown.
      placed_bound: the same under the placement; None with replicas, too.
      experts_seconds: the plan's estimate for the experts of this layer.
      seconds: the same under the loads, by step.
      seconds_placed: the same under the placement.
    """

    layer: str
    router: str
    dispatch: str
    experts: int
    devices: int
    busiest_expert: int
    busiest_over_mean: float
    slowest: Quantiles
    slowest_device: int
    placement: list[list[int]]
    replicas: int
    placed: Quantiles
    gap: float
    later: float | None
    later_placed: float | None
    dropped_share: Quantiles | None
    capacity: int | None
    capacity_factor: float | None
    sufficient_factor: Quantiles | None
    bound: float | None
    sufficient_bound: Quantiles | None
    placed_bound: Quantiles | None
    experts_seconds: float
    seconds: Quantiles
    seconds_placed: Quantiles


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterLoads:
    """A step under the loads that routers had, where a plan takes even loads.

    Attributes:
      path: the file of the loads.
      steps: number of steps.
      first_step: the first of them.
      last_step: the last of them.
      step_seconds: time of the step under the loads, by step of the file.
      step_seconds_placed: the same under the placement.
      step_seconds_dropping_nothing: the same with buffers that drop nothing in the step; None if
        no layer has buffers that can be full, or the file does not tell.
      dropped_share: share of all layers' requests that are dropped, by step; None if the file does
        not tell.
      layers: the layers, in the order of the model.
      replica_bytes: weights of the copies of experts that the device with the most of them has in
        addition, in all layers.
      notes: what the numbers leave out.
    """

    path: str
    steps: int
    first_step: int
    last_step: int
    step_seconds: Quantiles
    step_seconds_placed: Quantiles
    step_seconds_dropping_nothing: Quantiles | None
    dropped_share: Quantiles | None
    layers: list[LayerLoads]
    replica_bytes: int
    notes: list[str]
