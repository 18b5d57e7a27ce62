"""Checks the data of a run before it starts: records, images, and whether the batch fits them."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path

from distflow.config.run import MOST_TURNS
from distflow.config.spec import Spec
from distflow.contracts.forms import ENGINE_TYPES
from distflow.contracts.functions import contract_of
from distflow.contracts.nodes import TARGETS, columns_read, token_columns
from distflow.contracts.rewards import branches, validation_fields, validation_reads
from distflow.data.dataset import (
    Records,
    RequiredFields,
    check_images,
    check_records,
    fields_of,
    form_in_use,
    open_records,
    open_training_sets,
    read_blocks,
)
from distflow.data.duplicates import NEAR, Overlap, find_repeats, overlaps
from distflow.data.forms import QUESTION
from distflow.data.problems import (
    VARIABLES,
    asked_and_answered,
    ends_with_answer,
    has_broken_text,
    has_more_turns,
    holds_answer,
    template_variables,
)
from distflow.data.rendering import check_rendering
from distflow.errors import Diagnostic, InvalidInput, abbreviated
from distflow.telemetry.learning_series import Doubt

_CHECKED = 200_000
_CHECKED_IMAGES = 200
"""Limits of the records, and of those with images, that are read before the start; others fail later."""
_COMPARED = 10_000
"""Records of training and validation together up to which equal questions are looked for."""
_REPEATED = 0.1
"""Share of records with a question that came before, from which on it is noted."""
_PASSES = 100
_ROWS = 1_000_000
"""More passes over the data than this, with more questions, are a mistake: the step would probably never end."""
_OFTEN = 10
"""Passes over one training set, for each over another, from above which on it is noted."""
_ANSWERS = "answers"


def check_data(spec: Spec, whole: bool = False) -> list[str]:
    """Read the data of a run, and return notes on what is no mistake but probably not meant. `whole`: compare
    validation with training data whatever their size, nearly equal questions too. Raises `InvalidInput`."""
    training = open_training_sets(spec.run.data, spec.data_path)
    notes = [*_check_batch(spec, sum(map(len, training.values()))), *_cut_texts(spec), *_uneven_passes(spec, training)]
    for name, records in training.items():
        empty = check_records(records, training_fields(spec), _nth(records), branches(spec, validation=False))
        notes += _check_rest(spec, name, records, empty, "others take their place")
        notes += [*_form_note(name, records), *_repeat_notes(name, records, spec)]
        check_rendering(spec, records, training_fields(spec))
        notes += _odd_texts(spec, name, records)
    tested = open_validation_sets(spec)
    for name, records in tested.items():
        empty = check_records(records, validated_fields(spec), _nth(records), branches(spec, validation=True))
        notes += _check_rest(spec, name, records, empty, "they are left out") + _form_note(name, records)
    if whole or sum(map(len, (*training.values(), *tested.values()))) <= _COMPARED:
        for name, other, found in overlaps(training, tested, spec.run.data.question, near=whole):
            notes += _overlap_note((name, training[name]), (other, tested[other]), found)
    return notes


def _uneven_passes(spec: Spec, training: dict[str, Records]) -> Iterator[str]:
    """Yield a note on a training set that comes far more often than another: weights count prompts, whatever the
    number of records."""
    turns, prompts = spec.run.data.turns, spec.run.steps * spec.run.data.batch
    passes = {name: prompts * own / sum(turns) / len(each) for own, (name, each) in zip(turns, training.items())}
    (seldom, least), *_, (often, most) = sorted(passes.items(), key=lambda item: item[1]) * 2
    if most > _OFTEN and most > _OFTEN * least:
        weights = _even_weights([len(each) for each in training.values()])
        alike = ", ".join(f"{name}: {weight}" for name, weight in zip(training, weights))
        yield f"each record of {often} ({len(training[often]):,} of them) comes {most:,.0f} times in this run, and " \
              f"each of {seldom} ({len(training[seldom]):,}) {least:,.2g} times: weights count prompts. For equally " \
              f"often:  data: {{train: {{{alike}}}}}"


def _even_weights(records: list[int]) -> list[int]:
    """Return weights by which each record comes about equally often, as far as the run file takes them."""
    weights = [round(each / min(records)) for each in records]
    if sum(weights) <= MOST_TURNS:
        return weights
    return [max(1, each * (MOST_TURNS - len(records)) // sum(records)) for each in records]


def _cut_texts(spec: Spec) -> Iterator[str]:
    """Yield notes on texts of the run file that end where YAML begins a comment."""
    for key in ("system_prompt", "prompt_suffix"):
        where = spec.run_source.location(("data", key))
        behind = where.text[where.column - 1 + where.length :]
        if where.length and re.match(r"\s+#\S", behind):
            text = json.dumps(f"{getattr(spec.run.data, key)}{behind.rstrip()}", ensure_ascii=False)
            yield f"`{key}` ends at ` #`, where YAML begins a comment. If that belongs to it, write at {where}:  " \
                  f"{key}: {text}"


def _overlap_note(training: tuple[str, Records], tested: tuple[str, Records], found: Overlap) -> list[str]:
    """Return a note on validation questions that are trained, with the places of some in both files."""
    (name, trained), (other, held_out) = training, tested
    near = f", and {found.near:,} others nearly so ({NEAR:.0%} of runs of eight letters are)" if found.near else ""
    places = ", ".join(f"{held_out.location(there)} is {trained.location(here)}" for here, there in found.examples)
    text = f"{found.exact:,} of the {len(held_out):,} questions of {other} are in the training set {name}{near}, so " \
           f"that what is trained is validated: {places}"
    share = (found.exact + found.near) / len(held_out)
    return [Doubt(text, "held_out_trained", share)] if share else []


def open_validation_sets(spec: Spec) -> dict[str, Records]:
    """Open what a run validates on, by its name in the run file."""
    names = spec.run.validation.data.values() if spec.run.validation else ()
    return {name: open_records(spec.data_path(name) or Path(name), spec.run.data) for name in names}


def training_fields(spec: Spec) -> RequiredFields:
    """Return the fields that training needs of each record."""
    return fields_of(spec.run.data, spec.run.data.columns, reads_answers(spec), imitated_fields(spec))


def validated_fields(spec: Spec) -> RequiredFields:
    """Return the fields that validation needs of each record."""
    return fields_of(spec.run.data, validation_fields(spec), reads_answers(spec, validation=True))


def reads_answers(spec: Spec, validation: bool = False) -> bool:
    """Return whether training, or else validation, needs the right answer of each record. A node whose function is not
    known counts as one that does."""
    if validation:
        return any(read.name == _ANSWERS and not read.optional for read in validation_reads(spec))
    return not all(contract_of(spec.functions, node) for node in spec.dag.nodes.values()) or any(
        column == TARGETS or (column == _ANSWERS and not read.optional) for column, read in columns_read(spec))


def imitated_fields(spec: Spec) -> set[str]:
    """Return the fields of the data whose tokens a model is given."""
    return {spec.run.data.answer if column == TARGETS else column for column in token_columns(spec, ENGINE_TYPES)}


def _nth(records: Records) -> int:
    return -(-len(records) // _CHECKED)


def _check_rest(spec: Spec, name: str, records: Records, empty: list[int], instead: str) -> list[str]:
    """Check images, and return a note on records with an empty field."""
    if spec.run.data.images:
        some = range(0, len(records), -(-len(records) // _CHECKED_IMAGES))
        check_images(records, spec.run.data.images, (spec.data_path(name) or Path(name)).parent, some)
    if not empty:
        return []
    read = len(range(0, len(records), _nth(records)))
    return [f"{len(empty)} of the {read} records of {name} that were read have an empty field, as "
            f"{records.location(empty[0])}: {instead}"]


_RENDERING = ("converse", "run_agent", "ask")
"""Functions that render more than the question of a record."""
_PICTURE = re.compile(r"<image>|<video>|<\|(?:image_pad|video_pad|image|vision_start)\|>|<(?:start|end)_of_image>")
"""What templates and data sets write in the place of an image."""


def _odd_texts(spec: Spec, name: str, records: Records) -> Iterator[str]:
    """Yield notes on records that are read otherwise than they are written, of the first ones. Raises InvalidInput: the
    answer that is imitated would continue that of the messages."""
    data, read, broken, continued = spec.run.data, min(len(records), _COMPARED), list[int](), list[int]()
    pictured, messages, own, form = list[int](), list[int](), list[int](), form_in_use(records)
    imitates, rejected, spoken = data.answer in imitated_fields(spec), list[int](), dict[str, int]()
    for index, record in itertools.islice(read_blocks(records), read):
        broken += [index] * has_broken_text(record)
        label = str(record.get("label")).lower() if imitates and "completion" in record else ""
        rejected += [index] * (label in ("false", "0"))
        own += [index] * (template_variables(record, data) != data.chat_template_kwargs)
        messages += [index] * (form is None and data.question == QUESTION and isinstance(record.get("prompt"), list))
        if data.question in record:
            asked, answer = asked_and_answered(record, data)
            for turn in (*(asked if isinstance(asked, list) else ()), *(answer if ends_with_answer(answer) else ())):
                spoken.setdefault(str(turn.get("role")) if isinstance(turn, dict) else "user", index)
            pictured += [index] * (data.images is None and _PICTURE.search(str(asked)) is not None)
            continued += [index] * (ends_with_answer(asked) and not (imitates and has_more_turns(answer, asked)))
    if rejected:
        yield f"{len(rejected)} of {read} records of {name} have `label: false`, such as " \
              f"{records.location(rejected[0])}, and are imitated as the others are. Leave them out " \
              "of the file."
    if odd := [role for role in spoken if role not in ("system", "user", "assistant", "tool")]:
        others = f" (and {len(odd) - 1} more have others)" * (len(odd) > 1)
        yield f"a message of {name} has the role {abbreviated(odd[0])}, at {records.location(spoken[odd[0]])}" \
              f"{others}, which is written as it is. Roles of most models: system, user, assistant, tool."
    later = next((node for node, each in spec.dag.nodes.items() if each.function in _RENDERING), None)
    if own and later:
        raise InvalidInput(Diagnostic(f"the record has `{VARIABLES}` of its own, and node `{later}` renders other "
                                      "messages than its question, by those of the run file", records.location(own[0]),
                                      f"Take them out, and write for all:  data: {{{VARIABLES}: …}}"))
    if messages:
        yield f"{len(messages)} of {read} records of {name} have messages in `prompt`, such as " \
              f"{records.location(messages[0])}, which are not asked: `{QUESTION}` is. To ask them:  " \
              "--set data.question=prompt"
    if pictured:
        yield f"{len(pictured)} of {read} questions of {name} have places of images, such as " \
              f"{records.location(pictured[0])}, and are read as text. Say which field has the images:  " \
              "--set data.images=FIELD"
    if broken:
        yield f"{len(broken)} of {read} records of {name} have half of a surrogate pair in a text, such as " \
              f"{records.location(broken[0])}: it becomes U+FFFD, and `data/texts_mended` counts such records"
    asked = form.question if form else data.question
    if continued and holds_answer(asked) and imitates:
        what = f"the messages of `{asked}` end with an answer, which `{data.answer}` would continue"
        raise InvalidInput(Diagnostic(what, records.location(continued[0]),
                                      f"To learn the messages:  --set data.answer={asked}"))
    if continued:
        yield f"{len(continued)} of {read} questions of {name} end with an answer of the assistant, which the " \
              f"model continues, such as {records.location(continued[0])}. Ask without it:  --set data.drop_answer=true"


def _form_note(name: str, records: Records) -> list[str]:
    form = form_in_use(records)
    if form is None:
        return []
    asked, answered = "the question", f", the answer from `{form.answer}`" if form.answer else ""
    if form.answer == form.question:  # a conversation
        asked, answered = "question and answer", ""
    about = f" and `{form.input}`" if form.input else ""
    return [f"{name} is read in {form.name}: {asked} from `{form.question}`{about}{answered}. Other fields:  "
            "data: {question: FIELD, answer: FIELD}"]


def _repeat_notes(name: str, records: Records, spec: Spec) -> Iterator[str]:
    if spec.run.data.images:
        return
    read = min(len(records), _COMPARED)
    found = find_repeats(records, spec.run.data.question, spec.run.data.answer, read)
    if found.otherwise:
        here, there = map(records.location, found.first_otherwise)
        # columns may tell the records apart, and several answers may be learned
        several = spec.run.data.columns or spec.environments or spec.run.data.answer in imitated_fields(spec)
        kind = "answers_contradict" if reads_answers(spec) and not several else ""
        yield Doubt(f"{found.otherwise:,} questions of {name} come again with another answer, as {here} and {there}: "
                    "what one teaches the other takes back", kind, min(1.0, 2 * found.otherwise / read))
    elif found.count >= _REPEATED * read:
        yield f"{found.count:,} of the {read:,} records of {name} have a question that an earlier one has, " \
              f"as {records.location(found.first[0])}"


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
