"""This module finds the messages of a `.demo` file.

    byte 0   length, metadata      32 bytes and the length's one are reserved for them
    byte 33  length, parameters of the behavior
    then     length, pair          as often as the metadata say
    then     the metadata again, without a length: the recorder writes them here too when it closes

A recorder that was never closed leaves 0 for the number of pairs and no second metadata: all pairs in the file count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sparring.pipeline.bridges.unity import UnreadableData
from sparring.pipeline.bridges.unity.messages import Proto, parsed

PARAMETERS_AT: Final = 33
VERSIONS: Final = (0, 1)

_LONGEST_LENGTH: Final = 5
"""Bytes of a length: 7 bits each, 32 in all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """Holds the messages of a file: parameters of the behavior, and all pairs."""

    brain: Proto
    pairs: list[Proto]


def content(data: bytes) -> Content:
    """Returns all messages of a file.

    Raises:
        UnreadableData: a message is truncated, invalid, missing or unexpected; or the version is unknown.
    """
    if not data:
        raise UnreadableData("an empty file")
    first, after = _delimited(data, 0, "metadata")
    if after > PARAMETERS_AT:
        raise UnreadableData(f"{after} bytes of metadata, more than the {PARAMETERS_AT} reserved for it")
    meta = parsed("DemonstrationMetaProto", first, "metadata")
    if meta.api_version not in VERSIONS:
        raise UnreadableData(f"version {meta.api_version} of the format, which is unknown")
    if meta.number_steps < 0:
        raise UnreadableData(f"metadata of {meta.number_steps} steps")
    second, at = _delimited(data, PARAMETERS_AT, "parameters of the behavior")
    brain = parsed("BrainParametersProto", second, "parameters of the behavior")
    pairs = [
        parsed("AgentInfoActionPairProto", one, f"pair {i}")
        for i, one in enumerate(_pairs(data, at, meta.number_steps, first))
    ]
    return Content(brain=brain, pairs=pairs)


def _pairs(data: bytes, at: int, number: int, meta: bytes) -> list[bytes]:
    """Returns the pairs, of which there must be `number`; any number of them if that is 0."""
    pairs: list[bytes] = []
    while at < len(data) and (number == 0 or len(pairs) < number):
        if number == 0 and data[at:] == meta:
            return pairs
        one, at = _delimited(data, at, f"pair {len(pairs)}")
        pairs.append(one)
    if len(pairs) < number:
        raise UnreadableData(f"{len(pairs)} pairs of the {number} in its metadata: it was truncated")
    if at < len(data) and data[at:] != meta:
        raise UnreadableData(f"{len(data) - at} bytes after the last of the {number} pairs in its metadata")
    return pairs


def _delimited(data: bytes, at: int, what: str) -> tuple[bytes, int]:
    """Returns the message after the length at `at`, and the position after it."""
    length, start = 0, at
    for place in range(_LONGEST_LENGTH):
        if start >= len(data):
            raise UnreadableData(f"the end of the file where {what} should be: it was truncated")
        length |= (data[start] & 0x7F) << 7 * place
        start += 1
        if data[start - 1] < 0x80:
            break
    else:
        raise UnreadableData(f"no length before {what}")
    if length > len(data) - start:
        raise UnreadableData(f"{len(data) - start} of the {length} bytes of {what}: it was truncated")
    return data[start : start + length], start + length
