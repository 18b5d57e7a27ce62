"""Checks the data of a run before it starts: records, images, and whether the batch fits them."""

from __future__ import annotations

from pathlib import Path

from distflow.config.load import Spec
from distflow.contracts.rewards import branches, validation_fields
from distflow.data.dataset import check_images, check_records, fields_of, open_records
from distflow.errors import Diagnostic, InvalidInput

_CHECKED = 200_000
_CHECKED_IMAGES = 200
"""Limits of the records, and of those with images, that are read before the start; others fail later."""
_PASSES = 100
_ROWS = 1_000_000
"""More passes over the data than this, with more questions, are a mistake: the step would probably never end."""


def check_data(spec: Spec) -> list[str]:
    """Read the data of a run, and return notes on what is no mistake but probably not meant. Raises `InvalidInput`."""
    notes, held_out = [], spec.run.validation
    sets = [(spec.run.data.train, spec.run.data.columns, branches(spec, validation=False)),
            *((data, validation_fields(spec), branches(spec, validation=True))
              for data in (held_out.data.values() if held_out else ()))]
    for number, (data, own, rewarded) in enumerate(sets):
        path = spec.data_path(data) or Path(data)
        records = open_records(path)
        if number == 0:
            notes += _check_batch(spec, len(records))
        nth = -(-len(records) // _CHECKED)
        empty = check_records(records, fields_of(spec.run.data, own), nth, rewarded)
        if empty:
            instead = "others take their place" if number == 0 else "they are left out"
            read = len(range(0, len(records), nth))
            notes.append(f"{len(empty)} of the {read} records of {data} that were read have an empty field, as "
                         f"{records.where(empty[0])}: {instead}. --set data.strict=true refuses them")
        if spec.run.data.images:
            some = range(0, len(records), -(-len(records) // _CHECKED_IMAGES))
            check_images(records, spec.run.data.images, path.parent, some)
    return notes


def _check_batch(spec: Spec, records: int) -> list[str]:
    batch = spec.run.data.batch
    if batch <= records:
        return []
    if batch > max(_PASSES * records, _ROWS):
        what = f"`data.batch` asks for {batch:,} questions in each step, and the data has {records:,}"
        hint = f"Instead:  data: {{batch: {records}}}"
        raise InvalidInput(Diagnostic(what, spec.run_source.location(("data", "batch")), hint))
    return [f"data.batch ({batch:,}) is more than the {records:,} records of the data, so that each step asks some of "
            f"the questions again. Set  data: {{batch: {records}}}"]
