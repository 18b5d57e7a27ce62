"""Commands of agents as environments of one step."""

import subprocess
import sys

from harness import ROOT


def test_what_a_command_leaves_running_ends_with_it():
    script = """
import json, os
from distflow.telemetry.processes import adopt_orphans, descendants
from workers.isolation.agent_command import AgentCommand
adopt_orphans()
words = ["sh", "-c", "sleep 1000 > /dev/null 2>&1 & echo '{\\"reward\\": 1}'"]
assert AgentCommand(json.dumps(words), printed_reward=True).step("{}").reward == 1.0
assert not descendants(os.getpid())
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
