"""Environment of the recipe: a calculator for sums of several terms."""

import re

from distflow import Turn, environment

SUM = re.compile(r"-?\d{1,9}( [-+] \d{1,9})+ =")


@environment(safe=True, stateless=True)
class ChainCalculator:
    """Answers a turn such as `4 - 1 + 12 =` with its result. Any other is the last, and earns 1 for `#### RESULT`."""

    def __init__(self, answer: str):
        self.expected = f"#### {answer}"

    def step(self, text: str) -> Turn:
        if SUM.fullmatch(text.strip()):
            return Turn(str(sum(int(term.replace(" ", "")) for term in re.findall(r"[-+]? ?\d+", text))))
        return Turn(done=True, reward=float(text.strip() == self.expected))
