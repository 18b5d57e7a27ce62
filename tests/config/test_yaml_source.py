"""YAML as we read it: YAML 1.2 scalars, a place for everything, no key twice."""

import pytest

from distflow.config.yaml_source import dump, parse, parse_value, read
from distflow.errors import InvalidInput, Location


@pytest.mark.parametrize(("text", "value"), [
    ("1e-6", 1e-6), ("1E3", 1000.0), ("1.", 1.0), (".5", 0.5), ("-2.5e+2", -250.0), ("12", 12), ("-3", -3),
    ("1_000", 1000),
    ("true", True), ("false", False), ("null", None), ("~", None), ("", None),
    (".inf", float("inf")), ("-.inf", -float("inf")),
    ("yes", "yes"), ("no", "no"), ("on", "on"), ("off", "off"), ("y", "y"), ("True", "True"), ("NULL", "NULL"),
    ("1.2.3", "1.2.3"), ("0x10", "0x10"), ("12:30", "12:30"), ("2024-01-01", "2024-01-01"), ("1e", "1e"), ("_1", "_1"),
    ("'1e-6'", "1e-6"), ('"true"', "true"), ("'12'", "12"), ("|\n  12\n", "12\n"),
])
def test_scalars(text, value):
    found = parse(f"key: {text}", "file").data["key"]
    assert found == value
    assert type(found) is type(value)


def test_everything_has_its_place():
    source = parse("one: 1\nouter:\n  inner: {deep: [10, twenty]}\n", "file.yaml")
    line = "  inner: {deep: [10, twenty]}"
    assert source.location(("one",), key=True) == Location("file.yaml", 1, 1, 3, "one: 1")
    assert source.location(("one",)) == Location("file.yaml", 1, 6, 1, "one: 1")
    assert source.location(("outer", "inner", "deep", 1)) == Location("file.yaml", 3, 22, 6, line)
    assert source.location(("outer", "inner", "deep"), key=True) == Location("file.yaml", 3, 11, 4, line)


def test_a_key_twice_is_noted_and_the_first_kept():
    source = parse("a: 1\nb:\n  c: 2\n  c: 3\na: 4\n", "file.yaml")
    assert source.data == {"a": 1, "b": {"c": 2}}
    assert [str(mistake.where) for mistake in source.mistakes] == ["file.yaml:4", "file.yaml:5"]
    assert source.recovered == {("b", "c"), ("a",)}


def test_an_alias_may_stand_twice_but_not_in_itself():
    assert not parse("a: &x [1]\nb: *x\n", "file").mistakes
    assert "inside what it stands for" in parse("a: &x [*x]\n", "file").mistakes[0].what


def test_a_merge_key_takes_what_does_not_stand_there():
    source = parse("a: &a {x: 1, y: 2}\nb: &b {y: 3, <<: *a}\nc: {<<: [*b, *a], z: 4}\nd: {'<<': 5}\n", "file.yaml")
    assert source.data == {"a": {"x": 1, "y": 2}, "b": {"y": 3, "x": 1}, "c": {"z": 4, "y": 3, "x": 1}, "d": {"<<": 5}}
    assert (source.mistakes, source.location(("b", "x")).line) == ([], 1)
    assert "no mapping" in parse("a: &a {<<: *a}\n", "file").mistakes[0].what
    assert "no mapping" in parse("a: {<<: 3}\n", "file").mistakes[0].what


@pytest.mark.parametrize("value", [
    "1e5", "5569858060e51287", "12", "007", ".5", "5.", "1_0", ".inf", "true", "yes", "null", "~", "", "x: y", "é\n",
    1e-6, 1.5, 10**18, float("inf"), True, None])
def test_what_is_dumped_is_read_as_it_was(value):
    data = {"given": value, "several": [value, "1e5"]}
    assert parse(dump(data), "file").data == data
    assert parse(dump(data, default_flow_style=None), "file").data == data


@pytest.mark.parametrize(("text", "line", "said"), [
    ("a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"{chr(98 + n)}: &{chr(98 + n)} [{', '.join([f'*{chr(97 + n)}'] * 9)}]\n" for n in range(12)), 6,
     "this stands for more than 200,000 values"),
    ("a: 1\nb: " + 3000 * "[", 2, "stand in each other more than 64 deep"),
    ("a: 1\nb: " + 100_000 * "{c: ", 2, "stand in each other more than 64 deep"),
    ("".join(f"{'  ' * depth}a:\n" for depth in range(1500)), 64, "stand in each other more than 64 deep")])
def test_a_bomb_is_refused_with_its_line(text, line, said):
    with pytest.raises(InvalidInput) as caught:
        parse(text, "file")
    mistake, = caught.value.mistakes
    assert said in mistake.what
    assert mistake.where is not None
    assert mistake.where.line == line
    assert len(str(mistake)) < 500


def test_aliases_of_a_usual_file_are_read():
    text = "a: &a {x: [1, 2]}\n" + "".join(f"k{number}: *a\n" for number in range(200))
    assert parse(text, "file").data["k199"] == {"x": [1, 2]}


@pytest.mark.parametrize("number", [str(2**64 + 1), 300 * "9", 100_000 * "9", f"-{5000 * '9'}", "1e999", "-1e999",
                                    f"1.{'0' * 2000}"])
def test_a_number_that_no_machine_holds_is_a_mistake(number):
    source = parse(f"a: {{b: {number}}}", "file")
    assert source.data == {"a": {"b": None}}
    assert "this number is too large or too long" in source.mistakes[0].what
    assert source.recovered == {("a", "b")}


def test_a_large_file_is_no_file_of_settings(tmp_path):
    with (tmp_path / "data.json").open("wb") as file:
        file.truncate(2**33)
    with pytest.raises(InvalidInput, match="8,192 MiB are no file of settings"):
        read(tmp_path / "data.json")


def test_an_override_takes_the_place_of_all_that_stood_below():
    source = parse("a: {b: {c: 1}}\n", "file")
    source.override(("a", "b"), {"c": 2}, "a.b={c: 2}")
    assert source.data == {"a": {"b": {"c": 2}}}
    assert source.location(("a", "b", "c")) == Location("--set a.b={c: 2}")
    source.override(("d", "e"), 5, "d.e=5")
    assert source.data["d"] == {"e": 5}


@pytest.mark.parametrize(("text", "value"), [("1e-3", 0.001), ("[a, 2]", ["a", 2]), ("{x: no}", {"x": "no"}),
                                             ("", None)])
def test_values_of_the_command_line(text, value):
    assert parse_value(text, "--set x") == value


def test_characters_that_yaml_does_not_allow(tmp_path):
    (tmp_path / "bell.yaml").write_text("a: 1\nb: \a\n")
    with pytest.raises(InvalidInput, match=r"bell\.yaml:2: not valid YAML: character"):
        read(tmp_path / "bell.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"a: \xe9\n")
    with pytest.raises(InvalidInput, match="cannot be read"):
        read(tmp_path / "latin.yaml")


def test_long_lines_are_cut_around_what_is_underlined():
    source = parse(f"a: {{{', '.join(f'key{index}: {index}' for index in range(100))}}}\n", "file")
    head, under = source.location(("a", "key60"), key=True).excerpt().splitlines()
    assert len(head) < 130
    assert head[under.index("^") :].startswith("key60")
    assert under.count("^") == len("key60")
