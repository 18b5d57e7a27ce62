"""What `distflow faults` prints of recoveries."""

from distflow.cli.running_job import _recoveries
from distflow.telemetry.ettr import Recovery


def test_a_recovery_is_a_row_and_what_has_not_happened_a_dash():
    found = Recovery("trainer", 1, 3, "training", "killed\nby SIGKILL " + "x" * 80, "attempt 1", 12.34, 0.5, 1.25)
    head, row = _recoveries([found])
    assert " ".join(head.split()) == "at group rank step phase detect start connect load first what"
    assert row.split()[:10] == ["12.3", "trainer", "1", "3", "training", "0.50", "1.25", "–", "–", "–"]
    assert row.endswith("x… → attempt 1")
    assert "killed by SIGKILL x" in row
    assert _recoveries([]) == ["nothing has failed"]
