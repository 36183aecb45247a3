"""A gymnasium environment of a few numbers, `--env.type=toy_reach`, for a policy trained on `make_dataset`."""

from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from lerobot.envs import EnvConfig

STEPS = 5


class ToyReach(gymnasium.Env):
    """The state moves by the action; the reward is the negative distance to the goal."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}
    task = task_description = "reach"
    _max_episode_steps = STEPS
    fails = False
    """Set on the class: stepping then raises."""

    def __init__(self, render_mode: str = "rgb_array") -> None:
        self.render_mode = render_mode
        self.observation_space = gymnasium.spaces.Dict(
            {
                "agent_pos": gymnasium.spaces.Box(-np.inf, np.inf, (6,)),
                "environment_state": gymnasium.spaces.Box(-np.inf, np.inf, (4,)),
            }
        )
        self.action_space = gymnasium.spaces.Box(-np.inf, np.inf, (6,))

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        super().reset(seed=seed)
        self.state, self.goal, self.steps = self.np_random.normal(size=6), self.np_random.normal(size=4), 0
        return self._observation(), {"is_success": False}

    def step(self, action: np.ndarray) -> tuple[dict, float, bool, bool, dict]:
        if self.fails:
            raise RuntimeError("the simulator is gone")
        self.state = self.state + 0.2 * action
        self.steps += 1
        done = self.steps == STEPS
        return self._observation(), -float(np.abs(self.state).mean()), done, False, {"is_success": done}

    def render(self) -> np.ndarray:
        return np.full((16, 16, 3), 40 * self.steps, dtype=np.uint8)

    def _observation(self) -> dict[str, np.ndarray]:
        return {"agent_pos": self.state.astype(np.float32), "environment_state": self.goal.astype(np.float32)}


gymnasium.register("gym_toy_reach/Reach-v0", entry_point=ToyReach)


@EnvConfig.register_subclass("toy_reach")
@dataclass
class ToyReachConfig(EnvConfig):
    task: str | None = "Reach-v0"
    fps: int = 10

    @property
    def gym_kwargs(self) -> dict[str, Any]:
        return {"render_mode": "rgb_array"}
