"""This module defines the settings of a network, in ML-Agents' terms, and checks what networks can be built for.

The check builds none, because stepping makes it at a simulator's Hello.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, SerializeAsAny, ValidationInfo, field_validator
from pydantic_core import InitErrorDetails, ValidationError

from sparring.pipeline import plugins
from sparring.pipeline.errors import ExplainedError, SettingsError, described, did_you_mean, undefined
from sparring.pipeline.specs import ActionSpec, BehaviorSpec, ObservationSpec

if TYPE_CHECKING:
    import torch
    from torch import nn

GoalConditioning = Literal["hyper", "none"]
Activation = Literal["silu", "tanh", "relu"]
Initialization = Literal["he_normal", "orthogonal", "uniform"]

ACTION_LIMIT: Final = 3.0
"""Default of `network_settings.action_limit` (ML-Agents)."""

MOST_ENTITIES: Final = 1024
"""Entities that attention relates to each other, of one agent: the weights of that take 16 MiB."""
HEADS: Final = 4
"""Heads of the attention over entities and over group members."""


class StrictSettings(BaseModel):
    """Refuses unknown keys, other types and numbers that are not finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Unsupported(ExplainedError, SettingsError):
    """Reports that the settings or a behavior's spec need what cannot be built."""


# ---------------------------------------------------------------- sections of plug-ins


def plugin(group: str, name: object) -> type[Any]:
    """Returns the model of a plug-in's section.

    Raises:
        ValueError: there is none of this name, or it cannot be loaded.
    """
    try:
        model: type[Any] = plugins.load(group, str(name))
    except SettingsError as error:
        raise ValueError(str(error)) from error
    return model


def typed_section(group: str, value: Any, info: ValidationInfo) -> Any:
    """Returns the validated section of a plug-in that its `type` names; a text is a `type` alone.

    Raises:
        ValueError: there is no such plug-in, or its section has errors, which are those of a `ValidationError`.
    """
    if isinstance(value, BaseModel):
        return value
    if isinstance(value, str):
        return _validated(plugin(group, value), {"type": value}, info)
    if not isinstance(value, dict):
        raise ValidationError.from_exception_data(
            group, [InitErrorDetails(type="model_type", input=value, ctx={"class_name": group})]
        )
    name = value.get("type")
    if not isinstance(name, str):
        misspelt = () if "type" in value else tuple(key for key in value if did_you_mean(key, ["type"]))
        found = [InitErrorDetails(type="extra_forbidden", loc=(key,), input=value[key]) for key in misspelt]
        kind = "string_type" if "type" in value else "missing"
        missing = [InitErrorDetails(type=kind, loc=("type",), input=name)]
        raise ValidationError.from_exception_data(group, found or missing)
    try:
        model = plugin(group, name)
    except ValueError as error:
        details = InitErrorDetails(type="value_error", loc=("type",), input=name, ctx={"error": error})
        raise ValidationError.from_exception_data(group, [details]) from error
    return _validated(model, value, info)


def named_section(group: str, name: str, value: Any, info: ValidationInfo) -> Any:
    """Returns the validated section of a plug-in.

    Args:
        group: of `plugins`.
        name: of the plug-in.
        value: keys of the section, or the section itself.
        info: of the validation under way.

    Raises:
        ValueError: there is no such plug-in, or its section has errors, which are those of a `ValidationError`.
    """
    model = plugin(group, name)
    if isinstance(value, model):
        return value
    if isinstance(value, BaseModel):
        value = {key: getattr(value, key) for key in value.model_fields_set}
    return _validated(model, value, info)


def _validated(model: type[Any], value: Any, info: ValidationInfo) -> Any:
    try:
        # In JSON, lists stand for tuples.
        return model.model_validate_json(json.dumps(value)) if info.mode == "json" else model.model_validate(value)
    except ValueError:  # as a ValidationError is
        raise
    except Exception as error:  # whatever the validators of a package raise
        got, where = described(error), f"{model.__module__}.{model.__qualname__}"
        raise ValueError(f"got {got} from {where}; expected a ValueError or none; mend its validators") from error


