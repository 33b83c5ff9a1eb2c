"""Defines what each part of a run needs of a machine, where a cluster runs it (`sparring train CONFIG --ray`)."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, field_validator

from sparring.pipeline.networks.settings import StrictSettings

Amount = Annotated[float, Field(ge=0)]


class PartResources(StrictSettings):
    """Configures the resources that Ray reserves for one process; they bound nothing by themselves.

    Attributes:
        num_cpus: CPU cores.
        num_gpus: GPUs; a part sees only those that are reserved for it.
        resources: further ones by the names that the nodes were started with.
    """

    num_cpus: Amount = 1.0
    num_gpus: Amount = 0.0
    resources: dict[str, Amount] = Field(default={})

    @field_validator("num_gpus")
    @classmethod
    def _whole_above_one(cls, num_gpus: float) -> float:
        if num_gpus > 1 and not num_gpus.is_integer():
            raise ValueError(f"got {num_gpus:g} GPUs; expected a part of one, or a whole number; write such a number")
        return num_gpus

    @field_validator("resources")
    @classmethod
    def _others(cls, resources: dict[str, float]) -> dict[str, float]:
        if own := {"CPU", "GPU", "memory", "object_store_memory"} & resources.keys():
            raise ValueError(f"got {', '.join(sorted(own))} among resources; expected others; use num_cpus, num_gpus")
        return resources

    @property
    def bundle(self) -> Mapping[str, float]:
        """Returns the amounts above 0 by Ray's names of the resources."""
        amounts = {"CPU": self.num_cpus, "GPU": self.num_gpus, **self.resources}
        return {name: amount for name, amount in amounts.items() if amount}


class SteppingResources(PartResources):
    """Configures the resources of a stepping process.

    Attributes:
        per: `node` runs one stepping process on each node that has room for it and its share of the simulators, in
            place of `pipeline.stepping_processes`.
    """

    per: Literal["node"] | None = None


class PlacementSettings(StrictSettings):
    """Configures where a cluster runs the parts of a run. Coordination and monitor stay where the run was started.

    Attributes:
        stepping: of each stepping process. Its simulators run on the same node.
        assembly: of assembly.
        learning: of each learner.
        simulators: of each simulator.
        strategy: PACK places parts on few nodes, SPREAD on many.
        wait_s: seconds for which the start waits for nodes that the cluster lacks, as an autoscaler adds them.
        timeout_s: seconds for which a part that lost its node may wait for another before the run ends.
    """

    stepping: SteppingResources = SteppingResources()
    assembly: PartResources = PartResources()
    learning: PartResources = PartResources()
    simulators: PartResources = PartResources()
    strategy: Literal["PACK", "SPREAD"] = "PACK"
    wait_s: Amount = 0.0
    timeout_s: float = Field(default=60.0, gt=0)
