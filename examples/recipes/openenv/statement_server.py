"""Server of an OpenEnv environment: whose statement is it? Two tries, and a word about the first.

    runs/recipes/tasks/bin/pip install openenv-core==0.2.1
    runs/recipes/tasks/bin/python examples/recipes/openenv/statement_server.py 8765
"""

import sys
from pathlib import Path
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

sys.path.insert(0, str(Path(__file__).resolve().parent))

from problems import PROBLEMS  # noqa: E402 - needs the path above


class Reply(Action):
    message: str


class Said(Observation):
    text: str = ""


class Statements(Environment[Reply, Said, State]):
    """Asks the question of the problem whose number is the seed. The reward is 1 at the first try, a half at the
    second."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **more: Any) -> Said:
        problem = PROBLEMS[seed or 0]
        self.tries, self.right = 0, problem["answer"]
        self.statements, _, asked = problem["question"].partition("\n")
        return Said(text=asked)

    def step(self, action: Reply, timeout_s: float | None = None, **more: Any) -> Said:
        self.tries += 1
        name = action.message.strip()
        if name == self.right:
            return Said(text="Yes.", done=True, reward=1.0 / self.tries)
        known = name and f"{name} " in self.statements
        hint = f"Not {name}. Who else?" if known else "Reply only with a name."
        return Said(text=hint, done=self.tries == 2, reward=0.0)

    @property
    def state(self) -> State:
        return State(step_count=self.tries)


if __name__ == "__main__":
    app = create_fastapi_app(Statements, Reply, Said, max_concurrent_envs=256)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