def each(values: dict[str, Any], read: Callable[[str, Any], Any]) -> dict[str, Any]:
    """Returns what `read` makes of each key and value.

    Raises:
        ValidationError: lists the errors of all keys.
    """
    found, errors = {}, list[InitErrorDetails]()
    for key, value in values.items():
        try:
            found[key] = read(key, value)
        except ValueError as error:
            errors.append(InitErrorDetails(type="value_error", loc=(key,), input=value, ctx={"error": error}))
    if errors:
        raise ValidationError.from_exception_data("sections", errors)
    return found


class EncoderSettings(StrictSettings):
    """Configures the encoder of one observation; a plug-in is a subclass.

    Attributes:
        type: name of the encoder.
        kinds: kinds of observations that it can encode.
        smallest: fewest pixels of an image's height and width.
    """

    type: str
    kinds: ClassVar[tuple[str, ...]] = ("image",)
    smallest: ClassVar[int] = 1

    def build(self, shape: tuple[int, ...], units: int, generator: torch.Generator) -> nn.Module:
        """Returns a module that maps an observation [B, *shape] to features [B, units].

        An image has bytes, or floats 0..1. A module of layers that `export.onnx` knows is exported as it is; another
        has a method `onnx(graph, name)`, which adds its nodes to the graph and returns the name of the features.

        Args:
            shape: of the observation.
            units: number of features.
            generator: random source of the initial weights.
        """
        raise undefined(self, "build")


class ImageEncoderSettings(EncoderSettings):
    """Configures one of ML-Agents' encoders; after its last convolution something of the image is left."""

    def build(self, shape: tuple[int, ...], units: int, generator: torch.Generator) -> nn.Module:
        from sparring.pipeline.networks.encoders import ImageEncoder

        return ImageEncoder(shape, self.type, units, generator)


class SimpleEncoder(ImageEncoderSettings):
    """Configures two convolutions (ML-Agents)."""

    smallest = 20


class NatureEncoder(ImageEncoderSettings):
    """Configures three convolutions (Mnih et al. 2015)."""

    smallest = 36


class ResnetEncoder(ImageEncoderSettings):
    """Configures three stacks of residual blocks (Espeholt et al. 2018)."""

    smallest = 15


class Match3Encoder(ImageEncoderSettings):
    """Configures two convolutions for small boards (ML-Agents)."""

    smallest = 5


class FullyConnectedEncoder(ImageEncoderSettings):
    """Configures one dense layer."""


# ---------------------------------------------------------------- networks


class MemorySettings(StrictSettings):
    """Configures a recurrent layer (LSTM) after the body.

    Attributes:
        sequence_length: steps that are trained as one sequence.
        memory_size: values in an agent's memory: hidden and cell state, half each.
    """

    sequence_length: int = Field(default=64, ge=1)
    memory_size: int = Field(default=128, ge=2, multiple_of=2)


class NetworkSettings(StrictSettings):
    """Configures an actor, critic or reward network.

    Attributes:
        normalize: keep a running mean and variance of vector observations and normalize by them.
        hidden_units: width of each layer of the body.
        num_layers: layers of the body.
        vis_encode_type: encoder of image observations.
        encoders: encoder of single observations, by the observation's name, in place of what its kind has. Such an
            observation is not normalized.
        memory: the recurrent layer; None for none.
        goal_conditioning_type: how goal observations condition the body.
        deterministic: act with the most likely action instead of a sample.
        previous_action: the networks read the agent's previous action: continuous actions as the simulator received
            them, discrete ones as one 1 per branch; zeros at the first decision of an episode.
        activation: function of the hidden units; image encoders keep their leaky ReLU.
        action_limit: continuous samples are clipped to +- this and divided by it, so that simulators receive [-1, 1].
            The standard deviation starts at 1: a limit of 1 explores three times as far as 3, ML-Agents' own.
        initialization: distribution of the initial weights of the body and of the outputs; image and entity encoders,
            hypernetworks and recurrent layers keep their own.
    """

    normalize: bool = False
    hidden_units: int = Field(default=128, ge=1)
    num_layers: int = Field(default=2, ge=1)
    vis_encode_type: str = "simple"
    encoders: dict[str, SerializeAsAny[EncoderSettings]] = Field(default={})
    memory: MemorySettings | None = None
    goal_conditioning_type: GoalConditioning = "hyper"
    deterministic: bool = False
    previous_action: bool = False
    activation: Activation = "silu"
    action_limit: float = Field(default=ACTION_LIMIT, gt=0)
    initialization: Initialization = "he_normal"

    @field_validator("vis_encode_type")
    @classmethod
    def _known(cls, name: str) -> str:
        encoder = plugin(plugins.ENCODERS, name)
        if "image" not in encoder.kinds:
            raise ValueError(f"got {name!r}, which encodes {', '.join(encoder.kinds)}; expected an encoder of images")
        return name

    @field_validator("encoders", mode="before")
    @classmethod
    def _of_plugins(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, dict):
            return value
        return each(value, lambda _, one: typed_section(plugins.ENCODERS, one, info))

    def encoder_of(self, observation: ObservationSpec) -> EncoderSettings | None:
        """Returns the settings of an observation's own encoder; None for one without, which other parts read."""
        if (own := self.encoders.get(observation.name)) is not None:
            return own
        if observation.kind != "image":
            return None
        model: type[EncoderSettings] = plugins.load(plugins.ENCODERS, self.vis_encode_type)
        return model(type=self.vis_encode_type)

    @property
    def sequence_length(self) -> int:
        """Returns the steps from one stored memory of an agent to the next; 0 if agents carry nothing."""
        return self.memory.sequence_length if self.memory is not None else int(self.previous_action)

    def carried(self, actions: ActionSpec) -> int:
        """Returns how many numbers an agent carries from one decision to the next: memory, then previous action."""
        return (0 if self.memory is None else self.memory.memory_size) + self.previous_size(actions)

    def previous_size(self, actions: ActionSpec) -> int:
        """Returns the number of features of the previous action; 0 if networks do not read it."""
        return actions.continuous + actions.mask_size if self.previous_action else 0


