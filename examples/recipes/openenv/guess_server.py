"""Server of an OpenEnv environment: a sum of reasoning-gym, two tries, and a hint after the first.

    runs/recipes/tasks/bin/pip install openenv-core==0.2.1
    runs/recipes/tasks/bin/python examples/recipes/openenv/guess_server.py 8765
"""

import sys
from pathlib import Path
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

sys.path.insert(0, str(Path(__file__).resolve().parent))

from problems import PROBLEMS  # noqa: E402 - needs the path above


class Guess(Action):
    message: str


class Hint(Observation):
    text: str = ""


class Sums(Environment[Guess, Hint, State]):
    """Asks the problem whose number is the seed. The reward is 1 at the first try, and a half at the second."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **more: Any) -> Hint:
        self.tries, self.right = 0, int(PROBLEMS[seed or 0]["answer"])
        return Hint(text="You have two tries.")

    def step(self, action: Guess, timeout_s: float | None = None, **more: Any) -> Hint:
        self.tries += 1
        said = action.message.strip().removesuffix(".")
        number = int(said) if said.removeprefix("-").isdecimal() else None
        if number == self.right:
            return Hint(text="right", done=True, reward=1.0 / self.tries)
        hint = "a number, please" if number is None else "too low" if number < self.right else "too high"
        return Hint(text=hint, done=self.tries == 2, reward=0.0)

    @property
    def state(self) -> State:
        return State(step_count=self.tries)


if __name__ == "__main__":
    app = create_fastapi_app(Sums, Guess, Hint, max_concurrent_envs=256)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
