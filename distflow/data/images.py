"""The images of a record: files beside the data, or bytes in it."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image, UnidentifiedImageError

from distflow.data.records import Record, Records
from distflow.schema.errors import InvalidInput, Mistake, did_you_mean


def open_images(record: Record, field: str, folder: Path) -> list[Image.Image]:
    """The images in a field of a record: none, one, or a list of them.

    Each is a path from `folder` on, bytes of an image file, {bytes, path} as `datasets` writes them, or an image that
    `datasets` has read.

    Raises:
        InvalidInput: there is no such field or file, or it is no image.
    """
    if field not in record:
        hint = f"{did_you_mean(field, record, 'It has')}\nSay which field has them:  --set data.images=FIELD"
        raise InvalidInput(Mistake(f"the record has no field `{field}`, where its images should be", None, hint))
    value = record[field]
    found = value if isinstance(value, list) else [] if value is None else [value]
    return [_open(each, field, folder) for each in found]


def _open(value: Any, field: str, folder: Path) -> Image.Image:
    if isinstance(value, Image.Image):
        return value
    if isinstance(value, dict) and (value.get("bytes") or value.get("path")):
        value = value.get("bytes") or value["path"]
    if not isinstance(value, bytes | str):
        raise InvalidInput(f"field `{field}` must be the path of an image, {{bytes, path}} or a list of these, not "
                           f"{value!r}")
    source = io.BytesIO(value) if isinstance(value, bytes) else folder / value
    try:
        image = Image.open(source)
        image.load()
    except (OSError, UnidentifiedImageError) as error:
        shown = f"`{value}`" if isinstance(value, str) else f"{len(value)} bytes"
        raise InvalidInput(f"field `{field}`: {shown} cannot be read as an image: {error}") from None
    return image


def check_images(records: Records, field: str, folder: Path, indices: Sequence[int]) -> None:
    """Read the images of some records.

    Raises:
        InvalidInput: what is wrong with the first that cannot be read, and where.
    """
    for index in indices:
        try:
            open_images(records.get([index])[0], field, folder)
        except InvalidInput as error:
            raise InvalidInput(Mistake(error.mistakes[0].what, records.where(index), error.mistakes[0].hint)) from None