def refuse_unsupported(spec: BehaviorSpec, settings: NetworkSettings) -> None:
    """Refuses a spec and settings for which no network can be built.

    Raises:
        Unsupported: names the observation or setting.
    """
    units, named = settings.hidden_units, [one.name for one in spec.observations]
    if unknown := sorted(settings.encoders.keys() - set(named)):
        raise Unsupported(
            got=f"observations {named} with network_settings.encoders for {unknown}",
            expected="observations of these names",
            remedy="correct the names, or remove them from network_settings.encoders",
        )
    for one in spec.observations:
        encoder = settings.encoder_of(one)
        if encoder is not None and one.kind not in encoder.kinds:
            raise Unsupported(
                got=f"{one.kind} {one.name!r} with an encoder of type {encoder.type!r}",
                expected=f"an observation of the kind {' or '.join(encoder.kinds)}",
                remedy="choose another encoder in network_settings.encoders",
            )
        if encoder is not None and one.kind == "image" and (pixels := min(one.shape[1:])) < encoder.smallest:
            fitting = [
                name
                for name, other in plugins.working(plugins.ENCODERS)
                if "image" in other.kinds and other.smallest <= pixels
            ]
            raise Unsupported(
                got=f"image {one.name!r} of {one.shape[1]} x {one.shape[2]} pixels with vis_encode_type "
                f"{encoder.type!r}",
                expected=f"at least {encoder.smallest} x {encoder.smallest}",
                remedy=f"send a larger image, or set network_settings.vis_encode_type to one of {fitting}",
            )
        if one.kind == "entities" and encoder is None and units % HEADS:
            raise Unsupported(
                got=f"hidden_units {units} with entities {one.name!r}",
                expected=f"a multiple of {HEADS}, one part for each attention head",
                remedy=f"set network_settings.hidden_units to {-(-units // HEADS) * HEADS}",
            )
    entities = [one for one in spec.observations if one.kind == "entities" and settings.encoder_of(one) is None]
    if (count := sum(one.shape[0] for one in entities)) > MOST_ENTITIES:
        raise Unsupported(
            got=f"{count:,} entities in {', '.join(repr(one.name) for one in entities)}",
            expected=f"at most {MOST_ENTITIES:,}, because attention relates each to each",
            remedy="send the nearest ones only, or choose an encoder of your own in network_settings.encoders",
        )
    kinds = {"own" if settings.encoder_of(one) else one.kind for one in spec.observations}
    if kinds == {"goal"} and settings.goal_conditioning_type == "hyper":
        raise Unsupported(
            got="goal observations alone, with goal_conditioning_type 'hyper'",
            expected="another observation, whose processing the goal can condition",
            remedy="set network_settings.goal_conditioning_type to none, so that goals are read as vectors",
        )
