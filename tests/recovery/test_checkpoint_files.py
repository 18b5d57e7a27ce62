"""Complete checkpoints are found without torch."""

import subprocess
import sys

from harness import ROOT


def test_no_torch_is_imported():
    code = "import sys; import distflow.recovery.checkpoint_files; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_a_folder_that_only_looks_like_a_checkpoint_is_passed_over(tmp_path):
    from distflow.recovery.checkpoint_files import complete_checkpoints, step_of

    for name in ("step-00000004", "step-abc", "step-", "step-4\N{SUPERSCRIPT TWO}"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "progress.json").write_text('{"files": {}}')
    assert [step_of(each) for each in complete_checkpoints(tmp_path)] == [4]
