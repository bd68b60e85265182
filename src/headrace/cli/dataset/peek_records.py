"""Records as `headrace dataset peek` shows them: keys, and how their fields begin."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.cli.volume.common import shown

if TYPE_CHECKING:
    from headrace.dataset import Records


def looks(records: Records, numbers: list[int], limit: int) -> Iterator[dict[str, Any]]:
    """Of each record: number, key, and of each field its kind, its bytes, how many of them are shown, as what, and
    they."""
    for number in numbers:
        (key,), (places,) = records.keys([number]), records.submit_locate([[number]]).wait()
        begins = replace(places, lengths=np.minimum(places.lengths, limit))
        (fields,) = records.submit_places(begins).wait()
        whole = dict(zip(places.kinds.tolist(), places.lengths.tolist(), strict=True))
        told = [
            {"kind": kind, "bytes": whole[records.kinds.index(kind)], "shown": len(data), **_shown(bytes(data))}
            for kind, data in fields.items()
        ]
        yield {"number": number, "kind": "records", "key": key, "fields": told}


def lines(look: dict[str, Any], total: int) -> Iterator[str]:
    """The same for people."""
    yield f"record {look['number']:,} of {total:,}: {shown(look['key'])}"
    for field in look["fields"]:
        yield f"  {shown(field['kind'])}, {field['bytes']:,} bytes"
        for line in field.get("text", field.get("hex")).splitlines():
            yield f"  | {shown(line)}"
        if field["bytes"] > field["shown"]:
            yield f"  | ... {field['bytes'] - field['shown']:,} bytes more"


def _shown(data: bytes) -> dict[str, str]:
    """As text where it is text, but for a letter that was cut in two, else in hexadecimal, 32 bytes a line."""
    for cut in range(min(4, len(data) + 1)):
        try:
            text = data[: len(data) - cut].decode()
        except UnicodeDecodeError:
            continue
        if all(letter.isprintable() or letter in "\n\r\t" for letter in text):
            return {"text": text}
        break
    return {"hex": "\n".join(data[at : at + 32].hex(" ") for at in range(0, len(data), 32))}
