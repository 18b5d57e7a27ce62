"""A step's rows by all three ways between machines made of network namespaces."""

import json
import re

import pytest

from benchmarks.ablation import WAYS, main
from benchmarks.machines import NoMachines


@pytest.mark.run
def test_a_central_buffer_carries_all_rows_through_one_link(capfd):
    try:
        main(["--quick", "--mib", "4"])
    except NoMachines as error:
        pytest.skip(str(error))
    said = capfd.readouterr().out
    link = {way: float(re.search(rf"^{way} .*busiest link ([\d.]+)", said, re.MULTILINE)[1]) for way in WAYS}
    assert link["central"] > 1.5 * max(link["dock"], link["databuffer"])
    assert "transfer dock, over a central buffer" in json.loads(said.splitlines()[-1])["claim"]
