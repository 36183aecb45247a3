"""All cases, in one list."""

from tests.policies.builds import joint, plain, qwen, rewards, towers, world_models
from tests.policies.builds.common import Case

CASES: dict[str, Case] = {
    case.name: case for module in (plain, joint, qwen, towers, world_models, rewards) for case in module.CASES
}
HSDP = ("act", "smolvla", "pi0", "groot", "fastwam")
